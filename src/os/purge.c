#include "os/purge.h"

#include "os/filters.h"
#include "os/syscall.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>

#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
/* linux/pidfd.h of Linux 6.14: the calling process, without a descriptor that could be kept or inherited. */
#define PIDFD_SELF_PROCESS (-10001)

static _Atomic(int) allowed = PURGE_VECTORED_AUTO;
static _Atomic(int) method = PURGE_UNKNOWN;
static _Atomic(bool) needs_descriptor; /* a kernel with process_madvise on oneself, but without PIDFD_SELF */

static bool may_try_vectored(void) {
    int how = atomic_load_explicit(&allowed, memory_order_relaxed);
    return how == PURGE_VECTORED_ON ? filters_now() != FILTERS_ADDED
                                    : how == PURGE_VECTORED_AUTO && filters_allow_all();
}

enum purge_method purge_current_method(void) {
    return may_try_vectored() ? (enum purge_method)atomic_load_explicit(&method, memory_order_relaxed)
                              : PURGE_SINGLE;
}

void purge_allow_vectored(enum purge_vectored allow) {
    atomic_store_explicit(&allowed, (int)allow, memory_order_relaxed);
    atomic_store_explicit(&method, PURGE_UNKNOWN, memory_order_relaxed);
}

/* Bytes advised, or -errno. A pidfd is opened anew each time: after fork, a kept one would refer to the
 * parent, and the application may close any descriptor that it finds. */
static long advise_vector(const struct iovec *ranges, size_t count) {
    if (!atomic_load_explicit(&needs_descriptor, memory_order_relaxed)) {
        long done = os_syscall(SYS_process_madvise, PIDFD_SELF_PROCESS, ranges, count, MADV_DONTNEED);
        if (done != -EBADF) {
            return done;
        }
        atomic_store_explicit(&needs_descriptor, true, memory_order_relaxed);
    }
    long process = os_syscall(SYS_getpid);
    long pidfd = os_syscall(SYS_pidfd_open, process);
    if (pidfd < 0) {
        return pidfd;
    }
    long done = os_syscall(SYS_process_madvise, pidfd, ranges, count, MADV_DONTNEED);
    os_syscall(SYS_close, pidfd);
    return done;
}

struct purge_result purge_ranges(const struct iovec *ranges, size_t count) {
    struct purge_result result = {0};
    int known = atomic_load_explicit(&method, memory_order_relaxed);

    if (known != PURGE_SINGLE && count > 0 && may_try_vectored()) {
        long advised = advise_vector(ranges, count);
        result.vectored_calls = advised > 0;
        /* A range that was purged in part is not done. */
        while (result.ranges_done < count && advised >= (long)ranges[result.ranges_done].iov_len) {
            advised -= (long)ranges[result.ranges_done++].iov_len;
        }
        if (result.ranges_done > 0 && known == PURGE_UNKNOWN) {
            atomic_store_explicit(&method, PURGE_VECTORED, memory_order_relaxed);
        }
    }
    /* The rest, one by one: all ranges where the vectored call is refused, none where it worked. A range that
     * is refused here, too, says nothing about the vectored call. */
    while (result.ranges_done < count) {
        const struct iovec *range = &ranges[result.ranges_done];
        long refused = os_syscall(SYS_madvise, range->iov_base, range->iov_len, MADV_DONTNEED);
        if (refused != 0) {
            result.error = (int)-refused;
            break;
        }
        result.single_calls++;
        result.ranges_done++;
        if (known == PURGE_UNKNOWN && result.vectored_calls == 0) {
            atomic_store_explicit(&method, PURGE_SINGLE, memory_order_relaxed);
        }
    }
    return result;
}
