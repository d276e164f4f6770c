#include "governor.h"

#include <errno.h>
#include <fcntl.h>
#include <gnu/libc-version.h>
#include <limits.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"
#include "calmalloc.h"
#include "glibc_malloc.h"
#include "glibc_prove.h"
#include "governor_state.h"
#include "os/control.h"
#include "os/figures.h"
#include "os/filters.h"
#include "os/huge_pages.h"
#include "policy/hysteresis.h"
#include "trim.h"

/*
 * Bytes a thread frees before it looks, at least, so that a small program does not look all the time; and
 * bytes that may come free between two walks, at least, for the same reason. Both add to what may be
 * retained.
 */
#define MIN_LOOK_BYTES  (256UL << 10)
#define MIN_SLACK_BYTES (1UL << 20)
/* What a merge may leave free above the threshold, for each CPU that the process uses. */
#define MERGED_BYTES_PER_CPU (8UL << 20)
#define MAX_ROUNDS           8
#define MIN_ALLOC_LOOK_BYTES (16UL << 10)
/*
 * Claimed pages cost nothing until they are touched, but each claim is a system call that takes the address
 * space's lock. So no claim is smaller than glibc's own default pad, and a growing heap at least doubles, up
 * to a limit.
 */
#define MIN_CLAIM_BYTES    DEFAULT_TOP_PAD
#define MAX_DOUBLING_BYTES (8UL << 20)

enum state { STATE_UNBORN, STATE_ACTIVE, STATE_OUT };

/* What a forked child keeps: none of it is a lock or a sample. */
static struct {
    _Atomic(int) state;
    _Atomic(bool) user_trim_threshold, user_top_pad, user_mmap_threshold;
    _Atomic(size_t) user_top_pad_bytes;
    _Atomic(size_t) mmap_threshold; /* the user's, or what glibc's would be, were it still its own */
    const char *why_not;
    const char *glibc_version;
    const struct glibc_layout *layout;
    struct arena *main_arena;
    struct governor *wiped_on_fork;
    size_t page_bytes;
    size_t huge_page_bytes; /* 0: huge pages come only on request */
    double sensitivity;
} global = {.mmap_threshold = DEFAULT_MMAP_THRESHOLD, .glibc_version = "", .why_not = "not started"};

/* As much of an arena as is read without a lock: its top. */
static union {
    struct arena arena;
    char bytes[256];
} no_arena;

struct governor_view governor_view = {.main_arena = &no_arena.arena};

static size_t load(_Atomic(size_t) *figure) {
    return atomic_load_explicit(figure, memory_order_relaxed);
}

static void store(_Atomic(size_t) *figure, size_t value) {
    atomic_store_explicit(figure, value, memory_order_relaxed);
}

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static bool flag(_Atomic(bool) *value) {
    return atomic_load_explicit(value, memory_order_relaxed);
}

bool governor_is_unborn(void) {
    return atomic_load_explicit(&global.state, memory_order_relaxed) == STATE_UNBORN;
}

/* Leaves everything to glibc again, with its default settings. With no arena locked. */
static void step_out(const char *why) {
    int active = STATE_ACTIVE;
    if (!atomic_compare_exchange_strong(&global.state, &active, STATE_OUT)) {
        return;
    }
    global.why_not = why;
    atomic_store(&governor_view.main_arena, &no_arena.arena);
    if (!flag(&global.user_trim_threshold)) {
        __libc_mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD);
    }
    if (!flag(&global.user_top_pad)) {
        __libc_mallopt(M_TOP_PAD, DEFAULT_TOP_PAD);
    }
}

bool governor_is_active(void) {
    bool active = atomic_load_explicit(&global.state, memory_order_acquire) == STATE_ACTIVE;
    if (active && filters_now() == FILTERS_ADDED) {
        step_out("the program added a seccomp filter");
        return false;
    }
    return active;
}

static struct record *find_record(struct governor *governor, const struct arena *arena) {
    for (size_t i = 0; i < GOVERNOR_MAX_ARENAS; i++) {
        const struct arena *known = atomic_load_explicit(&governor->records[i].arena, memory_order_acquire);
        if (known == arena) {
            return &governor->records[i];
        }
        if (known == NULL) {
            break;
        }
    }
    return NULL;
}

