/* A queue of short-lived threads that each fill bins with blocks of random size, replace blocks at random,
 * and free all of them before they end. Written from the published description of the t-test1 benchmark's
 * parameters; shares no code with it. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "ttest1";

static const unsigned long memory_limit = 64UL << 20;
static const size_t touch_stride = 4096;

struct bin {
    char *block;
    size_t size;
};

struct slot {
    struct queue *queue;
    pthread_t thread;
    unsigned long number; /* of the thread, in the order of starting */
};

struct queue {
    unsigned long actions;
    unsigned long size;
    unsigned long bins;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    struct slot **idle; /* slots whose thread has ended and waits to be joined */
    unsigned long idle_count;
    struct thread_cost cost; /* of all threads that have ended */
};

static void fill(struct bin *bin, unsigned long most, unsigned long long *random) {
    bin->size = 1 + random_next(random) % most;
    bin->block = checked(malloc(bin->size), program_name);
    /* One byte of each page makes the whole block resident; the ends also carry a mark to check. */
    for (size_t at = 0; at < bin->size; at += touch_stride) {
        bin->block[at] = (char)bin->size;
    }
    bin->block[bin->size - 1] = (char)bin->size;
}

static void empty(struct bin *bin) {
    if (bin->block[0] != (char)bin->size || bin->block[bin->size - 1] != (char)bin->size) {
        fail(program_name, "a block does not hold what was written to it");
    }
    free(bin->block);
    bin->block = NULL;
}

static void *churn(void *argument) {
    struct slot *slot = argument;
    struct queue *queue = slot->queue;
    struct thread_cost before = thread_cost_now();
    unsigned long long random = slot->number;
    struct bin *bins = checked(calloc(queue->bins, sizeof *bins), program_name);
    for (unsigned long i = 0; i < queue->bins; i++) {
        if (random_next(&random) % 2 == 0) {
            fill(&bins[i], queue->size, &random);
        }
    }
    for (unsigned long action = 0; action < queue->actions; action++) {
        struct bin *bin = &bins[random_next(&random) % queue->bins];
        if (bin->block != NULL) {
            empty(bin);
        } else {
            fill(bin, queue->size, &random);
        }
    }
    for (unsigned long i = 0; i < queue->bins; i++) {
        if (bins[i].block != NULL) {
            empty(&bins[i]);
        }
    }
    free(bins);
    struct thread_cost cost = {0};
    thread_cost_add_since(&cost, &before);

    (void)pthread_mutex_lock(&queue->lock);
    thread_cost_add(&queue->cost, &cost);
    queue->idle[queue->idle_count++] = slot;
    (void)pthread_cond_signal(&queue->ended);
    (void)pthread_mutex_unlock(&queue->lock);
    return NULL;
}

static struct slot *join_one(struct queue *queue) {
    (void)pthread_mutex_lock(&queue->lock);
    while (queue->idle_count == 0) {
        (void)pthread_cond_wait(&queue->ended, &queue->lock);
    }
    struct slot *slot = queue->idle[--queue->idle_count];
    (void)pthread_mutex_unlock(&queue->lock);
    (void)pthread_join(slot->thread, NULL);
    return slot;
}

static void run_all(struct queue *queue, unsigned long total, unsigned long concurrent) {
    struct slot *slots = checked(calloc(concurrent, sizeof *slots), program_name);
    queue->idle = checked(calloc(concurrent, sizeof(struct slot *)), program_name);
    unsigned long active = 0;
    for (unsigned long number = 0; number < total; number++) {
        struct slot *slot = active < concurrent ? &slots[active++] : join_one(queue);
        slot->queue = queue;
        slot->number = number;
        if (pthread_create(&slot->thread, NULL, churn, slot) != 0) {
            fail(program_name, "cannot start a thread");
        }
    }
    while (active > 0) {
        (void)join_one(queue);
        active--;
    }
    free(queue->idle);
    free(slots);
}

int main(int argc, char **argv) {
    unsigned long total = 4000;
    unsigned long concurrent = 2;
    unsigned long actions = 10000;
    unsigned long size = 10000;
    unsigned long bins = 0;
    const struct option_spec options[] = {
        {"n_total_max", "threads to run in all", OPTION_COUNT, &total, 1, 1000000000, NULL},
        {"n_thr", "concurrent threads", OPTION_COUNT, &concurrent, 1, 4096, NULL},
        {"i_max", "actions of each thread: an allocation or a free", OPTION_COUNT, &actions, 0, 1000000000000,
         NULL},
        {"size", "maximum bytes in a block", OPTION_COUNT, &size, 1, 1UL << 30, NULL},
        {"bins", "maximum number of blocks of a thread (default: 64 MiB / size / n_thr)", OPTION_COUNT, &bins,
         1, 1UL << 30, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads start, allocate and free blocks of random size, free all of them, and end.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
        .positional = true,
    };
    options_parse(&program, argc, argv);
    if (bins == 0) {
        bins = memory_limit / size / concurrent;
        bins = bins == 0 ? 1 : bins;
    }

    struct queue queue = {
        .actions = actions,
        .size = size,
        .bins = bins,
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .ended = PTHREAD_COND_INITIALIZER,
    };
    double begin = now_seconds();
    run_all(&queue, total, concurrent);
    double seconds = now_seconds() - begin;

    printf("{\"workload\": \"ttest1\", \"n_total_max\": %lu, \"n_thr\": %lu, \"i_max\": %lu, \"size\": %lu, "
           "\"bins\": %lu, \"seconds\": %.6f, \"actions_per_second\": %.0f, "
           "\"client_minor_faults\": %lu, \"client_user_s\": %.6f, \"client_system_s\": %.6f}\n",
           total, concurrent, actions, size, bins, seconds, (double)total * (double)actions / seconds,
           queue.cost.minor_faults, queue.cost.user_s, queue.cost.system_s);
    return 0;
}
