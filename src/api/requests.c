#include "api/requests.h"

#include "api/features.h"
#include "api/state.h"
#include "base/assert.h"

#include <errno.h>

/*
 * A handler that interrupted the governor, a cache or the profile holds a lock that the request waits for.
 * One that interrupted a client of the server may be what the server waits for. And a forking thread holds
 * all locks, as if it had interrupted itself. Each leaves the request to the next thread that comes.
 */
static bool may_wait(void) {
    const struct backend *backend = calm_allocator.backend;
    return backend->functions->interrupted(backend) == INTERRUPTED_NOTHING && !heap_profile_is_locked();
}

void requests_carry_out(trim_function *trim) {
    struct control_claim claim;
    if (!may_wait()) {
        return;
    }
    if (heap_profile_should_switch()) {
        heap_profile_apply();
    }
    if (!control_claim(&os_control, &claim)) {
        return;
    }
    int error = 0;
    uint64_t result = 0;
    switch (claim.request) {
    case CONTROL_TRIM:
        result = trim(calm_allocator.backend, claim.argument < SIZE_MAX ? (size_t)claim.argument : SIZE_MAX);
        break;
    case CONTROL_PROFILE:
        error = heap_profile_request((uint32_t)claim.argument, (uint32_t)(claim.argument >> 32), &result);
        break;
    default:
        error = ENOSYS;
    }
    calm_assert(error >= 0, error);
    control_complete(&os_control, &claim, error, result);
}