/*
 * A locked arena's record, made (and the arena proved) at first sight. NULL if the table is full or the proof
 * failed. The lock lets one thread at a time make an arena's record; different arenas race for a slot by
 * compare-and-swap.
 */
static struct record *find_or_make_record(struct governor *governor, struct arena *arena, bool *proved) {
    *proved = true;
    struct record *record = find_record(governor, arena);
    if (record != NULL) {
        return record;
    }
    if (arena != global.main_arena && !glibc_prove_arena(arena, global.layout)) {
        *proved = false;
        return NULL;
    }
    for (size_t i = 0; i < GOVERNOR_MAX_ARENAS; i++) {
        struct arena *nobody = NULL;
        if (atomic_compare_exchange_strong(&governor->records[i].arena, &nobody, arena)) {
            atomic_fetch_add_explicit(&governor->arenas, 1, memory_order_relaxed);
            return &governor->records[i];
        }
    }
    return NULL;
}

/*
 * Sums by exchange: whatever order two threads come in, each difference is added exactly once, so the totals
 * are the sum of the records. They may pass through a value below zero for an instant: read as signed.
 */
static void record_figures(struct governor *governor, struct record *record, size_t top, size_t system) {
    size_t old_top = atomic_exchange_explicit(&record->top_bytes, top, memory_order_relaxed);
    size_t old_system = atomic_exchange_explicit(&record->system_bytes, system, memory_order_relaxed);
    atomic_fetch_add_explicit(&governor->total_top_bytes, top - old_top, memory_order_relaxed);
    atomic_fetch_add_explicit(&governor->total_system_bytes, system - old_system, memory_order_relaxed);
}

static size_t distance(size_t a, size_t b) {
    return a > b ? a - b : b - a;
}

/*
 * As above, but only what changed by much: most looks then write to no line that other threads read. Returns
 * whether the top grew by much.
 */
static bool note_change(struct governor *governor, struct record *record, size_t top, size_t system,
                        size_t much) {
    size_t old_top = load(&record->top_bytes);
    if (distance(top, old_top) >= much || distance(system, load(&record->system_bytes)) >= much) {
        record_figures(governor, record, top, system);
    }
    return top >= old_top + much;
}

static size_t total(_Atomic(size_t) *figure) {
    size_t sum = load(figure);
    return (ptrdiff_t)sum < 0 ? 0 : sum;
}

bool governor_record(struct governor *governor, struct arena *arena) {
    bool proved;
    struct record *record = find_or_make_record(governor, arena, &proved);
    if (record != NULL) {
        record_figures(governor, record, arena_trimmable_bytes(arena, arena == global.main_arena),
                       arena_body(arena)->system_mem);
    }
    return proved;
}

/* Records every arena that is not busy. False if one of them is not what glibc_layout.h says. */
static bool walk(struct governor *governor) {
    struct arena *arena = global.main_arena;
    do {
        if (arena_trylock(arena)) {
            bool proved = governor_record(governor, arena);
            arena_unlock(arena);
            if (!proved) {
                return false;
            }
        }
        arena = arena_next(arena);
    } while (arena != global.main_arena);
    governor_count(&governor->stats.walks, 1);
    return true;
}

static struct hysteresis_thresholds decide(struct governor *governor) {
    return hysteresis_decide((struct hysteresis_input){
        .footprint_bytes = total(&governor->total_system_bytes),
        .cpus_used = (double)load(&governor->cpus_hundredths) / 100,
        .arenas = load(&governor->arenas),
        .sensitivity = global.sensitivity,
    });
}

/* Whether a threshold has left the band of a quarter around the one in force. */
static bool has_moved(size_t now, size_t in_force) {
    return now > in_force + in_force / 4 || now < in_force - in_force / 4;
}

