#include "offload/endpoint.h"

#include "os/futex.h"
#include "os/syscall.h"

#define SPINS 64

void endpoint_enter(struct endpoint *endpoint) {
    for (unsigned spins = 0; !endpoint_try(endpoint); spins++) {
        if (spins % SPINS == SPINS - 1) {
            os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
        } else {
            cpu_relax();
        }
    }
}
