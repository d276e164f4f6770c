/*
 * Purging: the kernel takes ranges of memory back with as few TLB shootdowns as
 * possible. The arenas of both allocators call this file.
 *
 * All ranges go into one process_madvise(MADV_DONTNEED) on the process itself.
 * Linux 6.13 and later allow this call, and Linux 6.16 and later flush the TLBs
 * once for all ranges. If the kernel is older and refuses the call, or if a
 * seccomp filter may forbid it, each range takes one madvise.
 *
 * An emulator or a filter may report success and do nothing. A trial on a page
 * of the library's own therefore finds the call that works, before the first
 * purge and after each added filter. If neither call works, nothing is purged,
 * since the heap would take the memory to be zero.
 */
#ifndef CALM_OS_PURGE_H
#define CALM_OS_PURGE_H

#include <stddef.h>
#include <sys/uio.h>

/* The maximum of ranges in one call. The kernel accepts no more, and flushes
 * the TLBs once for all of them. */
#define PURGE_MAX_RANGES 1024

struct purge_result {
    size_t ranges_done;      /* the number of ranges that were purged completely, counted from the first */
    unsigned vectored_calls; /* calls of process_madvise that purged at least a page */
    unsigned single_calls;   /* calls of madvise that purged a range */
    int error; /* errno of the range at which it stopped, 0 if all are done; ENOSYS: no purge works */
};

/*
 * Makes page-aligned, private, anonymous ranges non-resident; their content
 * becomes zero. Stops at the first range that the kernel refuses (EINVAL:
 * locked in memory). A range that was purged in part does not count as done.
 * `count` is at most PURGE_MAX_RANGES. Thread-safe; preserves errno; allocates
 * nothing.
 */
struct purge_result purge_ranges(const struct iovec *ranges, size_t count);

enum purge_vectored {
    PURGE_VECTORED_OFF,
    PURGE_VECTORED_AUTO, /* if no seccomp filter can kill the process for process_madvise */
    PURGE_VECTORED_ON,   /* also if the process inherited a filter */
};

/* Sets whether process_madvise may be tried; initially PURGE_VECTORED_AUTO.
 * Thread-safe. */
void purge_allow_vectored(enum purge_vectored allowed);

enum purge_method { PURGE_UNKNOWN, PURGE_VECTORED, PURGE_SINGLE, PURGE_IMPOSSIBLE };

/* Returns the call that the next purge tries first; PURGE_UNKNOWN before the
 * first purge. Thread-safe. */
enum purge_method purge_current_method(void);

#endif
