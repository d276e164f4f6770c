/* Threads that start and end in every way, and the process that ends meanwhile: threads CASE [ARGUMENT]. */
#include "api.h"
#include "names.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LEFT = 128 };

static _Atomic(void *) left[LEFT];

/* Leaves its blocks to others, and frees theirs. */
static void live_briefly(size_t thread) {
    uint64_t random = thread * 31 + 1;
    for (int i = 0; i < 12; i++) {
        size_t bytes = 100 + next_random(&random) % (i == 0 ? 100 * KIB : 4 * KIB);
        void *mine = malloc(bytes);
        CHECK(mine != NULL);
        memset(mine, 1, bytes);
        free(atomic_exchange(&left[next_random(&random) % LEFT], mine));
    }
}

static void churn_threads(const char *argument) {
    size_t waves = number_or(argument, 200), grown_early = 0, grown_late = 0;
    size_t before = resident_bytes();
    for (size_t wave = 0; wave < waves; wave++) {
        run_threads(50, live_briefly);
        if (governed()) {
            stats_now(); /* a server, if there is one, has seen all that was freed, then */
        }
        if (wave < waves / 4) {
            size_t now = grown_since(before);
            grown_early = now > grown_early ? now : grown_early;
        } else if (wave >= waves * 3 / 4) {
            size_t now = grown_since(before);
            grown_late = now > grown_late ? now : grown_late;
        }
    }
    for (size_t i = 0; i < LEFT; i++) {
        free(atomic_exchange(&left[i], NULL));
    }
    say("grown_early", grown_early);
    say("grown_late", grown_late);
    say("kept", grown_since(before));
}

/* More threads at once than CPUs, many times over; each allocates after all have begun. */
static pthread_barrier_t all_here;

static void wait_and_work(size_t thread) {
    void *mine = malloc(100 + thread);
    CHECK(mine != NULL);
    pthread_barrier_wait(&all_here);
    use_blocks(thread, 50);
    pthread_barrier_wait(&all_here);
    free(mine);
}

static void many_at_once(const char *unused) {
    (void)unused;
    CHECK(pthread_barrier_init(&all_here, NULL, 200) == 0);
    size_t before = resident_bytes();
    for (int round = 0; round < 3; round++) {
        run_threads(200, wait_and_work);
    }
    say("kept", grown_since(before));
}

static pthread_key_t keys[3];
static _Atomic(size_t) destroyed;

/* Frees, allocates, and, the first times, sets itself again. */
static void destroy(void *value) {
    size_t *held = value, again = *held;
    use_blocks(again, 30);
    free(held);
    atomic_fetch_add(&destroyed, 1);
    if (again > 0) {
        size_t *next = malloc(sizeof *next);
        CHECK(next != NULL);
        *next = again - 1;
        CHECK(pthread_setspecific(keys[again % 3], next) == 0);
    }
}

static void *end_with_keys(void *argument) {
    size_t thread = (size_t)(uintptr_t)argument;
    for (size_t i = 0; i < 3; i++) {
        size_t *held = malloc(sizeof *held);
        CHECK(held != NULL);
        *held = i;
        CHECK(pthread_setspecific(keys[i], held) == 0);
    }
    use_blocks(thread, 30);
    if (thread % 2 == 0) {
        pthread_exit(malloc(thread + 1));
    }
    return malloc(thread + 1);
}

/* By pthread_exit and by return, with destructors of thread-specific data. */
static void thread_ends(const char *argument) {
    size_t waves = number_or(argument, 40);
    for (size_t i = 0; i < 3; i++) {
        CHECK(pthread_key_create(&keys[i], destroy) == 0);
    }
    for (size_t wave = 0; wave < waves; wave++) {
        pthread_t threads[10];
        for (size_t i = 0; i < 10; i++) {
            CHECK(pthread_create(&threads[i], NULL, end_with_keys, (void *)(uintptr_t)i) == 0);
        }
        for (size_t i = 0; i < 10; i++) {
            void *result;
            CHECK(pthread_join(threads[i], &result) == 0 && result != NULL);
            CHECK(malloc_usable_size(result) >= i + 1);
            free(result);
        }
    }
    say("destroyed", atomic_load(&destroyed));
    CHECK(atomic_load(&destroyed) >= waves * 10 * 3);
    end_with_keys((void *)1);
}

static _Atomic(size_t) survived, cleaned;

static void clean_up(void *block) {
    free(block);
    atomic_fetch_add(&cleaned, 1);
}

