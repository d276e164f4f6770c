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

#if defined(__x86_64__) && !defined(CALM_WITHOUT_RSEQ)

/* 0x53053053 is the signature that glibc registers; before label 4 it is part of an undefined instruction. */
#define RSEQ_BEGIN                         \
    ".pushsection __rseq_cs, \"aw\"\n\t"   \
    ".balign 32\n"                         \
    "3:\n\t"                               \
    ".long 0, 0\n\t"                       \
    ".quad 1f, 2f - 1f, 4f\n\t"            \
    ".popsection\n"                        \
    "7:\n\t"                               \
    "leaq 3b(%%rip), %[cache]\n\t"         \
    "movq %[cache], %%fs:8(%[area])\n"     \
    "1:\n\t"                               \
    "movl %%fs:(%[number]), %k[cache]\n\t" \
    "shlq %[shift], %[cache]\n\t"          \
    "addq %[base], %[cache]\n\t"

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
        [class] "r"((uint64_t) class), [shift] "i"(CPU_CACHE_SHIFT), [bounds] "i"(STACK_BOUNDS_AT)

static inline __attribute__((always_inline)) bool rseq_pop(const struct cpu_caches *caches, uint32_t class,
                                                           void **popped) {
    uint64_t cache;
    uint64_t top;
    void *block;
    bool found;
    /*
     * A top above the bottom, added to the bottom's complement, carries; dec leaves the carry. Only 16 bits
     * of the top are loaded (a cache has fewer words), as measured: see docs/experiments.md.
     */
    __asm__ volatile(RSEQ_BEGIN "movl %c[bounds](%[cache],%[class],8), %k[block]\n\t"
                                "movzwl (%[cache],%[class],8), %k[top]\n\t"
                                "addl %k[top], %k[block]\n\t"
                                "jnc 6f\n\t"
                                "movq -8(%[cache],%[top],8), %[block]\n\t"
                                "decq %[top]\n\t"
                                "movq %[top], (%[cache],%[class],8)\n" RSEQ_END
                     : [cache] "=&r"(cache), [top] "=&r"(top), [block] "=&r"(block), "=@ccc"(found)
                     : RSEQ_INPUTS
                     : "memory");
    *popped = block;
    return found;
}

static inline __attribute__((always_inline)) bool rseq_push(const struct cpu_caches *caches, uint32_t class,
                                                            void *block) {
    uint64_t cache;
    uint64_t top;
    uint64_t end;
    bool room;
    /* The carry is clear after each jump, and set where -1 is subtracted from any top. */
    __asm__ volatile(RSEQ_BEGIN "movl %c[bounds]+4(%[cache],%[class],8), %k[end]\n\t"
                                "movq (%[cache],%[class],8), %[top]\n\t"
                                "cmpq %[end], %[top]\n\t"
                                "jae 6f\n\t"
                                "cmpq %[block], -8(%[cache],%[top],8)\n\t"
                                "je 6f\n\t"
                                "movq %[block], (%[cache],%[top],8)\n\t"
                                "subq $-1, %[top]\n\t"
                                "movq %[top], (%[cache],%[class],8)\n" RSEQ_END
                     : [cache] "=&r"(cache), [top] "=&r"(top), [end] "=&r"(end), "=@ccb"(room)
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
    uint64_t cache;
    uint64_t top;
    uint64_t taken;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(RSEQ_BEGIN "xorl %k[moved], %k[moved]\n\t"
                                "movl %c[bounds](%[cache],%[class],8), %k[taken]\n\t"
                                "movq (%[cache],%[class],8), %[top]\n\t"
                                "addl %k[top], %k[taken]\n\t"
                                "jnc 6f\n\t"
                                "incl %k[taken]\n\t"
                                "cmpq %[count], %[taken]\n\t"
                                "cmovaq %[count], %[taken]\n\t"
                                "movq %[taken], %[left]\n\t"
                                "subq %[taken], %[top]\n\t"
                                "leaq (%[cache],%[top],8), %[top]\n\t" RSEQ_COPY(
                                    "%[top]", "%[blocks]") "movq %[taken], %[moved]\n\t"
                                                           "subq %[cache], %[top]\n\t"
                                                           "shrq $3, %[top]\n\t"
                                                           "movq %[top], (%[cache],%[class],8)\n" RSEQ_END
                     : [cache] "=&r"(cache), [top] "=&r"(top), [taken] "=&r"(taken), [left] "=&r"(left),
                       [block] "=&r"(block), [moved] "=&r"(moved)
                     : RSEQ_INPUTS, [blocks] "r"(blocks), [count] "r"(count)
                     : "memory", "cc", "xmm0");
    return moved;
}

static inline size_t rseq_push_some(const struct cpu_caches *caches, uint32_t class, void *const *blocks,
                                    uint64_t count) {
    uint64_t cache;
    uint64_t top;
    uint64_t given;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(RSEQ_BEGIN "xorl %k[moved], %k[moved]\n\t"
                                "movl %c[bounds]+4(%[cache],%[class],8), %k[given]\n\t"
                                "movq (%[cache],%[class],8), %[top]\n\t"
                                "subq %[top], %[given]\n\t"
                                "jbe 6f\n\t"
                                "cmpq %[count], %[given]\n\t"
                                "cmovaq %[count], %[given]\n\t"
                                "movq %[given], %[left]\n\t"
                                "leaq (%[cache],%[top],8), %[top]\n\t" RSEQ_COPY(
                                    "%[blocks]", "%[top]") "movq %[given], %[moved]\n\t"
                                                           "leaq (%[top],%[given],8), %[top]\n\t"
                                                           "subq %[cache], %[top]\n\t"
                                                           "shrq $3, %[top]\n\t"
                                                           "movq %[top], (%[cache],%[class],8)\n" RSEQ_END
                     : [cache] "=&r"(cache), [top] "=&r"(top), [given] "=&r"(given), [left] "=&r"(left),
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
