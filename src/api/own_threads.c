#include "api/own_threads.h"

#include "api/allocator.h"
#include "api/offloading.h"
#include "governor/helper.h"

bool own_threads_stop(void) {
    if (!helper_is_of_this_process(&calm_governor)) {
        return false; /* the threads are the parent's, and so is what they may do; or none was started yet */
    }
    helper_stop(&calm_governor);
    offloading_retire();
    return true;
}

void own_threads_resume(bool stopped) {
    if (stopped) {
        helper_resume();
    }
}
