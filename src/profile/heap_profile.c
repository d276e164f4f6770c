#include "profile/heap_profile.h"

#include "base/assert.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/process.h"
#include "os/random.h"
#include "os/syscall.h"
#include "os/text.h"
#include "profile/pprof.h"
#include "profile/samples_layout.h"
#include "profile/unwind.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>

#define MAX_COPIES         100
#define MAX_REQUESTED_MEAN ((uint64_t)1 << 30)

_Atomic(uint64_t) heap_profile_mean;
_Atomic(bool) heap_profile_listened;

static unsigned cpu_count;
static unsigned (*current_cpu)(void);
static void (*use_fast_path)(bool use);
static struct samples profile_samples = {.lock = LOCK_OF(LOCK_PROFILE_SAMPLES)};
static _Atomic(uint64_t) last_mean; /* of the time when the profile was last on; 0: never */
static _Atomic(bool) was_chosen;    /* whether the program or its user has chosen a profile */

/* Serializes switching, and protects the variables from here to
 * requested_until_ns. */
static struct lock switch_lock = LOCK_OF(LOCK_PROFILE_SWITCH);
static uint64_t chosen_mean;
static const char *chosen_prefix;
static uint64_t requested_mean;
static _Atomic(uint64_t) requested_until_ns; /* 0: until the next request */

const struct samples_layout heap_profile_layout =
    SAMPLES_LAYOUT(&profile_samples, &heap_profile_mean, &last_mean);

/* The countdown of a CPU, or of the threads that share its number. */
struct countdown {
    _Alignas(64) _Atomic(int64_t) left; /* bytes to the next sample */
    _Atomic(uint64_t) random;
};

static struct countdown *countdowns;

void heap_profile_start(unsigned cpus, unsigned (*current)(void), void (*use)(bool)) {
    cpu_count = cpus;
    current_cpu = current;
    use_fast_path = use;
}

void heap_profile_learn_modules(void) {
    unwind_learn_modules();
}

static int64_t next_gap(struct countdown *countdown, uint64_t mean) {
    uint64_t counter =
        atomic_fetch_add_explicit(&countdown->random, RANDOM_GOLDEN_RATIO, memory_order_relaxed);
    return sampling_gap(random_mix(counter), mean);
}

static bool make_ready(void) {
    if (countdowns == NULL) {
        countdowns = vm_map(cpu_count * sizeof *countdowns);
    }
    return countdowns != NULL && (profile_samples.tables != NULL || samples_init(&profile_samples));
}

/* Returns the mean that is in force now. Another process cannot make this
 * process call what a filter of the program may forbid. */
static uint64_t wanted_mean(void) {
    bool listened = probe_alloc_is_enabled() || probe_free_is_enabled();
    atomic_store_explicit(&heap_profile_listened, listened, memory_order_relaxed);
    if (chosen_mean != 0) {
        atomic_store_explicit(&was_chosen, true, memory_order_relaxed);
        return chosen_mean;
    }
    if (filters_now() == FILTERS_ADDED) {
        return 0;
    }
    return requested_mean != 0 ? requested_mean : listened ? PROBES_MEAN_BYTES : 0;
}

/* Switches the profile to the wanted mean. The caller holds switch_lock. */
static bool apply(void) {
    calm_assert(lock_is_mine(&switch_lock));
    uint64_t mean = wanted_mean();
    bool able = mean == 0 || make_ready();
    mean = able ? mean : 0;
    if (mean == atomic_load_explicit(&heap_profile_mean, memory_order_relaxed)) {
        return able;
    }
    if (mean != 0) {
        /* The seed differs from run to run, by the time and by the address that
         * the kernel chose for the counters. */
        uint64_t seed = random_mix(clock_now_ns() ^ (uint64_t)(uintptr_t)countdowns);
        for (unsigned i = 0; i < cpu_count; i++) {
            atomic_store_explicit(&countdowns[i].random, random_mix(seed + i), memory_order_relaxed);
            atomic_store_explicit(&countdowns[i].left, next_gap(&countdowns[i], mean), memory_order_relaxed);
        }
        atomic_store_explicit(&last_mean, mean, memory_order_release);
    }
    /* Release: a thread that reads the mean finds the counters. */
    atomic_store_explicit(&heap_profile_mean, mean, memory_order_release);
    use_fast_path(mean == 0);
    return able;
}

