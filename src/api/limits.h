/*
 * Limits on address space: what else the program maps has room, as beside the C library's malloc, which gives
 * address space back as it is freed.
 */
#ifndef CALM_API_LIMITS_H
#define CALM_API_LIMITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of a call that failed for want of room. */
#define LIMITS_FAILED SIZE_MAX

/*
 * If address space is limited, and so many bytes more than there are left are about to be mapped: gives back
 * all that is free. True if it did. Any thread that holds no lock of the allocator; does nothing in a signal
 * handler that interrupted one that does, or in a child of vfork. Preserves errno.
 */
bool limits_make_room(size_t bytes);

#endif
