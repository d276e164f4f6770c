/* After the benchmark "msync-mt" of Amit, "Optimizing the TLB Shootdown Algorithm with Page Access
 * Tracking": threads write pages of a shared file mapping, each in a part of its own, and write them back by
 * msync(MS_SYNC). This makes each page clean, and then no CPU may write to it unnoticed, although only the
 * writer's CPU can hold its translation. Use a file system on a disk: in one that is in memory, msync does
 * nothing. */
#include "paging.h"
#include "support.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static const char program_name[] = "msync-mt";

struct syncing {
    struct paged_file file;
    unsigned long threads;
    unsigned long rounds;
    unsigned long batch;
    bool pin;
    char *memory;
    atomic_ulong calls;
};

static unsigned long long written(unsigned long page, unsigned long round) {
    return page_stamp(page) ^ (round + 1);
}

static void work(unsigned long thread, void *shared) {
    struct syncing *syncing = shared;
    if (syncing->pin) {
        pin_thread(program_name, thread);
    }
    struct part part = part_of(syncing->file.pages, thread, syncing->threads);
    size_t page = page_bytes();
    for (unsigned long round = 0; round < syncing->rounds; round++) {
        for (unsigned long first = part.first; first < part.end; first += syncing->batch) {
            unsigned long end = part.end - first < syncing->batch ? part.end : first + syncing->batch;
            for (unsigned long i = first; i < end; i++) {
                page_store(syncing->memory + i * page, written(i, round));
            }
            if (msync(syncing->memory + first * page, (end - first) * page, MS_SYNC) != 0) {
                fail(program_name, "msync refused");
            }
            (void)atomic_fetch_add_explicit(&syncing->calls, 1, memory_order_relaxed);
        }
    }
}

static void check_file(const struct syncing *syncing) {
    for (unsigned long i = 0; i < syncing->file.pages; i++) {
        unsigned long long found = 0;
        ssize_t got = pread(syncing->file.descriptor, &found, sizeof found, (off_t)(i * page_bytes()));
        if (got != (ssize_t)sizeof found || found != written(i, syncing->rounds - 1)) {
            fail(program_name, "the file does not hold what was written");
        }
    }
}

int main(int argc, char **argv) {
    unsigned long path = 0;
    unsigned long size = 16UL << 20;
    unsigned long threads = 16;
    unsigned long rounds = 4;
    unsigned long batch = 16;
    unsigned long pin = 0;
    const struct option_spec options[] = {
        {"file", "file to create, map and write (default: a temporary file)", OPTION_PATH, &path, 0, 0, NULL},
        {"size", "the file's size in bytes", OPTION_COUNT, &size, 1, 1UL << 40, NULL},
        {"threads", "threads, each with its own part", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"rounds", "times that each page is written", OPTION_COUNT, &rounds, 1, 1000000, NULL},
        {"batch", "pages written before each msync", OPTION_COUNT, &batch, 1, 1UL << 32, NULL},
        {"pin", "each thread stays on one CPU", OPTION_FLAG, &pin, 0, 1, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads write pages of a shared file mapping and call msync for them.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct syncing syncing = {.threads = threads, .rounds = rounds, .batch = batch, .pin = pin != 0};
    syncing.file = paged_file_make(program_name, (const char *)path, pages_of(size), CONTENTS_STAMPED);
    /* What was written to fill it is no msync's work. */
    if (fsync(syncing.file.descriptor) != 0) {
        fail(program_name, "cannot write the file");
    }
    syncing.memory = paged_file_map(program_name, &syncing.file, MAP_SHARED);
    double seconds = run_threads(program_name, threads, work, &syncing);
    (void)munmap(syncing.memory, syncing.file.pages * page_bytes());
    check_file(&syncing);
    printf("{\"workload\": \"msync-mt\", \"size\": %lu, \"threads\": %lu, \"rounds\": %lu, \"batch\": %lu, "
           "\"pages\": %lu, \"writes\": %lu, \"calls\": %lu, \"seconds\": %.6f}\n",
           size, threads, rounds, batch, syncing.file.pages, syncing.file.pages * rounds,
           atomic_load(&syncing.calls), seconds);
    (void)close(syncing.file.descriptor);
    return 0;
}
