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

/* 0xd428bc00 is the signature that glibc registers. Before label 4 it is a brk
 * instruction. */
#define RSEQ_BEGIN                                      \
    ".pushsection __rseq_cs, \"aw\"\n\t"                \
    ".balign 32\n"                                      \
    "3:\n\t"                                            \
    ".long 0, 0\n\t"                                    \
    ".quad 1f, 2f - 1f, 4f\n\t"                         \
    ".popsection\n"                                     \
    "7:\n\t"                                            \
    "adrp %[stack], 3b\n\t"                             \
    "add %[stack], %[stack], :lo12:3b\n\t"              \
    "str %[stack], [%[thread], %[sequence]]\n"          \
    "1:\n\t"                                            \
    "ldrsw %[stack], [%[thread], %[number]]\n\t"        \
    "add %[stack], %[base], %[stack], lsl %[shift]\n\t" \
    "add %[stack], %[stack], %[size_class], lsl #3\n\t"

/* Loads a word of the stack, and then its top. The top's address is computed
 * from the word, though it does not change: so the processor may not load the
 * top first. */
#define RSEQ_LOAD_TOP(word, offset)            \
    "ldr " word ", [%[stack], " offset "]\n\t" \
    "eor %[top], " word ", " word "\n\t"       \
    "ldr %[top], [%[stack], %[top]]\n\t"

#define RSEQ_END                                  \
    "2:\n\t"                                      \
    ".pushsection .text.calm_restart, \"ax\"\n\t" \
    ".long 0xd428bc00\n"                          \
    "4:\n\t"                                      \
    "b 7b\n\t"                                    \
    ".popsection\n"                               \
    "6:\n\t"

#define RSEQ_INPUTS                                                                                          \
    [thread] "r"(thread_pointer()), [sequence] "r"(caches->rseq.sequence),                                   \
        [number] "r"(caches->rseq.cpu_number), [base] "r"(caches->base),                                     \
        [size_class] "r"((uint64_t)size_class), [shift] "i"(CPU_CACHE_SHIFT), [bottom] "i"(STACK_BOTTOM_AT), \
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
    char *stack;
    void **top;
    void *block;
    bool found;
    __asm__ volatile(RSEQ_BEGIN RSEQ_LOAD_TOP("%[block]", "%[bottom]") "adds %[block], %[block], %[top]\n\t"
                                                                       "b.cc 6f\n\t"
                                                                       "ldr %[block], [%[top], #-8]!\n\t"
                                                                       "str %[top], [%[stack]]\n" RSEQ_END
                     : [stack] "=&r"(stack), [top] "=&r"(top), [block] "=&r"(block), "=@cccs"(found)
                     : RSEQ_INPUTS
                     : "memory");
    *popped = block;
    return found;
}

/*
 * In C:
 *     if (top >= end) return false;                   full, or closed; the carry is set
 *     if (top[-1] == block) return false;             freed twice, which the slow path reports; set
 *     *top++ = block;                                 the next instruction clears the carry
 *     *stack = top;
 */
static inline __attribute__((always_inline)) bool rseq_push(const struct cpu_caches *caches,
                                                            uint32_t size_class, void *block) {
    char *stack;
    void **top;
    void **limit;
    bool room;
    __asm__ volatile(RSEQ_BEGIN RSEQ_LOAD_TOP("%[limit]", "%[end]") "cmp %[top], %[limit]\n\t"
                                                                    "b.hs 6f\n\t"
                                                                    "ldr %[limit], [%[top], #-8]\n\t"
                                                                    "cmp %[limit], %[block]\n\t"
                                                                    "b.eq 6f\n\t"
                                                                    "str %[block], [%[top]], #8\n\t"
                                                                    "cmn xzr, xzr\n\t"
                                                                    "stlr %[top], [%[stack]]\n" RSEQ_END
                     : [stack] "=&r"(stack), [top] "=&r"(top), [limit] "=&r"(limit), "=@cccc"(room)
                     : RSEQ_INPUTS, [block] "r"(block)
                     : "memory");
    return room;
}

#endif
