/*
 * The CPU caches rely on the rseq area that the C library registers for each
 * thread. Two kinds of callers have no registered area:
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

/* The number of caches plus each of these is the number of a cache that is
 * never opened. */
enum closed {
    SUSPENDED, /* for a child, while the kernel suspends its parent */
    SHARED,    /* for a child, and afterwards for its parent */
    ENDED,     /* for a thread whose registration the program ended */
};
_Static_assert(ENDED < CLOSED_CACHES, "each has a cache");

static void *own_memory(ptrdiff_t offset) {
    return (char *)thread_pointer() + offset;
}

static void set_number(enum closed number) {
    calm_assert(cpu_cache_is_rseq(&calm_caches) && number < CLOSED_CACHES, number);
    *(volatile uint32_t *)own_memory(calm_caches.rseq.cpu_number) = calm_caches.count + number;
}

bool registration_is_suspended(void) {
    return cpu_cache_is_rseq(&calm_caches) && cpu_cache_number(&calm_caches) == calm_caches.count + SUSPENDED;
}

static long registration_syscall(const long *arguments) {
    return os_syscall(SYS_rseq, arguments[0], arguments[1], arguments[2], arguments[3]);
}

/* The kernel resets the numbers to those of CPU 0. No signal handler may run
 * before set_number. */
static long end_registration(const long *arguments, enum closed number) {
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

bool registration_before_child(uint64_t flags) {
    if ((flags & (CLONE_VM | CLONE_SETTLS)) != CLONE_VM || !cpu_cache_is_rseq(&calm_caches) ||
        cpu_cache_number(&calm_caches) >= calm_caches.count || filters_now() == FILTERS_ADDED) {
        return false;
    }
    const struct rseq_offsets *rseq = &calm_caches.rseq;
    const long end[] = {(long)own_memory(rseq->area), rseq->area_bytes, RSEQ_UNREGISTER, RSEQ_SIGNATURE};
    return end_registration(end, (flags & CLONE_VFORK) != 0 ? SUSPENDED : SHARED) == 0;
}

static void register_again(void) {
    const struct rseq_offsets *rseq = &calm_caches.rseq;
    const long again[] = {(long)own_memory(rseq->area), rseq->area_bytes, 0, RSEQ_SIGNATURE};
    /* Clears the child's last sequence, which older kernels would take for one
     * that the caller is in. */
    *(volatile uint64_t *)own_memory(rseq->area + RSEQ_CS) = 0;
    if (registration_syscall(again) != 0) {
        set_number(ENDED);
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

long registration_call(const long *arguments) {
    bool ends = cpu_cache_is_rseq(&calm_caches) && (arguments[2] & RSEQ_UNREGISTER) != 0 &&
                arguments[0] == (long)own_memory(calm_caches.rseq.area);
    return ends ? end_registration(arguments, ENDED) : registration_syscall(arguments);
}

unsigned registration_of_creator(void) {
    bool registered = !cpu_cache_is_rseq(&calm_caches) || cpu_cache_number(&calm_caches) < calm_caches.count;
    return registered ? 0 : cpu_cache_number(&calm_caches) - calm_caches.count + 1;
}

void registration_begin_thread(unsigned creator) {
    uint32_t cpu = *(const volatile uint32_t *)own_memory(calm_caches.rseq.area + RSEQ_CPU_ID);
    if ((int)cpu >= 0) {
        return;
    }
    if (creator == SHARED + 1) {
        register_again();
    } else {
        set_number(ENDED);
    }
}
