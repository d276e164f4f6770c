/* Listing 1 of "Ptlbmalloc2: Reducing TLB Shootdowns with High Memory Efficiency": threads that repeatedly
 * fill and empty their own arenas. An allocator that trims each arena separately interrupts every CPU again
 * and again. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "listing1";

enum order { ORDER_PAPER, ORDER_REVERSED };
enum touch { TOUCH_NONE, TOUCH_FIRST, TOUCH_ALL };

static const char *const order_names[] = {"paper", "reversed", NULL};
static const char *const touch_names[] = {"none", "first", "all", NULL};

struct work {
    unsigned long rounds;
    unsigned long blocks;
    unsigned long size;
    enum order order;
    enum touch touch;
    bool pin;
    /* Row t is thread t's: the threads themselves must allocate nothing but the blocks. */
    void **rows;
    struct thread_cost *costs; /* of each thread */
};

static void fill_and_empty(unsigned long thread, void *shared) {
    const struct work *work = shared;
    void **row = work->rows + thread * work->blocks;
    if (work->pin) {
        pin_thread(program_name, thread);
    }
    struct thread_cost before = thread_cost_now();
    for (unsigned long round = 0; round < work->rounds; round++) {
        for (unsigned long j = 0; j < work->blocks; j++) {
            row[j] = checked(malloc(work->size), program_name);
            if (work->touch == TOUCH_FIRST) {
                *(volatile char *)row[j] = 1;
            } else if (work->touch == TOUCH_ALL) {
                memset(row[j], 1, work->size);
            }
        }
        for (unsigned long j = 0; j < work->blocks; j++) {
            free(row[work->order == ORDER_PAPER ? work->blocks - 1 - j : j]);
        }
    }
    thread_cost_add_since(&work->costs[thread], &before);
}

int main(int argc, char **argv) {
    unsigned long threads = 16;
    unsigned long rounds = 20;
    unsigned long blocks = 1000;
    unsigned long size = 130048;
    unsigned long order = ORDER_PAPER;
    unsigned long touch = TOUCH_NONE;
    unsigned long pin = 0;
    const struct option_spec options[] = {
        {"threads", "threads, each with its own blocks", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"rounds", "times that each thread allocates and frees its blocks", OPTION_COUNT, &rounds, 1,
         1000000000, NULL},
        {"blocks", "maximum number of blocks of a thread", OPTION_COUNT, &blocks, 1, 10000000, NULL},
        {"size", "bytes in a block", OPTION_COUNT, &size, 1, 1UL << 30, NULL},
        {"order", "free newest first, or oldest first", OPTION_CHOICE, &order, 0, 0, order_names},
        {"touch", "the part of each block that the thread writes", OPTION_CHOICE, &touch, 0, 0, touch_names},
        {"pin", "each thread stays on one CPU", OPTION_FLAG, &pin, 0, 1, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads repeatedly allocate blocks and free them.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct work work = {rounds, blocks, size, (enum order)order, (enum touch)touch, pin != 0, NULL, NULL};
    work.rows = checked(calloc(threads * blocks, sizeof *work.rows), program_name);
    work.costs = checked(calloc(threads, sizeof *work.costs), program_name);
    double seconds = run_threads(program_name, threads, fill_and_empty, &work);
    struct thread_cost cost = {0};
    for (unsigned long t = 0; t < threads; t++) {
        thread_cost_add(&cost, &work.costs[t]);
    }
    free(work.costs);
    free(work.rows);

    unsigned long allocations = threads * rounds * blocks;
    printf("{\"workload\": \"listing1\", \"threads\": %lu, \"rounds\": %lu, \"blocks\": %lu, \"size\": %lu, "
           "\"order\": \"%s\", \"touch\": \"%s\", \"allocations\": %lu, \"seconds\": %.6f, "
           "\"allocations_per_second\": %.0f, "
           "\"client_minor_faults\": %lu, \"client_user_s\": %.6f, \"client_system_s\": %.6f}\n",
           threads, rounds, blocks, size, order_names[order], touch_names[touch], allocations, seconds,
           (double)allocations / seconds, cost.minor_faults, cost.user_s, cost.system_s);
    return 0;
}
