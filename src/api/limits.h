/*
 * Limits on address space. The allocator's free memory leaves room for the
 * program's other mappings. The C library's malloc does so, too, because it
 * releases address space as blocks are freed.
 */
#ifndef CALM_API_LIMITS_H
#define CALM_API_LIMITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The argument after a call that failed for lack of address space. */
#define LIMITS_FAILED SIZE_MAX

/* Called before `bytes` are mapped, or after that failed. If the limit on
 * address space leaves no room for them, purges all free memory, and releases
 * the address space that it does not need. Returns whether it did. The caller
 * holds no lock of the allocator. Does nothing in a signal handler that
 * interrupted a thread with such a lock, or in a child of vfork. Preserves
 * errno. */
bool limits_make_room(size_t bytes);

#endif