static void put_in_force(struct governor *governor, struct hysteresis_thresholds thresholds) {
    size_t pad_each = thresholds.pad_each_bytes;
    store(&governor->threshold_bytes, thresholds.trim_bytes);
    if (flag(&global.user_top_pad)) {
        store(&governor->pad_each_bytes, load(&global.user_top_pad_bytes));
        return;
    }
    if (has_moved(pad_each, load(&governor->pad_each_bytes))) {
        governor_count(&governor->stats.threshold_changes, 1);
        store(&governor->pad_each_bytes, pad_each);
        /* Waits for the main arena, with nothing held but `busy`, for which nobody waits. */
        size_t top_pad = smaller(pad_each, global.huge_page_bytes > 0 ? DEFAULT_TOP_PAD : INT_MAX);
        __libc_mallopt(M_TOP_PAD, (int)top_pad);
    }
}

/* Of one arena's free top space, what is resident. A top that a trim would spare counts whole. */
static size_t resident_top_bytes(struct governor *governor, const struct arena *arena, size_t keep_bytes) {
    bool is_main = arena == global.main_arena;
    size_t top = arena_trimmable_bytes(arena, is_main);
    if (top <= 2 * keep_bytes) {
        return top;
    }
    size_t pages = arena_excess_bytes(arena, is_main, 0, global.page_bytes);
    return top - pages +
           residency_of_tail(arena_top_end(arena) - pages, pages, global.page_bytes, SIZE_MAX,
                             governor->scratch)
               .resident_bytes;
}

/*
 * How much of all free top space is resident: the rest costs nobody anything, and purging it would gain
 * nothing. A busy arena counts whole, as last seen. An upper bound, then, for the arenas that are known.
 */
static size_t resident_total_bytes(struct governor *governor, size_t keep_bytes) {
    size_t resident = 0;
    struct arena *arena = global.main_arena;
    do {
        struct record *record = find_record(governor, arena);
        if (record != NULL && arena_trylock(arena)) {
            resident += resident_top_bytes(governor, arena, keep_bytes);
            arena_unlock(arena);
        } else if (record != NULL) {
            resident += load(&record->top_bytes);
        }
        arena = arena_next(arena);
    } while (arena != global.main_arena);
    return resident;
}

/*
 * Trims if more than the threshold is free and resident. Then says when to come again: after so much more was
 * freed, or came free by merging with the top, as could take the process over the threshold.
 */
static void trim_if_needed(struct governor *governor, size_t trim_bytes) {
    size_t resident = total(&governor->total_top_bytes);
    if (!flag(&global.user_trim_threshold) && resident > trim_bytes) {
        size_t keep_bytes = load(&governor->pad_each_bytes);
        resident = resident_total_bytes(governor, keep_bytes);
        if (resident > trim_bytes) {
            size_t purged = trim_arenas(governor, global.main_arena, keep_bytes, global.page_bytes);
            resident -= purged < resident ? purged : resident;
        }
    }
    size_t slack = trim_bytes > resident ? trim_bytes - resident : 0;
    store(&governor->slack_bytes, larger(larger(slack, trim_bytes / 16), MIN_SLACK_BYTES));
    store(&governor->top_bytes_at_walk, total(&governor->total_top_bytes));
    store(&governor->freed_bytes_at_walk, load(&governor->freed_bytes));
}

/* What another process asked for. One thread at a time, and no arena is locked. */
static void carry_out(struct governor *governor) {
    struct control_claim claim;
    if (!control_take(&os_control, &claim)) {
        return;
    }
    int error = claim.request == CONTROL_TRIM ? 0 : ENOSYS;
    size_t purged = 0;
    if (error == 0) {
        size_t arenas = larger(load(&governor->arenas), 1);
        purged = trim_arenas(governor, global.main_arena, (size_t)claim.argument / arenas, global.page_bytes);
    }
    control_finish(&os_control, &claim, error, purged);
}

static void walk_and_decide(struct governor *governor, bool trim) {
    if (!walk(governor)) {
        step_out("an arena is not laid out as known");
        return;
    }
    double cpus = cpu_usage_sample(&governor->cpu_usage);
    store(&governor->cpus_hundredths, (size_t)(cpus * 100));
    struct hysteresis_thresholds thresholds = decide(governor);
    put_in_force(governor, thresholds);
    if (control_is_asked(&os_control)) {
        carry_out(governor);
    }
    if (trim) {
        trim_if_needed(governor, thresholds.trim_bytes);
    }
}

