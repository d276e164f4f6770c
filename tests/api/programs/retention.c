/*
 * Memory that stays resident: retention CASE BYTES,ORDER. Threads fill 200 MiB with blocks of BYTES bytes,
 * free them and wait. ORDER is in-order, reversed, random, or others (each thread frees its neighbour's
 * blocks).
 */
#include "api.h"
#include "names.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

#define THREADS 8
#define EACH    (25 * MIB)

/* Of free memory, and of cached blocks, once all is tidied. */
#define SETTLED_BYTES (256 * KIB)

static size_t block_bytes, block_count;
static const char *order;
static void **rows[THREADS];
static pthread_barrier_t filled, freeing, emptied, measured;

static void read_argument(const char *argument) {
    char *end;
    block_bytes = strtoul(argument, &end, 10);
    CHECK(block_bytes >= 16 && *end == ',');
    order = end + 1;
    block_count = EACH / block_bytes;
}

static void fill_rows(size_t thread) {
    for (size_t i = 0; i < block_count; i++) {
        rows[thread][i] = malloc(block_bytes);
        CHECK(rows[thread][i] != NULL);
        memset(rows[thread][i], (int)thread + 1, block_bytes);
    }
}

static void free_rows(void **mine) {
    uint64_t random = 5;
    for (size_t left = block_count; left > 0; left--) {
        size_t take = left - 1;
        if (strcmp(order, "in-order") == 0) {
            take = block_count - left;
        } else if (strcmp(order, "random") == 0) {
            take = next_random(&random) % left;
        }
        void *block = mine[take];
        if (strcmp(order, "random") == 0) {
            mine[take] = mine[left - 1];
        }
        free(block);
    }
}

static void fill_free_and_wait(size_t thread) {
    fill_rows(thread);
    pthread_barrier_wait(&filled);
    pthread_barrier_wait(&freeing);
    free_rows(rows[(thread + (strcmp(order, "others") == 0)) % THREADS]);
    pthread_barrier_wait(&emptied);
    pthread_barrier_wait(&measured);
}

static pthread_t threads[THREADS];

static void *run_one(void *thread) {
    fill_free_and_wait((size_t)(uintptr_t)thread);
    return NULL;
}

static void say_stats(void) {
    if (!governed()) {
        return;
    }
    struct calm_stats stats = stats_now();
    say("in_use", stats.in_use);
    say("dirty", stats.dirty);
    say("dirty_limit", stats.dirty_limit);
    say("cached", stats.cached);
    say("cached_limit", stats.cached_limit);
    say("metadata", stats.metadata);
    say("dirtied", stats.dirtied);
    say("purged", stats.purged);
    say("purges", stats.purges_limit);
    say("purge_failures", stats.purge_failures);
    say("purge_vectored_calls", stats.purge_vectored_calls);
    say("purge_single_calls", stats.purge_single_calls);
}

/* Resident more than before; once a server, if there is one, has seen all that was freed: then it counts. */
static void say_kept(const char *name, size_t before) {
    if (governed()) {
        stats_now();
    }
    say(name, grown_since(before));
}

/* Whether next to nothing is kept: of a program that went idle, in the end, however busy the machine is. */
static bool has_settled(size_t before, size_t kept) {
    struct calm_stats stats = stats_now();
    return stats.dirty <= SETTLED_BYTES && stats.cached <= SETTLED_BYTES && grown_since(before) <= kept;
}

/* idle_kept: what may be resident once the threads have been idle for long enough; 0: the test does not wait
 * for that.
 */
