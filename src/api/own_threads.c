#include "api/own_threads.h"

#include "api/state.h"
#include "governor/helper.h"
#include "os/filters.h"

/* Enough also on a machine that stands still for seconds. */
#define TIMEOUT_NS 10000000000ULL

bool own_threads_stop(void) {
    if (filters_now() == FILTERS_ADDED) { /* which may not know the next call */
        helper_hold();
        return true;
    }
    if (!allocator_is_ready() || !helper_is_of_this_process(&calm_governor)) {
        return false; /* the threads are the parent's, and so is what they may do; or none was started yet */
    }
    struct backend *backend = calm_allocator.backend;
    bool waits = backend->functions->interrupted(backend) != INTERRUPTED_HOLDER;
    return backend->functions->stop_threads(backend, waits ? TIMEOUT_NS : 0);
}

void own_threads_resume(bool stopped) {
    if (stopped) {
        helper_resume();
    }
}
