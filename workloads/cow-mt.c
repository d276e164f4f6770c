/* After the benchmark "cow-mt" of Amit, "Optimizing the TLB Shootdown Algorithm with Page Access Tracking":
 * threads read and then write pages of a private file mapping. The first write to a page copies it, and then
 * no CPU may read the original, although only the writer's CPU can hold its translation. */
#include "paging.h"
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static const char program_name[] = "cow-mt";

enum part_kind { PART_OWN, PART_SHARED };
enum order { ORDER_SEQUENTIAL, ORDER_RANDOM };

static const char *const part_names[] = {"own", "shared", NULL};
static const char *const order_names[] = {"sequential", "random", NULL};

struct copying {
    struct paged_file file;
    unsigned long threads;
    unsigned long rounds;
    unsigned long batch;
    enum part_kind part;
    enum order order;
    unsigned long seed;
    bool pin;
    char *memory;
    pthread_barrier_t turn;
    struct thread_cost *costs; /* of each thread */
};

/* Differs from every stamp of a file, all but certainly, and from round to round. */
static unsigned long long written(unsigned long page, unsigned long round) {
    return page_stamp(page) ^ (round + 1);
}

/* What a page of a shared part holds was written in this round, or is the file's still. */
static void check(const struct copying *copying, unsigned long page, unsigned long round) {
    unsigned long long found = page_load(copying->memory + page * page_bytes());
    bool copied = copying->part == PART_SHARED && found == written(page, round);
    if (copying->file.ours && !copied && found != page_stamp(page)) {
        fail(program_name, "a page holds neither what the file does nor what was written");
    }
}

static void write_page(const struct copying *copying, unsigned long page, unsigned long round) {
    char *at = copying->memory + page * page_bytes();
    page_store(at, written(page, round));
    if (page_load(at) != written(page, round)) {
        fail(program_name, "a page does not hold what was written");
    }
}

static void go_through(const struct copying *copying, const unsigned *pages, unsigned long count,
                       unsigned long round) {
    for (unsigned long first = 0; first < count; first += copying->batch) {
        unsigned long end = count - first < copying->batch ? count : first + copying->batch;
        for (unsigned long i = first; i < end; i++) {
            check(copying, pages[i], round);
        }
        for (unsigned long i = first; i < end; i++) {
            write_page(copying, pages[i], round);
        }
    }
}

static void work(unsigned long thread, void *shared) {
    struct copying *copying = shared;
    if (copying->pin) {
        pin_thread(program_name, thread);
    }
    struct part part = {0, copying->file.pages};
    if (copying->part == PART_OWN) {
        part = part_of(copying->file.pages, thread, copying->threads);
    }
    unsigned long count = part.end - part.first;
    unsigned *pages = checked(malloc((count + 1) * sizeof *pages), program_name);
    for (unsigned long i = 0; i < count; i++) {
        pages[i] = (unsigned)(part.first + i);
    }
    struct thread_cost before = thread_cost_now();
    for (unsigned long round = 0; round < copying->rounds; round++) {
        if (thread == 0) {
            copying->memory = paged_file_map(program_name, &copying->file, MAP_PRIVATE);
        }
        if (copying->order == ORDER_RANDOM) {
            shuffle(pages, count, copying->seed + round * copying->threads + thread);
        }
        (void)pthread_barrier_wait(&copying->turn);
        go_through(copying, pages, count, round);
        (void)pthread_barrier_wait(&copying->turn);
        if (thread == 0) {
            (void)munmap(copying->memory, copying->file.pages * page_bytes());
        }
    }
    thread_cost_add_since(&copying->costs[thread], &before);
    free(pages);
}

int main(int argc, char **argv) {
    unsigned long path = 0;
    unsigned long size = 64UL << 20;
    unsigned long threads = 16;
    unsigned long rounds = 2;
    unsigned long batch = 1;
    unsigned long part = PART_OWN;
    unsigned long order = ORDER_SEQUENTIAL;
    unsigned long seed = 1;
    unsigned long pin = 0;
    const struct option_spec options[] = {
        {"file", "file to map, created and filled if missing (default: a temporary file)", OPTION_PATH, &path,
         0, 0, NULL},
        {"size", "the file's size in bytes", OPTION_COUNT, &size, 1, 1UL << 40, NULL},
        {"threads", "threads that read and write", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"rounds", "times that the file is mapped and written", OPTION_COUNT, &rounds, 1, 1000000, NULL},
        {"batch", "pages read before the first of them is written", OPTION_COUNT, &batch, 1, 1UL << 32, NULL},
        {"part", "a part of the mapping for each thread, or all of it for each", OPTION_CHOICE, &part, 0, 0,
         part_names},
        {"order", "order of a thread's accesses", OPTION_CHOICE, &order, 0, 0, order_names},
        {"seed", "seed of the random order", OPTION_COUNT, &seed, 1, 1UL << 32, NULL},
        {"pin", "each thread stays on one CPU", OPTION_FLAG, &pin, 0, 1, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads read and write a private mapping of a file, which copies its pages.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct copying copying = {.threads = threads,
                              .rounds = rounds,
                              .batch = batch,
                              .part = (enum part_kind)part,
                              .order = (enum order)order,
                              .seed = seed,
                              .pin = pin != 0};
    copying.file = paged_file_open(program_name, (const char *)path, pages_of(size), CONTENTS_STAMPED);
    copying.costs = checked(calloc(threads, sizeof *copying.costs), program_name);
    if (pthread_barrier_init(&copying.turn, NULL, (unsigned)threads) != 0) {
        fail(program_name, "cannot make a barrier");
    }
    double seconds = run_threads(program_name, threads, work, &copying);
    struct thread_cost cost = {0};
    for (unsigned long t = 0; t < threads; t++) {
        thread_cost_add(&cost, &copying.costs[t]);
    }
    unsigned long writes = copying.file.pages * rounds * (part == PART_SHARED ? threads : 1);
    printf("{\"workload\": \"cow-mt\", \"size\": %lu, \"threads\": %lu, \"rounds\": %lu, \"batch\": %lu, "
           "\"part\": \"%s\", \"order\": \"%s\", \"seed\": %lu, \"pages\": %lu, \"writes\": %lu, "
           "\"pages_copied\": %lu, \"minor_faults\": %lu, \"seconds\": %.6f}\n",
           size, threads, rounds, batch, part_names[part], order_names[order], seed, copying.file.pages,
           writes, copying.file.pages * rounds, cost.minor_faults, seconds);
    (void)pthread_barrier_destroy(&copying.turn);
    (void)close(copying.file.descriptor);
    free(copying.costs);
    return 0;
}
