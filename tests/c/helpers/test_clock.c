#include "test_clock.h"

#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stddef.h>

#include "check.h"

/*
 * Called by threads without thread-local storage: nothing of the C library here, but in what tests call.
 */
int __real_clock_read(clockid_t clock, struct timespec *time);
int __wrap_clock_read(clockid_t clock, struct timespec *time);
void __real_futex_wait(_Atomic(uint32_t) *word, uint32_t seen, uint64_t ns);
void __wrap_futex_wait(_Atomic(uint32_t) *word, uint32_t seen, uint64_t ns);
void __real_futex_wake_all(_Atomic(uint32_t) *word);
void __wrap_futex_wake_all(_Atomic(uint32_t) *word);

#define MAX_SLEEPERS 64

static _Atomic(bool) stopped;
static _Atomic(uint64_t) now_ns;
static _Atomic(uint64_t) process_ns;
static _Atomic(uint64_t) thread_ns;
static _Atomic(uint64_t) step_ns;
static _Atomic(uint64_t) cpu_step_ns;
static _Atomic(uint64_t) readings;

/* A thread in futex_wait. The slot is its own from `used` on, its other fields under the lock. */
struct sleeper {
    bool used;
    const _Atomic(uint32_t) *word; /* NULL: woken, but not yet gone */
    uint64_t until_ns;             /* UINT64_MAX: for good */
    _Atomic(uint32_t) woken;       /* what it really sleeps on */
};

static struct sleeper sleepers[MAX_SLEEPERS];
static _Atomic(bool) held;

static void lock_sleepers(void) {
    while (atomic_exchange_explicit(&held, true, memory_order_acquire)) {
        os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
    }
}

static void unlock_sleepers(void) {
    atomic_store_explicit(&held, false, memory_order_release);
}

static void forget_sleepers(void) {
    for (size_t i = 0; i < MAX_SLEEPERS; i++) {
        sleepers[i].used = false;
        sleepers[i].word = NULL;
    }
    unlock_sleepers();
}

/* Under the lock. */
static void wake(struct sleeper *sleeper) {
    sleeper->word = NULL;
    atomic_store(&sleeper->woken, 1);
    os_syscall(SYS_futex, (long)&sleeper->woken, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

static struct sleeper *new_sleeper(void) {
    for (size_t i = 0; i < MAX_SLEEPERS; i++) {
        if (!sleepers[i].used) {
            return &sleepers[i];
        }
    }
    os_syscall(SYS_exit_group, 1, 0, 0, 0, 0, 0);
    return NULL;
}

void __wrap_futex_wait(_Atomic(uint32_t) *word, uint32_t seen, uint64_t ns) {
    if (!atomic_load(&stopped)) {
        __real_futex_wait(word, seen, ns);
        return;
    }
    lock_sleepers();
    if (atomic_load(word) != seen) {
        unlock_sleepers();
        return;
    }
    struct sleeper *sleeper = new_sleeper();
    sleeper->used = true;
    sleeper->word = word;
    sleeper->until_ns = ns == 0 ? UINT64_MAX : atomic_load(&now_ns) + ns;
    atomic_store(&sleeper->woken, 0);
    unlock_sleepers();
    while (atomic_load(&sleeper->woken) == 0) {
        __real_futex_wait(&sleeper->woken, 0, 0);
    }
    lock_sleepers();
    sleeper->used = false;
    unlock_sleepers();
}

void __wrap_futex_wake_all(_Atomic(uint32_t) *word) {
    __real_futex_wake_all(word); /* a thread may sleep since before the clock was stopped */
    if (!atomic_load(&stopped)) {
        return;
    }
    lock_sleepers();
    for (size_t i = 0; i < MAX_SLEEPERS; i++) {
        if (sleepers[i].used && sleepers[i].word == word) {
            wake(&sleepers[i]);
        }
    }
    unlock_sleepers();
}

static void set_time(struct timespec *time, uint64_t ns) {
    time->tv_sec = (time_t)(ns / 1000000000U);
    time->tv_nsec = (long)(ns % 1000000000U);
}

int __wrap_clock_read(clockid_t clock, struct timespec *time) {
    bool is_monotonic = clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE;
    if (!atomic_load(&stopped)) {
        return __real_clock_read(clock, time);
    }
    if (is_monotonic) {
        atomic_fetch_add(&readings, 1);
        set_time(time, atomic_fetch_add(&now_ns, atomic_load(&step_ns)));
    } else if (clock == CLOCK_PROCESS_CPUTIME_ID) {
        set_time(time, atomic_load(&process_ns));
    } else if (clock == CLOCK_THREAD_CPUTIME_ID) {
        set_time(time, atomic_fetch_add(&thread_ns, atomic_load(&cpu_step_ns)));
    } else {
        return __real_clock_read(clock, time);
    }
    return 0;
}

void clock_stop(void) {
    CHECK(!atomic_load(&stopped));
    atomic_store(&now_ns, clock_now_ns());
    atomic_store(&process_ns, 1000 * CLOCK_MS);
    atomic_store(&thread_ns, 1000 * CLOCK_MS);
    CHECK(pthread_atfork(lock_sleepers, unlock_sleepers, forget_sleepers) == 0);
    atomic_store(&stopped, true);
}

void clock_advance(uint64_t ns) {
    lock_sleepers();
    uint64_t now = atomic_fetch_add(&now_ns, ns) + ns;
    for (size_t i = 0; i < MAX_SLEEPERS; i++) {
        if (sleepers[i].used && sleepers[i].word != NULL && sleepers[i].until_ns <= now) {
            wake(&sleepers[i]);
        }
    }
    unlock_sleepers();
}

void clock_use_cpu(uint64_t by_process_ns, uint64_t by_thread_ns) {
    atomic_fetch_add(&process_ns, by_process_ns);
    atomic_fetch_add(&thread_ns, by_thread_ns);
}

void clock_set_step(uint64_t ns) {
    atomic_store(&step_ns, ns);
}

void clock_set_cpu_step(uint64_t ns) {
    atomic_store(&cpu_step_ns, ns);
}

uint64_t clock_readings(void) {
    return atomic_load(&readings);
}

enum clock_sleep clock_sleep_of(const _Atomic(uint32_t) *word) {
    enum clock_sleep sleep = AWAKE;
    lock_sleepers();
    for (size_t i = 0; i < MAX_SLEEPERS; i++) {
        if (sleepers[i].used && sleepers[i].word == word) {
            sleep = sleepers[i].until_ns == UINT64_MAX ? ASLEEP_FOR_GOOD : ASLEEP_FOR_A_WHILE;
        }
    }
    unlock_sleepers();
    return sleep;
}

void clock_await_sleep(const _Atomic(uint32_t) *word) {
    WAIT_UNTIL(clock_sleep_of(word) != AWAKE);
}
