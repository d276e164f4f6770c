/* Passive false sharing, after Berger et al., "Hoard: A Scalable Memory Allocator for Multithreaded
 * Applications". The main thread allocates small blocks in a row, and gives one to each thread. A thread
 * frees its block, and then repeatedly allocates one, writes to it many times and frees it. If an allocator
 * lets a thread reuse the block that it was given, several threads write to one cache line, which migrates
 * between CPUs. Written from the published description; shares no code with the authors' program. */
#include "support.h"
#include "write-often.h"

#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "cache-scratch";

struct work {
    unsigned long rounds;
    unsigned long size;
    unsigned long writes;
    unsigned char **given; /* one for each thread */
};

static void scratch(unsigned long thread, void *shared) {
    const struct work *work = shared;
    if (!block_holds(work->given[thread], work->size, (unsigned char)thread)) {
        fail(program_name, "a block does not hold what was written to it");
    }
    free(work->given[thread]);
    for (unsigned long round = 0; round < work->rounds; round++) {
        unsigned char *block = checked(malloc(work->size), program_name);
        if (!write_often(block, work->size, work->writes)) {
            fail(program_name, "a block does not hold what was written to it");
        }
        free(block);
    }
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long rounds = 1000;
    unsigned long size = 8;
    unsigned long writes = 200000;
    const struct option_spec options[] = {
        {"threads", "threads, each with a block", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"rounds", "blocks that each thread allocates in turn", OPTION_COUNT, &rounds, 1, 1000000000, NULL},
        {"size", "bytes in a block", OPTION_COUNT, &size, 1, 1UL << 20, NULL},
        {"writes", "writes to every byte of a block", OPTION_COUNT, &writes, 1, 1000000000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary =
            "Threads free a block given to them; then each repeatedly allocates, writes and frees a block.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct work work = {rounds, size, writes, NULL};
    work.given = checked(calloc(threads, sizeof *work.given), program_name);
    for (unsigned long t = 0; t < threads; t++) {
        work.given[t] = checked(malloc(size), program_name);
        block_fill(work.given[t], size, (unsigned char)t);
    }
    double seconds = run_threads(program_name, threads, scratch, &work);
    free(work.given);
    printf("{\"workload\": \"cache-scratch\", \"threads\": %lu, \"rounds\": %lu, \"size\": %lu, "
           "\"writes\": %lu, \"allocations\": %lu, \"seconds\": %.6f}\n",
           threads, rounds, size, writes, threads * (rounds + 1), seconds);
    return 0;
}
