/*
 * signals CASE SECONDS: threads that allocate while signals interrupt them, or while they migrate between
 * CPUs, all the time. An interrupted restartable sequence must restart, and no block may be lost or returned
 * twice.
 */
#include "api.h"
#include "names.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

#define WORKERS 4
#define HELD    64
#define COUNTED 1024 /* operations are, together */

static atomic_bool stop;
static _Atomic(uint64_t) interrupts, moves, operations;
static int worker_ids[WORKERS];
static bool by_timer, by_moving;

static void interrupt(int number) {
    (void)number;
    atomic_fetch_add_explicit(&interrupts, 1, memory_order_relaxed);
}

/* Blocks of few classes, so that the same magazines are used by all; each is marked with who owns it. */
static void work(size_t thread) {
    worker_ids[thread] = (int)syscall(SYS_gettid);
    timer_t timer;
    if (by_timer) {
        struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
        event.sigev_notify_thread_id = worker_ids[thread];
        CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
        long period = 20000 + 7001 * (long)thread;
        struct itimerspec often = {{0, period}, {0, period}};
        CHECK(timer_settime(timer, 0, &often, NULL) == 0);
    }
    uint64_t random = thread + 1, count = 0;
    uint64_t *held[HELD] = {0};
    static const size_t sizes[] = {16, 16, 24, 48, 64, 64, 200, 1000};
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        uint64_t dice = next_random(&random);
        size_t at = dice % HELD;
        uint64_t mark = (uint64_t)thread << 32 | at;
        if (held[at] != NULL) {
            CHECK_EQUAL(held[at][0], mark);
            CHECK_EQUAL(held[at][1], ~mark);
            held[at][0] = 0;
            free(held[at]);
            held[at] = NULL;
        } else {
            held[at] = malloc(sizes[(dice >> 8) % 8]);
            CHECK(held[at] != NULL);
            held[at][0] = mark;
            held[at][1] = ~mark;
        }
        if (++count % COUNTED == 0) {
            atomic_fetch_add_explicit(&operations, COUNTED, memory_order_relaxed);
        }
        if ((dice >> 16) % 4096 == 0) {
            /* A burst, so that magazines are filled and emptied. */
            void *burst[300];
            for (size_t i = 0; i < 300; i++) {
                burst[i] = malloc(48);
                CHECK(burst[i] != NULL);
                memset(burst[i], (int)thread, 48);
            }
            for (size_t i = 0; i < 300; i++) {
                CHECK(*(unsigned char *)burst[i] == thread);
                free(burst[i]);
            }
        }
        if ((dice >> 32) % 256 == 0) {
            sched_yield();
        }
    }
    for (size_t i = 0; i < HELD; i++) {
        free(held[i]);
    }
    if (by_timer) {
        CHECK(timer_delete(timer) == 0);
    }
}

static double wanted_seconds;

/* However slow the machine is. */
static bool has_done_enough(void) {
    return atomic_load(&operations) > 20000 && (!by_timer || atomic_load(&interrupts) > 2000) &&
           (!by_moving || atomic_load(&moves) > 1000);
}

static void move_all(double until) {
    cpu_set_t allowed;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    int cpus[CPU_SETSIZE], count = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &allowed)) {
            cpus[count++] = cpu;
        }
    }
    uint64_t random = 3;
    while (seconds_now() < until || !has_done_enough()) {
        for (size_t i = 0; i < WORKERS && by_moving; i++) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cpus[next_random(&random) % (uint64_t)count], &one);
            if (worker_ids[i] != 0 && sched_setaffinity(worker_ids[i], sizeof one, &one) == 0) {
                atomic_fetch_add_explicit(&moves, 1, memory_order_relaxed);
            }
        }
        if (!by_moving) {
            sleep_seconds(0.01);
        } else if (next_random(&random) % 64 == 0) {
            sleep_seconds(0.0002);
        }
    }
}

static void direct(size_t thread) {
    if (thread < WORKERS) {
        work(thread);
        return;
    }
    double until = seconds_now() + wanted_seconds;
    move_all(until);
    atomic_store(&stop, true);
}

static void run_all(const char *argument) {
    wanted_seconds = *argument == '\0' ? 2 : strtod(argument, NULL);
    struct sigaction action = {.sa_handler = interrupt, .sa_flags = SA_RESTART};
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    struct calm_stats first = {0};
    if (governed()) {
        first = stats_now();
    }
    run_threads(WORKERS + 1, direct);
    say("interrupts", atomic_load(&interrupts));
    say("moves", atomic_load(&moves));
    say("operations", atomic_load(&operations));
    if (governed()) {
        calm_trim(0);
        struct calm_stats last = stats_now();
        CHECK_EQUAL(last.cached, 0);
        CHECK_EQUAL(last.dirty, 0);
        CHECK(last.in_use <= first.in_use + 128 * KIB); /* no block is lost */
    }
}

static void run_timers(const char *argument) {
    by_timer = true;
    run_all(argument);
}

static void run_moves(const char *argument) {
    by_moving = true;
    run_all(argument);
}

static void run_both(const char *argument) {
    by_timer = by_moving = true;
    run_all(argument);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"timers", run_timers}, {"moves", run_moves}, {"both", run_both}};
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
