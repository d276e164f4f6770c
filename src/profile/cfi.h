/*
 * Takes one step up the call stack by unwind tables: computes a caller's
 * registers from those of its callee. The tables are .eh_frame (System V ABI;
 * DWARF 5, section 6.4). x86-64 only. Called by unwind.c.
 *
 * The tables belong to a module that stays loaded, since its code is running.
 * The functions read them only within the module's bounds. They read the stack
 * through the caller's `load`, which may refuse. Async-signal-safe.
 */
#ifndef CALM_PROFILE_CFI_H
#define CALM_PROFILE_CFI_H

#include <stdbool.h>
#include <stdint.h>

/* DWARF's numbers of registers on x86-64. */
enum { CFI_RBP = 6, CFI_RSP = 7, CFI_RIP = 16, CFI_REGISTERS = 17 };

struct cfi_registers {
    uintptr_t of[CFI_REGISTERS];
    bool in_signal; /* rip is the instruction that a signal interrupted, not the one after a call */
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
