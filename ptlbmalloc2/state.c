#include "state.h"

#include <string.h>
#include <sys/mman.h>

#include "os/filters.h"
#include "os/syscall.h"

struct state state;

static bool kernel_wipes;

static bool advise(int advice) {
    return os_syscall(SYS_madvise, &state, sizeof state, advice) == 0;
}

void state_start(void) {
    kernel_wipes = advise(MADV_WIPEONFORK);
}

/* Under a filter of the program's, nothing is governed (activation_is_on). */
void state_after_fork(void) {
    if (!kernel_wipes && filters_now() != FILTERS_ADDED && !advise(MADV_DONTNEED)) {
        memset(&state, 0, sizeof state);
    }
}
