#include "api/requests.h"

#include "api/state.h"

#include <errno.h>

/*
 * A handler that interrupted the governor, a cache or the profile holds a lock that the request waits for.
 * One that interrupted a client of the server may be what the server waits for. And a forking thread holds
 * all locks, as if it had interrupted itself. Each leaves the request to the next thread that comes.
 */
static bool may_wait(void) {
    const struct backend *backend = calm_allocator.backend;
    return backend->functions->interrupted(backend) == INTERRUPTED_NOTHING && !profiling_is_held();
}

void requests_carry_out(trim_function *trim) {
    struct control_claim claim;
    if (!may_wait()) {
        return;
    }
    if (profiling_should_switch()) {
        profiling_apply();
    }
    if (!control_take(&os_control, &claim)) {
        return;
    }
    int error = 0;
    uint64_t result = 0;
    switch (claim.request) {
    case CONTROL_TRIM:
        result = trim(calm_allocator.backend, claim.argument < SIZE_MAX ? (size_t)claim.argument : SIZE_MAX);
        break;
    case CONTROL_PROFILE:
        error = profiling_ask((uint32_t)claim.argument, (uint32_t)(claim.argument >> 32));
        result = atomic_load_explicit(&profiling_mean, memory_order_relaxed);
        break;
    default:
        error = ENOSYS;
    }
    control_finish(&os_control, &claim, error, result);
}

void requests_after_fork(void) {
    control_clear(&os_control);
}
