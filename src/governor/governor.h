/*
 * The governor: knows the heap, the depots and the caches of CPUs, asks the policy how much free memory may
 * stay, and gives back the rest.
 *
 * It also guards the heap: a thread takes from the heap, and puts into it, under the heap's lock, and checks
 * the bound before it leaves. So free memory in the heap never exceeds the bound once a thread has
 * left, whether or not any code of ours runs afterwards; caches and depots are bounded by their size.
 *
 * A purge takes its ranges out of the free set first, and asks the kernel without any lock but the purger's
 * own.
 *
 * Locks, outermost first: purger, a region's, a shelf's, the heap's.
 */
#ifndef CALM_GOVERNOR_GOVERNOR_H
#define CALM_GOVERNOR_GOVERNOR_H

#include "cache/cpu_cache.h"
#include "cache/depot.h"
#include "governor/density.h"
#include "heap/heap.h"
#include "os/cpu_usage.h"
#include "os/lock.h"
#include "os/thread.h"
#include "policy/demand.h"
#include "policy/retention.h"

#include <stdatomic.h>

#define DEPOTS_MOST 8
/* One for so many CPUs, while they are no more than DEPOTS_MOST: a program of few threads has what belongs to
 * few CPUs. */
#define DEPOT_CPUS 4

enum policy { POLICY_ADAPTIVE, POLICY_PAPER };
enum placement { PLACEMENT_OFF, PLACEMENT_LINES, PLACEMENT_COLORS, PLACEMENT_RANDOM };

/* What a person may set, at any time. */
struct governor_settings {
    _Atomic(int) policy;
    _Atomic(int) background; /* whether a helper thread may tidy */
    _Atomic(int) watch_cgroup;
    _Atomic(int) huge_pages; /* whether they may be earned */
    _Atomic(int) placement;  /* enum placement: where large blocks begin */
    _Atomic(int) populate;   /* whether calloc's blocks may be made resident ahead of use */
    _Atomic(int) slack;      /* per cent of the policy's threshold */
    _Atomic(int) purge_time; /* per cent of CPU time that giving back in vain may cost */
};

struct governor_counts {
    uint64_t purged_pages;
    uint64_t purges;
    uint64_t purges_timed;
    uint64_t purges_asked;
    uint64_t failures;
    uint64_t vectored_calls;
    uint64_t single_calls;
    uint64_t ranges;
    uint64_t purge_ns;
    uint64_t vain_ns; /* what it cost to give back what was wanted again */
};

#define MISS_COUNTERS 32

struct miss_counter {
    _Alignas(64) _Atomic(uint64_t) count;
};

/*
 * A thread that alone works on the heap, and so needs none of its locks; and what it keeps besides. All of it
 * is called on that thread.
 */
struct governor_owner {
    void *context;
    void (*between)(void *context);                       /* two slices of a purge: clients wait */
    size_t (*cached)(const void *context, size_t *bytes); /* blocks that it keeps ready, about */
    void (*shed)(void *context);                          /* gives those back, by governor_put_blocks */
};

struct governor {
    const struct governor_owner *owner; /* NULL: the heap is everybody's, by the locks */
    _Atomic(bool) purging;              /* the owner is at it */
    bool purger_may_stop; /* a thread that others must not wait for gives back, too: then it sees to what they
                             leave over the bound */
    bool has_clients;     /* which see misuse_waits, and report the misuse */
    _Atomic(bool) misuse_waits;
    struct lock heap_lock;
    struct heap heap;
    uint64_t heap_locks;
    size_t misuses_reported;
    void (*misused)(enum misuse kind, const void *pointer);
    void (*visited)(void); /* by the helper, which holds no lock; NULL: no matter */
    /* Under the heap's lock. */
    struct retention_terms terms; /* of the bound; the peak rises with what is in use */
    bool tended;                  /* a helper or server calls governor_tick; terms follow once within them */
    size_t limit_pages;           /* the bound at the last check, for readers without the lock */
    size_t max_used;              /* pages in use, in this window */
    size_t max_held;              /* the same with free ones */
    size_t min_free;              /* free pages in this window, and all that were given back before */
    size_t retry_above_pages;     /* after a refusal: not before there is so much, or a while has passed */
    struct density density;
    bool knows_caches; /* the heap's colors are made */
    uint64_t looks;
    _Atomic(uint64_t) looks_of_others; /* than the first thread */
    struct governor_counts counts;

    struct cpu_caches *caches;
    struct depot depots[DEPOTS_MOST];
    unsigned depot_count;
    unsigned depots_per_node;
    struct governor_settings settings;

    /* Under the purger's lock. */
    struct lock purge_lock;
    struct purge_batch batch;
    struct cpu_usage cpu_usage;
    struct demand demand;
    uint64_t window_looks;
    size_t untouched_windows; /* in a row in which no thread came to the heap */
    size_t shrunk_window;     /* 1 + the number of that in which a fork last gave back */
    uint64_t window_cpu_ns;
    uint64_t window_purge_ns;
    uint64_t window_purged_pages;
    size_t window_faulted_pages;
    uint64_t retry_ns;
    uint64_t retry_after_ns;

    _Atomic(uint64_t) window_start_ns;
    _Atomic(uint64_t) room_read_ns;
    _Atomic(size_t) room_bytes;    /* which the footprint may come to */
    _Atomic(double) fault_ns;      /* for one page, as measured; 0: not yet */
    const void *first_thread;      /* its thread pointer */
    _Atomic(bool) cannot_populate; /* on this kernel */
    _Atomic(int) helper;           /* enum helper_state */
    struct thread helper_thread;
    _Atomic(uint32_t) helper_bell;
    _Atomic(uint32_t) quiet_windows; /* since there was something to tidy */
    struct cpu_mask cpus;            /* that the process could use at its start */
    int process;                     /* whose threads there may be */
    struct miss_counter misses[MISS_COUNTERS];
};

