/*
 * The scheme of "NextGen-Malloc" as printed (section 4.2, pseudo code 1): each malloc and each free is one
 * message, for which the caller waits. Kept small, to be measured against.
 *
 * As printed it never clears malloc_done, so that the second malloc returns the first one's block; and two
 * clients may both find malloc_ready clear and overwrite each other's request. Here the client that was
 * answered clears done, and a lock lets in one client at a time. tests/model/paper.pml has both faults.
 */
#ifndef CALM_OFFLOAD_SYNC_H
#define CALM_OFFLOAD_SYNC_H

#include "os/lock.h"

#include <stdbool.h>
#include <stddef.h>

enum sync_request {
    SYNC_NONE,
    SYNC_REQUEST,
    SYNC_TAKEN, /* the server is at it: too late to take it back */
};

struct sync {
    struct lock clients;
    _Atomic(bool) closing; /* somebody waits for the lock for whom the server does not answer meanwhile */
    _Alignas(64) _Atomic(uint32_t) ready; /* enum sync_request */
    _Atomic(uint32_t) done;               /* the request was served */
    uint32_t class;
    void *block; /* in: to free, or NULL; out: what was allocated */
};

#endif
