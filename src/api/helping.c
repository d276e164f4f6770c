#include "api/helping.h"

#include "api/allocator.h"
#include "api/offloading.h"
#include "governor/helper.h"

void helping_stop(void) {
    if (cpu_cache_is_vforked()) {
        return; /* the threads are the parent's, and so is what they may do */
    }
    helper_stop(&calm_governor);
    offloading_retire();
}

void helping_resume(void) {
    if (cpu_cache_is_vforked()) {
        return;
    }
    helper_resume(&calm_governor);
}
