#include "api/profiling.h"

#include "api/options.h"
#include "api/state.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/syscall.h"
#include "os/text.h"
#include "profile/pprof.h"
#include "profile/probes.h"
#include "profile/unwind.h"

#include <errno.h>
#include <string.h>

_Atomic(uint64_t) profiling_mean;
_Atomic(bool) profiling_listened;

#define MEAN_MOST ((uint64_t)1 << 30)
#define SECOND_NS ((uint64_t)1000000000)

static struct lock switch_lock; /* of who switches */
static struct samples samples;
static uint64_t last_mean;               /* when it was last on */
static uint64_t asked_mean;              /* by another process; the program's own option goes before it */
static _Atomic(uint64_t) asked_until_ns; /* 0: until it asks again */
static _Atomic(bool) was_on;
static _Atomic(bool) was_chosen; /* by the program or its user, so that a file is written at exit */

const struct samples_layout profiling_layout = SAMPLES_LAYOUT(&samples, &profiling_mean, &last_mean);

/* Of a CPU, or of the threads that hash to it: bytes to the next sample. */
struct countdown {
    _Alignas(64) _Atomic(int64_t) left;
    _Atomic(uint64_t) random;
};

static struct countdown *countdowns;

static int64_t next_gap(struct countdown *countdown, uint64_t mean) {
    uint64_t counter = atomic_fetch_add_explicit(&countdown->random, SAMPLING_STEP, memory_order_relaxed);
    return sampling_gap(sampling_mix(counter), mean);
}

static bool make_ready(void) {
    if (countdowns != NULL) {
        return true;
    }
    size_t page = os_page_size();
    size_t bytes = (calm_caches.count * sizeof(struct countdown) + page - 1) & ~(page - 1);
    struct countdown *made = os_reserve(bytes, page);
    if (made == NULL) {
        return false;
    }
    if (!os_commit(made, bytes) || !samples_init(&samples)) {
        os_release(made, bytes);
        return false;
    }
    countdowns = made;
    return true;
}

/* What makes one run differ from the next: the clock, and where the kernel put things. */
static uint64_t seed(void) {
    return sampling_mix(clock_now_ns() ^ (uint64_t)(uintptr_t)countdowns);
}

/* Under switch_lock. For another process no system call is made that the program's filter may not know. */
static uint64_t wanted_mean(void) {
    bool listened = profiling_has_listener();
    atomic_store_explicit(&profiling_listened, listened, memory_order_relaxed);
    uint64_t chosen = (uint64_t)options_profile();
    if (chosen != 0) {
        atomic_store_explicit(&was_chosen, true, memory_order_relaxed);
        return chosen;
    }
    if (filters_now() == FILTERS_ADDED) {
        return 0;
    }
    return asked_mean != 0 ? asked_mean : listened ? PROBES_MEAN_BYTES : 0;
}

/* Under switch_lock. */
static bool apply(void) {
    uint64_t mean = wanted_mean();
    bool able = mean == 0 || make_ready();
    mean = able ? mean : 0;
    if (mean != atomic_load_explicit(&profiling_mean, memory_order_relaxed)) {
        uint64_t start = seed();
        for (unsigned i = 0; mean != 0 && i < calm_caches.count; i++) {
            atomic_store_explicit(&countdowns[i].random, sampling_mix(start + i), memory_order_relaxed);
            atomic_store_explicit(&countdowns[i].left, next_gap(&countdowns[i], mean), memory_order_relaxed);
        }
        last_mean = mean != 0 ? mean : last_mean;
        if (mean != 0) {
            atomic_store_explicit(&was_on, true, memory_order_release);
        }
        /* Release: who sees that it is on sees the counters. */
        atomic_store_explicit(&profiling_mean, mean, memory_order_release);
        allocator_use_fast_path(mean == 0);
    }
    return able;
}

bool profiling_apply(void) {
    lock_acquire(&switch_lock);
    bool able = apply();
    lock_release(&switch_lock);
    return able;
}

int profiling_ask(uint64_t mean, uint32_t seconds) {
    if (mean > MEAN_MOST) {
        return EINVAL;
    }
    if (mean != 0 && filters_now() == FILTERS_ADDED) {
        return EPERM;
    }
    lock_acquire(&switch_lock);
    asked_mean = mean;
    atomic_store_explicit(&asked_until_ns, seconds == 0 ? 0 : clock_now_ns() + seconds * SECOND_NS,
                          memory_order_relaxed);
    bool able = apply();
    if (!able) {
        asked_mean = 0;
    }
    lock_release(&switch_lock);
    return able ? 0 : ENOMEM;
}

/* Within malloc. A thread that finds the lock taken leaves it to the next sample. */
static void end_when_due(uint64_t now_ns) {
    uint64_t until_ns = atomic_load_explicit(&asked_until_ns, memory_order_relaxed);
    if (until_ns != 0 && now_ns >= until_ns && lock_try(&switch_lock)) {
        if (atomic_load_explicit(&asked_until_ns, memory_order_relaxed) == until_ns) {
            asked_mean = 0;
            atomic_store_explicit(&asked_until_ns, 0, memory_order_relaxed);
            apply();
        }
        lock_release(&switch_lock);
    }
}

