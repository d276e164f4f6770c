/*
 * Requests of other processes (os/control.h), and requests by a tracer of the
 * profile's probes (profile/sample_probes.h). The helper notices them, and so
 * does a thread of the program where it enters the arena, which is no fast
 * path.
 */
#ifndef CALM_API_REQUESTS_H
#define CALM_API_REQUESTS_H

#include "api/features.h"
#include "os/control.h"

/* Carries out pending requests, if there are any. Does nothing in a signal
 * handler that interrupted the allocator, or within a fork; the next thread
 * carries out the requests. Preserves errno. */
void requests_carry_out(void);

/* The caller holds no lock of the allocator, unless it is a signal handler that
 * interrupted a thread with such a lock. */
static inline void requests_notice(void) {
    if (control_is_pending(&os_control) || heap_profile_should_switch()) {
        requests_carry_out();
    }
}

#endif
