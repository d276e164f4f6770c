/* Threads that keep some blocks, exchange others, and come and go, after the stress test of mimalloc (Leijen
 * et al., "Mimalloc: Free List Sharding in Action"). In each iteration new threads allocate blocks whose
 * sizes are spread over powers of two, a few of them far larger. They free random blocks of theirs, and
 * exchange others through slots that all threads share; blocks in the slots outlive the threads. Every word
 * of a block is written after its allocation and checked before it is freed. Written from the published
 * description; shares no code with the authors' program. */
#include "support.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "mstress";

enum {
    DOUBLINGS = 6,         /* a block has 2 << 0 to 2 << (DOUBLINGS - 1) words, and up to as many more */
    LARGE_ONE_IN = 100,    /* such a part of the blocks ... */
    LARGE_TIMES = 30,      /* ... is so many times larger */
    HUGE_ONE_IN = 20000,   /* and such a part of them ... */
    HUGE_TIMES = 1000,     /* ... so many times */
    EXCHANGE_PERCENT = 25, /* of the steps */
    FREE_PERCENT = 50,     /* of the steps */
    RETAINED_ONE_IN = 4,   /* blocks are kept to the thread's end, unless exchanged */
    FIRST_ROOM = 16,
};

struct block {
    uint64_t words; /* with this one */
    uint64_t content[];
};

/* A list that grows as programs' lists do. */
struct list {
    struct block **blocks;
    size_t count;
    size_t room;
};

/* Each thread's has cache lines of its own. */
struct counts {
    _Alignas(128) unsigned long allocations;
    unsigned long bytes;
    unsigned long frees;
};

struct work {
    unsigned long steps;
    unsigned long iteration;
    unsigned long threads;
    unsigned long transfers;
    _Atomic(struct block *) *transfer;
    struct counts *counts;
};

static uint64_t word_at(uint64_t words, uint64_t index) {
    return (words << 32 | index) * 0x9e3779b97f4a7c15ULL;
}

static struct block *create(unsigned long long *random, struct counts *counts) {
    uint64_t words = 2ULL << random_next(random) % DOUBLINGS;
    words += random_next(random) % words;
    unsigned long long dice = random_next(random);
    if (dice % HUGE_ONE_IN == 0) {
        words *= HUGE_TIMES;
    } else if (dice % LARGE_ONE_IN == 0) {
        words *= LARGE_TIMES;
    }
    struct block *block = checked(malloc(words * sizeof(uint64_t)), program_name);
    block->words = words;
    for (uint64_t i = 0; i + 1 < words; i++) {
        block->content[i] = word_at(words, i);
    }
    counts->allocations++;
    counts->bytes += words * sizeof(uint64_t);
    return block;
}

static void destroy(struct block *block, struct counts *counts) {
    if (block == NULL) {
        return;
    }
    for (uint64_t i = 0; i + 1 < block->words; i++) {
        if (block->content[i] != word_at(block->words, i)) {
            fail(program_name, "a block does not hold what was written to it");
        }
    }
    free(block);
    counts->frees++;
}

static void append(struct list *list, struct block *block) {
    if (list->count == list->room) {
        list->room = list->room == 0 ? FIRST_ROOM : 2 * list->room;
        list->blocks =
            checked(realloc((void *)list->blocks, list->room * sizeof(struct block *)), program_name);
    }
    list->blocks[list->count++] = block;
}

static void destroy_all(struct list *list, struct counts *counts) {
    for (size_t i = 0; i < list->count; i++) {
        destroy(list->blocks[i], counts);
    }
    free((void *)list->blocks);
}

/* Each step draws as many numbers whatever the other threads do, so that what is allocated repeats exactly.
 */
static void stress(unsigned long thread, void *shared) {
    struct work *work = shared;
    struct counts counts = work->counts[thread];
    unsigned long long random = work->iteration * work->threads + thread;
    struct list passing = {0};
    struct list retained = {0};
    for (unsigned long step = 0; step < work->steps; step++) {
        struct block *block = create(&random, &counts);
        unsigned long long dice = random_next(&random);
        append(dice % RETAINED_ONE_IN == 0 ? &retained : &passing, block);
        dice >>= 8;
        unsigned long long place = random_next(&random);
        if (dice % 100 < FREE_PERCENT && passing.count > 0) {
            size_t victim = place % passing.count;
            destroy(passing.blocks[victim], &counts);
            passing.blocks[victim] = passing.blocks[--passing.count];
        }
        dice >>= 8;
        place = random_next(&random);
        if (dice % 100 < EXCHANGE_PERCENT) {
            struct list *list = (dice >> 16) % 2 == 0 && passing.count > 0 ? &passing : &retained;
            if (list->count > 0) {
                struct block **mine = &list->blocks[place % list->count];
                *mine = atomic_exchange(&work->transfer[(place >> 32) % work->transfers], *mine);
            }
        }
    }
    destroy_all(&passing, &counts);
    destroy_all(&retained, &counts);
    work->counts[thread] = counts;
}

/* Between iterations the main thread, which allocated none of them, frees every second block in the slots. */
static void drain(struct work *work, unsigned long stride, struct counts *counts) {
    for (unsigned long i = 0; i < work->transfers; i += stride) {
        destroy(atomic_exchange(&work->transfer[i], NULL), counts);
    }
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long iterations = 20;
    unsigned long steps = 100000;
    unsigned long transfers = 1000;
    const struct option_spec options[] = {
        {"threads", "concurrent threads", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"iterations", "times that all threads start and end", OPTION_COUNT, &iterations, 1, 1000000, NULL},
        {"steps", "blocks that each thread allocates in an iteration", OPTION_COUNT, &steps, 1, 100000000,
         NULL},
        {"transfers", "slots for exchanged blocks", OPTION_COUNT, &transfers, 1, 10000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads allocate, keep, exchange and free blocks, and are replaced by others.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct work work = {.steps = steps, .threads = threads, .transfers = transfers};
    work.transfer = checked(calloc(transfers, sizeof *work.transfer), program_name);
    work.counts =
        checked(aligned_alloc(_Alignof(struct counts), (threads + 1) * sizeof *work.counts), program_name);
    for (unsigned long t = 0; t <= threads; t++) {
        work.counts[t] = (struct counts){0};
    }
    double begin = now_seconds();
    for (work.iteration = 0; work.iteration < iterations; work.iteration++) {
        (void)run_threads(program_name, threads, stress, &work);
        drain(&work, work.iteration + 1 < iterations ? 2 : 1, &work.counts[threads]);
    }
    double seconds = now_seconds() - begin;

    struct counts all = {0};
    for (unsigned long t = 0; t <= threads; t++) {
        all.allocations += work.counts[t].allocations;
        all.bytes += work.counts[t].bytes;
        all.frees += work.counts[t].frees;
    }
    if (all.frees != all.allocations) {
        fail(program_name, "not every block was freed once");
    }
    free(work.counts);
    free((void *)work.transfer);
    printf("{\"workload\": \"mstress\", \"threads\": %lu, \"iterations\": %lu, \"steps\": %lu, "
           "\"transfers\": %lu, \"allocations\": %lu, \"bytes\": %lu, \"seconds\": %.6f}\n",
           threads, iterations, steps, transfers, all.allocations, all.bytes, seconds);
    return 0;
}
