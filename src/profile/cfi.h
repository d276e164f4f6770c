/*
 * Takes one step up the call stack by unwind tables: computes a caller's
 * registers from those of its callee. The tables are .eh_frame (System V ABI;
 * DWARF 5, section 6.4). Called by unwind.c.
 *
 * The tables belong to a module that stays loaded, since its code is running.
 * The functions read them only within the module's bounds. They read the stack
 * through the caller's `load`, which may refuse. Async-signal-safe.
 */
#ifndef CALM_PROFILE_CFI_H
#define CALM_PROFILE_CFI_H

#include <stdbool.h>
#include <stdint.h>

/* DWARF's numbers of registers. CFI_RETURN holds a function's return address,
 * and CFI_PC the address of the instruction: on x86-64 one number for both, on
 * aarch64 the link register and one that only this library numbers. CFI_LAST is
 * the last one that tables name. */
#if defined(__aarch64__)
enum { CFI_FRAME = 29, CFI_RETURN = 30, CFI_STACK = 31, CFI_LAST = 31, CFI_PC = 32, CFI_REGISTERS = 33 };
#else
enum { CFI_FRAME = 6, CFI_STACK = 7, CFI_RETURN = 16, CFI_LAST = 16, CFI_PC = 16, CFI_REGISTERS = 17 };
#endif

struct cfi_registers {
    uintptr_t of[CFI_REGISTERS];
    bool in_signal;      /* the instruction is one that a signal interrupted, not the one after a call */
    bool stack_is_least; /* the stack pointer's value is not known; it is not below this */
};

struct cfi_module {
    uintptr_t start; /* the first readable address */
    uintptr_t end;
    uintptr_t tables; /* .eh_frame_hdr; 0: none */
};

enum cfi_step { CFI_STEPPED, CFI_OUTERMOST, CFI_UNKNOWN /* no tables for the address, or unusual ones */ };

/* Reads a word of the stack. Returns false if the word is not readable. */
typedef bool (*cfi_load)(void *context, uintptr_t address, uintptr_t *word);

/* If it returns CFI_STEPPED, the registers have become the caller's. Otherwise
 * they are unchanged. */
enum cfi_step cfi_step(const struct cfi_module *module, struct cfi_registers *registers, cfi_load load,
                       void *context);

#endif
