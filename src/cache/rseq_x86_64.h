/*
 * The restartable sequences for one block on x86-64, and what those for several
 * blocks begin and end with. Included by rseq.h.
 *
 * x86-64 keeps the order of loads and of stores. The number of a cache has a
 * sign.
 */
#ifndef CALM_CACHE_RSEQ_X86_64_H
#define CALM_CACHE_RSEQ_X86_64_H

/* Leaves the address of the class's stack in r8. 0x53053053 is the signature
 * that glibc registers. Before label 4 it is part of an undefined
 * instruction. */
#define RSEQ_BEGIN                       \
    ".pushsection __rseq_cs, \"aw\"\n\t" \
    ".balign 32\n"                       \
    "3:\n\t"                             \
    ".long 0, 0\n\t"                     \
    ".quad 1f, 2f - 1f, 4f\n\t"          \
    ".popsection\n"                      \
    "7:\n\t"                             \
    "leaq 3b(%%rip), %%r8\n\t"           \
    "movq %%r8, %%fs:(%[sequence])\n"    \
    "1:\n\t"                             \
    "movslq %%fs:(%[number]), %%r8\n\t"  \
    "shlq %[shift], %%r8\n\t"            \
    "addq %[base], %%r8\n\t"             \
    "leaq (%%r8,%[size_class],8), %%r8\n\t"

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
    void **top;
    void *block;
    bool found;
    __asm__ volatile(RSEQ_BEGIN "movq %c[bottom](%%r8), %[block]\n\t"
                                "movq (%%r8), %[top]\n\t"
                                "addq %[top], %[block]\n\t"
                                "jnc 6f\n\t"
                                "movq -8(%[top]), %[block]\n\t"
                                "leaq -8(%[top]), %[top]\n\t"
                                "movq %[top], (%%r8)\n" RSEQ_END
                     : [top] "=&r"(top), [block] "=&r"(block), "=@ccc"(found)
                     : RSEQ_INPUTS
                     : "r8", "memory");
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
    __asm__ goto(RSEQ_BEGIN "movq %c[end](%%r8), %%r10\n\t"
                            "movq (%%r8), %%r9\n\t"
                            "cmpq %%r10, %%r9\n\t"
                            "jae %l[no_room]\n\t"
                            "cmpq %[block], -8(%%r9)\n\t"
                            "je %l[no_room]\n\t"
                            "movq %[block], (%%r9)\n\t"
                            "addq $8, %%r9\n\t"
                            "movq %%r9, (%%r8)\n" RSEQ_END
                 :
                 : RSEQ_INPUTS, [block] "r"(block)
                 : "r8", "r9", "r10", "memory", "cc"
                 : no_room);
    return true;
no_room:
    return false;
}

#endif
