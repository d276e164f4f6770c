/*
 * The arenas' state, divided by what protects it. This file holds data only.
 *
 * An arena is a heap with its lock. Each arena serves a group of CPUs. The
 * process has one limit on free memory over all arenas, one purger, and one
 * policy, and the caches and depots in front of the arenas.
 *
 * The order of locks, outermost first: the purger's, a CPU cache's, a depot
 * bin's, a heap's. A thread holds at most one heap's lock, except around a
 * fork.
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

/* One for each part of the long range, and one for what these have no room
 * for. */
#define MAX_ARENAS (SPACE_MAX_PARTS + 1)

/* Address space that a heap can reach. At first the heap reserves only its
 * first segment. */
#define HEAP_SPACE_BYTES ((size_t)1 << 40)

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

/* The number of arenas that threads are sent to. */
enum heaps {
    HEAPS_AUTO, /* as many as the threads need */
    HEAPS_0,    /* the values from here on are numbers */
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
    _Atomic(int) heaps;          /* enum heaps; fixed at the start */
#ifdef CALM_ASSERTIONS
    _Atomic(int) check_interval; /* slow calls between two walks of the heap; 0 for no walks (verify.h) */
#endif
};

/* The reason of a purge: the limit was exceeded, memory was unused for too
 * long, or a caller asked for it. */
enum reason { REASON_LIMIT, REASON_TIME, REASON_ASKED, REASONS };

/* The words are atomic. */
struct arena_counts {
    _Atomic(uint64_t) purged_pages;
    _Atomic(uint64_t) purges[REASONS];
    _Atomic(uint64_t) failures;
    _Atomic(uint64_t) vectored_calls;
    _Atomic(uint64_t) single_calls;
    _Atomic(uint64_t) ranges;
    _Atomic(uint64_t) purge_ns;
    _Atomic(uint64_t) wasted_ns;         /* cost of purging memory that was needed again */
    _Atomic(uint64_t) saved_ns;          /* cost avoided by keeping memory that was needed again */
    _Atomic(uint64_t) kept_byte_seconds; /* free memory, multiplied by the time that it was kept */
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

/* The terms of the limit: struct retention_terms of the policy, which any
 * thread reads without a lock. The purger's lock is held to set them. A reader
 * may get some old and some new terms. The setter checks the limit afterwards,
 * and so does the next thread that reports its arena. */
struct limit_terms {
    _Atomic(bool) adaptive;
    _Atomic(bool) background_purge;
    _Atomic(double) factor;
    _Atomic(size_t) peak_bytes; /* rises with the pages in use */
    _Atomic(size_t) surplus_bytes;
    _Atomic(size_t) available_bytes;
};

/*
 * What all arenas hold together, and the limit on what is free of it. The words
 * are atomic.
 *
 * Several arenas report their levels when a report is due (is_report_due). The
 * total of the pages held, in use or dirty, therefore differs from the truth by
 * at most `max_batch` for each arena. The pages in use count as many as were in
 * use at a report of each arena. So fewer may be in use, and as many more may be
 * dirty: sum_levels says how many. report_all makes the totals exact. With one
 * arena, and where free memory has a limit of its own, `batch` is 0, and each
 * change is reported.
 */
struct limit_state {
    struct limit_terms terms;
    /* Whether a helper calls epoch_advance. `terms` change accordingly once
     * free memory is within the new limit. */
    _Atomic(bool) background_purge;
    _Atomic(size_t) batch;     /* set under the purger's lock */
    _Atomic(size_t) max_batch; /* the largest since all arenas reported */
    _Atomic(size_t) pages;     /* the limit, when it was published last */
    /* After the kernel refused a purge, no purge is tried until this many pages
     * are dirty, or until purger.retry_ns. 0: no back-off. */
    _Atomic(size_t) retry_above_pages;
    _Atomic(size_t) purging_pages; /* taken out of the heaps by a purge that is under way */
    /* These words are written at each report. */
    _Alignas(64) _Atomic(uint64_t) totals; /* the sum of what the arenas reported */
    _Atomic(size_t) max_used; /* the largest number of pages in use in this epoch (note_levels) */
    _Atomic(size_t) max_held; /* the largest number of pages in use or dirty in this epoch */
};

/* Under its own lock, which a thread holds while it purges or ends an epoch. */
struct purger {
    struct lock lock;
    size_t fork_epoch;          /* 1 + the number of the epoch in which a fork last purged */
    _Atomic(uint64_t) retry_ns; /* when limit.retry_above_pages ends; also read without the lock */
    uint64_t retry_after_ns;    /* length of the last back-off */
    unsigned examined_arena;
    bool in_batch[MAX_ARENAS]; /* whether the batch, or the last one, has pages of the arena */
};

/* What the current epoch showed. Under the purger's lock. */
struct epoch {
    _Atomic(uint64_t) start_ns; /* also read without the lock */
    struct cpu_usage cpu_usage;
    unsigned fault_measures;
    struct family family;
    double family_share;
    struct outlook outlook;
    _Atomic(uint64_t) checks; /* the checks of all arenas when the epoch began; also read without the lock */
    size_t untouched;         /* consecutive epochs in which no thread came to the heap */
    uint64_t cpu_ns;
    uint64_t purge_ns;
    uint64_t purged_pages;
    size_t dirty_pages; /* the dirty pages when the epoch began */
    size_t faulted_pages;
    size_t sparse_pages;
};

/* What only epochs and purges use, and is large. Under the purger's lock. */
struct workspace {
    struct demand demand; /* of the epochs before this one */
    unsigned char scratch[RESIDENCY_CHUNK_PAGES];
    /* Written under the lock of the heap that has claims in it (heap.claims),
     * too. */
    struct purge_batch batch;
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

/* A heap and what is under the heap's lock. Each arena begins on a cache line of
 * its own. The words that are marked as atomic are also read without the
 * lock. */
struct arena {
    struct lock lock;
    _Atomic(uint64_t) heap_locks;            /* acquisitions of the lock */
    _Atomic(uint64_t) contended;             /* acquisitions that had to wait */
    uint64_t window_locks, window_contended; /* the values of both when the window began (arena_is_crowded) */
    _Atomic(uint64_t) checks;
    _Atomic(uint64_t) checks_by_others; /* by threads other than the first */
    uint64_t reported;                  /* the levels at the last report */
    _Atomic(uint64_t) levels;           /* when a thread last left the heap: struct levels in a word */
    size_t misuses_reported;
    uint32_t examined_span; /* the descriptor, and the page of its run, at which examine_clean continues */
    uint32_t examined_pages;
    bool has_colors; /* the heap's colors are initialized */
    struct thp_policy thp;
    _Alignas(64) struct heap heap; /* the large field comes last, so that the others are on few pages */
};

/* Whether an arena can be used. The states are atomic. */
enum arena_state {
    ARENA_UNUSED,
    ARENA_STARTING, /* a thread initializes its heap; other threads use the first arena */
    ARENA_READY,
    ARENA_FAILED, /* there was no memory for its heap; other arenas serve its CPUs */
};

struct arenas {
    /* These fields are fixed at the start. Caches and depots have locks of
     * their own, and settings are atomic. */
    struct page_map map; /* what the fast path of free reads */
    void (*misused)(const struct misuse_record *misuse);
    void (*visited)(void); /* the helper calls it in each epoch, without a lock; may be NULL */
    struct cpu_caches *caches;
    unsigned depot_count;
    unsigned depots_per_node; /* 0 if there are no depots */
    unsigned nodes;
    /* The arenas that threads are sent to: the first `active` ones. It doubles
     * while threads wait for each other, up to `max_active`. Atomic. */
    _Atomic(unsigned) active;
    _Atomic(unsigned) max_active;
    _Atomic(uint32_t) started;           /* all arenas from this number on are unused */
    _Atomic(uint8_t) states[MAX_ARENAS]; /* enum arena_state */
    struct lock start_lock;              /* held while an arena starts */
    struct arena_settings settings;