/* A pending cancellation acts where the program says, and not within malloc or free. */
static void *work_until_cancelled(void *argument) {
    void *mine = malloc(1000);
    CHECK(mine != NULL);
    pthread_cleanup_push(clean_up, mine);
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL) == 0);
    pthread_barrier_wait(&all_here);
    pthread_barrier_wait(&all_here); /* it is pending now */
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL) == 0);
    for (int round = 0; round < 3; round++) {
        enum { BURST = 60 };
        void *burst[BURST];
        for (size_t i = 0; i < BURST; i++) {
            burst[i] = malloc(100 * KIB);
            CHECK(burst[i] != NULL);
            *(char *)burst[i] = 1;
        }
        for (size_t i = 0; i < BURST; i++) {
            free(burst[i]);
        }
        use_blocks((uintptr_t)argument, 50);
        if (governed()) {
            calm_trim(0);
        }
    }
    atomic_fetch_add(&survived, 1);
    pthread_testcancel();
    CHECK(false);
    pthread_cleanup_pop(0);
    return NULL;
}

static void thread_cancel(const char *unused) {
    (void)unused;
    CHECK(pthread_barrier_init(&all_here, NULL, 2) == 0);
    for (size_t i = 0; i < 100; i++) {
        pthread_t thread;
        void *result;
        CHECK(pthread_create(&thread, NULL, work_until_cancelled, (void *)(uintptr_t)i) == 0);
        pthread_barrier_wait(&all_here);
        CHECK(pthread_cancel(thread) == 0);
        pthread_barrier_wait(&all_here);
        CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
        CHECK_EQUAL(atomic_load(&survived), i + 1);
        CHECK_EQUAL(atomic_load(&cleaned), i + 1);
    }
    use_blocks(1, 1000);
}

/* main ends first; the process goes on. */
static pthread_t first_thread;

static void *outlive(void *unused) {
    (void)unused;
    CHECK(pthread_join(first_thread, NULL) == 0);
    use_blocks(1, 1000);
    run_threads(2, work_in_thread);
    say("outlived", 1);
    exit(0);
}

static void main_ends_first(const char *unused) {
    (void)unused;
    first_thread = pthread_self();
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, outlive, NULL) == 0);
    use_blocks(2, 100);
    pthread_exit(NULL);
}

/* Its end, in every way, while others are at work. */
static void *work_for_ever(void *thread) {
    for (uint64_t round = 0;; round++) {
        use_blocks((uintptr_t)thread * 1000 + round, 200);
    }
    return NULL;
}

static void *exit_later(void *unused) {
    (void)unused;
    CHECK(pthread_join(first_thread, NULL) == 0);
    sleep_seconds(0.05);
    exit(23);
}

static void end_while_busy(const char *way) {
    pthread_t thread;
    for (uintptr_t i = 0; i < 3; i++) {
        CHECK(pthread_create(&thread, NULL, work_for_ever, (void *)i) == 0);
    }
    first_thread = pthread_self();
    if (strcmp(way, "pthread_exit") == 0) {
        CHECK(pthread_create(&thread, NULL, exit_later, NULL) == 0);
    }
    sleep_seconds(0.05);
    if (strcmp(way, "exit") == 0) {
        exit(20);
    } else if (strcmp(way, "_exit") == 0) {
        _exit(21);
    } else if (strcmp(way, "execve") == 0) {
        execl("/bin/sh", "sh", "-c", "exit 22", NULL);
    } else if (strcmp(way, "pthread_exit") == 0) {
        pthread_exit(NULL);
    } else if (strcmp(way, "abort") == 0) {
        abort();
    }
    CHECK(false);
}

/* ---- a helper thread of the library's own ---- */

static _Atomic(pid_t) worked;

/* Enough for the allocator to notice that there is a second thread. */
static void work_much(size_t thread) {
    atomic_store(&worked, (pid_t)syscall(SYS_gettid));
    use_blocks(thread, 3000);
    for (size_t i = 0; i < 100; i++) {
        void *block = malloc(100 * KIB);
        CHECK(block != NULL);
        free(block);
    }
}

static void count_threads(const char *argument) {
    say("alone", number_of_threads());
    use_blocks(1, 50);
    say("still_alone", number_of_threads());
    run_threads(1, work_much);
    /* A thread that was joined may be about to end yet. */
    WAIT_UNTIL(syscall(SYS_tgkill, getpid(), atomic_load(&worked), 0) != 0);
    say("after_a_thread", number_of_threads());
    if (strcmp(argument, "signals") == 0) {
        /* A signal to the process must not be delivered to the helper: it blocks all. */
        sigset_t all;
        sigfillset(&all);
        CHECK(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
        CHECK(kill(getpid(), SIGUSR1) == 0 && kill(getpid(), SIGTERM) == 0);
        sleep_seconds(0.1);
        sigset_t pending;
        CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1) && sigismember(&pending, SIGTERM));
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"churn", churn_threads},
        {"many-at-once", many_at_once},
        {"thread-ends", thread_ends},
        {"thread-cancel", thread_cancel},
        {"main-ends-first", main_ends_first},
        {"end-while-busy", end_while_busy},
        {"count-threads", count_threads},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
