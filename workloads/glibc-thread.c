/* A working set whose random members are freed and allocated again, for a fixed time, after glibc's
 * malloc-thread benchmark: 1,024 blocks of 4 to 32,768 bytes for each thread. The likelihood of a size falls
 * with its square, because programs have many more small blocks than large ones. As in the original, blocks
 * are not written to. Written from the published description; shares no code with that program. */
#include "support.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "glibc-thread";

/* Sizes are drawn before the clock starts, as the drawing costs as much as the malloc. */
enum { SIZES = 1 << 14 };

struct slot {
    char *block;
    size_t size;
};

/* Each thread's has cache lines of its own. */
struct worker {
    _Alignas(128) struct slot *slots;
    unsigned long operations;
};

struct work {
    unsigned long threads;
    double seconds;
    unsigned long blocks;
    uint32_t sizes[SIZES];
    struct worker *workers;
    atomic_bool stopping;
    double elapsed; /* until the word to stop */
};

/* Below x lies the share (1/least - 1/x) / (1/least - 1/most) of the sizes; this turns a share into its x. */
static void draw_sizes(struct work *work, double least, double most) {
    unsigned long long random = 0;
    for (unsigned i = 0; i < SIZES; i++) {
        double share = (double)(random_next(&random) >> 11) * 0x1p-53;
        double size = 1 / (1 / least - share * (1 / least - 1 / most));
        work->sizes[i] = (uint32_t)(size < least ? least : size); /* 1 / (1 / 49.0) is less than 49 */
    }
}

static void replace(unsigned long thread, void *shared) {
    struct work *work = shared;
    if (thread == work->threads) {
        double begin = now_seconds();
        sleep_seconds(work->seconds);
        atomic_store(&work->stopping, true);
        work->elapsed = now_seconds() - begin;
        return;
    }
    struct slot *slots = work->workers[thread].slots;
    unsigned long long random = thread;
    unsigned long operations = 0;
    while (!atomic_load_explicit(&work->stopping, memory_order_relaxed)) {
        unsigned long long dice = random_next(&random);
        struct slot *slot = &slots[(dice >> 32) % work->blocks];
        free(slot->block);
        slot->size = work->sizes[dice % SIZES];
        slot->block = checked(malloc(slot->size), program_name);
        operations++;
    }
    work->workers[thread].operations = operations;
}

static int by_address(const void *left, const void *right) {
    const struct slot *a = left;
    const struct slot *b = right;
    return a->block < b->block ? -1 : a->block > b->block;
}

/* What the threads hold at the end must not overlap. */
static void check_and_free(struct work *work) {
    unsigned long count = work->threads * work->blocks;
    struct slot *all = checked(calloc(count, sizeof *all), program_name);
    for (unsigned long i = 0; i < count; i++) {
        all[i] = work->workers[i / work->blocks].slots[i % work->blocks];
    }
    qsort(all, count, sizeof *all, by_address);
    for (unsigned long i = 0; i + 1 < count; i++) {
        if (all[i].block != NULL && all[i].block + all[i].size > all[i + 1].block) {
            fail(program_name, "two blocks overlap");
        }
    }
    for (unsigned long i = 0; i < count; i++) {
        free(all[i].block);
    }
    free(all);
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long milliseconds = 2000;
    unsigned long blocks = 1024;
    unsigned long least = 4;
    unsigned long most = 32768;
    const struct option_spec options[] = {
        {"threads", "threads, each with a working set", OPTION_COUNT, &threads, 1, 4095, NULL},
        {"seconds", "duration", OPTION_SECONDS, &milliseconds, 1, 1000000000, NULL},
        {"blocks", "blocks in a working set", OPTION_COUNT, &blocks, 1, 10000000, NULL},
        {"min", "minimum bytes in a block", OPTION_COUNT, &least, 1, 1UL << 30, NULL},
        {"max", "maximum bytes in a block", OPTION_COUNT, &most, 1, 1UL << 30, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads free random blocks of a working set and replace them.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (least > most) {
        reject_arguments(program_name, "--min is more than --max");
    }

    struct work *work = checked(calloc(1, sizeof *work), program_name);
    work->threads = threads;
    work->seconds = (double)milliseconds / 1e3;
    work->blocks = blocks;
    draw_sizes(work, (double)least, (double)most);
    work->workers =
        checked(aligned_alloc(_Alignof(struct worker), threads * sizeof *work->workers), program_name);
    for (unsigned long t = 0; t < threads; t++) {
        work->workers[t].slots = checked(calloc(blocks, sizeof(struct slot)), program_name);
    }
    (void)run_threads(program_name, threads + 1, replace, work);

    check_and_free(work);
    double operations = 0;
    for (unsigned long t = 0; t < threads; t++) {
        operations += (double)work->workers[t].operations;
        free(work->workers[t].slots);
    }
    free(work->workers);
    printf("{\"workload\": \"glibc-thread\", \"threads\": %lu, \"blocks\": %lu, \"min\": %lu, \"max\": %lu, "
           "\"seconds\": %.6f, \"operations_per_second\": %.0f, \"ns_per_operation\": %.3f}\n",
           threads, blocks, least, most, work->elapsed, operations / work->elapsed,
           work->elapsed * 1e9 * (double)threads / operations);
    free(work);
    return 0;
}