bool heap_profile_is_locked(void) {
    return lock_is_mine(&switch_lock) || lock_is_mine(&profile_samples.lock);
}

void heap_profile_apply(void) {
    if (!heap_profile_is_locked()) {
        lock_acquire(&switch_lock);
        apply();
        lock_release(&switch_lock);
    }
}

bool heap_profile_configure(uint64_t mean_bytes, const char *file_prefix) {
    lock_acquire(&switch_lock);
    chosen_mean = mean_bytes;
    chosen_prefix = file_prefix;
    bool able = apply();
    lock_release(&switch_lock);
    return able;
}

static void set_request(uint64_t mean, uint64_t until_ns) {
    calm_assert(lock_is_mine(&switch_lock) && mean <= MAX_REQUESTED_MEAN, mean);
    requested_mean = mean;
    atomic_store_explicit(&requested_until_ns, until_ns, memory_order_relaxed);
}

int heap_profile_request(uint64_t mean_bytes, uint32_t seconds, uint64_t *in_force) {
    int error = 0;
    lock_acquire(&switch_lock);
    if (mean_bytes > MAX_REQUESTED_MEAN) {
        error = EINVAL;
    } else if (mean_bytes != 0 && filters_now() == FILTERS_ADDED) {
        error = EPERM;
    } else {
        set_request(mean_bytes, seconds == 0 ? 0 : clock_now_ns() + (uint64_t)seconds * CLOCK_NS_PER_S);
        if (!apply()) {
            requested_mean = 0;
            error = ENOMEM;
        }
    }
    *in_force = atomic_load_explicit(&heap_profile_mean, memory_order_relaxed);
    lock_release(&switch_lock);
    return error;
}

/* Ends a request whose time is over. A thread calls it within malloc, and so
 * does not wait for the lock. If the lock is held, the thread with the next
 * sample ends the request. */
static void end_overdue_request(uint64_t now_ns) {
    uint64_t until_ns = atomic_load_explicit(&requested_until_ns, memory_order_relaxed);
    if (until_ns != 0 && now_ns >= until_ns && lock_try(&switch_lock)) {
        if (atomic_load_explicit(&requested_until_ns, memory_order_relaxed) == until_ns) {
            set_request(0, 0);
            apply();
        }
        lock_release(&switch_lock);
    }
}

/*
 * Returns whether this allocation is to be sampled.
 *
 * The thread whose allocation takes the counter to zero takes the sample. It
 * also restarts the counter at the end of its block, so that the next gap does
 * not depend on the last one. The thread does both in one store. If it is
 * interrupted before the store, other threads on the CPU can still take
 * samples.
 */
bool heap_profile_should_sample(size_t size) {
    /* Acquire: pairs with the release in apply. */
    uint64_t mean = atomic_load_explicit(&heap_profile_mean, memory_order_acquire);
    if (mean == 0 || size > PTRDIFF_MAX / 2) {
        return false;
    }
    unsigned cpu = current_cpu();
    struct countdown *countdown = &countdowns[cpu < cpu_count ? cpu : 0];
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
    if (!samples_have_room(&profile_samples)) {
        samples_drop(&profile_samples);
        end_overdue_request(clock_now_ns());
        return false;
    }
    return true;
}

