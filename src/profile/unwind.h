/*
 * The call stack of the calling thread. heap_profile.c calls this file within
 * malloc, and pprof.c outside it.
 *
 * The unwinder follows the unwind tables that every program and library carries
 * (cfi.h), and frame pointers in code without tables. It asks the kernel about
 * each page of the stack before it reads an address from that page. A broken
 * stack therefore gives a short trace, never a fault.
 *
 * glibc 2.35 and later find the module of an address at any time, without a
 * lock (_dl_find_object). For other C libraries, unwind_learn_modules keeps a
 * table of the modules that are loaded when it is called.
 */
#ifndef CALM_PROFILE_UNWIND_H
#define CALM_PROFILE_UNWIND_H

#include "os/text.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Stores up to `max` return addresses, the innermost call first. Leaves out
 * addresses within this library if it is a shared one. Returns the number of
 * addresses. Async-signal-safe; preserves errno; allocates nothing. */
size_t unwind_here(uintptr_t *addresses, size_t max);

/* Appends an address. With glibc 2.35 and later, appends its module's name and
 * its offset in the module, too. Async-signal-safe; preserves errno; allocates
 * nothing. */
void unwind_print_address(uintptr_t address, struct text *text);

/* Called in a constructor, and after modules may have been loaded. Takes the
 * loader's lock, and so must not be called within malloc. */
void unwind_learn_modules(void);

/* Returns whether unwind_here leaves out this library's own frames. */
bool unwind_hides_itself(void);

#endif
