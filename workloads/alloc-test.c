/* A load that resembles real programs, after alloc-test of OLogN Technologies and node.cpp. Each thread has
 * an array of slots and picks slots at random, some far more often than others. An empty slot gets a block
 * of random size, which is filled at once; the block of a full slot is read and freed. Each doubling of the
 * size is half as likely as the previous one. Written from the published description; shares no code with
 * the authors' program. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "alloc-test";

struct slot {
    unsigned char *block;
    size_t size;
};

/* Each thread's has cache lines of its own. */
struct worker {
    _Alignas(128) struct slot *slots;
    unsigned long allocations;
    unsigned long bytes;
};

struct work {
    unsigned long operations;
    unsigned long slots;
    unsigned long least;
    unsigned long doublings;
    struct worker *workers;
};

/* Four fifths of the picks go to the first fifth of the slots; and so on within that fifth, four times. */
static struct slot *pick(struct slot *slots, unsigned long count, unsigned long long *random) {
    enum { DEPTH = 4, PARTS = 5 };
    unsigned long long dice = random_next(random);
    for (unsigned depth = 0; depth < DEPTH && count >= PARTS && (dice & 0xff) < 0xff * 4 / PARTS; depth++) {
        count /= PARTS;
        dice >>= 8;
    }
    return &slots[random_next(random) % count];
}

static size_t random_size(const struct work *work, unsigned long long *random) {
    unsigned long doubling = (unsigned long)__builtin_ctzll(random_next(random) | 1ULL << 63);
    if (doubling >= work->doublings) {
        doubling = 0;
    }
    unsigned long least = work->least << doubling;
    return random_between(random, least, 2 * least - 1);
}

static void empty(struct slot *slot) {
    if (!block_holds(slot->block, slot->size, (unsigned char)slot->size)) {
        fail(program_name, "a block does not hold what was written to it");
    }
    free(slot->block);
    slot->block = NULL;
}

static void churn(unsigned long thread, void *shared) {
    const struct work *work = shared;
    struct worker *worker = &work->workers[thread];
    struct slot *slots = worker->slots;
    unsigned long long random = thread;
    unsigned long allocations = 0;
    unsigned long bytes = 0;
    for (unsigned long i = 0; i < work->operations; i++) {
        struct slot *slot = pick(slots, work->slots, &random);
        if (slot->block != NULL) {
            empty(slot);
            continue;
        }
        slot->size = random_size(work, &random);
        slot->block = checked(malloc(slot->size), program_name);
        block_fill(slot->block, slot->size, (unsigned char)slot->size);
        allocations++;
        bytes += slot->size;
    }
    for (unsigned long i = 0; i < work->slots; i++) {
        if (slots[i].block != NULL) {
            empty(&slots[i]);
        }
    }
    worker->allocations = allocations;
    worker->bytes = bytes;
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long operations = 6000000;
    unsigned long slots = 100000;
    unsigned long least = 8;
    unsigned long most = 65536;
    const struct option_spec options[] = {
        {"threads", "threads, each with its own slots", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"operations", "slots that each thread fills or empties", OPTION_COUNT, &operations, 1, 1000000000000,
         NULL},
        {"slots", "maximum number of blocks of a thread", OPTION_COUNT, &slots, 1, 100000000, NULL},
        {"min", "minimum bytes in a block", OPTION_COUNT, &least, 1, 1UL << 30, NULL},
        {"max", "exclusive upper limit of a block's bytes; larger doublings of --min do not occur",
         OPTION_COUNT, &most, 2, 1UL << 30, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads fill and empty random slots with blocks of random size, most of them small.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (2 * least > most) {
        reject_arguments(program_name, "--max is less than twice --min");
    }

    struct work work = {.operations = operations, .slots = slots, .least = least};
    while (least << (work.doublings + 1) <= most) {
        work.doublings++;
    }
    work.workers =
        checked(aligned_alloc(_Alignof(struct worker), threads * sizeof *work.workers), program_name);
    for (unsigned long t = 0; t < threads; t++) {
        /* Threads read a slot before they write it. The kernel would map a page
         * that was never written as the zero page, and copy it at the first
         * write, with an interrupt to each other CPU that runs the program. */
        work.workers[t].slots = checked(malloc(slots * sizeof(struct slot)), program_name);
        memset(work.workers[t].slots, 0, slots * sizeof(struct slot));
    }
    double seconds = run_threads(program_name, threads, churn, &work);

    unsigned long allocations = 0;
    unsigned long bytes = 0;
    for (unsigned long t = 0; t < threads; t++) {
        allocations += work.workers[t].allocations;
        bytes += work.workers[t].bytes;
        free(work.workers[t].slots);
    }
    free(work.workers);
    printf(
        "{\"workload\": \"alloc-test\", \"threads\": %lu, \"operations\": %lu, \"slots\": %lu, \"min\": %lu, "
        "\"max\": %lu, \"allocations\": %lu, \"bytes\": %lu, \"seconds\": %.6f}\n",
        threads, operations, slots, least, most, allocations, bytes, seconds);
    return 0;
}