/*
 * One thread at a time: look at all arenas, set the thresholds and, if asked, trim. Who finds it taken leaves
 * word: what came free behind the back of the one at work may be the last that ever does. That one goes round
 * again, but not for ever on behalf of others.
 */
static void govern(struct governor *governor, bool trim) {
    if (trim) {
        atomic_store_explicit(&governor->trim_wanted, true, memory_order_release);
    }
    for (int round = 0; round < MAX_ROUNDS; round++) {
        if (atomic_exchange_explicit(&governor->busy, 1, memory_order_acquire) != 0) {
            return;
        }
        bool wanted = atomic_exchange_explicit(&governor->trim_wanted, false, memory_order_acquire);
        walk_and_decide(governor, wanted);
        atomic_store_explicit(&governor->busy, 0, memory_order_seq_cst);
        if (!atomic_load_explicit(&governor->trim_wanted, memory_order_seq_cst)) {
            return;
        }
    }
}

static bool is_threshold_due(struct governor *governor) {
    struct hysteresis_thresholds now = decide(governor);
    return has_moved(now.trim_bytes, load(&governor->threshold_bytes)) ||
           (!flag(&global.user_top_pad) && has_moved(now.pad_each_bytes, load(&governor->pad_each_bytes)));
}

/* Whether a walk may find more than the threshold and so much more. */
static bool is_trim_due(struct governor *governor, size_t margin_bytes) {
    size_t top = total(&governor->total_top_bytes);
    size_t threshold = load(&governor->threshold_bytes);
    /* It was found by a threshold that may have fallen since, with the footprint. */
    size_t slack = smaller(load(&governor->slack_bytes), larger(threshold, MIN_SLACK_BYTES));
    return top > threshold + margin_bytes &&
           (load(&governor->freed_bytes) - load(&governor->freed_bytes_at_walk) >= slack ||
            top >= load(&governor->top_bytes_at_walk) + slack);
}

/*
 * Section 6.2.1: all arenas are looked at when a free has changed its own by much. Who allocates never trims:
 * it might take the very pages that it is about to use. What came free by a merge, all at once as a thread's
 * last blocks were freed, belongs to a thread that ends or turns to something new: a few MiB for each CPU in
 * use may stay for the next, wherever it is found.
 */
static bool may_trim(struct governor *governor, enum look_reason reason, bool grew) {
    if (reason == LOOK_ALLOCATED) {
        return false;
    }
    size_t merged_bytes = MERGED_BYTES_PER_CPU / 100 * load(&governor->cpus_hundredths);
    return is_trim_due(governor, reason == LOOK_FREED && grew ? 0 : merged_bytes);
}

/*
 * Refreshes one more arena's figures, each in its turn: a thread's end frees what its thread cache held, by
 * no call of the program's.
 */
static void look_at_another(struct governor *governor) {
    size_t arenas = load(&governor->arenas);
    size_t turn = atomic_fetch_add_explicit(&governor->turn, 1, memory_order_relaxed);
    struct arena *arena = atomic_load_explicit(&governor->records[turn % arenas].arena, memory_order_acquire);
    if (arena != NULL && arena_trylock(arena)) {
        governor_record(governor, arena);
        arena_unlock(arena);
    }
}

struct arena *governor_arena_of(const void *block) {
    if (!governor_is_active()) {
        return NULL;
    }
    if ((chunk_of_block(block)->size_flags & CHUNK_NON_MAIN_ARENA) == 0) {
        return global.main_arena;
    }
    if (!flag(&governor_view.heaps_proved)) {
        if (!glibc_prove_heap_of_block(block, global.main_arena)) {
            step_out("a heap is not laid out as known");
            return NULL;
        }
        atomic_store_explicit(&governor_view.heaps_proved, true, memory_order_relaxed);
    }
    return heap_of(block)->arena;
}

/*
 * Padding claimed ahead (section 6.2.2) once the usable top falls under a quarter of the arena's share.
 * Returns how much the thread may allocate before that can happen again. The main arena's padding is glibc's
 * own top_pad.
 */
