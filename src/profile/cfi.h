/*
 * One step up the call stack by unwind tables (.eh_frame: System V ABI, and DWARF 5, section 6.4): a caller's
 * registers from those of its callee. x86-64. Called by unwind.c.
 *
 * The tables belong to a module that stays loaded, since its code is running. They are read within the
 * module's bounds. What they say of the stack is read by the caller's `load`, which may refuse.
 * Async-signal-safe.
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
    uintptr_t start; /* of what may be read */
    uintptr_t end;
    uintptr_t tables; /* .eh_frame_hdr; 0: none */
};

enum cfi_step { CFI_STEPPED, CFI_OUTERMOST, CFI_UNKNOWN /* no tables for the address, or unusual ones */ };

/* Reads a word of the stack. False if it is not readable. */
typedef bool (*cfi_load)(void *context, uintptr_t address, uintptr_t *word);

/* After CFI_STEPPED registers are the caller's, otherwise they are unchanged. */
enum cfi_step cfi_step(const struct cfi_module *module, struct cfi_registers *registers, cfi_load load,
                       void *context);

#endif
