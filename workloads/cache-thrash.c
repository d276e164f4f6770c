/* Active false sharing, after Berger et al., "Hoard: A Scalable Memory Allocator for Multithreaded
 * Applications": threads that each repeatedly allocate a small block, write to it many times and free it. If
 * an allocator gives parts of one cache line to two threads, the line migrates with each write. Written from
 * the published description; shares no code with the authors' program. */
#include "support.h"
#include "write-often.h"

#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "cache-thrash";

struct work {
    unsigned long rounds;
    unsigned long size;
    unsigned long writes;
};

static void thrash(unsigned long thread, void *shared) {
    (void)thread;
    const struct work *work = shared;
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
        .summary = "Threads repeatedly allocate a small block, write to it often and free it.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct work work = {rounds, size, writes};
    double seconds = run_threads(program_name, threads, thrash, &work);
    printf("{\"workload\": \"cache-thrash\", \"threads\": %lu, \"rounds\": %lu, \"size\": %lu, "
           "\"writes\": %lu, \"allocations\": %lu, \"seconds\": %.6f}\n",
           threads, rounds, size, writes, threads * rounds, seconds);
    return 0;
}
