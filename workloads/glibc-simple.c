/* One thread allocates a number of blocks of one size and frees them, as in the published description of
 * glibc's malloc-simple benchmark: 25, 100, 400 and 1,600 blocks at a time, fewer and more than a thread's
 * cache holds, and a single block, the shortest path through any allocator. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "glibc-simple";

enum order { ORDER_FIFO, ORDER_LIFO };

static const char *const order_names[] = {"fifo", "lifo", NULL};

static const unsigned long counts[] = {1, 25, 100, 400, 1600};
enum { COUNTS = sizeof counts / sizeof counts[0], MOST_BLOCKS = 1600 };

static double measure(unsigned long rounds, unsigned long count, size_t size, enum order order) {
    static void *blocks[MOST_BLOCKS];
    double begin = now_seconds();
    for (unsigned long round = 0; round < rounds; round++) {
        for (unsigned long i = 0; i < count; i++) {
            blocks[i] = checked(malloc(size), program_name);
        }
        if (order == ORDER_FIFO) {
            for (unsigned long i = 0; i < count; i++) {
                free(blocks[i]);
            }
        } else {
            for (unsigned long i = count; i > 0; i--) {
                free(blocks[i - 1]);
            }
        }
    }
    return now_seconds() - begin;
}

int main(int argc, char **argv) {
    unsigned long size = 64;
    unsigned long pairs = 10000000;
    unsigned long order = ORDER_FIFO;
    const struct option_spec options[] = {
        {"size", "bytes in a block", OPTION_COUNT, &size, 1, 1UL << 30, NULL},
        {"pairs", "pairs of malloc and free, for each number of blocks", OPTION_COUNT, &pairs, MOST_BLOCKS,
         1000000000000, NULL},
        {"order", "free oldest first, or newest first", OPTION_CHOICE, &order, 0, 0, order_names},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "One thread repeatedly allocates a number of blocks and frees them.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    double seconds[COUNTS];
    unsigned long done[COUNTS];
    double all_seconds = 0;
    unsigned long all_pairs = 0;
    for (unsigned i = 0; i < COUNTS; i++) {
        /* The first rounds fetch memory from the system. */
        (void)measure(1, counts[i], size, (enum order)order);
        unsigned long rounds = pairs / counts[i];
        done[i] = rounds * counts[i];
        seconds[i] = measure(rounds, counts[i], size, (enum order)order);
        all_seconds += seconds[i];
        all_pairs += done[i];
    }
    printf("{\"workload\": \"glibc-simple\", \"size\": %lu, \"pairs\": %lu, \"order\": \"%s\", ", size, pairs,
           order_names[order]);
    for (unsigned i = 0; i < COUNTS; i++) {
        printf("\"ns_per_pair_of_%lu\": %.3f, ", counts[i], seconds[i] * 1e9 / (double)done[i]);
    }
    printf("\"seconds\": %.6f, \"ns_per_pair\": %.3f}\n", all_seconds, all_seconds * 1e9 / (double)all_pairs);
    return 0;
}
