#include "api/own_threads.h"

#include "api/allocator.h"
#include "api/offloading.h"
#include "governor/helper.h"
#include "os/filters.h"

/* Also on a machine that stands still for seconds. */
#define PATIENCE_NS 10000000000ULL

bool own_threads_stop(void) {
    if (filters_now() == FILTERS_ADDED) { /* which may not know the next call */
        helper_hold();
        return true;
    }
    if (!helper_is_of_this_process(&calm_governor)) {
        return false; /* the threads are the parent's, and so is what they may do; or none was started yet */
    }
    uint64_t patience_ns = offloading_is_held() ? 0 : PATIENCE_NS;
    bool gone = helper_stop(&calm_governor, patience_ns);
    offloading_retire(patience_ns);
    return gone;
}

void own_threads_resume(bool stopped) {
    if (stopped) {
        helper_resume();
    }
}
