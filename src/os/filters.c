#include "os/filters.h"

#include "os/syscall.h"

#include <errno.h>
#include <sys/prctl.h>

_Atomic(int) filters_state = FILTERS_INHERITED;
_Atomic(unsigned) filters_set_calls;

void filters_detect(void) {
    long mode = os_syscall(SYS_prctl, PR_GET_SECCOMP);
    /* A kernel that was built without filters fails this call with EINVAL. */
    filters_set(mode == 0 || mode == -EINVAL ? FILTERS_NONE : FILTERS_INHERITED);
}

void filters_set(enum filters filters) {
    atomic_store_explicit(&filters_state, filters, memory_order_relaxed);
    atomic_fetch_add_explicit(&filters_set_calls, 1, memory_order_relaxed);
}
