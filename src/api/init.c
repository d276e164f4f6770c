/*
 * The start, forks and the end of the allocator, each in this order:
 *
 * Start: the first call of malloc, or the constructor.
 *   1 the filters, the machine, the options
 *   2 the size classes, the CPU caches
 *   3 the arena
 *   4 the mode of the caches; from here on, the fast paths work
 *   5 the fork handlers
 *   6 the heap profile, if an option requests it
 *
 * Before a fork (pthread_atfork). After it, steps 2, 3 and 5 in the opposite
 * order.
 *   1 waking the threads that sleep on a lock
 *   2 the locks of stdio
 *   3 the locks of the heap profile
 *   4 purging free memory
 *   5 the locks of the arena
 * The child first renews what belongs to one process: for example the counters,
 * the seed of placing, and requests.
 *
 * End: the last destructor.
 *   1 the heap profile is written
 *   2 the report is written
 *   3 the helper ends
 *
 * A process without other threads holds no lock over a fork; it only purges, and
 * prevents the start of a helper. No fork handler needs ready_lock, because the
 * handlers are registered after the start.
 */
#include "api/counters.h"
#include "api/features.h"
#include "api/instance.h"
#include "api/link_order.h"
#include "api/misuse.h"
#include "api/options.h"
#include "api/pin.h"
#include "api/placing.h"
#include "api/registration.h"
#include "api/report.h"
#include "api/requests.h"
#include "api/sanitizer.h"
#include "api/settings.h"
#include "arena/arena.h"
#include "arena/epoch.h"
#include "arena/helper.h"
#include "arena/verify.h"
#include "base/assert.h"
#include "cache/rseq.h"
#include "os/filters.h"
#include "os/lock.h"
#include "os/memory.h"
#include "os/process.h"
#include "os/rseq.h"
#include "os/rseq_check.h"
#include "os/stdio.h"
#include "os/vm.h"

#include <errno.h>
#include <pthread.h>
#include <unistd.h>

static struct lock ready_lock = LOCK_OF(LOCK_START);

/* ---- forks ---- */

/* Returns whether the process has one thread, and the allocator has none of its
 * own. Then no other thread can hold a lock. The forking thread itself holds
 * one only if a signal handler interrupted it and forks. The fork handlers then
 * do as little as possible, because a single thread waits for no lock, and
 * because the kernel copies each page that is written around a fork. */
static bool forks_single(void) {
    return thread_is_single() && !helper_exists(&calm_arenas);
}

/* Does nothing in a signal handler that interrupted the arena. */
static void verify_heap(void) {
    if (verify_is_on(&calm_arenas) && !arena_is_held(&calm_arenas)) {
        verify_arena(&calm_arenas);
    }
}

/* The state that allocator_before_fork found. The handlers after the fork rely
 * on it, because a helper may end meanwhile, and a signal handler may fork,
 * too. */
static bool forked_single;
static bool forked_with_files;
static unsigned forks_with_locks; /* nested forks that hold the locks */

static void allocator_before_fork(void) {
    verify_heap();
    if (forks_with_locks == 0 && forks_single()) {
        arena_shrink_for_fork(&calm_arenas);
        if (!forked_single) {
            forked_single = true;
        }
        family_before_fork(&calm_arenas.epoch.family);
        /* Another fork handler may free enough memory for a helper. It must not
         * start during the fork. */
        helper_hold();
        return;
    }
    lock_wake_sleepers();
    forked_with_files = !thread_is_single(); /* the allocator's own threads use no stdio */
    if (forked_with_files) {
        stdio_before_fork();
    }
    heap_profile_before_fork();
    arena_shrink_for_fork(&calm_arenas); /* waits for locks, so not before the first step */
    arena_before_fork(&calm_arenas);
    family_before_fork(&calm_arenas.epoch.family);
    forks_with_locks++;
    forked_single = false;
}

static void allocator_after_fork_in_parent(void) {
    if (forked_single) {
        helper_resume();
        return;
    }
    calm_assert(forks_with_locks > 0);
    forks_with_locks--;
    arena_after_fork(&calm_arenas, false);
    heap_profile_after_fork();
    if (forked_with_files) {
        stdio_after_fork(false);
    }
}

static void allocator_after_fork_in_child(void) {
    lock_ranks_after_fork();
    registration_after_fork();
    family_start_child(&calm_arenas.epoch.family);
    counters_start_child();
    process_begin();
    placing_after_fork();
    control_cancel(&os_control); /* a request to the parent */
    if (forked_single) {
        arena_start_child(&calm_arenas);
        return;
    }
    forks_with_locks--;
    arena_after_fork(&calm_arenas, true);
    heap_profile_after_fork();
    if (forked_with_files) {
        stdio_after_fork(true);
    }
}

/* ---- the start ---- */

