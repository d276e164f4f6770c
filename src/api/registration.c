/*
 * The CPU caches rely on the C library's registration of each thread's rseq area. Two kinds of callers have
 * none:
 *
 *  - a child that runs on its parent's thread-local storage (vfork, and clone with CLONE_VM). The CPU number
 *    that it finds is its parent's, and other threads may run on that CPU meanwhile;
 *  - a thread whose registration the program has ended, as libraries do that register an area of their own.
 *
 * The fast paths do not ask. Instead the number that they read becomes that of a cache which is always
 * closed: every block comes from the heap, and returns to it. The kernel may kill a process that writes to
 * the numbers of a registered area (since Linux 7.0, if the area has more than 32 bytes). So it is the parent
 * that ends its own registration, before the child exists, and registers the area again, which sets the true
 * numbers, once the child has left the memory, however that ended. Where the kernel does not suspend the
 * parent for as long as that (CLONE_VFORK), the two threads share the area for an unknown time, and the
 * parent stays unregistered.
 *
 * A program that has added a filter may be killed for rseq(2): then nothing is done for its children.
 */
#include "api/registration.h"

#include "api/state.h"
#include "base/assert.h"
#include "cache/cpu_cache.h"
#include "os/filters.h"
#include "os/rseq.h"
#include "os/syscall.h"
#include "os/thread.h"

#include <linux/sched.h>

/* Added to the number of caches, this is that of a cache which is never opened. */
enum closed {
    SUSPENDED, /* for a child, while the kernel suspends its parent */
    SHARED,    /* for a child, and its parent for good */
    ENDED,     /* by the program */
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

/* The kernel resets the numbers, to that of CPU 0. No signal handler may run before they are set here. */
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
    /* The child's last sequence. Older kernels would take it for one that the caller is in. */
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
