/*
 * The arena's state: one heap, the caches and depots in front of it, and what
 * the arena knows of their use. This file holds data only.
 *
 * The order of locks, outermost first: the purger's, a CPU cache's, a depot
 * bin's, the heap's.
 */
#ifndef CALM_ARENA_STATE_H
#define CALM_ARENA_STATE_H

#include "base/assert.h"
#include "calmalloc.h"

#include "arena/family.h"
#include "arena/thp_policy.h"
#include "cache/cpu_cache.h"
#include "cache/depot.h"
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
/* There is one depot for this many CPUs, up to MAX_DEPOTS. A program of few
 * threads then uses the depots of few CPUs. */
#define DEPOT_CPUS 4

enum policy { POLICY_ADAPTIVE, POLICY_PAPER };
enum placement { PLACEMENT_OFF, PLACEMENT_LINES, PLACEMENT_COLORS, PLACEMENT_RANDOM };

/* The number of GiB that, kept for a second, are worth a second of CPU time. */
enum memory_per_cpu {
    MEMORY_PER_CPU_AUTO, /* what the machine offers */
    MEMORY_PER_CPU_0,    /* the values from here on are numbers */
};

/* The settings, which a user may change at any time. */
struct arena_settings {
    _Atomic(int) policy;
    _Atomic(int) background; /* whether a helper may purge */
    /* Whether the free memory of the machine and of the control group bounds
     * what is kept. */
    _Atomic(int) watch_cgroup;
    _Atomic(int) huge_pages;     /* whether they may be requested */
    _Atomic(int) placement;      /* enum placement: where large blocks begin */
    _Atomic(int) memory_per_cpu; /* the price of memory: enum memory_per_cpu */
#ifdef CALM_ASSERTIONS
    _Atomic(int) check_interval; /* slow calls between two walks of the heap; 0 for no walks (verify.h) */
#endif
};

/* The reason of a purge: the limit was exceeded, memory was unused for too
 * long, or a caller asked for it. */
enum reason { REASON_LIMIT, REASON_TIME, REASON_ASKED, REASONS };

struct arena_counts {
    uint64_t purged_pages;
    uint64_t purges[REASONS];
    uint64_t failures;
    uint64_t vectored_calls;
    uint64_t single_calls;
    uint64_t ranges;
    uint64_t purge_ns;
    uint64_t wasted_ns;         /* cost of purging memory that was needed again */
    uint64_t saved_ns;          /* cost avoided by keeping memory that was needed again */
    uint64_t kept_byte_seconds; /* free memory, multiplied by the time that it was kept */
};

/* For readers in other processes, as of the end of the last epoch. */
struct outlook {
    uint64_t memory_per_cpu_bytes; /* price: bytes that, kept for a second, are worth a second of CPU time */
    uint64_t break_even_ns;        /* the time for which free memory is kept if it has no history */
    uint64_t waiting_bytes;        /* the largest part of the kept memory (demand_forecast) */
    uint64_t waiting_unused_ns;
    uint64_t waiting_reuse_ns;
    uint64_t waiting_until_ns;
};

enum helper_state {
    HELPER_NONE,
    HELPER_RUNS,
    /* Nothing was left to purge, or the helper was stopped. The next thread
     * that leaves the heap starts a helper. */
    HELPER_AWAY,
    /* The process became single-threaded. The next thread other than the first
     * that leaves the heap starts a helper. */
    HELPER_SINGLE,
    HELPER_ENDED,   /* the process is ending; no helper starts */
    HELPER_REFUSED, /* the kernel refused the thread; one check in many tries again */
};

#define MISS_COUNTERS 32

struct miss_counter {
    _Alignas(64) _Atomic(uint64_t) count;
};

/* The limit on free memory, and what it is computed from. Under the heap's
 * lock. */
struct limit_state {
    struct retention_terms terms; /* the peak rises with the pages in use */
    /* Whether a helper calls epoch_advance. `terms` change accordingly once
     * free memory is within the new limit. */
    bool background_purge;
    size_t pages;    /* the limit at the last check; also read without the lock */
    size_t max_used; /* the largest number of pages in use in this epoch */
    size_t max_held; /* the largest number of pages in use or dirty in this epoch */
    /* After the kernel refused a purge, no purge is tried until this many pages
     * are dirty, or until purger.retry_ns. 0: no back-off. */
    size_t retry_above_pages;
    uint64_t checks;
    _Atomic(uint64_t) checks_by_others; /* by threads other than the first; also read without the lock */
};

