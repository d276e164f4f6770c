/*
 * The governor's state: one heap, the caches and depots in front of it, and what is known of their use. Data
 * only.
 *
 * Locks, outermost first: the purger's, a CPU cache's, a depot bin's, the heap's. The heap is in one of two
 * modes. In shared mode any thread works on it, under these locks. In exclusive mode one thread alone does,
 * without the heap's lock (offload mode's server); the mode changes only while no thread is within the heap.
 */
#ifndef CALM_GOVERNOR_STATE_H
#define CALM_GOVERNOR_STATE_H

#include "base/assert.h"
#include "calmalloc.h"

#include "cache/cpu_cache.h"
#include "cache/depot.h"
#include "governor/family.h"
#include "governor/thp_policy.h"
#include "heap/large_blocks.h"
#include "heap/purge_batch.h"
#include "heap/slab_blocks.h"
#include "os/cpus.h"
#include "os/lock.h"
#include "os/residency.h"
#include "os/thread.h"
#include "policy/demand.h"
#include "policy/retention.h"

#include <stdatomic.h>

#define MAX_DEPOTS 8
/* One depot for so many CPUs, up to MAX_DEPOTS: a program of few threads uses the depots of few CPUs. */
#define DEPOT_CPUS 4

enum policy { POLICY_ADAPTIVE, POLICY_PAPER };
enum placement { PLACEMENT_OFF, PLACEMENT_LINES, PLACEMENT_COLORS, PLACEMENT_RANDOM };

/* GiB that are worth, for a second, a second of CPU time. */
enum memory_per_cpu {
    MEMORY_PER_CPU_AUTO, /* what the machine offers */
    MEMORY_PER_CPU_0,    /* and so on: numbers */
};

/* What a user may set, at any time. */
struct governor_settings {
    _Atomic(int) policy;
    _Atomic(int) background; /* whether a helper thread may purge */
    /* Whether free memory, of the machine and of the cgroup, limits what is kept. */
    _Atomic(int) watch_cgroup;
    _Atomic(int) huge_pages;     /* whether they may be requested */
    _Atomic(int) placement;      /* enum placement: where large blocks begin */
    _Atomic(int) memory_per_cpu; /* the price of memory, by enum memory_per_cpu */
#ifdef CALM_ASSERTIONS
    _Atomic(int) check_interval; /* slow calls from one walk of the heap to the next; 0: none (verify.h) */
#endif
};

/* Of a purge. */
enum reason { REASON_LIMIT, REASON_TIME, REASON_ASKED, REASONS };

struct governor_counts {
    uint64_t purged_pages;
    uint64_t purges[REASONS];
    uint64_t failures;
    uint64_t vectored_calls;
    uint64_t single_calls;
    uint64_t ranges;
    uint64_t purge_ns;
    uint64_t wasted_ns;         /* cost of purging memory that was needed again */
    uint64_t saved_ns;          /* by keeping memory that was needed again */
    uint64_t kept_byte_seconds; /* of free memory */
};

/* For readers in other processes: as of the last epoch's end. */
struct outlook {
    uint64_t memory_per_cpu_bytes; /* the price: kept for a second, worth a second of CPU time */
    uint64_t break_even_ns;        /* for which free memory is kept of which nothing is known */
    uint64_t waiting_bytes;        /* the largest part of what is kept: demand_forecast */
    uint64_t waiting_unused_ns;
    uint64_t waiting_reuse_ns;
    uint64_t waiting_until_ns;
};

enum helper_state {
    HELPER_NONE,
    HELPER_RUNS,
    HELPER_AWAY,  /* nothing was left to purge, or it was stopped: the next thread at the heap starts it */
    HELPER_ALONE, /* the first thread is alone again: the next other thread at the heap starts it */
    HELPER_ELSEWHERE, /* a server does its work, or the process ends */
    HELPER_REFUSED,   /* by the kernel: tried again after many checks; never for a heap with clients */
};

#define MISS_COUNTERS 32

struct miss_counter {
    _Alignas(64) _Atomic(uint64_t) count;
};

/* What the one thread of exclusive mode keeps and does besides the heap. Called in that mode alone, on that
 * thread. */
struct heap_ops {
    void *context;
    void (*between_slices)(void *context);                /* of a purge: clients wait */
    size_t (*cached)(const void *context, size_t *bytes); /* blocks that it keeps ready, about */
    void (*flush)(void *context); /* puts those into the heap, by governor_put_blocks */
};

struct governor {
    /* Fixed at the start, or changed only while no thread is within the heap. */
    bool exclusive; /* the heap's mode */
    const struct heap_ops *ops;
    bool purger_may_stop; /* its purging thread may be stopped by a debugger: no other thread waits for it */
    bool has_clients;     /* threads that report misuse when they see misuse_waits */
    _Atomic(bool) misuse_waits;
    struct lock lock; /* the heap's */
    uint64_t heap_locks;
    size_t misuses_reported;
    void (*misused)(const struct misuse_record *misuse); /* fixed at the start, as is visited */
    void (*visited)(void); /* called by the helper in each epoch, without a lock; may be NULL */

