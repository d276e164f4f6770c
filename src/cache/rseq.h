/*
 * The restartable sequences on x86-64: operations on the cache of the CPU that runs the caller, in CACHE_RSEQ
 * alone. Those of the fast paths are always inline, so that a constant address of the caches folds.
 *
 * A sequence is a few plain instructions. It announces its descriptor (rseq_cs) in the thread's rseq area,
 * reads the CPU's number, and ends with the one store that commits. If the thread is preempted, migrated or
 * interrupted by a signal between labels 1 and 2, the kernel sends it to label 4, from where it starts over.
 * A jump out needs no announcement: the kernel compares the thread's instruction pointer.
 *
 * A sequence reads a stack's bottom or end before its top. A thread that opens a closed cache writes them in
 * the opposite order, so a sequence that finds the cache open finds the top that belongs to it (x86-64 keeps
 * the order of loads, and of stores); one that finds it closed leaves, whatever the top is by then. So does
 * one that meets a cache of zeros, which another thread is about to open for the first time.
 *
 * No jumps out of the assembly: gcc 12 loses the values that come with them. A sequence returns its result in
 * the flags, or in a register.
 */
#ifndef CALM_CACHE_RSEQ_H
#define CALM_CACHE_RSEQ_H

#include "cache/stacks.h"

#if HAS_SEQUENCES

/* 0x53053053 is the signature that glibc registers; before label 4 it is part of an undefined instruction. */
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
    "leaq (%[stack],%[class],8), %[stack]\n\t"

#define RSEQ_END                                  \
    "2:\n\t"                                      \
    ".pushsection .text.calm_restart, \"ax\"\n\t" \
    ".byte 0x0f, 0xb9, 0x3d\n\t"                  \
    ".long 0x53053053\n"                          \
    "4:\n\t"                                      \
    "jmp 7b\n\t"                                  \
    ".popsection\n"                               \
    "6:\n\t"

#define RSEQ_INPUTS                                                                                 \
    [area] "r"(caches->rseq.area), [number] "r"(caches->rseq.cpu_number), [base] "r"(caches->base), \
        [class] "r"((uint64_t) class), [shift] "i"(CPU_CACHE_SHIFT), [bottom] "i"(STACK_BOTTOM_AT), \
        [end] "i"(STACK_END_AT)

/*
 * The same in C:
 *     block = ~bottom;
 *     if (block + top does not carry) return false;   top <= bottom: empty, or closed
 *     block = top[-1];
 *     *stack = --top;                                 lea leaves the carry, which is the result
 */
static inline __attribute__((always_inline)) bool rseq_pop(const struct cpu_caches *caches, uint32_t class,
                                                           void **popped) {
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
 * The same in C:
 *     if (top >= end) return false;                   full, or closed; the carry is clear
 *     if (top[-1] == block) return false;             freed twice, which the slow path reports; clear, too
 *     *top = block;
 *     *stack = ++top;                                 as top - -8, which sets the carry
 */
static inline __attribute__((always_inline)) bool rseq_push(const struct cpu_caches *caches, uint32_t class,
                                                            void *block) {
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

/* Copies %[left] pointers, at least one, from the last on: the odd one, then pairs. */
#define RSEQ_COPY(from, to)                      \
    "testb $1, %b[left]\n\t"                     \
    "je 5f\n\t"                                  \
    "movq -8(" from ",%[left],8), %[block]\n\t"  \
    "movq %[block], -8(" to ",%[left],8)\n\t"    \
    "decq %[left]\n\t"                           \
    "je 8f\n"                                    \
    "5:\n\t"                                     \
    "movups -16(" from ",%[left],8), %%xmm0\n\t" \
    "movups %%xmm0, -16(" to ",%[left],8)\n\t"   \
    "subq $2, %[left]\n\t"                       \
    "jnz 5b\n"                                   \
    "8:\n\t"

/* Copies before it commits: an interrupted copy is made again. moved stays 0 if there is nothing to copy. */
static inline size_t rseq_pop_some(const struct cpu_caches *caches, uint32_t class, void **blocks,
                                   uint64_t count) {
    char *stack;
    void **top;
    uint64_t taken;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(RSEQ_BEGIN "xorl %k[moved], %k[moved]\n\t"
                                "movq %c[bottom](%[stack]), %[taken]\n\t"
                                "movq (%[stack]), %[top]\n\t"
                                "addq %[top], %[taken]\n\t"
                                "jnc 6f\n\t"
                                "incq %[taken]\n\t"
                                "shrq $3, %[taken]\n\t"
                                "cmpq %[count], %[taken]\n\t"
                                "cmovaq %[count], %[taken]\n\t"
                                "leaq (,%[taken],8), %[left]\n\t"
                                "subq %[left], %[top]\n\t"
                                "movq %[taken], %[left]\n\t" RSEQ_COPY(
                                    "%[top]", "%[blocks]") "movq %[taken], %[moved]\n\t"
                                                           "movq %[top], (%[stack])\n" RSEQ_END
                     : [stack] "=&r"(stack), [top] "=&r"(top), [taken] "=&r"(taken), [left] "=&r"(left),
                       [block] "=&r"(block), [moved] "=&r"(moved)
                     : RSEQ_INPUTS, [blocks] "r"(blocks), [count] "r"(count)
                     : "memory", "cc", "xmm0");
    return moved;
}

static inline size_t rseq_push_some(const struct cpu_caches *caches, uint32_t class, void *const *blocks,
                                    uint64_t count) {
    char *stack;
    void **top;
    uint64_t given;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(RSEQ_BEGIN "xorl %k[moved], %k[moved]\n\t"
                                "movq %c[end](%[stack]), %[given]\n\t"
                                "movq (%[stack]), %[top]\n\t"
                                "subq %[top], %[given]\n\t"
                                "jbe 6f\n\t"
                                "shrq $3, %[given]\n\t"
                                "cmpq %[count], %[given]\n\t"
                                "cmovaq %[count], %[given]\n\t"
                                "movq %[given], %[left]\n\t" RSEQ_COPY(
                                    "%[blocks]", "%[top]") "movq %[given], %[moved]\n\t"
                                                           "leaq (%[top],%[given],8), %[top]\n\t"
                                                           "movq %[top], (%[stack])\n" RSEQ_END
                     : [stack] "=&r"(stack), [top] "=&r"(top), [given] "=&r"(given), [left] "=&r"(left),
                       [block] "=&r"(block), [moved] "=&r"(moved)
                     : RSEQ_INPUTS, [blocks] "r"(blocks), [count] "r"(count)
                     : "memory", "cc", "xmm0");
    return moved;
}

#else

/* Never called: rseq_find reports that there are none. */
#define rseq_pop(caches, class, popped)              false
#define rseq_push(caches, class, block)              false
#define rseq_pop_some(caches, class, blocks, count)  0
#define rseq_push_some(caches, class, blocks, count) 0

#endif

#endif
