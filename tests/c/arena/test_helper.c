/* The helper: when there is one, what it gives back, and when it ends. */
#include "arena/helper.h"

#include "os/syscall.h"
#include "whole_allocator.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>

static void *use_heap(void *unused) {
    for (size_t i = 0; i < 40; i++) {
        calm_free(obtain(8 * page_size + KIB));
    }
    return unused;
}

static void come_from_other_thread(void *(*body)(void *)) {
    pthread_t other;
    CHECK(pthread_create(&other, NULL, body, NULL) == 0);
    CHECK(pthread_join(other, NULL) == 0);
}

static void *come_once(void *unused) {
    calm_free(obtain(uncached_bytes()));
    return unused;
}

/* Tidies up after a program that has threads and went idle, for as long as there is anything to tidy. */
static void test_helper(void) {
    set("test_placement", "off");
    void *kept = obtain(64 * MIB); /* beside which more may stay */
    use_heap(NULL);
    CHECK_EQUAL(calm_arenas.helper.state, HELPER_NONE); /* of a program with one thread */
    build();
    free_all();
    come_from_other_thread(use_heap);
    clock_await_sleep(&calm_arenas.helper.wakeup);
    CHECK_EQUAL(calm_arenas.helper.state, HELPER_RUNS);
    CHECK_EQUAL(helper_sleep(), ASLEEP_FOR_A_WHILE);
    struct calm_stats stats = stats_now();
    CHECK(stats.dirty > 5 * MIB);
    CHECK_EQUAL(stats.purges_epoch, 0);
    for (unsigned epoch = 0; epoch < 2 + break_even_epochs(); epoch++) {
        pass_epoch();
    }
    stats = stats_now();
    CHECK(stats.dirty + stats.cached <= 5 * MIB);
    CHECK(stats.purges_epoch > 0 && stats.purges_epoch <= 10);

    CHECK(epochs_to_end() <= 10);
    CHECK_EQUAL(calm_arenas.helper.state, HELPER_SINGLE);
    stats = stats_now();
    CHECK_EQUAL(stats.dirty + stats.cached, 0);
    CHECK_EQUAL(stats.in_use, 64 * MIB);

    /* The next to come to the heap starts it, on the same stack, unless that is the first thread, which may
     * be the last one, too. */
    const char *memory = calm_arenas.helper.thread.memory;
    calm_free(obtain(uncached_bytes()));
    CHECK(helper_is_gone());
    come_from_other_thread(come_once);
    CHECK(stats_now().dirty > 0);
    WAIT_UNTIL(helper_sleep() == ASLEEP_FOR_A_WHILE);
    CHECK_EQUAL(calm_arenas.helper.state, HELPER_RUNS);
    CHECK(epochs_to_end() <= 10);
    CHECK_EQUAL(stats_now().dirty, 0);
    CHECK(calm_arenas.helper.thread.memory == memory);

    /* While it is to be none, there is none. */
    come_from_other_thread(come_once);
    WAIT_UNTIL(helper_sleep() == ASLEEP_FOR_A_WHILE);
    CHECK(helper_stop(&calm_arenas, UINT64_MAX));
    CHECK(helper_is_gone());
    CHECK(helper_stop(&calm_arenas, UINT64_MAX));
    helper_resume();
    come_from_other_thread(come_once);
    CHECK(helper_is_gone());
    helper_resume();
    come_from_other_thread(come_once);
    WAIT_UNTIL(helper_sleep() == ASLEEP_FOR_A_WHILE);

    /* One that waits for who stops it is left, and ends as soon as it can; until then there is no other. */
    lock_acquire(&calm_arenas.of[0].lock);
    clock_advance(DEMAND_EPOCH_NS);
    WAIT_UNTIL((atomic_load(&calm_arenas.of[0].lock.state) & LOCK_WAITED) != 0);
    CHECK(!helper_stop(&calm_arenas, 0));
    CHECK(!helper_is_gone());
    lock_release(&calm_arenas.of[0].lock);
    WAIT_UNTIL(helper_is_gone());
    come_from_other_thread(come_once);
    CHECK(helper_is_gone());
    helper_resume();
    come_from_other_thread(come_once);
    WAIT_UNTIL(helper_sleep() == ASLEEP_FOR_A_WHILE);

    /* One that is not wanted any more is gone after its next epoch. */
    set("background", "off");
    clock_advance(DEMAND_EPOCH_NS);
    WAIT_UNTIL(helper_is_gone());
    CHECK_EQUAL(calm_arenas.helper.state, HELPER_NONE);
    calm_free(kept);
}

