#include "cache/rseq.h"

static uint32_t read_rseq(ptrdiff_t offset) {
    return *(const volatile uint32_t *)(const void *)((const char *)thread_pointer() + offset);
}

unsigned rseq_number(const struct cpu_caches *caches) {
    return read_rseq(caches->rseq.cpu_number);
}

unsigned rseq_node(const struct cpu_caches *caches) {
    return caches->rseq.node == 0 ? 0 : read_rseq(caches->rseq.node);
}

#if HAS_SEQUENCES

/* These sequences copy before they commit, so an interrupted copy is made
 * again. `moved` stays 0 if there is nothing to copy. */

#if defined(__x86_64__)

/* Copies %[left] pointers, at least one, from the last to the first. Copies one
 * pointer if their number is odd, and then pairs. */
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

size_t rseq_pop_some(const struct cpu_caches *caches, uint32_t size_class, void **blocks, uint64_t count) {
    uint64_t taken;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(
        RSEQ_BEGIN "xorl %k[moved], %k[moved]\n\t"
                   "movq %c[bottom](%%r8), %[taken]\n\t"
                   "movq (%%r8), %%r9\n\t"
                   "addq %%r9, %[taken]\n\t"
                   "jnc 6f\n\t"
                   "incq %[taken]\n\t"
                   "shrq $3, %[taken]\n\t"
                   "cmpq %[count], %[taken]\n\t"
                   "cmovaq %[count], %[taken]\n\t"
                   "leaq (,%[taken],8), %[left]\n\t"
                   "subq %[left], %%r9\n\t"
                   "movq %[taken], %[left]\n\t" RSEQ_COPY("%%r9", "%[blocks]") "movq %[taken], %[moved]\n\t"
                                                                               "movq %%r9, (%%r8)\n" RSEQ_END
        : [taken] "=&r"(taken), [left] "=&r"(left), [block] "=&r"(block), [moved] "=&r"(moved)
        : RSEQ_INPUTS, [blocks] "r"(blocks), [count] "r"(count)
        : "r8", "r9", "memory", "cc", "xmm0");
    return moved;
}

size_t rseq_push_some(const struct cpu_caches *caches, uint32_t size_class, void *const *blocks,
                      uint64_t count) {
    uint64_t given;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(RSEQ_BEGIN "xorl %k[moved], %k[moved]\n\t"
                                "movq %c[end](%%r8), %[given]\n\t"
                                "movq (%%r8), %%r9\n\t"
                                "subq %%r9, %[given]\n\t"
                                "jbe 6f\n\t"
                                "shrq $3, %[given]\n\t"
                                "cmpq %[count], %[given]\n\t"
                                "cmovaq %[count], %[given]\n\t"
                                "movq %[given], %[left]\n\t" RSEQ_COPY(
                                    "%[blocks]", "%%r9") "movq %[given], %[moved]\n\t"
                                                         "leaq (%%r9,%[given],8), %%r9\n\t"
                                                         "movq %%r9, (%%r8)\n" RSEQ_END
                     : [given] "=&r"(given), [left] "=&r"(left), [block] "=&r"(block), [moved] "=&r"(moved)
                     : RSEQ_INPUTS, [blocks] "r"(blocks), [count] "r"(count)
                     : "r8", "r9", "memory", "cc", "xmm0");
    return moved;
}
#else

/* Copies %[left] pointers, at least one, from the last to the first. */
#define RSEQ_COPY(from, to)                         \
    "5:\n\t"                                        \
    "sub %[left], %[left], #1\n\t"                  \
    "ldr %[block], [" from ", %[left], lsl #3]\n\t" \
    "str %[block], [" to ", %[left], lsl #3]\n\t"   \
    "cbnz %[left], 5b\n\t"

size_t rseq_pop_some(const struct cpu_caches *caches, uint32_t size_class, void **blocks, uint64_t count) {
    uint64_t taken;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(RSEQ_BEGIN "mov %[moved], xzr\n\t" RSEQ_LOAD_TOP(
                         "%[taken]", "%[bottom]") "adds %[taken], %[taken], x10\n\t"
                                                  "b.cc 6f\n\t"
                                                  "add %[taken], %[taken], #1\n\t"
                                                  "lsr %[taken], %[taken], #3\n\t"
                                                  "cmp %[taken], %[count]\n\t"
                                                  "csel %[taken], %[taken], %[count], ls\n\t"
                                                  "sub x10, x10, %[taken], lsl #3\n\t"
                                                  "mov %[left], %[taken]\n\t" RSEQ_COPY(
                                                      "x10", "%[blocks]") "mov %[moved], %[taken]\n\t"
                                                                          "str x10, [x9]\n" RSEQ_END
                     : [taken] "=&r"(taken), [left] "=&r"(left), [block] "=&r"(block), [moved] "=&r"(moved)
                     : RSEQ_INPUTS, [blocks] "r"(blocks), [count] "r"(count)
                     : "x9", "x10", "x11", "memory", "cc");
    return moved;
}

size_t rseq_push_some(const struct cpu_caches *caches, uint32_t size_class, void *const *blocks,
                      uint64_t count) {
    uint64_t given;
    uint64_t left;
    uint64_t moved;
    void *block;
    __asm__ volatile(RSEQ_BEGIN "mov %[moved], xzr\n\t" RSEQ_LOAD_TOP(
                         "%[given]", "%[end]") "subs %[given], %[given], x10\n\t"
                                               "b.ls 6f\n\t"
                                               "lsr %[given], %[given], #3\n\t"
                                               "cmp %[given], %[count]\n\t"
                                               "csel %[given], %[given], %[count], ls\n\t"
                                               "mov %[left], %[given]\n\t" RSEQ_COPY(
                                                   "%[blocks]", "x10") "mov %[moved], %[given]\n\t"
                                                                       "add x10, x10, %[given], lsl #3\n\t"
                                                                       "stlr x10, [x9]\n" RSEQ_END
                     : [given] "=&r"(given), [left] "=&r"(left), [block] "=&r"(block), [moved] "=&r"(moved)
                     : RSEQ_INPUTS, [blocks] "r"(blocks), [count] "r"(count)
                     : "x9", "x10", "x11", "memory", "cc");
    return moved;
}

#endif

#endif
