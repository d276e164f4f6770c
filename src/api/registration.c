/*
 * The CPU caches rely on the rseq area that the C library, or this one
 * (os/rseq.h), registers for each thread. Two kinds of callers have no registered area:
 *
 * - A child that runs on its parent's thread-local storage (vfork, and clone
 *   with CLONE_VM). It finds its parent's CPU number, while other threads may
 *   run on that CPU.
 * - A thread whose registration the program has ended. Libraries that register
 *   an area of their own do so.
 *
 * The fast paths do not check this. Instead, the CPU number that they read is
 * changed to the number of a cache that is always closed, so that these callers
 * take every block from the arena, and return it there.
 *
 * The kernel may kill a process that writes to the numbers of a registered area
 * (since Linux 7.0, if the area has more than 32 bytes). So the parent ends its
 * own registration before the child exists. Once the child has left the memory,
 * in whatever way, the parent registers the area again, which sets the true
 * numbers. Without CLONE_VFORK, the kernel does not suspend the parent until
 * then. Parent and child then share the area for an unknown time, so the parent
 * stays unregistered.
 *
 * If the program has added a filter, the kernel may kill the process for
 * rseq(2). Nothing is done for its children then.
 */
#include "api/registration.h"

#include "api/instance.h"
#include "base/assert.h"
#include "cache/cpu_cache.h"
#include "os/filters.h"
#include "os/rseq.h"
#include "os/syscall.h"
#include "os/thread.h"

#include <linux/sched.h>

static void *own_memory(ptrdiff_t offset) {
    return (char *)thread_pointer() + offset;
}

static char *area_of_caller(void) {
    return own_memory(calm_caches.rseq.sequence - RSEQ_CS);
}

static void set_number(enum rseq_no_cpu number) {
    calm_assert(cpu_cache_is_rseq(&calm_caches) && number >= -RSEQ_NUMBERS && number < 0, number);
    *(volatile int32_t *)own_memory(calm_caches.rseq.cpu_number) = number;
}

/* Returns the number of the caller's CPU, or why it has none. */
static int number_now(void) {
    return cpu_cache_is_rseq(&calm_caches) ? (int)cpu_cache_number(&calm_caches) : 0;
}

bool registration_is_suspended(void) {
    return number_now() == RSEQ_SUSPENDED;
}

static long registration_syscall(const long *arguments) {
    return os_syscall(SYS_rseq, arguments[0], arguments[1], arguments[2], arguments[3]);
}

/* The kernel resets the numbers to those of CPU 0. No signal handler may run
 * before set_number. */
static long end_registration(const long *arguments, enum rseq_no_cpu number) {
    bool blocks = filters_now() != FILTERS_ADDED;
    uint64_t mask = blocks ? thread_block_signals() : 0;
    long result = registration_syscall(arguments);
    if (result == 0) {
        set_number(number);
    }
    if (blocks) {
        thread_set_signals(mask);
    }
    return result;
}

static bool end_own_registration(enum rseq_no_cpu number) {
    const long end[] = {(long)area_of_caller(), calm_caches.rseq.area_bytes, RSEQ_UNREGISTER, RSEQ_SIGNATURE};
    return end_registration(end, number) == 0;
}

/* A child must not find its parent unregistered yet, and register the area for
 * itself. */
bool registration_before_child(uint64_t flags) {
    if ((flags & (CLONE_VM | CLONE_SETTLS)) != CLONE_VM || !cpu_cache_is_rseq(&calm_caches) ||
        filters_now() == FILTERS_ADDED) {
        return false;
    }
    if (number_now() == RSEQ_UNREGISTERED && calm_caches.rseq.own) {
        rseq_register();
    }
    return number_now() >= 0 &&
           end_own_registration((flags & CLONE_VFORK) != 0 ? RSEQ_SUSPENDED : RSEQ_SHARED);
}

static void register_again(void) {
    const long again[] = {(long)area_of_caller(), calm_caches.rseq.area_bytes, 0, RSEQ_SIGNATURE};
    /* Clears the child's last sequence, which older kernels would take for one
     * that the caller is in. */
    *(volatile uint64_t *)own_memory(calm_caches.rseq.sequence) = 0;
    if (registration_syscall(again) != 0) {
        set_number(RSEQ_ENDED);
    }
}

void registration_after_child(long result) {
    if (result < 0 || registration_is_suspended()) {
        register_again();
    }
}

void registration_after_fork(void) {
    if (registration_is_suspended()) {
        register_again();
    }
}

/* A thread has one area. If the program registers one, this library's yields
 * to it; the C library's does not. */
long registration_call(const long *arguments) {
    if (!cpu_cache_is_rseq(&calm_caches)) {
        return registration_syscall(arguments);
    }
    bool ends = (arguments[2] & RSEQ_UNREGISTER) != 0;
    bool same = arguments[0] == (long)area_of_caller();
    if (ends && same) {
        return end_registration(arguments, RSEQ_ENDED);
    }
    bool yields =
        calm_caches.rseq.own && !ends && !same && number_now() >= 0 && end_own_registration(RSEQ_ENDED);
    long result = registration_syscall(arguments);
    if (yields && result < 0) {
        register_again();
    }
    return result;
}

int registration_of_creator(void) {
    int number = number_now();
    return calm_caches.rseq.own && cpu_cache_is_rseq(&calm_caches) ? RSEQ_UNREGISTERED
           : number >= 0                                           ? 0
                                                                   : number;
}

void registration_begin_thread(int creator) {
    int cpu = *(const volatile int32_t *)(const void *)(area_of_caller() + RSEQ_CPU_ID);
    if (cpu >= 0) {
        return;
    }
    if (calm_caches.rseq.own) {
        rseq_register();
    } else if (creator == RSEQ_SHARED) {
        register_again();
    } else {
        set_number(RSEQ_ENDED);
    }
}
