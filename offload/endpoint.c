#include "offload/endpoint.h"

#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"

#include <string.h>

#define ENDPOINT_SPINS 64

void endpoint_nap(void) {
    const struct timespec nap = clock_timespec(ENDPOINT_NAP_NS);
    os_syscall(SYS_nanosleep, &nap, NULL);
}

bool endpoint_enter(struct endpoint *endpoint, unsigned max_naps) {
    for (unsigned naps = 0;; naps++) {
        for (unsigned spins = 0; spins < ENDPOINT_SPINS; spins++) {
            if (endpoint_try(endpoint)) {
                return true;
            }
            cpu_relax();
        }
        if (naps == max_naps) {
            return false;
        }
        endpoint_nap();
    }
}

void endpoint_forget(struct endpoint *endpoint) {
    const struct endpoint_layout *layout = endpoint->layout;
    struct endpoint *next = endpoint->next;
    memset(endpoint, 0, sizeof *endpoint + layout->words * sizeof *endpoint->words);
    endpoint->layout = layout;
    endpoint->next = next;
}
