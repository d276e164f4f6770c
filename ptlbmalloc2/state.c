#include "state.h"

#include <sys/mman.h>

struct state state;

bool state_wipe_on_fork(void) {
    return madvise(&state, sizeof state, MADV_WIPEONFORK) == 0;
}