static void burst(size_t idle_kept) {
    const unsigned all = THREADS + 1;
    CHECK(pthread_barrier_init(&filled, NULL, all) == 0 && pthread_barrier_init(&freeing, NULL, all) == 0);
    CHECK(pthread_barrier_init(&emptied, NULL, all) == 0 && pthread_barrier_init(&measured, NULL, all) == 0);
    /* Their pages are there from the start: not the heap's, and not in what grows. */
    for (size_t i = 0; i < THREADS; i++) {
        rows[i] = own_pages(block_count * sizeof(void *));
        memset(rows[i], 0xFF, block_count * sizeof(void *));
    }
    size_t before = resident_bytes();
    for (uintptr_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, run_one, (void *)i) == 0);
    }
    pthread_barrier_wait(&filled);
    say("peak", grown_since(before));
    pthread_barrier_wait(&freeing);
    pthread_barrier_wait(&emptied);
    say_kept("kept", before);
    say_stats();
    if (idle_kept > 0) {
        for (double until = seconds_now() + TIMEOUT_S; !has_settled(before, idle_kept);) {
            struct calm_stats stats = stats_now();
            if (seconds_now() >= until) {
                fprintf(stderr, "%llu dirty, %llu cached, %zu resident\n", (unsigned long long)stats.dirty,
                        (unsigned long long)stats.cached, grown_since(before));
                _Exit(1);
            }
            sleep_seconds(0.1);
        }
        say("settled", 1);
    }
    pthread_barrier_wait(&measured);
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

static void plain(const char *argument) {
    read_argument(argument);
    burst(0);
}

static void idle(const char *argument) {
    read_argument(argument);
    burst(3 * MIB); /* stacks and what the C library holds for each thread */
}

/* With a server. */
static void idle_with_server(const char *argument) {
    read_argument(argument);
    burst(7 * MIB);
}

static void deny_vectored(const char *argument) {
    read_argument(argument);
    deny_call(SYS_process_madvise, EPERM);
    burst(0);
}

static void deny_missing(const char *argument) {
    read_argument(argument);
    deny_call(SYS_process_madvise, ENOSYS);
    burst(0);
}

/* Nothing can be given back at all. Memory that is free is still used again. */
static void deny_all(const char *argument) {
    read_argument(argument);
    deny_call(SYS_process_madvise, EPERM);
    deny_call(SYS_madvise, EPERM);
    burst(0);
    say("frees", THREADS * block_count);
    size_t before = resident_bytes();
    for (size_t i = 0; i < THREADS; i++) {
        fill_rows(i);
    }
    say("grown_again", grown_since(before));
    for (size_t i = 0; i < THREADS; i++) {
        free_rows(rows[i]);
    }
}

static void locked(const char *argument) {
    read_argument(argument);
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) {
        fprintf(stderr, "memory may not be locked here\n");
        _Exit(CANNOT);
    }
    burst(0);
    say("frees", THREADS * block_count);
}

/* One thread, blocks up and down: a purge for each of them would be a purge for nothing. */
static void steady(const char *argument) {
    read_argument(argument);
    void **mine = own_pages(block_count * sizeof *mine);
    rows[0] = mine;
    for (int round = 0; round < 40; round++) {
        fill_rows(0);
        free_rows(mine);
    }
    say_stats();
}

/*
 * Most of what was full becomes free while some stays in use: what is left keeps its page, or its share of
 * one, and not the whole.
 */
static void sparse(const char *argument) {
    read_argument(argument);
    size_t before = resident_bytes();
    void **mine = own_pages(block_count * sizeof *mine);
    rows[0] = mine;
    fill_rows(0);
    size_t full = grown_since(before), keep_each = 64 * KIB / block_bytes + 1;
    for (size_t i = 0; i < block_count; i++) {
        if (i % keep_each != 0) {
            free(mine[i]);
        }
    }
    say("full", full);
    say_kept("kept", before);
    say("live", block_count / keep_each * block_bytes);
    say("live_pages", block_count / keep_each * (size_t)sysconf(_SC_PAGESIZE));
    say_stats();
    for (size_t i = 0; i < block_count; i += keep_each) {
        CHECK(((unsigned char *)mine[i])[0] == 1 && ((unsigned char *)mine[i])[block_bytes - 1] == 1);
        free(mine[i]);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"plain", plain},
        {"idle", idle},
        {"idle-with-server", idle_with_server},
        {"deny-vectored", deny_vectored},
        {"deny-missing", deny_missing},
        {"deny-all", deny_all},
        {"locked", locked},
        {"steady", steady},
        {"sparse", sparse},
    };
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