/* Of a heap that has an owner at other times. */
enum lent {
    LENT_TENDED,   /* a server calls governor_tick */
    LENT_UNTENDED, /* the threads that come to the heap do */
    LENT_FOR_GOOD, /* and is told of misuse, as of any heap */
};

/* From now on the heap has an owner, who also calls governor_tick; or none. While no thread is at it. */
void governor_own(struct governor *governor, const struct governor_owner *owner);
void governor_lend(struct governor *governor, enum lent lent);

/* The heap's lock, for a reader of its figures. False if there is an owner, which needs no lock: then the
 * figures are consistent for the owner alone, and there is nothing to unlock. */
bool governor_lock(struct governor *governor);
void governor_unlock(struct governor *governor);

/* What came to light since the last time, up to MISUSE_NOTES; returns how many. */
size_t governor_take_misuse(struct governor *governor, struct misuse_note *notes);

/* settings must be filled. False if there is no memory at all. */
bool governor_init(struct governor *governor, const struct size_classes *classes, struct cpu_caches *caches,
                   size_t address_space, bool with_depots,
                   void (*misused)(enum misuse kind, const void *pointer));

/* Blocks of one class, from the depot or the heap. Returns how many. */
size_t governor_take_blocks(struct governor *governor, uint32_t class, void **blocks, size_t count);
/* The same for an owner, which may have pages made resident first; fewer than count only if memory is short.
 */
size_t governor_take_blocks_ready(struct governor *governor, uint32_t class, void **blocks, size_t count,
                                  bool ready);

void governor_put_blocks(struct governor *governor, uint32_t class, void *const *blocks, size_t count);

void *governor_take_large(struct governor *governor, size_t pages, size_t align_pages, bool *zero);

/* The same for an owner, which may have the block made resident first, if all such blocks are touched. */
void *governor_take_large_ready(struct governor *governor, size_t pages, size_t align_pages, bool *zero,
                                bool ready);

/* Whether a new block of calloc's, which is clean, is to be made resident, as that is little beside what is
 * used: then by governor_populate. */
bool governor_may_populate(struct governor *governor, void *block, size_t pages);

/* Makes the block resident: needs nothing of the heap, and takes as long as the block is large. Any thread.
 */
void governor_populate(struct governor *governor, void *block, size_t pages);

void governor_put_large(struct governor *governor, void *block);

/*
 * A large block, to be so many pages long: where it is, or by moving its pages. NULL if neither can be, and
 * then nothing changed.
 */
void *governor_resize_large(struct governor *governor, struct span *span, size_t pages);

/* Gives back all but keep_bytes of free memory, that of caches and depots included. Returns the bytes given
 * back. */
size_t governor_trim(struct governor *governor, size_t keep_bytes);

/* The same for the helper, which leaves what comes to light to the program's threads. */
size_t governor_trim_by_helper(struct governor *governor, size_t keep_bytes);

/* From now on governor_tick is called even if the program stays idle; or that is not certain any more, and
 * what exceeds the lower bound is given back first. The latter waits for another purger. Any thread. */
void governor_tend(struct governor *governor);
void governor_leave_untended(struct governor *governor);

/* The process ends, and with it all that it holds: from now on no helper is started. Also in a signal
 * handler, whatever it interrupted. */
void governor_end(struct governor *governor);

/* Once a window has passed: sheds what lay unused. Any thread, also the helper. own_files: whether the thread
 * has a table of open files of its own. True if there is nothing left to tidy. */
bool governor_tick(struct governor *governor, bool own_files);

/* Blocks in the caches and depots, and their bytes, about. */
size_t governor_cached(const struct governor *governor, size_t *bytes);

/* How often a CPU's cache had no block, or no room. */
uint64_t governor_misses(const struct governor *governor);

/* Whether no thread came to the heap since the last window ended. */
bool governor_is_untouched(struct governor *governor);

/* Whether all that is free and may be resident may also stay untended. */
bool governor_keeps_little(struct governor *governor);

/* Whether there is a helper thread. */
bool governor_has_helper(const struct governor *governor);

/* Whether a helper may run. */
bool governor_wants_helper(const struct governor *governor);

/* The bound on free memory in the heap, in bytes, for the current footprint. Under the heap's lock. */
size_t governor_limit(const struct governor *governor);

/* See space_limit. */
void governor_limit_space(struct governor *governor, size_t bytes);

/* Reads how much memory the process may take, at its start, where that may not be read later. */
void governor_read_room(struct governor *governor);

/* Settings changed: the bound follows. */
void governor_refresh(struct governor *governor);

/* Whether the caller holds a lock of the heap, of depots or of caches. */
bool governor_is_held(const struct governor *governor);

/*
 * Before governor_before_fork, of a heap without an owner. Free memory that is kept for later is worth less
 * over a fork: each of its small pages costs a fault afterwards in any case, and the child has it, too, until
 * it gives it back. So what may not stay without a helper is given back, once a window, as long as the budget
 * of purge_time is not spent. Nothing happens in a signal handler that interrupted the governor.
 */
void governor_shrink_for_fork(struct governor *governor);

/* Around fork: no other thread is within the heap, the depots or the caches meanwhile. Not needed in a
 * process of one thread, whose child only calls governor_start_child. */
void governor_before_fork(struct governor *governor);
void governor_after_fork(struct governor *governor, bool child);
void governor_start_child(struct governor *governor);

#endif
