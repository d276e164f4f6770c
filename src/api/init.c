/*
 * The start, forks and the end, each step in its order:
 *
 *  start (first call of malloc, or the constructor)  fork (pthread_atfork)          end (the last destructor)
 *  1 filters, machine, options                       1 wake sleepers of locks       1 heap profile is written
 *  2 size classes, CPU caches                        2 stdio's locks                2 report is written
 *  3 whether there is a server                       3 heap profile                 3 threads end
 *  4 governor and heap                               4 backend: server, heaps
 *  5 backend                                         after it, the same backwards;
 *  6 mode of the caches: the fast paths may run      in the child also placing,
 *  7 fork handlers                                   requests and colored memory
 *  8 heap profile, if an option asks for it
 *
 * A process without other threads holds nothing over a fork but the start of a helper. ready_lock is not
 * held: the handlers are registered after the start.
 */
#include "api/counters.h"
#include "api/features.h"
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
#include "api/state.h"
#include "base/assert.h"
#include "cache/rseq.h"
#include "governor/epoch.h"
#include "governor/governor.h"
#include "governor/helper.h"
#include "governor/verify.h"
#include "os/filters.h"
#include "os/lock.h"
#include "os/memory.h"
#include "os/process.h"
#include "os/rseq.h"
#include "os/stdio.h"
#include "os/vm.h"

#include <errno.h>
#include <pthread.h>
#include <unistd.h>

static struct lock ready_lock = LOCK_OF(LOCK_START);

static struct backend direct;

/* ---- forks ---- */

/*
 * Whether no other thread exists, not even one of the allocator. Then no lock can be held except by the
 * forking thread itself, in a section that a signal interrupted, and all stays as it is: a lone thread has
 * nothing to wait for, and the fewer pages are written around a fork, the fewer are copied.
 */
static bool forks_alone(void) {
    const struct backend *backend = calm_allocator.backend;
    return thread_is_alone() && !backend->has_server && !governor_has_helper(backend->governor);
}

/* Unless a server has the heap, or a signal handler forks that interrupted its thread at the heap. */
static void verify_heap(void) {
    if (governor_verifies(&calm_governor) && !calm_allocator.backend->has_server &&
        !governor_is_held(&calm_governor)) {
        governor_verify(&calm_governor);
    }
}

/* As allocator_before_fork found it: meanwhile a helper may end, and a signal handler may fork in its turn.
 */
static bool forked_alone;
static bool forked_with_files;
static unsigned forks_with_locks; /* nested ones */

static void allocator_before_fork(void) {
    verify_heap();
    if (forks_with_locks == 0 && forks_alone()) {
        if (!forked_alone) {
            forked_alone = true;
        }
        family_before_fork(&calm_governor.family);
        /* No helper starts meanwhile, either: another fork handler may free enough memory for one. */
        helper_hold();
        return;
    }
    lock_wake_sleepers();
    forked_with_files = !thread_is_alone(); /* the allocator's own threads use no stdio */
    if (forked_with_files) {
        stdio_before_fork();
    }
    heap_profile_before_fork();
    calm_allocator.backend->functions->before_fork(calm_allocator.backend);
    family_before_fork(&calm_governor.family);
    forks_with_locks++;
    forked_alone = false;
}

static void allocator_after_fork_in_parent(void) {
    if (forked_alone) {
        helper_resume();
        return;
    }
    calm_assert(forks_with_locks > 0);
    forks_with_locks--;
    calm_allocator.backend->functions->after_fork(calm_allocator.backend, false);
    heap_profile_after_fork();
    if (forked_with_files) {
        stdio_after_fork(false);
    }
}

static void allocator_after_fork_in_child(void) {
    lock_ranks_after_fork();
    registration_after_fork();
    family_start_child(&calm_governor.family);
    counters_start_child();
    process_begin();
    placing_after_fork();
    control_cancel(&os_control); /* what was asked of the parent */
    if (forked_alone) {
        governor_start_child(&calm_governor);
        return;
    }
    forks_with_locks--;
    calm_allocator.backend->functions->after_fork(calm_allocator.backend, true);
    heap_profile_after_fork();
    colored_after_fork();
    if (forked_with_files) {
        stdio_after_fork(true);
    }
}

/* ---- the start ---- */

