/*
 * The restartable sequences on x86-64, for the caches of calm_caches and mode CACHE_RSEQ alone.
 *
 * Each sequence announces its descriptor (rseq_cs) in the thread's rseq area, reads the CPU's number, and
 * ends with the one store that commits. The kernel sends a thread that was interrupted between labels 1 and 2
 * to label 4, from where it starts over. Leaving early, by a jump, needs no farewell: the kernel looks where
 * the thread is.
 *
 * A sequence reads a stack's bottom or end before its top. Who opens a closed region writes them the other
 * way round, so a sequence that finds the region open finds the top that belongs to it (x86-64 keeps the
 * order of loads, and of stores); one that finds it closed leaves, whatever the top is by then. So does one
 * that meets a region of zeros, which another thread is about to open for the first time.
 *
 * No jumps out of the assembly: gcc 12 loses the values that come with them. What a sequence found is left in
 * the flags, or in a register.
 */
#ifndef CALM_CACHE_RSEQ_H
#define CALM_CACHE_RSEQ_H

#include "cache/cpu_cache.h"

#if defined(__x86_64__) && !defined(CALM_WITHOUT_RSEQ)

/* 0x53053053 is the signature that glibc registers; before label 4 it is part of an undefined instruction. */
#define RSEQ_BEGIN                          \
    ".pushsection __rseq_cs, \"aw\"\n\t"    \
    ".balign 32\n"                          \
    "3:\n\t"                                \
    ".long 0, 0\n\t"                        \
    ".quad 1f, 2f - 1f, 4f\n\t"             \
    ".popsection\n"                         \
    "7:\n\t"                                \
    "leaq 3b(%%rip), %[region]\n\t"         \
    "movq %[region], %%fs:8(%[area])\n"     \
    "1:\n\t"                                \
    "movl %%fs:(%[number]), %k[region]\n\t" \
    "shlq %[shift], %[region]\n\t"          \
    "addq %[regions], %[region]\n\t"

#define RSEQ_END                                  \
    "2:\n\t"                                      \
    ".pushsection .text.calm_restart, \"ax\"\n\t" \
    ".byte 0x0f, 0xb9, 0x3d\n\t"                  \
    ".long 0x53053053\n"                          \
    "4:\n\t"                                      \
    "jmp 7b\n\t"                                  \
    ".popsection\n"                               \
    "6:\n\t"

#define RSEQ_INPUTS                                                                                   \
    [area] "r"(calm_caches.rseq_area), [number] "r"(calm_caches.cpu_number),                          \
        [regions] "r"(calm_caches.regions), [class] "r"((uint64_t) class), [shift] "i"(REGION_SHIFT), \
        [bounds] "i"(STACK_BOUNDS_AT)

static inline __attribute__((always_inline)) bool rseq_pop(uint32_t class, void **popped) {
    uint64_t region;
    uint64_t top;
    void *block;
    bool found;
    /*
     * A top above the bottom, added to the bottom's complement, carries; dec leaves the carry. Only 16 bits
     * of the top are loaded (a region has fewer words), as measured: see docs/experiments.md.
     */
    __asm__ volatile(RSEQ_BEGIN "movl %c[bounds](%[region],%[class],8), %k[block]\n\t"
                                "movzwl (%[region],%[class],8), %k[top]\n\t"
                                "addl %k[top], %k[block]\n\t"
                                "jnc 6f\n\t"
                                "movq -8(%[region],%[top],8), %[block]\n\t"
                                "decq %[top]\n\t"
                                "movq %[top], (%[region],%[class],8)\n" RSEQ_END
                     : [region] "=&r"(region), [top] "=&r"(top), [block] "=&r"(block), "=@ccc"(found)
                     : RSEQ_INPUTS
                     : "memory");
    *popped = block;
    return found;
}

