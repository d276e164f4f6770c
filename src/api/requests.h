/*
 * What another process asks of this one (os/control.h), or asks for by tracing the profile's probes
 * (profile/probes.h): noticed where a thread of the program enters the heap, which is no fast path, and by
 * the helper or the server.
 */
#ifndef CALM_API_REQUESTS_H
#define CALM_API_REQUESTS_H

#include "api/features.h"
#include "backend/backend.h"
#include "os/control.h"

#include <stddef.h>

/* Of a backend. */
typedef size_t trim_function(struct backend *backend, size_t keep_bytes);

/* Carries out what is asked, a trim by that function. Not in a signal handler that interrupted the allocator,
 * nor within a fork: what is asked waits for the next thread. Preserves errno. */
void requests_carry_out(trim_function *trim);

/* The caller holds no lock of the allocator's, unless a signal handler interrupted one that does. */
static inline void requests_notice(trim_function *trim) {
    if (control_is_pending(&os_control) || heap_profile_should_switch()) {
        requests_carry_out(trim);
    }
}

#endif
