/*
 * The operations on CPU caches in the mode CACHE_RSEQ: restartable sequences on
 * x86-64, on the cache of the CPU that runs the caller. rseq.c has the
 * sequences for several blocks. The sequences for one block are always inline,
 * so that the fast paths contain them, and the compiler can insert a constant
 * address of the caches.
 *
 * A sequence is a few plain instructions. It announces its descriptor (rseq_cs)
 * in the thread's rseq area, reads the CPU's number, and ends with the one
 * store that commits. If the thread is preempted, migrated or interrupted by a
 * signal between labels 1 and 2, the kernel sends it to label 4, from where the
 * sequence starts over. A sequence may jump to code outside of the labels
 * without withdrawing the descriptor, since the kernel restarts a thread only
 * if its instruction pointer is between the labels.
 *
 * A sequence reads a stack's bottom or end before its top. A thread that opens
 * a closed stack writes them in the opposite order, and x86-64 keeps the order
 * of loads and of stores. A sequence that finds the stack open therefore finds
 * the top that belongs to it. A sequence that finds the stack closed leaves,
 * whatever the top is. It also leaves the zeros of a stack that never had room,
 * and that another thread is about to open.
 *
 * A sequence returns its result in the flags, or in a register. It does not
 * jump to labels of C, since gcc 12 loses the output values of such an asm
 * goto.
 */
#ifndef CALM_CACHE_RSEQ_H
#define CALM_CACHE_RSEQ_H

#include "cache/stacks.h"

/* Return the number of the caller's cache, and the number of its NUMA node. */
unsigned rseq_number(const struct cpu_caches *caches);
unsigned rseq_node(const struct cpu_caches *caches);

#if HAS_SEQUENCES

/* 0x53053053 is the signature that glibc registers. Before label 4 it is part
 * of an undefined instruction. */
#define RSEQ_BEGIN                         \
    ".pushsection __rseq_cs, \"aw\"\n\t"   \
    ".balign 32\n"                         \
    "3:\n\t"                               \
    ".long 0, 0\n\t"                       \
    ".quad 1f, 2f - 1f, 4f\n\t"            \
    ".popsection\n"                        \
    "7:\n\t"                               \
    "leaq 3b(%%rip), %[stack]\n\t"         \
    "movq %[stack], %%fs:8(%[area])\n"     \
    "1:\n\t"                               \
    "movl %%fs:(%[number]), %k[stack]\n\t" \
    "shlq %[shift], %[stack]\n\t"          \
    "addq %[base], %[stack]\n\t"           \
    "leaq (%[stack],%[size_class],8), %[stack]\n\t"

#define RSEQ_END                                  \
    "2:\n\t"                                      \
    ".pushsection .text.calm_restart, \"ax\"\n\t" \
    ".byte 0x0f, 0xb9, 0x3d\n\t"                  \
    ".long 0x53053053\n"                          \
    "4:\n\t"                                      \
    "jmp 7b\n\t"                                  \
    ".popsection\n"                               \
    "6:\n\t"

#define RSEQ_INPUTS                                                                                          \
    [area] "r"(caches->rseq.area), [number] "r"(caches->rseq.cpu_number), [base] "r"(caches->base),          \
        [size_class] "r"((uint64_t)size_class), [shift] "i"(CPU_CACHE_SHIFT), [bottom] "i"(STACK_BOTTOM_AT), \
        [end] "i"(STACK_END_AT)

/*
 * In C:
 *     block = ~bottom;
 *     if (block + top does not carry) return false;   top <= bottom: empty, or closed
 *     block = top[-1];
 *     *stack = --top;                                 lea keeps the carry, which is the result
 */
static inline __attribute__((always_inline)) bool rseq_pop(const struct cpu_caches *caches,
                                                           uint32_t size_class, void **popped) {
    char *stack;
    void **top;
    void *block;
    bool found;
    __asm__ volatile(RSEQ_BEGIN "movq %c[bottom](%[stack]), %[block]\n\t"
                                "movq (%[stack]), %[top]\n\t"
                                "addq %[top], %[block]\n\t"
                                "jnc 6f\n\t"
                                "movq -8(%[top]), %[block]\n\t"
                                "leaq -8(%[top]), %[top]\n\t"
                                "movq %[top], (%[stack])\n" RSEQ_END
                     : [stack] "=&r"(stack), [top] "=&r"(top), [block] "=&r"(block), "=@ccc"(found)
                     : RSEQ_INPUTS
                     : "memory");
    *popped = block;
    return found;
}

/*
 * In C:
 *     if (top >= end) return false;                   full, or closed; the carry is clear
 *     if (top[-1] == block) return false;             freed twice, which the slow path reports; clear
 *     *top = block;
 *     *stack = ++top;                                 as top - -8, which sets the carry
 */
static inline __attribute__((always_inline)) bool rseq_push(const struct cpu_caches *caches,
                                                            uint32_t size_class, void *block) {
    char *stack;
    void **top;
    void **limit;
    bool room;
    __asm__ volatile(RSEQ_BEGIN "movq %c[end](%[stack]), %[limit]\n\t"
                                "movq (%[stack]), %[top]\n\t"
                                "cmpq %[limit], %[top]\n\t"
                                "jae 6f\n\t"
                                "cmpq %[block], -8(%[top])\n\t"
                                "je 6f\n\t"
                                "movq %[block], (%[top])\n\t"
                                "subq $-8, %[top]\n\t"
                                "movq %[top], (%[stack])\n" RSEQ_END
                     : [stack] "=&r"(stack), [top] "=&r"(top), [limit] "=&r"(limit), "=@ccb"(room)
                     : RSEQ_INPUTS, [block] "r"(block)
                     : "memory");
    return room;
}

/* Move up to `count` blocks from, or to, the caller's cache. Return the number
 * of blocks moved. */
size_t rseq_pop_some(const struct cpu_caches *caches, uint32_t size_class, void **blocks, uint64_t count);
size_t rseq_push_some(const struct cpu_caches *caches, uint32_t size_class, void *const *blocks,
                      uint64_t count);

#else

/* Never called, since the mode is never CACHE_RSEQ. */
#define rseq_pop(caches, size_class, popped)              false
#define rseq_push(caches, size_class, block)              false
#define rseq_pop_some(caches, size_class, blocks, count)  0
#define rseq_push_some(caches, size_class, blocks, count) 0

#endif

#endif