static inline __attribute__((always_inline)) bool rseq_push(uint32_t class, void *block) {
    uint64_t region;
    uint64_t top;
    uint64_t end;
    bool room;
    /* The carry is clear after each jump, and set where -1 is subtracted from any top. */
    __asm__ volatile(RSEQ_BEGIN "movl %c[bounds]+4(%[region],%[class],8), %k[end]\n\t"
                                "movq (%[region],%[class],8), %[top]\n\t"
                                "cmpq %[end], %[top]\n\t"
                                "jae 6f\n\t"
                                "cmpq %[block], -8(%[region],%[top],8)\n\t"
                                "je 6f\n\t"
                                "movq %[block], (%[region],%[top],8)\n\t"
                                "subq $-1, %[top]\n\t"
                                "movq %[top], (%[region],%[class],8)\n" RSEQ_END
                     : [region] "=&r"(region), [top] "=&r"(top), [end] "=&r"(end), "=@ccb"(room)
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

/* Copies before it commits: a copy that is cut short is made again. moved stays 0 where there is nothing to
 * copy. */
static inline size_t rseq_pop_some(uint32_t class, void **blocks, uint64_t count) {
    uint64_t region;
    uint64_t top;
    uint64_t taken;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(RSEQ_BEGIN "xorl %k[moved], %k[moved]\n\t"
                                "movl %c[bounds](%[region],%[class],8), %k[taken]\n\t"
                                "movq (%[region],%[class],8), %[top]\n\t"
                                "addl %k[top], %k[taken]\n\t"
                                "jnc 6f\n\t"
                                "incl %k[taken]\n\t"
                                "cmpq %[count], %[taken]\n\t"
                                "cmovaq %[count], %[taken]\n\t"
                                "movq %[taken], %[left]\n\t"
                                "subq %[taken], %[top]\n\t"
                                "leaq (%[region],%[top],8), %[top]\n\t" RSEQ_COPY(
                                    "%[top]", "%[blocks]") "movq %[taken], %[moved]\n\t"
                                                           "subq %[region], %[top]\n\t"
                                                           "shrq $3, %[top]\n\t"
                                                           "movq %[top], (%[region],%[class],8)\n" RSEQ_END
                     : [region] "=&r"(region), [top] "=&r"(top), [taken] "=&r"(taken), [left] "=&r"(left),
                       [block] "=&r"(block), [moved] "=&r"(moved)
                     : RSEQ_INPUTS, [blocks] "r"(blocks), [count] "r"(count)
                     : "memory", "cc", "xmm0");
    return moved;
}

static inline size_t rseq_push_some(uint32_t class, void *const *blocks, uint64_t count) {
    uint64_t region;
    uint64_t top;
    uint64_t given;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(RSEQ_BEGIN "xorl %k[moved], %k[moved]\n\t"
                                "movl %c[bounds]+4(%[region],%[class],8), %k[given]\n\t"
                                "movq (%[region],%[class],8), %[top]\n\t"
                                "subq %[top], %[given]\n\t"
                                "jbe 6f\n\t"
                                "cmpq %[count], %[given]\n\t"
                                "cmovaq %[count], %[given]\n\t"
                                "movq %[given], %[left]\n\t"
                                "leaq (%[region],%[top],8), %[top]\n\t" RSEQ_COPY(
                                    "%[blocks]", "%[top]") "movq %[given], %[moved]\n\t"
                                                           "leaq (%[top],%[given],8), %[top]\n\t"
                                                           "subq %[region], %[top]\n\t"
                                                           "shrq $3, %[top]\n\t"
                                                           "movq %[top], (%[region],%[class],8)\n" RSEQ_END
                     : [region] "=&r"(region), [top] "=&r"(top), [given] "=&r"(given), [left] "=&r"(left),
                       [block] "=&r"(block), [moved] "=&r"(moved)
                     : RSEQ_INPUTS, [blocks] "r"(blocks), [count] "r"(count)
                     : "memory", "cc", "xmm0");
    return moved;
}

#else

/* Never called: rseq_find says that there are none. */
static inline bool rseq_pop(uint32_t class, void **popped) {
    (void)class, (void)popped;
    return false;
}
static inline bool rseq_push(uint32_t class, void *block) {
    (void)class, (void)block;
    return false;
}
static inline size_t rseq_pop_some(uint32_t class, void **blocks, uint64_t count) {
    (void)class, (void)blocks, (void)count;
    return 0;
}
static inline size_t rseq_push_some(uint32_t class, void *const *blocks, uint64_t count) {
    (void)class, (void)blocks, (void)count;
    return 0;
}

#endif

#endif
