/*
 * The restartable sequences for one block on aarch64, and what those for
 * several blocks begin and end with. Included by rseq.h.
 *
 * Three orders matter, since this processor reorders loads and stores:
 *
 * - A sequence reads a stack's bottom or end before its top. A thread that
 *   opens a closed stack stores the top before them, with release. So the
 *   address from which the sequence loads the top depends on the bottom or end.
 *   (A load with acquire would wait for the release of a push before it.)
 * - A push stores the block before the top. Sequences that follow run on the
 *   same CPU, and find both. A thread that was moved to another CPU meanwhile
 *   may read the top there, and the block below it (stack_has_newest); it must
 *   not find an older block, which may be the caller's own. So the push stores
 *   the top with release (stlr). A pop stores nothing else.
 * - A thread that flushes reads tops and blocks after rseq_restart_all, which
 *   orders memory on each CPU that runs a thread of the process. On all others,
 *   the kernel did when it switched to another process.
 *
 * A thread that migrates takes along all that it has stored and seen, since the
 * kernel orders memory whenever it switches threads.
 */
#ifndef CALM_CACHE_RSEQ_AARCH64_H
#define CALM_CACHE_RSEQ_AARCH64_H

#if defined(__AARCH64_CMODEL_TINY__)
#define RSEQ_DESCRIPTOR "adr x9, 3b\n\t"
#else
#define RSEQ_DESCRIPTOR \
    "adrp x9, 3b\n\t"   \
    "add x9, x9, :lo12:3b\n\t"
#endif

/* Leaves the address of the class's stack in x9. 0xd428bc00 is the signature
 * that glibc registers. Before label 4 it is a brk instruction. */
#define RSEQ_BEGIN                                    \
    ".pushsection __rseq_cs, \"aw\"\n\t"              \
    ".balign 32\n"                                    \
    "3:\n\t"                                          \
    ".long 0, 0\n\t"                                  \
    ".quad 1f, 2f - 1f, 4f\n\t"                       \
    ".popsection\n"                                   \
    "7:\n\t" RSEQ_DESCRIPTOR "mrs x11, tpidr_el0\n\t" \
    "str x9, [x11, %[sequence]]\n"                    \
    "1:\n\t"                                          \
    "ldrsw x9, [x11, %[number]]\n\t"                  \
    "add x9, %[base], x9, lsl %[shift]\n\t"           \
    "add x9, x9, %w[size_class], uxtw #3\n\t"

/* Loads a word of the stack, and then its top into x10. The top's address is
 * computed from the word, though it does not change: so the processor may not
 * load the top first. */
#define RSEQ_LOAD_TOP(word, offset)      \
    "ldr " word ", [x9, " offset "]\n\t" \
    "eor x10, " word ", " word "\n\t"    \
    "ldr x10, [x9, x10]\n\t"

#define RSEQ_END                                  \
    "2:\n\t"                                      \
    ".pushsection .text.calm_restart, \"ax\"\n\t" \
    ".long 0xd428bc00\n"                          \
    "4:\n\t"                                      \
    "b 7b\n\t"                                    \
    ".popsection\n"                               \
    "6:\n\t"

#define RSEQ_INPUTS                                                                                         \
    [sequence] "r"(caches->rseq.sequence), [number] "r"(caches->rseq.cpu_number), [base] "r"(caches->base), \
        [size_class] "r"(size_class), [shift] "i"(CPU_CACHE_SHIFT), [bottom] "i"(STACK_BOTTOM_AT),          \
        [end] "i"(STACK_END_AT)

/*
 * In C:
 *     block = ~bottom;
 *     if (block + top does not carry) return false;   top <= bottom: empty, or closed
 *     block = *--top;
 *     *stack = top;
 */
static inline __attribute__((always_inline)) bool rseq_pop(const struct cpu_caches *caches,
                                                           uint32_t size_class, void **popped) {
    void *block;
    bool found;
    __asm__ volatile(RSEQ_BEGIN RSEQ_LOAD_TOP("%[block]", "%[bottom]") "adds %[block], %[block], x10\n\t"
                                                                       "b.cc 6f\n\t"
                                                                       "ldr %[block], [x10, #-8]!\n\t"
                                                                       "str x10, [x9]\n" RSEQ_END
                     : [block] "=&r"(block), "=@cccs"(found)
                     : RSEQ_INPUTS
                     : "x9", "x10", "x11", "memory");
    *popped = block;
    return found;
}

/*
 * In C:
 *     if (top >= end) return false;                   full, or closed
 *     if (top[-1] == block) return false;             freed twice, which the slow path reports
 *     *top++ = block;
 *     *stack = top;
 */
static inline __attribute__((always_inline)) bool rseq_push(const struct cpu_caches *caches,
                                                            uint32_t size_class, void *block) {
    __asm__ goto(RSEQ_BEGIN RSEQ_LOAD_TOP("x11", "%[end]") "cmp x10, x11\n\t"
                                                           "b.hs %l[no_room]\n\t"
                                                           "ldur x11, [x10, #-8]\n\t"
                                                           "cmp x11, %[block]\n\t"
                                                           "b.eq %l[no_room]\n\t"
                                                           "str %[block], [x10], #8\n\t"
                                                           "stlr x10, [x9]\n" RSEQ_END
                 :
                 : RSEQ_INPUTS, [block] "r"(block)
                 : "x9", "x10", "x11", "memory", "cc"
                 : no_room);
    return true;
no_room:
    return false;
}

#endif