static size_t claim_ahead(struct governor *governor, const struct arena *arena, size_t pad_each) {
    if (arena == global.main_arena || flag(&global.user_top_pad)) {
        return SIZE_MAX;
    }
    size_t low = pad_each / 4;
    size_t usable = arena_usable_bytes(arena);
    if (usable < low) {
        size_t heap_bytes = heap_of(arena_body(arena)->top)->size;
        size_t doubling = smaller(heap_bytes, MAX_DOUBLING_BYTES);
        size_t wanted = larger(pad_each, larger(doubling, MIN_CLAIM_BYTES));
        size_t claimed = arena_claim(arena, wanted, global.page_bytes, global.huge_page_bytes);
        if (claimed > 0) {
            governor_count(&governor->stats.claims, 1);
            governor_count(&governor->stats.bytes_claimed, claimed);
            usable += claimed;
        }
    }
    return usable > low ? usable - low : 0;
}

struct allowance governor_look(struct arena *arena, enum look_reason reason, size_t freed_bytes) {
    if (!governor_is_active()) {
        return (struct allowance){SIZE_MAX, SIZE_MAX};
    }
    struct governor *governor = global.wiped_on_fork;
    atomic_fetch_add_explicit(&governor->freed_bytes, freed_bytes, memory_order_relaxed);
    size_t pad_each = load(&governor->pad_each_bytes);
    size_t look_bytes = larger(pad_each, MIN_LOOK_BYTES);
    struct allowance allowance = {look_bytes, look_bytes};
    int saved_errno = errno;
    bool grew = false;

    if (arena_trylock(arena)) {
        bool proved;
        bool is_main = arena == global.main_arena;
        struct record *record = find_or_make_record(governor, arena, &proved);
        if (record != NULL) {
            size_t ahead = claim_ahead(governor, arena, pad_each);
            allowance.alloc_bytes = larger(smaller(ahead, look_bytes), MIN_ALLOC_LOOK_BYTES);
            grew = note_change(governor, record, arena_trimmable_bytes(arena, is_main),
                               arena_body(arena)->system_mem, look_bytes / 2);
        }
        arena_unlock(arena);
        if (!proved) {
            step_out("an arena is not laid out as known");
        }
    }
    if (reason == LOOK_FREED && load(&governor->arenas) > 1) {
        look_at_another(governor);
    }
    if (governor_is_active()) {
        bool trim = may_trim(governor, reason, grew);
        if (trim || is_threshold_due(governor) || control_is_asked(&os_control)) {
            govern(governor, trim);
            if (!trim && may_trim(governor, reason, grew)) {
                govern(governor, true); /* the threshold has fallen just now, and this look may be the last */
            }
        }
    }
    errno = saved_errno;
    return allowance;
}

void governor_note_mmapped_free(size_t chunk_bytes) {
    /* Before the start too: glibc raises its own then, and the emulation must go on from there. */
    size_t threshold = load(&global.mmap_threshold);
    if (chunk_bytes <= threshold || chunk_bytes > DEFAULT_MMAP_THRESHOLD_MAX ||
        flag(&global.user_mmap_threshold)) {
        return;
    }
    store(&global.mmap_threshold, chunk_bytes);
    if (governor_is_active()) {
        int saved_errno = errno;
        __libc_mallopt(M_MMAP_THRESHOLD, (int)chunk_bytes);
        governor_count(&global.wiped_on_fork->stats.mmap_threshold_raises, 1);
        errno = saved_errno;
    }
}

void governor_note_mmap_threshold(size_t value) {
    store(&global.mmap_threshold, value);
}

size_t governor_mmap_threshold(void) {
    return load(&global.mmap_threshold);
}

void governor_note_placed(void) {
    governor_count(&global.wiped_on_fork->stats.placed_blocks, 1);
}

void governor_note_mallopt(int parameter, size_t value) {
    if (parameter == M_TRIM_THRESHOLD) {
        atomic_store(&global.user_trim_threshold, true);
    } else if (parameter == M_TOP_PAD) {
        store(&global.user_top_pad_bytes, value);
        atomic_store(&global.user_top_pad, true);
    }
    if (parameter == M_TRIM_THRESHOLD || parameter == M_TOP_PAD || parameter == M_MMAP_THRESHOLD ||
        parameter == M_MMAP_MAX) {
        atomic_store(&global.user_mmap_threshold, true); /* each of the four ends glibc's dynamic threshold */
    }
}

