#include "os/futex.h"

#include "os/clock.h"
#include "os/syscall.h"

#include <limits.h>
#include <linux/futex.h>

void futex_wait(_Atomic(uint32_t) *word, uint32_t seen, uint64_t ns) {
    struct timespec timeout = clock_timespec(ns);
    os_syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, ns == 0 ? NULL : &timeout);
}

void futex_wake_all(_Atomic(uint32_t) *word) {
    os_syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX);
}
