/*
 * Static probes for tracers: bpftrace, perf, systemtap, the OpenTelemetry profiler.
 *
 * A probe is a `nop` and a note about it, which says where it is, which registers hold its arguments, and
 * which 16-bit word counts the tracers that listen (SystemTap's "user-space probe", version 3 of its notes).
 * The kernel raises that word, the semaphore, while a tracer is attached and lowers it again when the tracer
 * detaches or dies. So a probe costs a load of the semaphore while no tracer listens; arguments are worked
 * out behind it.
 *
 * The arguments are in the registers of a function's first arguments, since some tracers read these without
 * looking at the note. Semaphores are in section `.probes` of the library's writable data, which must have an
 * image in the file: the kernel looks for them there.
 */
#ifndef CALM_OS_PROBE_H
#define CALM_OS_PROBE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* In a header: the probe `symbol`, with its arguments' types. symbol_is_heard is true while a tracer listens.
 */
#define PROBE_DECLARE(symbol, ...)                                                                        \
    extern _Atomic(uint16_t) symbol##_semaphore __attribute__((visibility("hidden")));                    \
    static inline bool symbol##_is_heard(void) {                                                          \
        return __builtin_expect(atomic_load_explicit(&symbol##_semaphore, memory_order_relaxed) != 0, 0); \
    }                                                                                                     \
    void symbol(__VA_ARGS__)

/* The base tells a tracer by how much a tool like prelink has moved the addresses in the note. */
#define PROBE_NOTE(provider, name, symbol, arguments)                     \
    "1: nop\n"                                                            \
    ".pushsection .note.stapsdt,\"\",%%note\n"                            \
    ".balign 4\n"                                                         \
    ".4byte 8, 3f - 2f, 3\n"                                              \
    ".asciz \"stapsdt\"\n"                                                \
    "2: .8byte 1b, _.stapsdt.base, " symbol "_semaphore\n"                \
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

#define PROBE_BEGIN(symbol)                                                                                \
    __attribute__((section(".probes"), used, visibility("hidden"))) _Atomic(uint16_t) symbol##_semaphore = \
        0;                                                                                                 \
    __attribute__((noinline)) void symbol

/* In one source file: the probe provider:name, of so many arguments of 64 bits. */
#define PROBE_DEFINE_0(provider, name, symbol)                         \
    PROBE_BEGIN(symbol)(void) {                                        \
        __asm__ volatile(PROBE_NOTE(provider, name, #symbol, "") : :); \
    }

#define PROBE_DEFINE_1(provider, name, symbol)                                      \
    PROBE_BEGIN(symbol)(uint64_t first) {                                           \
        register uint64_t one __asm__(PROBE_REGISTER_1) = first;                    \
        __asm__ volatile(PROBE_NOTE(provider, name, #symbol, "8@%0") : : "r"(one)); \
    }

#define PROBE_DEFINE_2(provider, name, symbol)                                                     \
    PROBE_BEGIN(symbol)(uint64_t first, uint64_t second) {                                         \
        register uint64_t one __asm__(PROBE_REGISTER_1) = first;                                   \
        register uint64_t two __asm__(PROBE_REGISTER_2) = second;                                  \
        __asm__ volatile(PROBE_NOTE(provider, name, #symbol, "8@%0 8@%1") : : "r"(one), "r"(two)); \
    }

#define PROBE_DEFINE_3(provider, name, symbol)                                 \
    PROBE_BEGIN(symbol)(uint64_t first, uint64_t second, uint64_t third) {     \
        register uint64_t one __asm__(PROBE_REGISTER_1) = first;               \
        register uint64_t two __asm__(PROBE_REGISTER_2) = second;              \
        register uint64_t three __asm__(PROBE_REGISTER_3) = third;             \
        __asm__ volatile(PROBE_NOTE(provider, name, #symbol, "8@%0 8@%1 8@%2") \
                         :                                                     \
                         : "r"(one), "r"(two), "r"(three));                    \
    }

#define PROBE_DEFINE_4(provider, name, symbol)                                              \
    PROBE_BEGIN(symbol)(uint64_t first, uint64_t second, uint64_t third, uint64_t fourth) { \
        register uint64_t one __asm__(PROBE_REGISTER_1) = first;                            \
        register uint64_t two __asm__(PROBE_REGISTER_2) = second;                           \
        register uint64_t three __asm__(PROBE_REGISTER_3) = third;                          \
        register uint64_t four __asm__(PROBE_REGISTER_4) = fourth;                          \
        __asm__ volatile(PROBE_NOTE(provider, name, #symbol, "8@%0 8@%1 8@%2 8@%3")         \
                         :                                                                  \
                         : "r"(one), "r"(two), "r"(three), "r"(four));                      \
    }

#endif
