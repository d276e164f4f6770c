/* The lock: mutual exclusion, no lost wakeups, and errno preserved. */
#include "os/lock.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>

#include "check.h"

#define THREADS 8
static struct lock lock;
static uint64_t counter; /* under the lock, and plain: ThreadSanitizer sees whether it is */
static unsigned holders;
static unsigned rounds = 20000;

static void hold(unsigned round, unsigned pause) {
    CHECK_EQUAL(holders, 0);
    holders++;
    counter++;
    /* Long enough at times that others stop spinning and sleep. */
    if (pause != 0 && round % pause == 0) {
        check_nap(20000);
    } else if (round % 64 == 0) {
        sched_yield();
    }
    holders--;
}

static void *contend(void *argument) {
    unsigned pause = (unsigned)(uintptr_t)argument;
    errno = KEPT_ERRNO;
    for (unsigned round = 1; round <= rounds; round++) {
        if (round % 3 == 0) {
            while (!lock_try(&lock)) {
                sched_yield();
            }
        } else {
            lock_acquire(&lock);
        }
        hold(round, pause);
        CHECK(atomic_load(&lock.state) != LOCK_FREE);
        lock_release(&lock);
    }
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return NULL;
}

static void test_exclusion(unsigned pause) {
    pthread_t threads[THREADS];
    counter = 0;
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, contend, (void *)(uintptr_t)pause) == 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_EQUAL(counter, (uint64_t)THREADS * rounds);
    CHECK_EQUAL(atomic_load(&lock.state), LOCK_FREE);
}

static void test_alone(void) {
    CHECK((lock_self() & ~LOCK_OWNER) == 0); /* no bit of a thread pointer is taken for another one */
    CHECK(lock_try(&lock));
    CHECK(!lock_try(&lock));
    CHECK_EQUAL(atomic_load(&lock.state), lock_self());
    CHECK(lock_is_mine(&lock));
    lock_release(&lock);
    CHECK(!lock_is_mine(&lock));
    lock_acquire(&lock);
    lock_release(&lock);
    CHECK(lock_try(&lock));
    lock_release(&lock);
    CHECK_EQUAL(atomic_load(&lock.state), LOCK_FREE);
}

/*
 * Strict turns by two locks, each released by the thread that waits for the other: one wake-up lost, and both
 * sleep for ever.
 */
static struct lock turns[2];

static void *take_turns(void *argument) {
    size_t own = (size_t)(uintptr_t)argument;
    for (unsigned round = 0; round < rounds; round++) {
        lock_acquire(&turns[own]);
        counter++;
        lock_release(&turns[1 - own]);
    }
    return NULL;
}

static void test_turns(void) {
    pthread_t threads[2];
    counter = 0;
    lock_acquire(&turns[1]);
    for (size_t i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, take_turns, (void *)(uintptr_t)i) == 0);
    }
    for (size_t i = 0; i < 2; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_EQUAL(counter, 2ULL * rounds);
}

/* ---- around fork ---- */

/* A lock that was free is the forking thread's, which may come again; then it is free. */
static void test_fork_with_a_free_lock(void) {
    for (int forks = 1; forks <= 2; forks++) {
        for (int i = 0; i < forks; i++) { /* the second: of a signal handler, before the first is over */
            lock_acquire_for_fork(&lock, true);
        }
        CHECK(!lock_try(&lock));
        for (int times = 0; times < 2; times++) {
            lock_acquire(&lock);
            lock_release(&lock);
            CHECK(lock_is_mine(&lock));
        }
        for (int i = 0; i < forks; i++) {
            CHECK(lock_is_mine(&lock));
            lock_release_after_fork(&lock);
        }
        CHECK_EQUAL(atomic_load(&lock.state), LOCK_FREE);
    }
}

/* A lock that the thread held stays held: what a signal interrupted goes on afterwards. */
static void test_fork_with_a_held_lock(void) {
    lock_acquire(&lock);
    lock_acquire_for_fork(&lock, true);
    lock_release_after_fork(&lock);
    CHECK_EQUAL(atomic_load(&lock.state), lock_self());
    CHECK(!lock_reset_in_child(&lock));
    CHECK_EQUAL(atomic_load(&lock.state), lock_self());
    /* Nor is it released if nothing was acquired for a fork. */
    lock_release_after_fork(&lock);
    CHECK_EQUAL(atomic_load(&lock.state), lock_self());
    lock_release(&lock);
    CHECK_EQUAL(atomic_load(&lock.state), LOCK_FREE);
}

static void *hold_for_good(void *unused) {
    lock_acquire(&lock);
    return unused;
}

/* Another thread's is left alone, or freed, in a child that does not have that thread. */
static void test_fork_with_a_lock_of_another_thread(void) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, hold_for_good, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    lock_acquire_for_fork(&lock, false);
    lock_release_after_fork(&lock);
    CHECK(atomic_load(&lock.state) != LOCK_FREE && !lock_is_mine(&lock));
    CHECK(lock_reset_in_child(&lock));
    CHECK(!lock_reset_in_child(&lock));
    CHECK_EQUAL(atomic_load(&lock.state), LOCK_FREE);
}

static void *hold_over_fork(void *unused) {
    lock_acquire_for_fork(&lock, true);
    return unused;
}

/* Of several locks: one that another thread holds over a fork is left alone, any other is waited for. */
static void test_fork_with_another_of_several_locks(void) {
    for (int held = 0; held < 2; held++) {
        if (held) {
            lock_acquire(&lock);
        }
        lock_acquire_unless_forking(&lock);
        CHECK(lock_is_mine(&lock));
        lock_release_after_fork(&lock);
        CHECK_EQUAL(lock_is_held(&lock), held);
        if (held) {
            lock_release(&lock);
        }
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, hold_over_fork, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    lock_acquire_unless_forking(&lock);
    CHECK(lock_is_held(&lock) && !lock_is_mine(&lock));
    lock_release_after_fork(&lock);
    CHECK(lock_reset_in_child(&lock));
    /* A thread that works under the lock is waited for. */
    CHECK(pthread_create(&thread, NULL, contend, NULL) == 0);
    for (unsigned i = 0; i < rounds / 10; i++) {
        lock_acquire_unless_forking(&lock);
        CHECK(lock_is_mine(&lock));
        lock_release_after_fork(&lock);
    }
    CHECK(pthread_join(thread, NULL) == 0);
}

/* A signal handler that forks came between a release and its wake-up. */
static void *acquire_and_release(void *unused) {
    lock_acquire(&lock);
    lock_release(&lock);
    return unused;
}

static void test_fork_between_release_and_wake(void) {
    pthread_t threads[THREADS];
    lock_acquire(&lock);
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, acquire_and_release, NULL) == 0);
    }
    WAIT_UNTIL((atomic_load(&lock.state) & LOCK_WAITED) != 0);
    check_nap(20000000); /* or they need no wake-up */
    CHECK((atomic_exchange(&lock.state, LOCK_FREE) & LOCK_WAITED) != 0);
    lock_wake_sleepers();
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_EQUAL(atomic_load(&lock.state), LOCK_FREE);
}

int main(void) {
    rounds = (unsigned)check_rounds(rounds);
    test_alone();
    test_fork_with_a_free_lock();
    test_fork_with_a_held_lock();
    test_fork_with_a_lock_of_another_thread();
    test_fork_with_another_of_several_locks();
    test_fork_between_release_and_wake();
    test_exclusion(0);
    rounds /= 2;
    test_turns();
    rounds /= 2;
    test_exclusion(50);
    return 0;
}
