/*
 * prctl and syscall, by which a program adds a seccomp filter, gives up the right to gain privileges, enters
 * other namespaces, or copies itself: no thread of ours is there meanwhile that would be left behind, and
 * from a filter on only such system calls are made as the C library's malloc makes.
 */
#ifndef CALM_WITHOUT_THREADS
#include "api/features.h"
#include "api/marks.h"
#include "api/own_threads.h"
#include "api/vfork.h"
#include "os/thread.h"
#endif
#include "os/filters.h"
#include "os/syscall.h"

#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/prctl.h>

#ifndef CALM_WITHOUT_MALLOC

#define EXPORT __attribute__((visibility("default")))

#ifndef SYS_landlock_restrict_self
#define SYS_landlock_restrict_self 446
#endif

#ifdef CALM_WITHOUT_THREADS
static bool own_threads_stop(void) {
    return false; /* nothing of ours runs by itself */
}
static void own_threads_resume(bool stopped) {
    (void)stopped;
}
static bool vfork_is_child(void) {
    return false;
}
static bool thread_is_alone(void) {
    return false;
}
static void heap_profile_apply(void) {
}
/* glibc unmaps large blocks, so that marks end with them. */
static long marks_call(long number, const long *arguments) {
    return os_syscall(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                      arguments[5]);
}
#endif

/* Filters that were added: another thread's may be one while this thread's is refused. */
static _Atomic(unsigned) filters_added;

static long make(bool filters, long number, const long *arguments) {
    unsigned added = atomic_load_explicit(&filters_added, memory_order_relaxed);
    enum filters before = filters_now();
    filters = filters && !vfork_is_child(); /* whose memory is that of a process without the filter */
    bool stopped = own_threads_stop();
    if (filters) {
        filters_set(FILTERS_ADDED);
        heap_profile_apply();
    }
    long result = marks_call(number, arguments);
    if (filters && result >= 0) {
        atomic_fetch_add_explicit(&filters_added, 1, memory_order_relaxed);
        filters_set(FILTERS_ADDED);
    } else if (filters && atomic_load_explicit(&filters_added, memory_order_relaxed) == added) {
        filters_set(before);
    }
    own_threads_resume(stopped);
    return result;
}

EXPORT int prctl(int option, ...) {
    va_list list;
    va_start(list, option);
    long arguments[6] = {option};
    for (int i = 1; i < 5; i++) {
        arguments[i] = va_arg(list, long);
    }
    va_end(list);
    switch (option) {
    case PR_SET_SECCOMP:
    case PR_SET_NO_NEW_PRIVS:
    case PR_SET_SECUREBITS:
    case PR_CAPBSET_DROP:
    case PR_CAP_AMBIENT:
        return (int)libc_result(make(option == PR_SET_SECCOMP, SYS_prctl, arguments));
    default:
        return (int)libc_result(marks_call(SYS_prctl, arguments));
    }
}

/* Whether a system call copies the process, whose threads would be missing in it. On another stack the caller
 * would not come back from here. */
static bool copies_process(long number, const long *arguments) {
#ifdef SYS_fork
    if (number == SYS_fork) {
        return true;
    }
#endif
    if (number == SYS_clone) {
        return (arguments[0] & CLONE_VM) == 0 && arguments[1] == 0;
    }
    if (number != SYS_clone3 || arguments[0] == 0 || (unsigned long)arguments[1] < CLONE_ARGS_SIZE_VER0) {
        return false; /* the kernel refuses the latter */
    }
    struct clone_args copied;
    memcpy(&copied, (const void *)arguments[0], CLONE_ARGS_SIZE_VER0);
    return (copied.flags & CLONE_VM) == 0 && copied.stack == 0;
}

/* Any system call, as by the C library's: what its arguments are not is passed on as it comes. */
EXPORT long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long arguments[6];
    for (int i = 0; i < 6; i++) {
        arguments[i] = va_arg(list, long);
    }
    va_end(list);
    if (copies_process(number, arguments)) {
        return libc_result(make(false, number, arguments));
    }
    if (number == SYS_exit && thread_is_alone()) {
        own_threads_resume(own_threads_stop()); /* the last thread's status is the process's */
    }
    switch (number) {
    case SYS_prctl:
        return prctl((int)arguments[0], arguments[1], arguments[2], arguments[3], arguments[4]);
    case SYS_seccomp: {
        bool adds = arguments[0] == SECCOMP_SET_MODE_STRICT || arguments[0] == SECCOMP_SET_MODE_FILTER;
        return libc_result(make(adds, number, arguments));
    }
    case SYS_landlock_restrict_self:
    case SYS_unshare:
    case SYS_setns:
    case SYS_capset:
        return libc_result(make(false, number, arguments));
    default:
        return libc_result(marks_call(number, arguments));
    }
}

#endif