    /* Under the heap's lock, as are heap, heap_locks and misuses_reported. */
    struct retention_terms terms; /* of the limit; the peak rises with what is in use */
    bool background_purge; /* a helper or server calls governor_tick; terms follow once it is within them */
    size_t limit_pages;    /* the limit at the last check, for readers without the lock */
    size_t max_used;       /* pages in use in this epoch */
    size_t max_held;       /* the same with free ones */
    size_t retry_above_pages; /* after the kernel refused a purge: none before so many pages are free, or a
                                 while later */
    struct thp_policy thp;
    bool has_colors;                    /* the heap's colors are initialized */
    uint64_t checks;                    /* of the limit */
    _Atomic(uint64_t) checks_by_others; /* than the first thread */
    struct governor_counts counts;
    struct calm_stats totals_at_fork; /* api/counters.c's, on a page that a forked child writes anyway */

    /* Fixed at the start; each has locks of its own, and settings are atomic. */
    struct cpu_caches *caches;
    struct depot depots[MAX_DEPOTS];
    unsigned depot_count;
    unsigned depots_per_node; /* 0: there are none */
    struct governor_settings settings;

    /* Under the purger's lock. */
    struct lock purge_lock;
    struct cpu_usage cpu_usage;
    unsigned fault_measures;
    struct family family;
    double family_share;
    struct outlook outlook;  /* written under both locks */
    uint64_t epoch_checks;   /* written under both locks, read under either */
    size_t untouched_epochs; /* in a row in which no thread came to the heap */
    size_t fork_purge_epoch; /* 1 + the number of the epoch in which a fork last purged */
    uint64_t epoch_cpu_ns;
    uint64_t epoch_purge_ns;
    uint64_t epoch_purged_pages;
    size_t epoch_dirty_pages; /* free when it began */
    size_t epoch_faulted_pages;
    uint64_t retry_ns; /* as epoch_checks; when retry_above_pages ends */
    uint64_t retry_after_ns;
    uint32_t examined_span; /* what examine_clean looks at next, and from which of its pages on */
    uint32_t examined_pages;

    /* Atomic, or of the thread that starts or stops the helper. */
    _Atomic(uint64_t) epoch_start_ns;
    _Atomic(uint64_t) max_footprint_read_ns;
    _Atomic(size_t) max_footprint;       /* bytes that the process may come to hold */
    _Atomic(double) machine_gib_per_cpu; /* GiB of memory for each CPU that the process may use */
    _Atomic(double) scarcity_factor;     /* in [0, 1]: 1 while half of the memory is available, or more */
    double cpu_quota;         /* of the control group; 0: not read yet. Of the one thread that reads files */
    _Atomic(double) fault_ns; /* cost of one page fault, as measured; 0: not yet */
    const void *first_thread; /* its thread pointer */
    _Atomic(int) helper;      /* enum helper_state */
    struct thread helper_thread;
    _Atomic(uint32_t) helper_wakeup; /* a futex word: counts wakeups */
    _Atomic(uint32_t) quiet_epochs;  /* since there was something to purge */
    struct cpu_set cpus;             /* that the process could use at its start */
    int process;                     /* that the helper belongs to */
    struct miss_counter misses[MISS_COUNTERS];

    /* The large ones, so that what comes before is on few pages. */
    struct heap heap;                             /* under its lock */
    struct demand demand;                         /* under the purger's lock */
    unsigned char scratch[RESIDENCY_CHUNK_PAGES]; /* under the purger's lock */
    struct purge_batch
        batch; /* under the purger's lock; once it is filled, written under both: heap.claims */
};

static inline size_t page_bytes(const struct governor *governor) {
    return governor->heap.space.page_size;
}

static inline bool governor_has_helper(const struct governor *governor) {
    int helper = atomic_load_explicit(&governor->helper, memory_order_acquire);
    return helper == HELPER_RUNS || !thread_is_gone(&governor->helper_thread);
}

static inline int setting_value(const _Atomic(int) *setting) {
    return atomic_load_explicit(setting, memory_order_relaxed);
}

/* Around all work on the heap. In exclusive mode the caller is the one thread of that mode. heap_unlock
 * leaves without a check of the limit; see check.h. */
static inline void heap_lock(struct governor *governor) {
    if (!governor->exclusive) {
        lock_acquire(&governor->lock);
        governor->heap_locks++;
    }
}

static inline void heap_unlock(struct governor *governor) {
    calm_assert(governor->exclusive || lock_is_mine(&governor->lock));
    if (!governor->exclusive) {
        lock_release(&governor->lock);
    }
}

#endif
