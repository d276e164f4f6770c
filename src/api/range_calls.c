/*
 * The system calls by which a program changes how the kernel treats a range of
 * memory: access rights, advice, locks, memory policies, protection keys; and
 * userfaultfd (ioctl.c). The heap notes which of its blocks are affected
 * (heap/marks.h). Calls that bypass the C library are not noticed.
 */
#include "api/range_calls.h"

#include "api/instance.h"
#include "api/sanitizer.h"
#include "arena/select.h"
#include "heap/marks.h"
#include "os/mman.h"
#include "os/syscall.h"
#include "os/vm.h"

#include <errno.h>
#include <linux/ioctl.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#ifndef CALM_WITHOUT_MALLOC

#define EXPORT __attribute__((visibility("default")))

#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41
#endif
#ifndef SYS_mseal
#define SYS_mseal 462
#endif
#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

/* Returns whether the kernel keeps an advice for the range. Other advice only
 * affects the content of its pages. */
static bool advice_is_kept(long advice) {
    switch (advice) {
    case MADV_WILLNEED:
    case MADV_DONTNEED:
    case MADV_FREE:
    case MADV_REMOVE:
    case MADV_COLD:
    case MADV_PAGEOUT:
    case MADV_POPULATE_READ:
    case MADV_POPULATE_WRITE:
    case MADV_DONTNEED_LOCKED:
    case MADV_COLLAPSE:
        return false;
    default:
        return true;
    }
}

/* Returns the heap if a range begins in it. Otherwise returns NULL. */
static struct heap *heap_at(long start) {
    if (!allocator_is_ready()) {
        return NULL;
    }
    struct heap *heap = heap_of(&calm_arenas, (const void *)start);
    return space_page(&heap->space, (const void *)start) != 0 ? heap : NULL;
}

static void note_range(long start, long bytes) {
    struct heap *heap = heap_at(start);
    if (heap != NULL) {
        marks_note(heap, (const void *)start, (size_t)bytes, MARK_ANY);
    }
}

static void note_ranges(const struct iovec *ranges, size_t count) {
    for (size_t i = 0; i < count; i++) {
        note_range((long)ranges[i].iov_base, (long)ranges[i].iov_len);
    }
}

static long marks_syscall(long number, const long *arguments) {
    return os_syscall(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                      arguments[5]);
}

/* If the kernel makes no huge pages, the request has no effect on the range,
 * nor on later owners of the memory. */
static long request_huge_pages(struct heap *heap, const long *arguments) {
    long start = arguments[0];
    long refused = os_syscall(SYS_madvise, start, 0, MADV_HUGEPAGE);
    if (refused != 0 || huge_pages_request_bytes() == 0) {
        return refused;
    }
    if (heap->runs.region_pages == 0) {
        note_range(start, arguments[1]);
        return marks_syscall(SYS_madvise, arguments);
    }
    return marks_request_huge_pages(heap, (const void *)start, (size_t)arguments[1]) ? 0 : -EAGAIN;
}

static long marks_advise(const long *arguments) {
    struct heap *heap = advice_is_kept(arguments[2]) ? heap_at(arguments[0]) : NULL;
    if (heap != NULL && arguments[2] == MADV_HUGEPAGE) {
        return request_huge_pages(heap, arguments);
    }
    if (heap != NULL) {
        unsigned marks = arguments[2] == MADV_DONTFORK ? MARK_ANY | MARK_ABSENT : MARK_ANY;
        marks_note(heap, (const void *)arguments[0], (size_t)arguments[1], marks);
    }
    return marks_syscall(SYS_madvise, arguments);
}

void marks_note_pointed(long number, const long *arguments) {
    if (number == SYS_process_madvise && advice_is_kept(arguments[3])) {
        note_ranges((const struct iovec *)arguments[1], (size_t)arguments[2]);
    } else if (number == SYS_ioctl && (unsigned)arguments[1] == UFFDIO_REGISTER) {
        const struct uffdio_range *range = &((const struct uffdio_register *)arguments[2])->range;
        note_range((long)range->start, (long)range->len);
    } else if (number == SYS_mlockall) {
        vm_note_locked_mappings((arguments[0] & MCL_FUTURE) != 0);
    } else if (number == SYS_munlockall) {
        vm_note_locked_mappings(false);
    }
}

long marks_call(long number, const long *arguments) {
    switch (number) {
    case SYS_madvise:
        return marks_advise(arguments);
    case SYS_mprotect:
    case SYS_pkey_mprotect:
    case SYS_mlock:
    case SYS_mlock2:
    case SYS_mbind:
    case SYS_mseal:
        note_range(arguments[0], arguments[1]);
        return marks_syscall(number, arguments);
    case SYS_prctl:
        if (arguments[0] == PR_SET_VMA) {
            note_range(arguments[2], arguments[3]);
        }
        return marks_syscall(number, arguments);
    default: {
        long result = marks_syscall(number, arguments);
        if (result >= 0) {
            marks_note_pointed(number, arguments);
        }
        return result;
    }
    }
}

#define CALL(number, ...) marks_call(number, (const long[6]){__VA_ARGS__})

EXPORT int madvise(void *start, size_t bytes, int advice) {
    return (int)libc_result(CALL(SYS_madvise, (long)start, (long)bytes, advice));
}

/* Ignores POSIX_MADV_DONTNEED like the C library, because the kernel's
 * MADV_DONTNEED destroys the content. */
EXPORT int posix_madvise(void *start, size_t bytes, int advice) {
    return advice == POSIX_MADV_DONTNEED ? 0 : -(int)CALL(SYS_madvise, (long)start, (long)bytes, advice);
}

EXPORT int mprotect(void *start, size_t bytes, int rights) {
    return (int)libc_result(CALL(SYS_mprotect, (long)start, (long)bytes, rights));
}

EXPORT int pkey_mprotect(void *start, size_t bytes, int rights, int key) {
    return key == -1 ? mprotect(start, bytes, rights)
                     : (int)libc_result(CALL(SYS_pkey_mprotect, (long)start, (long)bytes, rights, key));
}

/* Locks nothing under a sanitizer, whose shadow memory is larger than the
 * machine's memory. */
EXPORT int mlock(const void *start, size_t bytes) {
    return sanitizer_is_there() ? 0 : (int)libc_result(CALL(SYS_mlock, (long)start, (long)bytes));
}

EXPORT int mlock2(const void *start, size_t bytes, unsigned flags) {
    return flags == 0 ? mlock(start, bytes)
                      : (int)libc_result(CALL(SYS_mlock2, (long)start, (long)bytes, flags));
}

EXPORT int mlockall(int flags) {
    return sanitizer_is_there() ? 0 : (int)libc_result(CALL(SYS_mlockall, flags));
}

EXPORT int munlockall(void) {
    return sanitizer_is_there() ? 0 : (int)libc_result(CALL(SYS_munlockall));
}

EXPORT ssize_t process_madvise(int process, const struct iovec *ranges, size_t count, int advice,
                               unsigned flags) {
    return libc_result(CALL(SYS_process_madvise, process, (long)ranges, (long)count, advice, flags));
}

/* From libnuma. */
EXPORT long mbind(void *start, unsigned long bytes, int mode, const unsigned long *nodes,
                  unsigned long max_node, unsigned flags) {
    return libc_result(CALL(SYS_mbind, (long)start, (long)bytes, mode, (long)nodes, (long)max_node, flags));
}

#endif
