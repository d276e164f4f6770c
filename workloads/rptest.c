/* Random allocations with frees within and across threads, after the benchmark of rpmalloc (Jansson). Each
 * thread has a number of slots; every loop empties random ones, and then fills random ones with blocks of
 * random size. Every few loops it allocates additional blocks and passes them, as a list, to the next
 * thread, which frees them. Small sizes are as likely as large ones, or more likely, with a linear or
 * exponential distribution. A thread that has finished its loops frees the blocks that it receives until all
 * threads have finished: otherwise the first one to finish would decide how much memory the other threads'
 * blocks take. Written from the published description; shares no code with the author's program. */
#include "support.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "rptest";

enum distribution { UNIFORM, LINEAR, EXPONENTIAL };

static const char *const distribution_names[] = {"uniform", "linear", "exponential", NULL};

/* The start of each block. The last byte of the block repeats the size's last one. */
struct block {
    struct block *next; /* on its way to another thread */
    size_t size;
};

/* Each thread's has cache lines of its own. */
struct worker {
    _Alignas(128) struct block **slots;
    unsigned long allocations;
    unsigned long bytes;
    unsigned long frees;
    unsigned long long random;
    _Alignas(128) _Atomic(struct block *) inbox;
};

struct work {
    unsigned long threads;
    unsigned long loops;
    unsigned long slots;
    unsigned long operations;
    unsigned long cross;
    unsigned long least;
    unsigned long most;
    enum distribution distribution;
    struct worker *workers;
    _Atomic(unsigned long) *running; /* threads that have loops to do */
};

/* The exponential is a staircase: each sixteenth of the range is half as likely as the one before it. */
static size_t random_size(const struct work *work, unsigned long long *random) {
    size_t size = random_between(random, work->least, work->most);
    if (work->distribution == LINEAR) {
        size_t other = random_between(random, work->least, work->most);
        return other < size ? other : size;
    }
    if (work->distribution == EXPONENTIAL) {
        unsigned long step = (unsigned long)__builtin_ctzll(random_next(random) | 1ULL << 15);
        return work->least + (step * (work->most - work->least) + (size - work->least)) / 16;
    }
    return size;
}

static struct block *create(const struct work *work, struct worker *worker) {
    size_t size = random_size(work, &worker->random);
    struct block *block = checked(malloc(size), program_name);
    block->size = size;
    if (size > sizeof *block) {
        ((unsigned char *)block)[size - 1] = (unsigned char)size;
    }
    worker->allocations++;
    worker->bytes += size;
    return block;
}

static void destroy(struct worker *worker, struct block *block) {
    if (block == NULL) {
        return;
    }
    size_t size = block->size;
    if (size > sizeof *block && ((unsigned char *)block)[size - 1] != (unsigned char)size) {
        fail(program_name, "a block does not hold what was written to it");
    }
    free(block);
    worker->frees++;
}

static void hand_over(const struct work *work, struct worker *worker, struct worker *receiver) {
    struct block *last = create(work, worker);
    struct block *first = last;
    for (unsigned long i = 1; i < work->operations; i++) {
        struct block *block = create(work, worker);
        block->next = first;
        first = block;
    }
    last->next = atomic_load(&receiver->inbox);
    while (!atomic_compare_exchange_weak(&receiver->inbox, &last->next, first)) {
    }
}

static void empty_inbox(struct worker *worker) {
    for (struct block *block = atomic_exchange(&worker->inbox, NULL); block != NULL;) {
        struct block *next = block->next;
        destroy(worker, block);
        block = next;
    }
}

static void loop_all(unsigned long thread, void *shared) {
    const struct work *work = shared;
    struct worker *worker = &work->workers[thread];
    struct worker *receiver = &work->workers[(thread + 1) % work->threads];
    for (unsigned long loop = 0; loop < work->loops; loop++) {
        for (unsigned long i = 0; i < work->operations; i++) {
            struct block **slot = &worker->slots[random_next(&worker->random) % work->slots];
            destroy(worker, *slot);
            *slot = NULL;
        }
        for (unsigned long i = 0; i < work->operations; i++) {
            struct block **slot = &worker->slots[random_next(&worker->random) % work->slots];
            destroy(worker, *slot);
            *slot = create(work, worker);
        }
        if (work->cross != 0 && loop % work->cross == 0) {
            hand_over(work, worker, receiver);
        }
        empty_inbox(worker);
    }
    for (unsigned long i = 0; i < work->slots; i++) {
        destroy(worker, worker->slots[i]);
    }
    atomic_fetch_sub(work->running, 1);
    while (atomic_load(work->running) != 0) {
        empty_inbox(worker);
        sched_yield();
    }
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long loops = 15000;
    unsigned long slots = 1000;
    unsigned long operations = 100;
    unsigned long cross = 2;
    unsigned long least = 16;
    unsigned long most = 16000;
    unsigned long distribution = LINEAR;
    const struct option_spec options[] = {
        {"threads", "threads, each with its own slots", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"loops", "loops of each thread", OPTION_COUNT, &loops, 1, 1000000000, NULL},
        {"slots", "maximum number of blocks of a thread", OPTION_COUNT, &slots, 1, 100000000, NULL},
        {"operations", "number of slots emptied, slots filled and blocks passed on at a time", OPTION_COUNT,
         &operations, 1, 100000000, NULL},
        {"cross", "every Nth loop passes blocks on; 0: none", OPTION_COUNT, &cross, 0, 1000000000, NULL},
        {"min", "minimum bytes in a block", OPTION_COUNT, &least, sizeof(struct block), 1UL << 30, NULL},
        {"max", "maximum bytes in a block", OPTION_COUNT, &most, sizeof(struct block), 1UL << 30, NULL},
        {"sizes", "distribution of sizes", OPTION_CHOICE, &distribution, 0, 0, distribution_names},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads fill and empty random slots, and free blocks received from other threads.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (least > most) {
        reject_arguments(program_name, "--min is more than --max");
    }

    _Atomic(unsigned long) running = threads;
    struct work work = {threads, loops,   slots, operations,
                        cross,   least,   most,  (enum distribution)distribution,
                        NULL,    &running};
    work.workers =
        checked(aligned_alloc(_Alignof(struct worker), threads * sizeof *work.workers), program_name);
    for (unsigned long t = 0; t < threads; t++) {
        work.workers[t] = (struct worker){.random = t};
        work.workers[t].slots = checked(calloc(slots, sizeof(struct block *)), program_name);
    }
    double seconds = run_threads(program_name, threads, loop_all, &work);

    unsigned long allocations = 0;
    unsigned long bytes = 0;
    unsigned long frees = 0;
    for (unsigned long t = 0; t < threads; t++) {
        /* What came while the last thread did its last loop. */
        empty_inbox(&work.workers[t]);
        allocations += work.workers[t].allocations;
        bytes += work.workers[t].bytes;
        frees += work.workers[t].frees;
        free((void *)work.workers[t].slots);
    }
    if (frees != allocations) {
        fail(program_name, "not every block was freed once");
    }
    free(work.workers);
    printf(
        "{\"workload\": \"rptest\", \"threads\": %lu, \"loops\": %lu, \"slots\": %lu, \"operations\": %lu, "
        "\"cross\": %lu, \"min\": %lu, \"max\": %lu, \"sizes\": \"%s\", \"allocations\": %lu, "
        "\"bytes\": %lu, \"seconds\": %.6f}\n",
        threads, loops, slots, operations, cross, least, most, distribution_names[distribution], allocations,
        bytes, seconds);
    return 0;
}
