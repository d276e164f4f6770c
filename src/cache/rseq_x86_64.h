/*
 * The restartable sequences for one block on x86-64, and what those for several
 * blocks begin and end with. Included by rseq.h.
 *
 * x86-64 keeps the order of loads and of stores. The number of a cache has a
 * sign.
 */
#ifndef CALM_CACHE_RSEQ_X86_64_H
#define CALM_CACHE_RSEQ_X86_64_H

/* 0x53053053 is the signature that glibc registers. Before label 4 it is part
 * of an undefined instruction. */
#define RSEQ_BEGIN                          \
    ".pushsection __rseq_cs, \"aw\"\n\t"    \
    ".balign 32\n"                          \
    "3:\n\t"                                \
    ".long 0, 0\n\t"                        \
    ".quad 1f, 2f - 1f, 4f\n\t"             \
    ".popsection\n"                         \
    "7:\n\t"                                \
    "leaq 3b(%%rip), %[stack]\n\t"          \
    "movq %[stack], %%fs:(%[sequence])\n"   \
    "1:\n\t"                                \
    "movslq %%fs:(%[number]), %[stack]\n\t" \
    "shlq %[shift], %[stack]\n\t"           \
    "addq %[base], %[stack]\n\t"            \
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
    [sequence] "r"(caches->rseq.sequence), [number] "r"(caches->rseq.cpu_number), [base] "r"(caches->base),  \
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

#endif
