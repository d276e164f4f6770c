#include "os/filters.h"

#include "os/syscall.h"

#include <errno.h>
#include <sys/prctl.h>

_Atomic(int) filters_state = FILTERS_UNKNOWN;

void filters_look(void) {
    long mode = os_syscall(SYS_prctl, PR_GET_SECCOMP, 0, 0, 0, 0, 0);
    /* A kernel that has no filters does not know of them. */
    filters_note(mode == 0 || mode == -EINVAL ? FILTERS_NONE : FILTERS_INHERITED);
}

void filters_note(enum filters filters) {
    atomic_store_explicit(&filters_state, filters, memory_order_relaxed);
}
