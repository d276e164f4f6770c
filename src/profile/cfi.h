/*
 * One step up the stack of calls by unwind tables: registers of a caller from those of its callee. x86-64.
 *
 * The tables belong to a module that is loaded, since its code is running: they are read as they are, within
 * the module's bounds. What they say of the stack is read by the caller's `load`, which may refuse.
 */
#ifndef CALM_PROFILE_CFI_H
#define CALM_PROFILE_CFI_H

#include <stdbool.h>
#include <stdint.h>

/* DWARF's numbers of registers on x86-64. */
enum { CFI_RBP = 6, CFI_RSP = 7, CFI_RIP = 16, CFI_REGISTERS = 17 };

struct cfi_registers {
    uintptr_t of[CFI_REGISTERS];
    bool in_signal; /* rip is where a signal struck, not behind a call */
};

struct cfi_module {
    uintptr_t start; /* of what may be read */
    uintptr_t end;
    uintptr_t tables; /* .eh_frame_hdr */
};

enum cfi_step { CFI_STEPPED, CFI_OUTERMOST, CFI_UNKNOWN /* no tables for the address, or odd ones */ };

typedef bool (*cfi_load)(void *context, uintptr_t address, uintptr_t *word);

/* registers become the caller's if it is CFI_STEPPED, and else stay. */
enum cfi_step cfi_step(const struct cfi_module *module, struct cfi_registers *registers, cfi_load load,
                       void *context);

#endif
