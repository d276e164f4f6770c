/* After the benchmark "mmap-read" of Amit, "Optimizing the TLB Shootdown Algorithm with Page Access
 * Tracking": processes read a sparse file larger than memory through a shared mapping, so that the kernel
 * must reclaim pages: it unmaps them from all processes, most of which have not used them for long. "Memory"
 * is that of the machine, or the limit of a control group. Use a file system on a disk: in one that is in
 * memory, holes take memory when they are read, and can only be swapped out. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, mincore */
#include "paging.h"
#include "support.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static const char program_name[] = "mmap-read";

enum order { ORDER_SEQUENTIAL, ORDER_RANDOM };
enum { MOST_PROCESSES = 1024, RANDOM_RUN = 64 };

static const char *const order_names[] = {"sequential", "random", NULL};

struct reading {
    struct paged_file file;
    unsigned long processes;
    unsigned long rounds;
    enum order order;
    unsigned long seed;
    bool pin;
};

/* What a process tells its parent, in memory that both see. */
struct report {
    struct thread_cost cost;
    unsigned long reads;
};

static unsigned long long read_run(const char *memory, unsigned long first, unsigned long count) {
    unsigned long long bits = 0;
    for (unsigned long i = 0; i < count; i++) {
        bits |= page_load(memory + (first + i) * page_bytes());
    }
    return bits;
}

/* As many pages as the file has, one after the other or in runs that begin anywhere. */
static unsigned long long read_round(const struct reading *reading, const char *memory,
                                     unsigned long long *random) {
    unsigned long pages = reading->file.pages;
    if (reading->order == ORDER_SEQUENTIAL) {
        return read_run(memory, 0, pages);
    }
    unsigned long long bits = 0;
    unsigned long count = 0;
    for (unsigned long done = 0; done < pages; done += count) {
        unsigned long first = random_between(random, 0, pages - 1);
        count = pages - (first > done ? first : done);
        count = count < RANDOM_RUN ? count : RANDOM_RUN;
        bits |= read_run(memory, first, count);
    }
    return bits;
}

static _Noreturn void run_process(const struct reading *reading, unsigned long number,
                                  struct report *report) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (reading->pin) {
        pin_thread(program_name, number);
    }
    const char *memory = paged_file_map(program_name, &reading->file, MAP_SHARED);
    unsigned long long random = reading->seed + number;
    struct thread_cost before = thread_cost_now();
    for (unsigned long round = 0; round < reading->rounds; round++) {
        if (read_round(reading, memory, &random) != 0 && reading->file.ours) {
            fail(program_name, "a hole in the file is not zero");
        }
        report->reads += reading->file.pages;
    }
    thread_cost_add_since(&report->cost, &before);
    exit(0);
}

static void wait_for_all(const pid_t *children, unsigned long processes) {
    bool failed = false;
    for (unsigned long i = 0; i < processes; i++) {
        int status = 0;
        while (waitpid(children[i], &status, 0) < 0 && errno == EINTR) {
        }
        failed = failed || status != 0;
    }
    if (failed) {
        fail(program_name, "a process did not end as it should");
    }
}

/* Of the whole file, in the page cache. */
static unsigned long resident_pages(const struct paged_file *file) {
    char *memory = paged_file_map(program_name, file, MAP_SHARED);
    unsigned char *there = checked(malloc(file->pages), program_name);
    if (mincore(memory, file->pages * page_bytes(), there) != 0) {
        fail(program_name, "mincore refused");
    }
    unsigned long resident = 0;
    for (unsigned long i = 0; i < file->pages; i++) {
        resident += there[i] & 1;
    }
    free(there);
    (void)munmap(memory, file->pages * page_bytes());
    return resident;
}

int main(int argc, char **argv) {
    unsigned long path = 0;
    unsigned long size = 0;
    unsigned long processes = 16;
    unsigned long rounds = 1;
    unsigned long order = ORDER_SEQUENTIAL;
    unsigned long seed = 1;
    unsigned long pin = 0;
    const struct option_spec options[] = {
        {"file", "file to map, created as one hole if missing (default: a temporary file)", OPTION_PATH,
         &path, 0, 0, NULL},
        {"size", "the file's size in bytes (default: twice the machine's memory)", OPTION_COUNT, &size, 1,
         1UL << 43, NULL},
        {"processes", "processes that each read all of it", OPTION_COUNT, &processes, 1, MOST_PROCESSES,
         NULL},
        {"rounds", "times that each reads as many pages as the file has", OPTION_COUNT, &rounds, 1, 1000000,
         NULL},
        {"order", "sequential, or 64 pages at random positions", OPTION_CHOICE, &order, 0, 0, order_names},
        {"seed", "seed of the random order", OPTION_COUNT, &seed, 1, 1UL << 32, NULL},
        {"pin", "each process stays on one CPU", OPTION_FLAG, &pin, 0, 1, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Processes read a mapped sparse file that is larger than memory.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    if (size == 0) {
        size = 2 * (unsigned long)sysconf(_SC_PHYS_PAGES) * page_bytes();
    }
    struct reading reading = {
        .processes = processes, .rounds = rounds, .order = (enum order)order, .seed = seed, .pin = pin != 0};
    reading.file = paged_file_open(program_name, (const char *)path, pages_of(size), CONTENTS_HOLE);
    size_t bytes = processes * sizeof(struct report);
    struct report *reports = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (reports == MAP_FAILED) {
        fail(program_name, "cannot get what the processes share");
    }
    pid_t children[MOST_PROCESSES];
    double begin = now_seconds();
    for (unsigned long i = 0; i < processes; i++) {
        children[i] = fork();
        if (children[i] < 0) {
            fail(program_name, "cannot start a process");
        }
        if (children[i] == 0) {
            run_process(&reading, i, &reports[i]);
        }
    }
    wait_for_all(children, processes);
    double seconds = now_seconds() - begin;
    unsigned long reads = 0;
    struct thread_cost cost = {0};
    for (unsigned long i = 0; i < processes; i++) {
        reads += reports[i].reads;
        thread_cost_add(&cost, &reports[i].cost);
    }
    printf("{\"workload\": \"mmap-read\", \"size\": %lu, \"processes\": %lu, \"rounds\": %lu, \"order\": "
           "\"%s\", \"seed\": %lu, \"pages\": %lu, \"reads\": %lu, \"resident_pages\": %lu, "
           "\"minor_faults\": %lu, \"seconds\": %.6f}\n",
           size, processes, rounds, order_names[order], seed, reading.file.pages, reads,
           resident_pages(&reading.file), cost.minor_faults, seconds);
    (void)munmap(reports, bytes);
    (void)close(reading.file.descriptor);
    return 0;
}