    struct limit_state limit;
    struct arena_counts counts;
    struct machine_offer machine;
    struct helper helper;
    struct miss_counter misses[MISS_COUNTERS]; /* atomic */
    /* Belongs to api/counters.c. It is here because a forked child writes this
     * page in any case. */
    struct calm_stats totals_at_fork;
    struct depot depots[MAX_DEPOTS];
    struct epoch epoch;
    struct purger purger;
    /* Both are mapped at the start, together, since a collector of garbage that
     * scans the data of all libraries would scan them. The pages of unused arenas
     * are never touched. */
    struct arena *of;
    struct workspace *work;
};

static inline unsigned page_shift(const struct arenas *arenas) {
    return arenas->map.page_shift;
}

static inline size_t page_bytes(const struct arenas *arenas) {
    return (size_t)1 << page_shift(arenas);
}

static inline bool arena_has_helper(const struct arenas *arenas) {
    int helper = atomic_load_explicit(&arenas->helper.state, memory_order_acquire);
    return helper == HELPER_RUNS || !thread_is_gone(&arenas->helper.thread);
}

static inline int setting_value(const _Atomic(int) *setting) {
    return atomic_load_explicit(setting, memory_order_relaxed);
}

static inline void add_count(_Atomic(uint64_t) *counter, uint64_t more) {
    atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

static inline size_t get_total(const _Atomic(size_t) *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

/* Pages of one arena or of all. Both are in one word, the used pages in its high
 * half, so that a thread adds to both, and reads both, at once. So of several
 * threads that report concurrently, the last one sees what all have reported. A
 * decrease of the low half borrows from the high half. Sums are right
 * nevertheless, since no sum is negative. */
struct levels {
    size_t used, dirty;
};

#define LEVELS_SHIFT 32

static inline uint64_t pack_levels(size_t used, size_t dirty) {
    return ((uint64_t)used << LEVELS_SHIFT) + dirty;
}

static inline struct levels unpack_levels(uint64_t word) {
    return (struct levels){word >> LEVELS_SHIFT, word & (((uint64_t)1 << LEVELS_SHIFT) - 1)};
}

/* Returns the levels of an arena when a thread last left its heap. */
static inline struct levels arena_levels(const struct arena *arena) {
    return unpack_levels(atomic_load_explicit(&arena->levels, memory_order_relaxed));
}

static inline bool arena_is_ready(const struct arenas *arenas, unsigned number) {
    return atomic_load_explicit(&arenas->states[number], memory_order_acquire) == ARENA_READY;
}

/* Returns the next arena that is ready, from *number on, and stores the number
 * after it in *number. Returns NULL if there is none. */
static inline __attribute__((always_inline, nonnull)) struct arena *arena_next(const struct arenas *arenas,
                                                                               unsigned *number) {
    unsigned end = atomic_load_explicit(&arenas->started, memory_order_acquire);
    while (*number < end) {
        unsigned at = (*number)++;
        if (arena_is_ready(arenas, at)) {
            return (struct arena *)&arenas->of[at];
        }
    }
    return NULL;
}

#endif
