#include "api/requests.h"

#include "api/features.h"
#include "api/instance.h"
#include "arena/arena.h"
#include "base/assert.h"

#include <errno.h>

/* Returns whether the caller may wait for locks. A signal handler that
 * interrupted the arena, a cache or the profile holds a lock that the request
 * needs. A forking thread holds all locks, as if it had interrupted itself.
 * Such a caller leaves the request to the next thread. */
static bool may_wait(void) {
    return !arena_is_held(&calm_arenas) && !heap_profile_is_locked();
}

void requests_carry_out(void) {
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
        result =
            arena_trim_by_helper(&calm_arenas, claim.argument < SIZE_MAX ? (size_t)claim.argument : SIZE_MAX);
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
