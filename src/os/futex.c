#include "os/futex.h"

#include "os/syscall.h"

#include <limits.h>
#include <linux/futex.h>
#include <time.h>

void futex_wait(_Atomic(uint32_t) *word, uint32_t seen, uint64_t ns) {
    struct timespec timeout = {(time_t)(ns / 1000000000U), (long)(ns % 1000000000U)};
    os_syscall(SYS_futex, (long)word, FUTEX_WAIT_PRIVATE, (long)seen, ns == 0 ? 0 : (long)&timeout, 0, 0);
}

void futex_wake_all(_Atomic(uint32_t) *word) {
    os_syscall(SYS_futex, (long)word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}