/* Under its own lock, which a thread holds while it purges or ends an epoch. */
struct purger {
    struct lock lock;
    uint32_t examined_span; /* the descriptor, and the page of its run, at which examine_clean continues */
    uint32_t examined_pages;
    size_t fork_epoch;       /* 1 + the number of the epoch in which a fork last purged */
    uint64_t retry_ns;       /* when limit.retry_above_pages ends; written under both locks */
    uint64_t retry_after_ns; /* length of the last back-off; written under both locks */
    unsigned char scratch[RESIDENCY_CHUNK_PAGES];
    struct purge_batch batch; /* written under both locks once it is filled (heap.claims) */
};

/* What the current epoch showed, and the demand of the epochs before it. Under
 * the purger's lock. */
struct epoch {
    _Atomic(uint64_t) start_ns; /* also read without the lock */
    struct cpu_usage cpu_usage;
    unsigned fault_measures;
    struct family family;
    double family_share;
    struct outlook outlook; /* written under both locks */
    uint64_t checks;  /* limit.checks when the epoch began; written under both locks, read under either */
    size_t untouched; /* consecutive epochs in which no thread came to the heap */
    uint64_t cpu_ns;
    uint64_t purge_ns;
    uint64_t purged_pages;
    size_t dirty_pages; /* the dirty pages when the epoch began */
    size_t faulted_pages;
    struct demand demand;
};

/* What the machine and the control group offer. The words are atomic. After the
 * start, only the thread that reads files writes them, except fault_ns. */
struct machine_offer {
    _Atomic(uint64_t) read_ns;
    _Atomic(size_t) max_footprint;   /* bytes that the process may hold at most */
    _Atomic(double) gib_per_cpu;     /* GiB of memory for each CPU that the process may use */
    _Atomic(double) scarcity_factor; /* in [0, 1]; 1 while at least half of the memory is available */
    _Atomic(double) fault_ns;        /* measured cost of one page fault; 0: not measured yet */
    double cpu_quota; /* of the control group; 0: not read yet; private to the thread that reads files */
};

/* The words are atomic, or belong to the thread that starts or stops the
 * helper. */
struct helper {
    _Atomic(int) state; /* enum helper_state */
    struct thread thread;
    _Atomic(uint32_t) wakeup;       /* a futex word that counts wakeups */
    _Atomic(uint32_t) quiet_epochs; /* epochs since there was something to purge */
    const void *first_thread;       /* the thread pointer of the process's first thread */
    int process;                    /* the process that the helper belongs to */
    struct cpu_set cpus;            /* the CPUs that the process could use at its start */
};

struct arena {
    /* The heap's lock. It protects the fields from here to totals_at_fork, and
     * `heap`. */
    struct lock lock;
    uint64_t heap_locks;
    size_t misuses_reported;
    bool has_colors; /* the heap's colors are initialized */
    struct limit_state limit;
    struct thp_policy thp;
    struct arena_counts counts;
    /* Belongs to api/counters.c. It is here because a forked child writes this
     * page in any case. */
    struct calm_stats totals_at_fork;

    /* These fields are fixed at the start. Caches and depots have locks of
     * their own, and settings are atomic. */
    void (*misused)(const struct misuse_record *misuse);
    void (*visited)(void); /* the helper calls it in each epoch, without a lock; may be NULL */
    struct cpu_caches *caches;
    struct depot depots[MAX_DEPOTS];
    unsigned depot_count;
    unsigned depots_per_node; /* 0 if there are no depots */
    struct arena_settings settings;

    struct machine_offer machine;
    struct helper helper;
    struct miss_counter misses[MISS_COUNTERS]; /* atomic */

    /* The large fields come last, so that the others are on few pages. */
    struct heap heap;
    struct epoch epoch;
    struct purger purger;
};

static inline size_t page_bytes(const struct arena *arena) {
    return arena->heap.space.page_size;
}

static inline bool arena_has_helper(const struct arena *arena) {
    int helper = atomic_load_explicit(&arena->helper.state, memory_order_acquire);
    return helper == HELPER_RUNS || !thread_is_gone(&arena->helper.thread);
}

static inline int setting_value(const _Atomic(int) *setting) {
    return atomic_load_explicit(setting, memory_order_relaxed);
}

/* All work on the heap happens between heap_lock and a release of the lock.
 * heap_unlock releases it without a check of the limit (check.h). */
static inline void heap_lock(struct arena *arena) {
    lock_acquire(&arena->lock);
    arena->heap_locks++;
}

static inline void heap_unlock(struct arena *arena) {
    calm_assert(lock_is_mine(&arena->lock));
    lock_release(&arena->lock);
}

#endif
