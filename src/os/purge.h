/*
 * Purging: giving ranges of memory back to the system with as few TLB shootdowns as the kernel allows. Called
 * by the governors of both allocators and by the server's overflow.
 *
 * All ranges go into one process_madvise(MADV_DONTNEED) on the process itself, which Linux 6.13 and later
 * allow and Linux 6.16 and later flush once. Where it is refused (an older kernel), or may not be tried (a
 * seccomp filter), each range is one madvise.
 *
 * Which of the two works is found out before the first purge, and again once a filter was added, on a page of
 * the library's own: an emulator or a filter may answer that it purged, and do nothing. Where neither works
 * nothing is purged, since memory that is taken to be zero would not be.
 */
#ifndef CALM_OS_PURGE_H
#define CALM_OS_PURGE_H

#include <stddef.h>
#include <sys/uio.h>

#define PURGE_MAX_RANGES 1024 /* in one call: the kernel takes no more, and flushes once for all of them */

struct purge_result {
    size_t ranges_done;      /* purged whole, counted from the first */
    unsigned vectored_calls; /* process_madvise calls that purged at least a page */
    unsigned single_calls;   /* madvise calls likewise */
    int error; /* errno of the range that stopped it, 0 if all are done; ENOSYS: no purge works */
};

/*
 * Makes the page-aligned, private anonymous ranges non-resident; their content becomes zero. Stops at the
 * first range that the kernel refuses (EINVAL: locked in memory). A range that was purged in part counts as
 * not done. ranges must be at most PURGE_MAX_RANGES. Thread-safe; preserves errno; allocates nothing.
 */
struct purge_result purge_ranges(const struct iovec *ranges, size_t count);

enum purge_vectored {
    PURGE_VECTORED_OFF,
    PURGE_VECTORED_AUTO, /* where no seccomp filter can kill the process for it */
    PURGE_VECTORED_ON,   /* also under a filter that is older than the process */
};

/* Whether process_madvise may be tried from now on; at first PURGE_VECTORED_AUTO. Thread-safe. */
void purge_allow_vectored(enum purge_vectored allowed);

enum purge_method { PURGE_UNKNOWN, PURGE_VECTORED, PURGE_SINGLE, PURGE_IMPOSSIBLE };

/* How the next purge is tried first; PURGE_UNKNOWN before the first one. Thread-safe. */
enum purge_method purge_current_method(void);

#endif