__attribute__((noinline)) void heap_profile_add(const void *block, size_t size) {
    uint64_t mean = atomic_load_explicit(&heap_profile_mean, memory_order_relaxed);
    if (mean == 0) {
        return;
    }
    uintptr_t addresses[MAX_SAMPLE_DEPTH];
    size_t depth = unwind_here(addresses, MAX_SAMPLE_DEPTH);
    struct sample_weight weight = sampling_weight(size == 0 ? 1 : size, mean);
    uint64_t now_ns = clock_now_ns();
    if (samples_add(&profile_samples, block, weight, addresses, depth, now_ns) && probe_alloc_is_enabled()) {
        probe_alloc((uintptr_t)block, size, weight.bytes);
    }
    end_overdue_request(now_ns);
}

/* If the program has added a filter, blocks that were sampled only for another
 * process stay in the profile. */
void heap_profile_remove(const void *block) {
    if (samples_any_live(&profile_samples) &&
        (filters_now() != FILTERS_ADDED || atomic_load_explicit(&was_chosen, memory_order_relaxed)) &&
        samples_remove(&profile_samples, block, clock_now_ns()) && probe_free_is_enabled()) {
        probe_free((uintptr_t)block);
    }
}

size_t heap_profile_bytes(void) {
    return atomic_load_explicit(&last_mean, memory_order_acquire) != 0 ? samples_bytes(&profile_samples) : 0;
}

static int write_file(const char *path, bool is_new) {
    uint64_t mean = atomic_load_explicit(&last_mean, memory_order_acquire);
    return mean == 0 ? ENODATA : pprof_write(&profile_samples, mean, path, is_new);
}

int heap_profile_write(const char *path) {
    return write_file(path, false);
}

/* Renames a file to a name that is not taken. Returns 0 or an errno, EEXIST if
 * the name is taken. If the kernel or the file system cannot rename without
 * replacing (before Linux 3.15; NFS), it makes a link. */
static int rename_new(const char *from, const char *to) {
    long result = os_syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);
    if (result != -ENOSYS && result != -EINVAL) {
        return (int)-result;
    }
    result = os_syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (result == 0) {
        os_syscall(SYS_unlinkat, AT_FDCWD, from, 0);
    } else if (result != -EEXIST && os_syscall(SYS_faccessat, AT_FDCWD, to, F_OK) == -ENOENT) {
        /* The file system has no links either. If another process takes the
         * name at this moment, its file is lost. */
        result = os_syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    }
    return (int)-result;
}

/* Writes the file under another name, and renames it once it is complete. */
static int write_new(const char *path) {
    struct text unfinished = {0};
    text_format(&unfinished, "%s.tmp", path);
    int error = write_file(unfinished.bytes, true);
    if (error == 0) {
        error = rename_new(unfinished.bytes, path);
        if (error != 0) {
            os_syscall(SYS_unlinkat, AT_FDCWD, unfinished.bytes, 0);
        }
    }
    return error;
}

/*
 * Writes the profile to a file that no other process uses. The process's number
 * and start time tell the files apart, also between PID namespaces and after
 * restarts. Copies of a virtual machine may still agree in both, and so no file
 * is ever replaced.
 */
void heap_profile_end(void) {
    if (!atomic_load_explicit(&was_chosen, memory_order_relaxed)) {
        return;
    }
    struct process process = process_now();
    struct text path;
    int error = EEXIST;
    for (unsigned copy = 0; error == EEXIST && copy < MAX_COPIES; copy++) {
        path = (struct text){0};
        text_format(&path, "%s.%u.%lu", *chosen_prefix == '\0' ? "calmalloc" : chosen_prefix, process.number,
                    process.started_ns);
        if (copy > 0) {
            text_format(&path, ".%u", copy);
        }
        text_format(&path, ".heap");
        error = write_new(path.bytes);
    }
    if (error != 0 && error != ENODATA) {
        text_write_line(2, "calmalloc: profile not written to %s: error %u", path.bytes, (unsigned)error);
    }
}

void heap_profile_before_fork(void) {
    lock_acquire_for_fork(&switch_lock, true);
    lock_acquire_for_fork(&profile_samples.lock, true);
}

void heap_profile_after_fork(void) {
    lock_release_after_fork(&profile_samples.lock);
    lock_release_after_fork(&switch_lock);
}