/* A program of one thread that keeps much has a helper, which gives it back, and is gone then; one that keeps
 * little has none. */
static void test_lone_thread(void) {
    for (int round = 0; round < 3; round++) {
        calm_free(obtain(3 * MIB));
        CHECK(helper_is_gone());
        build();
        CHECK(helper_is_gone());
        free_all();
        CHECK_EQUAL(stats_now().purges_limit, 0);
        CHECK(stats_now().dirty > (WAVE - 1) * wave_bytes());
        clock_await_sleep(&calm_arenas.helper.wakeup);
        CHECK_EQUAL(calm_arenas.helper.state, HELPER_RUNS);
        pass_epochs(1, 0);
        pass_epochs(break_even_epochs(), 0);
        CHECK_EQUAL(stats_now().dirty, 0);
        CHECK(epochs_to_end() <= 10);
        CHECK_EQUAL(calm_arenas.helper.state, HELPER_SINGLE);
    }
}

/* No helper would give it back: then it does not stay. */
static void test_lone_thread_without_helper(void) {
    build();
    free_all();
    CHECK(helper_is_gone());
    CHECK(stats_now().dirty <= RETENTION_FOREGROUND_BYTES);
}

/* A copy of the process that the C library did not make takes the helper for one that runs: there is none,
 * and the threads that come to the heap look at the clock. */
static void test_overdue(void) {
    build();
    free_all();
    clock_await_sleep(&calm_arenas.helper.wakeup);
    pid_t child = (pid_t)os_syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
    CHECK(child >= 0);
    if (child == 0) {
        for (int i = 0; i < 100; i++) {
            clock_advance(2 * DEMAND_EPOCH_NS);
            for (int j = 0; j < 20; j++) {
                calm_free(obtain(uncached_bytes()));
            }
        }
        CHECK(stats_now().purges_epoch > 0);
        CHECK(stats_now().dirty < MIB + uncached_bytes()); /* the block freed last may stay */
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* What refused a thread, a limit on their number say, may not last. */
static void test_refused_helper(void) {
    enum { VISITS = 65536 };
    atomic_store(&calm_arenas.helper.state, HELPER_REFUSED);
    for (int visit = 0; visit < VISITS / 4; visit++) {
        calm_free(obtain(uncached_bytes()));
    }
    CHECK_EQUAL(calm_arenas.helper.state, HELPER_REFUSED);
    for (int visit = 0; visit < VISITS && calm_arenas.helper.state == HELPER_REFUSED; visit++) {
        calm_free(obtain(uncached_bytes()));
    }
    CHECK_EQUAL(calm_arenas.helper.state, HELPER_RUNS);
}

/* A helper drains caches: while there is one, a lone thread takes the caches' locks. */
static void test_lone_thread_beside_helper(void) {
    calm_caches.single_without_helper = thread_single;
    cpu_caches_set_helper(&calm_caches, false);
    CHECK(!thread_is_single() || cpu_cache_is_single_threaded(&calm_caches));
    build();
    free_all();
    clock_await_sleep(&calm_arenas.helper.wakeup);
    CHECK(!cpu_cache_is_single_threaded(&calm_caches));
    epochs_to_end();
    CHECK(!thread_is_single() || cpu_cache_is_single_threaded(&calm_caches));
}

int main(void) {
    prepare_governor();
    in_child(test_helper);
    if (WATCHES_THREADS) {
        return 0;
    }
    in_child(test_lone_thread);
    in_child(test_overdue);
    in_child(test_refused_helper);
    in_child(test_lone_thread_beside_helper);
    set("background", "off");
    in_child(test_lone_thread_without_helper);
    return 0;
}