static struct governor *map_state(void) {
    void *state =
        mmap(NULL, sizeof(struct governor), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (state == MAP_FAILED) {
        return NULL;
    }
    if (madvise(state, sizeof(struct governor), MADV_WIPEONFORK) != 0) {
        munmap(state, sizeof(struct governor));
        return NULL;
    }
    return state;
}

/* Whether the system counts what a process may touch: then glibc gives address space back, which we do not.
 */
static bool overcommits_strictly(void) {
    int descriptor = open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        return false;
    }
    char mode = '0';
    bool strict = read(descriptor, &mode, 1) == 1 && mode == '2';
    close(descriptor);
    return strict;
}

/* NULL if nothing stands against governing, with the main arena and the state set; else why not. */
static const char *prepare(const struct options *options) {
    global.layout = glibc_layout_choose(global.glibc_version);
    if (global.layout == NULL) {
        return "this version of glibc is not known";
    }
    if (options->sets_huge_pages) {
        return "glibc.malloc.hugetlb changes the layout of heaps";
    }
    if (options->sets_tagging) {
        return "glibc.mem.tagging changes the addresses of blocks";
    }
    if (flag(&global.user_trim_threshold) && flag(&global.user_top_pad)) {
        return "trim_threshold and top_pad are set by the user";
    }
    if (overcommits_strictly()) {
        return "under strict overcommit (vm.overcommit_memory=2) glibc gives address space back itself";
    }
    const char *why_not = NULL;
    global.main_arena = glibc_prove_main_arena(global.layout, &why_not);
    if (global.main_arena == NULL) {
        return why_not;
    }
    global.wiped_on_fork = map_state();
    return global.wiped_on_fork != NULL ? NULL : "the kernel has no MADV_WIPEONFORK";
}

/*
 * A child starts with a copy of all that is resident: better without what may be given back. Only where there
 * are several arenas: in a process of one thread, locks mean nothing to glibc, and fork may be called by a
 * signal handler in the midst of malloc. It waits for nothing, for the same reason.
 */
static void before_fork(void) {
    struct governor *governor = global.wiped_on_fork;
    if (!governor_is_active() || load(&governor->arenas) < 2 ||
        atomic_exchange_explicit(&governor->busy, 1, memory_order_acquire) != 0) {
        return;
    }
    int saved_errno = errno;
    if (walk(governor)) {
        trim_if_needed(governor, decide(governor).trim_bytes);
    }
    errno = saved_errno;
    atomic_store_explicit(&governor->busy, 0, memory_order_release);
}

/* The request was for the parent. */
static void after_fork_in_child(void) {
    control_clear(&os_control);
}

bool governor_start(const struct options *options) {
    filters_look();
    global.glibc_version = gnu_get_libc_version();
    global.page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    global.huge_page_bytes = huge_page_always_bytes();
    global.sensitivity = options->sensitivity;
    if (options->sets_trim_threshold) {
        governor_note_mallopt(M_TRIM_THRESHOLD, 0);
    }
    if (options->sets_top_pad) {
        governor_note_mallopt(M_TOP_PAD, options->top_pad);
    }
    if (options->sets_mmap_threshold) {
        governor_note_mallopt(M_MMAP_THRESHOLD, options->mmap_threshold);
        governor_note_mmap_threshold(options->mmap_threshold);
    }
    if (options->sets_mmap_max) {
        governor_note_mallopt(M_MMAP_MAX, 0);
    }
    global.why_not = prepare(options);
    if (global.why_not != NULL) {
        atomic_store(&global.state, STATE_OUT);
        return false;
    }
    if (!flag(&global.user_trim_threshold)) {
        __libc_mallopt(M_TRIM_THRESHOLD, -1);
    }
    atomic_store_explicit(&global.state, STATE_ACTIVE, memory_order_release);
    atomic_store_explicit(&governor_view.main_arena, global.main_arena, memory_order_relaxed);
    govern(global.wiped_on_fork, false);
    pthread_atfork(before_fork, NULL, after_fork_in_child);
    return governor_is_active();
}

