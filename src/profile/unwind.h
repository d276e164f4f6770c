/*
 * The call stack of the calling thread. Called by heap_profile.c within malloc, and by pprof.c.
 *
 * On x86-64 by the unwind tables that every program and library carries (cfi.h), and by frame pointers where
 * code has none; on aarch64 by frame pointers. All addresses that are read off the stack are checked with the
 * kernel first, page by page: a broken stack gives a short trace, never a fault.
 *
 * glibc 2.35 and later find an address's module at any time, without a lock (_dl_find_object). For other C
 * libraries, unwind_learn_modules keeps a table of the modules that are loaded when it is called.
 */
#ifndef CALM_PROFILE_UNWIND_H
#define CALM_PROFILE_UNWIND_H

#include "os/text.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Up to max return addresses, the innermost call first, without those within this library if it is a shared
 * one. Returns how many. Async-signal-safe; preserves errno; allocates nothing.
 */
size_t unwind_here(uintptr_t *addresses, size_t max);

/* Appends an address, with its module's name and the offset in it where glibc tells them (2.35 and later). As
 * unwind_here. */
void unwind_print_address(uintptr_t address, struct text *text);

/* In a constructor, and whenever modules may have been loaded since. Not from within malloc: takes the
 * loader's lock. */
void unwind_learn_modules(void);

/* Whether unwind_here leaves out this library's own frames. */
bool unwind_hides_itself(void);

#endif
