/*
 * Static probes for tracers: bpftrace, perf, systemtap, the OpenTelemetry
 * profiler.
 *
 * A probe is a `nop` and a note about it. The note contains the probe's
 * address, the registers that hold its arguments, and the address of its
 * semaphore. The semaphore is a 16-bit word that counts the attached tracers.
 * SystemTap defines this format: version 3 of its notes on user-space probes.
 * The kernel increments the semaphore when a tracer attaches, and decrements it
 * when the tracer detaches or dies. While no tracer is attached, a probe costs
 * a load of the semaphore. The arguments are computed after that load.
 *
 * Some tracers ignore the note and read the registers of a function's first
 * arguments, so the arguments are in these registers. Semaphores are in the
 * section `.probes` of the library's writable data. The section must have an
 * image in the file, since the kernel looks for semaphores there.
 */
#ifndef CALM_OS_PROBE_H
#define CALM_OS_PROBE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* The note is assembly and names this symbol, so the compiler's renaming
 * (namespace.h) must not change it. */
#define PROBE_SEMAPHORE(symbol) "calm_" symbol "_semaphore"

/* Declares, in a header, the probe `symbol` with the types of its arguments.
 * symbol_is_enabled() is true while a tracer is attached. */
#define PROBE_DECLARE(symbol, ...)                                                                        \
    extern _Atomic(uint16_t) symbol##_semaphore __asm__(PROBE_SEMAPHORE(#symbol))                         \
        __attribute__((visibility("hidden")));                                                            \
    static inline bool symbol##_is_enabled(void) {                                                        \
        return __builtin_expect(atomic_load_explicit(&symbol##_semaphore, memory_order_relaxed) != 0, 0); \
    }                                                                                                     \
    void symbol(__VA_ARGS__)

/* A tool such as prelink may have moved the addresses in the note. Tracers
 * calculate the distance from the base. */
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

/* Each defines, in one source file, the probe provider:name with 0 to 4
 * arguments of 64 bits. */
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