struct governor_stats governor_read_stats(void) {
    struct governor_stats stats = {
        .active = governor_is_active(),
        .why_not = global.why_not,
        .glibc_version = global.glibc_version,
        .sensitivity = global.sensitivity,
        .user_trim_threshold = flag(&global.user_trim_threshold),
        .user_top_pad = flag(&global.user_top_pad),
        .user_mmap_threshold = flag(&global.user_mmap_threshold),
    };
    struct governor *governor = global.wiped_on_fork;
    if (governor == NULL) {
        return stats;
    }
    stats.threshold_bytes = load(&governor->threshold_bytes);
    stats.pad_each_bytes = load(&governor->pad_each_bytes);
    stats.footprint_bytes = total(&governor->total_system_bytes);
    stats.free_top_bytes = total(&governor->total_top_bytes);
    stats.arenas = load(&governor->arenas);
    stats.cpus_hundredths = load(&governor->cpus_hundredths);
    struct governor_counters *counters = &governor->stats;
    stats.trims = load(&counters->trims);
    stats.bytes_trimmed = load(&counters->bytes_trimmed);
    stats.bytes_purged = load(&counters->bytes_purged);
    stats.ranges = load(&counters->ranges);
    stats.vectored_calls = load(&counters->vectored_calls);
    stats.purge_calls = load(&counters->single_calls) + stats.vectored_calls;
    stats.break_calls = load(&counters->break_calls);
    stats.failed_purges = load(&counters->failed_purges);
    stats.busy_arenas = load(&counters->busy_arenas);
    stats.walks = load(&counters->walks);
    stats.claims = load(&counters->claims);
    stats.bytes_claimed = load(&counters->bytes_claimed);
    stats.threshold_changes = load(&counters->threshold_changes);
    stats.mmap_threshold_raises = load(&counters->mmap_threshold_raises);
    stats.placed_blocks = load(&counters->placed_blocks);
    return stats;
}

/* The same for processes outside. All but the state lies in memory that is mapped later, and anew in a child.
 */
#define KEPT(label, field)                                                                              \
    {                                                                                                   \
        .name = (label), .at = &global.wiped_on_fork, .flags = FIGURE_THROUGH, .bytes = sizeof(size_t), \
        .offset = offsetof(struct governor, field)                                                      \
    }

extern const struct ptlbmalloc2_figures {
    struct figures head;
    struct figure figure[21];
} ptlbmalloc2_figures;

__attribute__((used, visibility("hidden"))) const struct ptlbmalloc2_figures ptlbmalloc2_figures = {
    .head = FIGURES_HEAD("ptlbmalloc2", ptlbmalloc2_figures, .release = CALM_RELEASE, .control = &os_control),
    .figure =
        {
            {.name = "state", .at = &global.state, .bytes = sizeof global.state},
            KEPT("threshold_bytes", threshold_bytes),
            KEPT("pad_each_bytes", pad_each_bytes),
            KEPT("footprint_bytes", total_system_bytes),
            KEPT("free_top_bytes", total_top_bytes),
            KEPT("arenas", arenas),
            KEPT("cpus_hundredths", cpus_hundredths),
            KEPT("trims", stats.trims),
            KEPT("bytes_trimmed", stats.bytes_trimmed),
            KEPT("bytes_purged", stats.bytes_purged),
            KEPT("ranges", stats.ranges),
            KEPT("process_madvise_calls", stats.vectored_calls),
            KEPT("madvise_calls", stats.single_calls),
            KEPT("break_calls", stats.break_calls),
            KEPT("failed_purges", stats.failed_purges),
            KEPT("busy_arenas", stats.busy_arenas),
            KEPT("walks", stats.walks),
            KEPT("claims", stats.claims),
            KEPT("bytes_claimed", stats.bytes_claimed),
            KEPT("threshold_changes", stats.threshold_changes),
            KEPT("mmap_threshold_raises", stats.mmap_threshold_raises),
        },
};
FIGURES_NOTE(ptlbmalloc2_figures);
