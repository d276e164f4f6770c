#include "os/signals.h"

#include "os/syscall.h"

#include <signal.h>

uint64_t thread_set_signals(uint64_t mask) {
    uint64_t before = 0;
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, &mask, &before, sizeof mask);
    return before;
}

/* setxid is the last signal that the C library reserves (glibc's SIGSETXID,
 * musl's SIGSYNCCALL). */
uint64_t thread_block_signals(void) {
    int setxid = SIGRTMIN - 1;
    return thread_set_signals(~((uint64_t)1 << (setxid - 1)));
}
