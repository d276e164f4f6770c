#include "api/own_threads.h"

#include "api/instance.h"
#include "arena/arena.h"
#include "arena/helper.h"
#include "os/filters.h"

/* Long enough for a machine that stalls for seconds. */
#define TIMEOUT_NS 10000000000ULL

bool own_threads_stop(void) {
    if (filters_now() == FILTERS_ADDED) { /* the filter may forbid the system calls below */
        helper_hold();
        return true;
    }
    if (!allocator_is_ready() || !helper_is_of_this_process(&calm_arenas)) {
        return false; /* the threads are the parent's, which this call does not change; or there are none */
    }
    return helper_stop(&calm_arenas, arena_is_held(&calm_arenas) ? 0 : TIMEOUT_NS);
}

void own_threads_resume(bool stopped) {
    if (stopped) {
        helper_resume();
    }
}