static enum cache_lock_reason find_lock_reason(struct rseq_offsets place) {
    return calm_options.test_cache == OPTION_CACHE_LOCKED ? LOCKS_WANTED
           : !place.usable                                ? LOCKS_UNREGISTERED
           : !calm_caches.one_per_cpu                     ? LOCKS_MANY_CPUS
           : !rseq_can_restart()                          ? LOCKS_NO_FENCE
           : rseq_is_broken(&place)                       ? LOCKS_BROKEN
                                                          : LOCKS_NONE;
}

/* The mode is chosen once. The fast paths rely on this. */
static enum cache_mode choose_cache_mode(struct rseq_offsets place, bool have_caches) {
    bool immediate = calm_options.misuse == OPTION_MISUSE_IMMEDIATE;
    if (!have_caches || calm_options.test_cache == OPTION_CACHE_OFF || immediate) {
        return CACHE_OFF;
    }
    calm_caches.lock_reason = find_lock_reason(place);
    return calm_caches.lock_reason == LOCKS_NONE ? CACHE_RSEQ : CACHE_LOCKED;
}

static unsigned allocator_cpu(void) {
    return cpu_cache_number(&calm_caches);
}

/* In the shared library, the definition in link_order.c replaces this one. An
 * undefined hidden function is not enough, because gold treats it as
 * defined. */
__attribute__((weak)) bool link_order_has_own_malloc(void) {
    return true;
}

/* Called under ready_lock. Returns false if there is no memory. */
static bool start(void) {
    calm_assert(lock_is_mine(&ready_lock) && !atomic_load_explicit(&calm_ready, memory_order_relaxed));
    filters_detect();
    process_begin();
    struct rseq_offsets place = rseq_find();
    calm_memory_bytes = memory_total_bytes();
    settings_read();
    size_classes_fill(&calm_all_classes, vm_page_size());
    calm_caches.rseq = place; /* an earlier start may have failed after the next call */
    bool have_caches = calm_caches.states != NULL || cpu_caches_init(&calm_caches, &calm_all_classes, place);

    enum cache_mode mode = choose_cache_mode(place, have_caches);
    if (mode != CACHE_RSEQ && place.own && place.usable) {
        rseq_end(); /* the program may register an area instead */
    }
    if (!arena_init(&calm_arenas, &calm_all_classes, &calm_caches, HEAP_SPACE_BYTES, mode != CACHE_OFF,
                    misuse_report)) {
        return false;
    }
    calm_arenas.visited = requests_carry_out;
    /* From here on the fast paths may use the caches. They find class 0 or no
     * cache until both the mode and calm_classes are set. The release store to
     * calm_ready is for the slow paths. A fast path of another thread does not
     * see the mode and calm_classes without the rest: this is a constructor, or
     * an allocation before it, and a thread that was started later sees what
     * its creator saw. */
    cpu_caches_start(&calm_caches, mode);
    if (!filters_allow_all()) {
        epoch_read_machine(&calm_arenas, true); /* a filter may forbid this later */
    }
    heap_profile_start(calm_caches.count, allocator_cpu, allocator_use_fast_path);
    if (mode != CACHE_OFF) {
        small_sizes_coarsen(calm_all_classes.small);
    }
    allocator_use_fast_path(true);
    calm_new_is_passed_on = !link_order_has_own_malloc();
    if (!calm_new_is_passed_on) {
        cpu_caches_share(&calm_caches, &calm_new_caches);
    }
    atomic_store_explicit(&calm_ready, true, memory_order_release);
    return true;
}

bool allocator_start(void) {
    if (sanitizer_is_there()) {
        return false;
    }
    int saved_errno = errno;
    lock_acquire(&ready_lock);
    bool first = !atomic_load_explicit(&calm_ready, memory_order_relaxed) && start();
    lock_release(&ready_lock);
    if (first) {
        /* Handlers that other code registers later run before the one here,
         * which then takes all locks. In a program that is linked with the
         * archive, a handler may have been registered earlier. It runs while these locks are held, and may
         * allocate nevertheless: see os/lock.h and fork_order.c. */
        pthread_atfork(allocator_before_fork, allocator_after_fork_in_parent, allocator_after_fork_in_child);
        settings_apply_profile();
    }
    errno = saved_errno;
    return atomic_load_explicit(&calm_ready, memory_order_relaxed);
}

/* Starts the allocator also in programs that fork and never allocate. Reads the
 * options if the first call of malloc found no environment. Before the other
 * constructors run, glibc has not set environ. It passes the environment as an
 * argument, which not every C library does. */
__attribute__((constructor(101))) static void allocator_prepare(int argc, char **argv, char **environment) {
    (void)argc, (void)argv;
#ifdef CALM_ARCHIVE
    pin_own_object();
#endif
    if (environ == NULL) {
        options_keep_environment(environment);
    }
    if (allocator_ensure_started()) {
        settings_read_late();
    }
}

/* ---- the end ---- */

/* Later calls of malloc and free are served without a helper. */
__attribute__((destructor)) static void allocator_finish(void) {
    if (allocator_is_ready()) {
        verify_heap();
        heap_profile_end();
        report_write();
        helper_end(&calm_arenas);
    }
}
