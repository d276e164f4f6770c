/* Threads come and go, each allocates a little and frees it or leaves it to a later thread, and memory must
 * not grow. The name and the question, whether an allocator loses the memory of ended threads, are from
 * mleak of mimalloc-bench; the rest is original. Resident memory is read after the first tenth of the rounds
 * and at the end. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char program_name[] = "mleak";

enum fate { FATE_FREED, FATE_LEFT, FATE_LOST };

static const char *const fate_names[] = {"freed", "left", "lost", NULL};

struct piece {
    unsigned char *block;
    size_t size;
};

struct work {
    unsigned long blocks;
    unsigned long size;
    unsigned long round;
    unsigned long threads;
    enum fate fate;
    struct piece *pieces; /* row t is of the round's thread t */
};

static void empty(struct piece *piece) {
    if (piece->block == NULL) {
        return;
    }
    if (!block_holds(piece->block, piece->size, (unsigned char)piece->size)) {
        fail(program_name, "a block does not hold what was written to it");
    }
    free(piece->block);
    piece->block = NULL;
}

static void live(unsigned long thread, void *shared) {
    const struct work *work = shared;
    struct piece *pieces = work->pieces + thread * work->blocks;
    unsigned long long random = work->round * work->threads + thread;
    for (unsigned long i = 0; i < work->blocks; i++) {
        empty(&pieces[i]); /* left by a thread of the round before */
        pieces[i].size = random_between(&random, 1, work->size);
        pieces[i].block = checked(malloc(pieces[i].size), program_name);
        block_fill(pieces[i].block, pieces[i].size, (unsigned char)pieces[i].size);
    }
    for (unsigned long i = 0; i < work->blocks; i++) {
        if (work->fate == FATE_FREED || (work->fate == FATE_LEFT && i % 2 == 0)) {
            empty(&pieces[i]);
        } else if (work->fate == FATE_LOST) {
            pieces[i].block = NULL;
        }
    }
}

static unsigned long resident_kib(void) {
    FILE *statm = fopen("/proc/self/statm", "r");
    if (statm == NULL) {
        fail(program_name, "cannot read /proc/self/statm");
    }
    char line[128];
    char *text = fgets(line, sizeof line, statm);
    (void)fclose(statm);
    if (text == NULL) {
        fail(program_name, "cannot read /proc/self/statm");
    }
    char *after = NULL;
    (void)strtoul(line, &after, 10);
    return strtoul(after, NULL, 10) * ((unsigned long)sysconf(_SC_PAGESIZE) / 1024);
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long rounds = 6000;
    unsigned long blocks = 100;
    unsigned long size = 1000;
    unsigned long fate = FATE_LEFT;
    unsigned long growth = 16384;
    const struct option_spec options[] = {
        {"threads", "concurrent threads", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"rounds", "times that all threads start and end", OPTION_COUNT, &rounds, 1, 1000000000, NULL},
        {"blocks", "blocks that each thread allocates", OPTION_COUNT, &blocks, 1, 100000000, NULL},
        {"size", "maximum bytes in a block", OPTION_COUNT, &size, 1, 1UL << 30, NULL},
        {"fate", "threads free all blocks, leave half of them to later threads, or lose them: a leak",
         OPTION_CHOICE, &fate, 0, 0, fate_names},
        {"growth", "permitted growth in KiB after the first tenth of the rounds", OPTION_COUNT, &growth, 1,
         1UL << 40, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Short-lived threads allocate a little; fails if memory grows.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct work work = {blocks, size, 0, threads, (enum fate)fate, NULL};
    work.pieces = checked(calloc(threads * blocks, sizeof *work.pieces), program_name);
    unsigned long early = 0;
    double begin = now_seconds();
    for (work.round = 0; work.round < rounds; work.round++) {
        if (work.round == rounds / 10) {
            early = resident_kib();
        }
        (void)run_threads(program_name, threads, live, &work);
    }
    double seconds = now_seconds() - begin;
    unsigned long late = resident_kib();
    if (late > early + growth) {
        (void)fprintf(stderr, "%s: memory grew from %lu to %lu KiB resident\n", program_name, early, late);
        return 1;
    }
    for (unsigned long i = 0; i < threads * blocks; i++) {
        empty(&work.pieces[i]);
    }
    free(work.pieces);
    printf("{\"workload\": \"mleak\", \"threads\": %lu, \"rounds\": %lu, \"blocks\": %lu, \"size\": %lu, "
           "\"fate\": \"%s\", \"growth\": %lu, \"threads_started\": %lu, \"allocations\": %lu, "
           "\"rss_early_kib\": %lu, \"rss_late_kib\": %lu, \"seconds\": %.6f}\n",
           threads, rounds, blocks, size, fate_names[fate], growth, threads * rounds,
           threads * rounds * blocks, early, late, seconds);
    return 0;
}
