/*
 * The stack of calls of the thread that asks, without anything that allocates, waits or faults.
 *
 * On x86-64 by the unwind tables that every program and library carries (.eh_frame, System V ABI and DWARF 5,
 * section 6.4), read by a small interpreter (cfi.c); where code has none, and on aarch64, by frame pointers.
 * Whatever is read off the stack is first asked of the kernel, page by page: a broken stack gives a short
 * trace, never a fault.
 *
 * Which module's tables tell of an address is what the C library knows: glibc 2.35 and later say at any time,
 * without a lock (_dl_find_object). For others, unwind_learn_modules keeps a table of those loaded by then.
 */
#ifndef CALM_PROFILE_UNWIND_H
#define CALM_PROFILE_UNWIND_H

#include <stddef.h>
#include <stdint.h>

/*
 * Up to most return addresses, the innermost call first; those within this very library are left out if it is
 * a shared one. Async-signal-safe; preserves errno. Returns how many.
 */
size_t unwind_here(uintptr_t *addresses, size_t most);

/* Not from within malloc: takes the loader's lock. Any number of times. */
void unwind_learn_modules(void);

/* Whether this library's own frames are left out. */
int unwind_hides_itself(void);

#endif