/* Fixed once: the fast paths know no other change of mode. */
static enum cache_mode choose_cache_mode(struct rseq_offsets place, bool have_caches, bool sync) {
    int wanted = calm_options.test_cache;
    bool immediate = calm_options.misuse == OPTION_MISUSE_IMMEDIATE;
    if (!have_caches || wanted == OPTION_CACHE_OFF || sync || immediate) {
        return CACHE_OFF;
    }
    /* Without a way to stop the sequences, caches could not be emptied. */
    bool restartable = wanted == OPTION_CACHE_AUTO && calm_caches.one_per_cpu && place.usable;
    return restartable && rseq_can_restart() ? CACHE_RSEQ : CACHE_LOCKED;
}

static unsigned allocator_cpu(void) {
    return cpu_cache_number(&calm_caches);
}

/* Requests of other processes, carried out by the helper or the server. */
static void visited(void) {
    requests_notice(calm_allocator.backend->functions->trim_by_helper);
}

/* Replaced in the shared library by link_order.c's. Defined, as gold takes a hidden function that is not
 * there for one that is. */
__attribute__((weak)) bool link_order_has_own_malloc(void) {
    return true;
}

/* Under ready_lock. */
static bool allocator_start(void) {
    struct allocator *this = &calm_allocator;
    calm_assert(lock_is_mine(&ready_lock) && !atomic_load_explicit(&calm_ready, memory_order_relaxed));
    filters_detect();
    process_begin();
    struct rseq_offsets place = rseq_find();
    this->memory_bytes = memory_total_bytes();
    settings_read();
    size_classes_fill(&this->classes, vm_page_size());
    bool have_caches = cpu_caches_init(this->caches, &this->classes, place);

    bool offloads = have_caches && offload_is_wanted();
    bool sync = offloads && calm_options.test_sync != 0;
    enum cache_mode mode = choose_cache_mode(place, have_caches, sync);
    if (!governor_init(this->governor, &this->classes, this->caches, HEAP_SPACE_BYTES, mode != CACHE_OFF,
                       misuse_report)) {
        return false;
    }
    this->governor->visited = visited;
    if (offloads) {
        this->backend = offload_start(this->governor);
    }
    if (this->backend == NULL) {
        backend_direct_open(&direct, this->governor);
        this->backend = &direct;
    }
    /*
     * Only now the fast paths learn of it: until both the mode and calm_classes are set they find class 0, or
     * no cache. The release on calm_ready is for the slow paths; a fast path that sees these without the rest
     * would need a processor that reorders stores, and those have no restartable sequences here.
     */
    cpu_caches_start(this->caches, mode, this->backend == &direct);
    if (!filters_allow_all()) {
        governor_read_max_footprint(this->governor, true); /* which later may not be read any more */
    }
    heap_profile_start(this->caches->count, allocator_cpu, allocator_use_fast_path);
    calm_classes = this->classes;
    calm_new_is_passed_on = !link_order_has_own_malloc();
    if (!calm_new_is_passed_on) {
        cpu_caches_share(this->caches, &calm_new_caches);
    }
    atomic_store_explicit(&calm_ready, true, memory_order_release);
    return true;
}

bool allocator_ready(void) {
    if (allocator_is_ready()) {
        return true;
    }
    if (sanitizer_is_there()) {
        return false;
    }
    int saved_errno = errno;
    lock_acquire(&ready_lock);
    bool first = !atomic_load_explicit(&calm_ready, memory_order_relaxed) && allocator_start();
    lock_release(&ready_lock);
    if (first) {
        /*
         * As early as possible: handlers that are registered later run before ours, which then holds all
         * locks. A handler that was registered earlier runs while they are held, and may allocate
         * nevertheless: see os/lock.h.
         */
        pthread_atfork(allocator_before_fork, allocator_after_fork_in_parent, allocator_after_fork_in_child);
        settings_apply_profile();
    }
    errno = saved_errno;
    return atomic_load_explicit(&calm_ready, memory_order_relaxed);
}

/*
 * For programs that fork and never allocate; and the environment may not have been there before. Before the
 * other constructors run, glibc's environ is not set, but glibc passes the environment, which not every C
 * library does.
 */
__attribute__((constructor(101))) static void allocator_prepare(int argc, char **argv, char **environment) {
    (void)argc, (void)argv;
#ifdef CALM_ARCHIVE
    pin_own_object();
#endif
    if (environ == NULL) {
        options_keep_environment(environment);
    }
    if (allocator_ready()) {
        settings_read_late();
    }
}

/* ---- the end ---- */

/* Later calls are served without threads. */
__attribute__((destructor)) static void allocator_finish(void) {
    if (allocator_is_ready()) {
        verify_heap();
        heap_profile_end();
        report_write();
        calm_allocator.backend->functions->end(calm_allocator.backend);
    }
}
