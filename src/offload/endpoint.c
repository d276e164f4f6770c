#include "offload/endpoint.h"

#include "os/futex.h"
#include "os/syscall.h"

#define ENDPOINT_SPINS 64

bool endpoint_enter(struct endpoint *endpoint, uint32_t max_yields) {
    for (uint32_t spins = 0; !endpoint_try(endpoint); spins++) {
        if (spins / ENDPOINT_SPINS >= max_yields) {
            return false;
        }
        if (spins % ENDPOINT_SPINS == ENDPOINT_SPINS - 1) {
            os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
        } else {
            cpu_relax();
        }
    }
    return true;
}