bool profiling_is_held(void) {
    return lock_is_mine(&switch_lock) || lock_is_mine(&samples.lock);
}

void profiling_before_filter(void) {
    if (!profiling_is_held()) {
        profiling_apply();
    }
}

static struct countdown *current_countdown(void) {
    uint32_t number = 0;
    if (cpu_cache_is_rseq()) {
        const char *place = (const char *)thread_pointer() + calm_caches.cpu_number;
        number = *(const volatile uint32_t *)(const void *)place;
    } else {
        uint64_t mixed = sampling_mix((uintptr_t)thread_pointer());
        number = (uint32_t)((mixed >> 32) * calm_caches.count >> 32);
    }
    return &countdowns[number < calm_caches.count ? number : 0];
}

/*
 * The thread whose block takes the counter to zero has the sample, and sets it anew from the end of its
 * block: what lies ahead does not depend on what went before. Both in one store: whoever is interrupted
 * before it has done neither, and keeps nobody who counts on the same CPU meanwhile from a sample.
 */
bool profiling_counts(size_t size) {
    /* Acquire: with the release of who switched it on. */
    uint64_t mean = atomic_load_explicit(&profiling_mean, memory_order_acquire);
    if (mean == 0 || size > PTRDIFF_MAX / 2) {
        return false;
    }
    struct countdown *countdown = current_countdown();
    int64_t bytes = size == 0 ? 1 : (int64_t)size;
    int64_t before = atomic_load_explicit(&countdown->left, memory_order_relaxed);
    int64_t after;
    do {
        after = before > bytes ? before - bytes : next_gap(countdown, mean);
    } while (!atomic_compare_exchange_weak_explicit(&countdown->left, &before, after, memory_order_relaxed,
                                                    memory_order_relaxed));
    if (before > bytes) {
        return false;
    }
    if (!samples_have_room(&samples)) {
        samples_drop(&samples);
        end_when_due(clock_now_ns());
        return false;
    }
    return true;
}

__attribute__((noinline)) void profiling_note(const void *block, size_t size) {
    uint64_t mean = atomic_load_explicit(&profiling_mean, memory_order_relaxed);
    if (mean == 0) {
        return;
    }
    uintptr_t addresses[SAMPLE_DEPTH_MOST];
    size_t depth = unwind_here(addresses, SAMPLE_DEPTH_MOST);
    struct sample_weight weight = sampling_weight(size == 0 ? 1 : size, mean);
    uint64_t now_ns = clock_now_ns();
    if (samples_add(&samples, block, weight, addresses, depth, now_ns) && probe_alloc_is_heard()) {
        probe_alloc((uintptr_t)block, size, weight.bytes);
    }
    end_when_due(now_ns);
}

/* Blocks that were sampled for another process before a filter was there stay in the profile. */
static bool may_forget(void) {
    return filters_now() != FILTERS_ADDED || atomic_load_explicit(&was_chosen, memory_order_relaxed);
}

void profiling_forget(const void *block) {
    if (samples_any_live(&samples) && may_forget() && samples_remove(&samples, block, clock_now_ns()) &&
        probe_free_is_heard()) {
        probe_free((uintptr_t)block);
    }
}

size_t profiling_bytes(void) {
    return atomic_load_explicit(&was_on, memory_order_acquire) ? samples_bytes(&samples) : 0;
}

static int write_profile(const char *path, bool anew) {
    if (!atomic_load_explicit(&was_on, memory_order_acquire)) {
        return ENODATA;
    }
    lock_acquire(&switch_lock);
    uint64_t mean = last_mean;
    lock_release(&switch_lock);
    return pprof_write(&samples, mean, path, anew);
}

int profiling_write(const char *path) {
    return write_profile(path, false);
}

/* The file's name has the process id, so that forked processes write files of their own. */
void profiling_write_at_exit(void) {
    if (!atomic_load_explicit(&was_on, memory_order_acquire) ||
        !atomic_load_explicit(&was_chosen, memory_order_relaxed)) {
        return;
    }
    struct text path = {0};
    const char *prefix = options_profile_file();
    text_string(&path, *prefix == '\0' ? "calmalloc" : prefix);
    text_string(&path, ".");
    text_number(&path, (uint64_t)os_syscall(SYS_getpid, 0, 0, 0, 0, 0, 0));
    text_string(&path, ".heap");
    path.bytes[path.length] = '\0';
    int error = write_profile(path.bytes, true);
    if (error != 0) {
        struct text line = {0};
        text_string(&line, "calmalloc: profile not written to ");
        text_string(&line, path.bytes);
        text_string(&line, ": error ");
        text_number(&line, (uint64_t)error);
        text_string(&line, "\n");
        text_write(&line, 2);
    }
}

/* Nobody is switching or sampling while the process forks; the child goes on with what there was. */
void profiling_before_fork(void) {
    lock_acquire_for_fork(&switch_lock, true);
    samples_before_fork(&samples);
}

void profiling_after_fork(void) {
    samples_after_fork(&samples);
    lock_release_after_fork(&switch_lock);
}
