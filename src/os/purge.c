#include "os/purge.h"

#include "base/assert.h"
#include "os/filters.h"
#include "os/syscall.h"
#include "os/vm.h"

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
/* From linux/pidfd.h of Linux 6.14: the calling process, without a descriptor
 * that could be kept or inherited. */
#define PIDFD_SELF_PROCESS (-10001)

static _Atomic(int) allowed = PURGE_VECTORED_AUTO;
static _Atomic(int) method = PURGE_UNKNOWN;
static _Atomic(unsigned) method_filters; /* the result of filters_changes when the method was found */
static _Atomic(bool) needs_descriptor;   /* process_madvise works, PIDFD_SELF does not */

static bool may_try_vectored(void) {
    int how = atomic_load_explicit(&allowed, memory_order_relaxed);
    return how == PURGE_VECTORED_ON ? filters_now() != FILTERS_ADDED
                                    : how == PURGE_VECTORED_AUTO && filters_allow_all();
}

enum purge_method purge_current_method(void) {
    bool is_current = atomic_load_explicit(&method_filters, memory_order_relaxed) == filters_changes();
    return is_current ? (enum purge_method)atomic_load_explicit(&method, memory_order_relaxed)
                      : PURGE_UNKNOWN;
}

void purge_allow_vectored(enum purge_vectored allow) {
    atomic_store_explicit(&allowed, (int)allow, memory_order_relaxed);
    atomic_store_explicit(&method, PURGE_UNKNOWN, memory_order_relaxed);
}

/* Returns the number of advised bytes, or -errno. Each call opens a pidfd of
 * its own, if it needs one: after fork, a kept pidfd would refer to the parent,
 * and the program may close any descriptor that it finds. */
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

static long advise_one(const struct iovec *range) {
    return os_syscall(SYS_madvise, range->iov_base, range->iov_len, MADV_DONTNEED);
}

/* Returns whether the kernel reports success and does nothing. A refusal (for
 * example of a page that mlockall locks) does not count, since the kernel may
 * accept other pages. */
static bool single_is_untrue(const struct iovec *page) {
    volatile char *word = page->iov_base;
    *word = 1;
    return advise_one(page) == 0 && *word != 0;
}

static bool vectored_works(const struct iovec *page) {
    volatile char *word = page->iov_base;
    *word = 1;
    return advise_vector(page, 1) > 0 && *word == 0;
}

/* The size of a page for the trial: the largest page size of the architecture.
 * These pages exist from the start, because there may be no room for a mapping
 * when a purge is needed to make room. */
#ifdef __x86_64__
#define PROBED_BYTES 4096
#else
#define PROBED_BYTES 65536
#endif
/* Each call has a page of its own. Several threads may try the same call at the
 * same time, and get the same result. */
static _Alignas(PROBED_BYTES) char probed[2][PROBED_BYTES];

/* Both calls are tried, because madvise continues where process_madvise
 * stops. */
static enum purge_method find_method(void) {
    unsigned filters = filters_changes();
    struct iovec one = {probed[0], vm_page_size()};
    struct iovec other = {probed[1], vm_page_size()};
    enum purge_method found = single_is_untrue(&one)                         ? PURGE_IMPOSSIBLE
                              : may_try_vectored() && vectored_works(&other) ? PURGE_VECTORED
                                                                             : PURGE_SINGLE;
    atomic_store_explicit(&method, found, memory_order_relaxed);
    atomic_store_explicit(&method_filters, filters, memory_order_relaxed);
    return found;
}

struct purge_result purge_ranges(const struct iovec *ranges, size_t count) {
    struct purge_result result = {0};
    enum purge_method by = count == 0 ? PURGE_SINGLE : purge_current_method();
    if (by == PURGE_UNKNOWN) {
        by = find_method();
    }
    if (by == PURGE_IMPOSSIBLE) {
        result.error = ENOSYS;
        return result;
    }
    if (by == PURGE_VECTORED) {
        long advised = advise_vector(ranges, count);
        calm_assert(count <= PURGE_MAX_RANGES, count);
        result.vectored_calls = advised > 0;
        /* A range that was purged in part does not count as done. */
        while (result.ranges_done < count && advised >= (long)ranges[result.ranges_done].iov_len) {
            advised -= (long)ranges[result.ranges_done++].iov_len;
        }
    }
    /* The remaining ranges take one call each. None remain if the vectored call
     * worked, and all if the kernel refused it. */
    while (result.ranges_done < count) {
        long refused = advise_one(&ranges[result.ranges_done]);
        if (refused != 0) {
            result.error = (int)-refused;
            break;
        }
        result.single_calls++;
        result.ranges_done++;
    }
    return result;
}
