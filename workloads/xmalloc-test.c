/* Producers allocate batches of blocks and consumers free them, so that each block is freed by another
 * thread than the one that allocated it: the asymmetric load of Lever and Boreham's "malloc() Performance in
 * a Multithreaded Linux Environment", in the form of xmalloc-test. Written from the published descriptions;
 * shares no code with that program. Only the blocks are allocated during the run: the batches that hold them
 * are recycled. */
#include "support.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "xmalloc-test";

struct batch {
    struct batch *next;
    void **blocks;
};

/* Batches that wait: the newest is taken first. */
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    struct batch *newest;
};

struct work {
    unsigned long threads;
    double seconds;
    unsigned long least;
    unsigned long most;
    unsigned long batch;
    unsigned long rounds; /* batches that each producer fills, or 0: as many as the time allows */
    struct pool empty;
    struct pool full;
    atomic_bool stopping;
    atomic_ulong allocations;
    atomic_ulong frees;
    atomic_ulong emptied; /* batches */
    double elapsed;       /* until the word to stop */
};

static void put(struct pool *pool, struct batch *batch) {
    (void)pthread_mutex_lock(&pool->lock);
    batch->next = pool->newest;
    pool->newest = batch;
    (void)pthread_cond_signal(&pool->filled);
    (void)pthread_mutex_unlock(&pool->lock);
}

/* Waits for a batch; returns NULL when the work is over. */
static struct batch *take(struct work *work, struct pool *pool) {
    (void)pthread_mutex_lock(&pool->lock);
    while (pool->newest == NULL && !atomic_load(&work->stopping)) {
        (void)pthread_cond_wait(&pool->filled, &pool->lock);
    }
    struct batch *batch = atomic_load(&work->stopping) ? NULL : pool->newest;
    if (batch != NULL) {
        pool->newest = batch->next;
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return batch;
}

static void wake_all(struct pool *pool) {
    (void)pthread_mutex_lock(&pool->lock);
    (void)pthread_cond_broadcast(&pool->filled);
    (void)pthread_mutex_unlock(&pool->lock);
}

static void stop(struct work *work) {
    atomic_store(&work->stopping, true);
    wake_all(&work->empty);
    wake_all(&work->full);
}

static void produce(struct work *work, unsigned long long random) {
    unsigned long filled = 0;
    for (struct batch *batch;
         (work->rounds == 0 || filled < work->rounds) && (batch = take(work, &work->empty)) != NULL;
         filled++) {
        for (unsigned long i = 0; i < work->batch; i++) {
            size_t size = random_between(&random, work->least, work->most);
            char *block = checked(malloc(size), program_name);
            block[0] = 1;
            block[size - 1] = 1;
            batch->blocks[i] = block;
        }
        put(&work->full, batch);
    }
    atomic_fetch_add(&work->allocations, filled * work->batch);
}

static void consume(struct work *work) {
    unsigned long frees = 0;
    for (struct batch *batch; (batch = take(work, &work->full)) != NULL;) {
        for (unsigned long i = 0; i < work->batch; i++) {
            free(batch->blocks[i]);
        }
        frees += work->batch;
        put(&work->empty, batch);
        if (atomic_fetch_add(&work->emptied, 1) + 1 == work->rounds * work->threads) {
            stop(work);
        }
    }
    atomic_fetch_add(&work->frees, frees);
}

static void stop_in_time(struct work *work) {
    double begin = now_seconds();
    sleep_seconds(work->seconds);
    work->elapsed = now_seconds() - begin;
    stop(work);
}

static void act(unsigned long thread, void *shared) {
    struct work *work = shared;
    if (thread < work->threads) {
        produce(work, thread);
    } else if (thread < 2 * work->threads) {
        consume(work);
    } else {
        stop_in_time(work);
    }
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long milliseconds = 2000;
    unsigned long least = 64;
    unsigned long most = 64;
    unsigned long batch = 4096;
    unsigned long batches = 32;
    unsigned long rounds = 0;
    const struct option_spec options[] = {
        {"threads", "producers, and as many consumers", OPTION_COUNT, &threads, 1, 2048, NULL},
        {"seconds", "duration", OPTION_SECONDS, &milliseconds, 1, 1000000000, NULL},
        {"min", "minimum bytes in a block", OPTION_COUNT, &least, 1, 1UL << 30, NULL},
        {"max", "maximum bytes in a block", OPTION_COUNT, &most, 1, 1UL << 30, NULL},
        {"batch", "blocks in a batch", OPTION_COUNT, &batch, 1, 10000000, NULL},
        {"batches", "total number of batches, full and empty", OPTION_COUNT, &batches, 1, 1000000, NULL},
        {"rounds", "batches that each producer fills, instead of --seconds", OPTION_COUNT, &rounds, 1,
         1000000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads allocate blocks that other threads free.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (least > most) {
        reject_arguments(program_name, "--min is more than --max");
    }

    struct work work = {
        .threads = threads,
        .seconds = (double)milliseconds / 1e3,
        .least = least,
        .most = most,
        .batch = batch,
        .rounds = rounds,
        .empty = {.lock = PTHREAD_MUTEX_INITIALIZER, .filled = PTHREAD_COND_INITIALIZER},
        .full = {.lock = PTHREAD_MUTEX_INITIALIZER, .filled = PTHREAD_COND_INITIALIZER},
    };
    struct batch *all = checked(calloc(batches, sizeof *all), program_name);
    for (unsigned long i = 0; i < batches; i++) {
        all[i].blocks = checked(calloc(batch, sizeof(void *)), program_name);
        put(&work.empty, &all[i]);
    }
    double seconds = run_threads(program_name, 2 * threads + (rounds == 0), act, &work);
    if (rounds != 0) {
        work.elapsed = seconds;
    }

    printf("{\"workload\": \"xmalloc-test\", \"threads\": %lu, \"min\": %lu, \"max\": %lu, \"batch\": %lu, "
           "\"batches\": %lu, \"allocations\": %lu, \"frees\": %lu, \"seconds\": %.6f, "
           "\"frees_per_second\": %.0f}\n",
           threads, least, most, batch, batches, atomic_load(&work.allocations), atomic_load(&work.frees),
           work.elapsed, (double)atomic_load(&work.frees) / work.elapsed);
    return 0;
}
