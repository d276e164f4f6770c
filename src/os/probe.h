/*
 * Static probes for tracers: bpftrace, perf, systemtap, the OpenTelemetry profiler.
 *
 * A probe is a `nop` and a note about it, which has its address, the registers that hold its arguments, and
 * the address of a 16-bit word that counts the attached tracers (SystemTap's "user-space probe", version 3 of
 * its notes). The kernel increments that word, the semaphore, when a tracer is attached and decrements it
 * when the tracer detaches or dies. So a probe costs a load of the semaphore while no tracer is attached;
 * arguments are computed behind it.
 *
 * The arguments are in the registers of a function's first arguments, since some tracers read these and
 * ignore the note. Semaphores are in section `.probes` of the library's writable data, which must have an
 * image in the file: the kernel looks for them there.
 */
#ifndef CALM_OS_PROBE_H
#define CALM_OS_PROBE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* As the note in assembly names it: no renaming by the compiler (namespace.h) gets there. */
#define PROBE_SEMAPHORE(symbol) "calm_" symbol "_semaphore"

/* In a header: the probe `symbol`, with its arguments' types. symbol_is_enabled() is true while a tracer is
 * attached. */
#define PROBE_DECLARE(symbol, ...)                                                                        \
    extern _Atomic(uint16_t) symbol##_semaphore __asm__(PROBE_SEMAPHORE(#symbol))                         \
        __attribute__((visibility("hidden")));                                                            \
    static inline bool symbol##_is_enabled(void) {                                                        \
        return __builtin_expect(atomic_load_explicit(&symbol##_semaphore, memory_order_relaxed) != 0, 0); \
    }                                                                                                     \
    void symbol(__VA_ARGS__)

/* From the base, tracers calculate by how much a tool like prelink has moved the addresses in the note. */
#define PROBE_NOTE(provider, name, semaphore, arguments)                  \
    "1: nop\n"                                                            \
    ".pushsection .note.stapsdt,\"\",%%note\n"                            \
    ".balign 4\n"                                                         \
    ".4byte 8, 3f - 2f, 3\n"                                              \
    ".asciz \"stapsdt\"\n"                                                \
    "2: .8byte 1b, _.stapsdt.base, " semaphore "\n"                       \
    ".asciz \"" provider "\"\n"                                           \
    ".asciz \"" name "\"\n"                                               \
    ".asciz \"" arguments "\"\n"                                          \
    "3: .balign 4\n"                                                      \
    ".popsection\n"                                                       \
    ".ifndef _.stapsdt.base\n"                                            \
    ".pushsection .stapsdt.base,\"aG\",%%progbits,.stapsdt.base,comdat\n" \
    ".weak _.stapsdt.base\n"                                              \
    ".hidden _.stapsdt.base\n"                                            \
    "_.stapsdt.base: .zero 1\n"                                           \
    ".size _.stapsdt.base, 1\n"                                           \
    ".popsection\n"                                                       \
    ".endif\n"

#if defined(__x86_64__)
#define PROBE_REGISTER_1 "rdi"
#define PROBE_REGISTER_2 "rsi"
#define PROBE_REGISTER_3 "rdx"
#define PROBE_REGISTER_4 "rcx"
#else
#define PROBE_REGISTER_1 "x0"
#define PROBE_REGISTER_2 "x1"
#define PROBE_REGISTER_3 "x2"
#define PROBE_REGISTER_4 "x3"
#endif

#define PROBE_ARGUMENT(number, value) register uint64_t r##number __asm__(PROBE_REGISTER_##number) = value

#define PROBE_BODY(provider, name, symbol, parameters, registers, arguments, ...)                          \
    __attribute__((section(".probes"), used, visibility("hidden"))) _Atomic(uint16_t) symbol##_semaphore = \
        0;                                                                                                 \
    __attribute__((noinline)) void symbol parameters {                                                     \
        registers;                                                                                         \
        __asm__ volatile(PROBE_NOTE(provider, name, PROBE_SEMAPHORE(#symbol), arguments) : : __VA_ARGS__); \
    }

/* In one source file: the probe provider:name, with 0 to 4 arguments of 64 bits. */
#define PROBE_DEFINE_0(provider, name, symbol) PROBE_BODY(provider, name, symbol, (void), , "")

#define PROBE_DEFINE_1(provider, name, symbol) \
    PROBE_BODY(provider, name, symbol, (uint64_t a), PROBE_ARGUMENT(1, a), "8@%0", "r"(r1))

#define PROBE_DEFINE_2(provider, name, symbol)                                         \
    PROBE_BODY(provider, name, symbol, (uint64_t a, uint64_t b), PROBE_ARGUMENT(1, a); \
               PROBE_ARGUMENT(2, b), "8@%0 8@%1", "r"(r1), "r"(r2))

#define PROBE_DEFINE_3(provider, name, symbol)                                                     \
    PROBE_BODY(provider, name, symbol, (uint64_t a, uint64_t b, uint64_t c), PROBE_ARGUMENT(1, a); \
               PROBE_ARGUMENT(2, b); PROBE_ARGUMENT(3, c), "8@%0 8@%1 8@%2", "r"(r1), "r"(r2), "r"(r3))

#define PROBE_DEFINE_4(provider, name, symbol)                                           \
    PROBE_BODY(provider, name, symbol, (uint64_t a, uint64_t b, uint64_t c, uint64_t d), \
               PROBE_ARGUMENT(1, a);                                                     \
               PROBE_ARGUMENT(2, b); PROBE_ARGUMENT(3, c);                               \
               PROBE_ARGUMENT(4, d), "8@%0 8@%1 8@%2 8@%3", "r"(r1), "r"(r2), "r"(r3), "r"(r4))

#endif
