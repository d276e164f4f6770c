/* Figure 10 and section 4.4 of Valat, "Impact of the Operating System Memory Allocation on CPU Intensive
 * Applications": every thread iterates over many arrays at once, element by element. Only the heads of the
 * arrays are used, which fit into L1: any additional cost is due to where the arrays start. */
#include "arrays.h"
#include "support.h"

#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "streams";

enum work { WORK_SUM, WORK_UPDATE };
enum memory { MEMORY_MALLOC, MEMORY_MMAP };

static const char *const work_names[] = {"sum", "update", NULL};
static const char *const memory_names[] = {"malloc", "mmap", NULL};
static const char *const huge_names[] = {"system", "on", "off", NULL};

/* Half of an L1 of 32 KiB, the smallest that is common. */
enum { ALL_HEADS_BYTES = 16 << 10 };

struct member {
    struct array *blocks; /* of malloc, or the one mapping */
    double **arrays;      /* one more than there are: the first follows the last */
    double begin;
    double end;
    unsigned long long checksum;
};

struct streams {
    unsigned long arrays;
    unsigned long bytes;
    unsigned long gap;
    unsigned long elements; /* of a head */
    unsigned long repeats;
    enum work work;
    enum memory memory;
    enum huge huge;
    pthread_barrier_t ready;
    struct member *members;
};

static void have_arrays(const struct streams *streams, struct member *member) {
    if (streams->memory == MEMORY_MMAP) {
        size_t bytes = (streams->arrays - 1) * streams->gap + streams->bytes;
        member->blocks[0] = array_mapped(program_name, bytes, streams->huge);
        for (unsigned long k = 0; k < streams->arrays; k++) {
            member->arrays[k] = (double *)((char *)member->blocks[0].start + k * streams->gap);
        }
    } else {
        for (unsigned long k = 0; k < streams->arrays; k++) {
            member->blocks[k] = array_malloc(program_name, streams->bytes);
            member->arrays[k] = member->blocks[k].start;
        }
    }
    member->arrays[streams->arrays] = member->arrays[0];
}

/* All numbers are whole and small, so that sums are exact in any order. */
static double first_value(unsigned long array, unsigned long element) {
    return (double)((array * 7 + element * 3) % 1021);
}

/* What update adds in one pass: another number each time, so that no pass stores what is there already. */
static double addend(unsigned long pass) {
    return (double)(1 + pass % 1000);
}

/* The sum between the arrays, at one index after the other: as many streams of loads as there are arrays.
 * Four sums at once, for one would make each addition wait for the one before it. */
static __attribute__((noinline)) double sum(double *const *arrays, unsigned long count,
                                            unsigned long elements) {
    double total = 0;
    for (unsigned long i = 0; i < elements; i++) {
        double sums[4] = {0, 0, 0, 0};
        unsigned long k = 0;
        for (; k + 4 <= count; k += 4) {
            sums[0] += arrays[k][i];
            sums[1] += arrays[k + 1][i];
            sums[2] += arrays[k + 2][i];
            sums[3] += arrays[k + 3][i];
        }
        for (; k < count; k++) {
            sums[0] += arrays[k][i];
        }
        total += sums[0] + sums[1] + (sums[2] + sums[3]);
    }
    return total;
}

/* Each element from the one before it in the next array. Between the store that a load reads from and the
 * load, every other array is stored to at the same index: where arrays start alike modulo 4 KiB, the load has
 * to find out of each of these stores that it is to another page. */
static __attribute__((noinline)) void update(double *const *arrays, unsigned long count,
                                             unsigned long elements, double more) {
    for (unsigned long i = 1; i < elements; i++) {
        for (unsigned long k = 0; k < count; k++) {
            arrays[k][i] = arrays[k + 1][i - 1] + more;
        }
    }
}

static double sum_expected(const struct streams *streams) {
    double total = 0;
    for (unsigned long k = 0; k < streams->arrays; k++) {
        for (unsigned long i = 0; i < streams->elements; i++) {
            total += first_value(k, i);
        }
    }
    return total;
}

/* After any number of passes an element has what its diagonal began with, and the last pass's addends. */
static unsigned long long check_update(const struct streams *streams, double *const *arrays) {
    double more = addend(streams->repeats);
    unsigned long long checksum = 0;
    for (unsigned long k = 0; k < streams->arrays; k++) {
        for (unsigned long i = 0; i < streams->elements; i++) {
            double expected = first_value((k + i) % streams->arrays, 0) + (double)i * more;
            if (arrays[k][i] != expected) {
                fail(program_name, "an element is not what the passes make of it");
            }
            checksum = checksum_add(checksum, (unsigned long long)arrays[k][i]);
        }
    }
    return checksum;
}

static void work(unsigned long thread, void *shared) {
    struct streams *streams = shared;
    struct member *member = &streams->members[thread];
    have_arrays(streams, member);
    double *const *arrays = member->arrays;
    for (unsigned long k = 0; k < streams->arrays; k++) {
        for (unsigned long i = 0; i < streams->elements; i++) {
            arrays[k][i] = first_value(k, i);
        }
    }

    /* Pass 0 warms up. */
    double expected = streams->work == WORK_SUM ? sum_expected(streams) : 0;
    for (unsigned long pass = 0; pass <= streams->repeats; pass++) {
        if (pass == 1) {
            (void)pthread_barrier_wait(&streams->ready);
            member->begin = now_seconds();
        }
        if (streams->work == WORK_SUM) {
            double total = sum(arrays, streams->arrays, streams->elements);
            if (total != expected) {
                fail(program_name, "the arrays do not hold what was written to them");
            }
            member->checksum = checksum_add(member->checksum, (unsigned long long)total);
        } else {
            update(arrays, streams->arrays, streams->elements, addend(pass));
        }
        /* Memory may have changed, for all the compiler knows: no pass is like the one before it. */
        __asm__ volatile("" ::: "memory");
    }
    member->end = now_seconds();
    if (streams->work == WORK_UPDATE) {
        member->checksum = check_update(streams, arrays);
    }
}

static void check_arguments(const struct streams *streams, unsigned long head) {
    if (head % LINE_BYTES != 0) {
        reject_arguments(program_name, "--head is no multiple of 64");
    }
    if (head > streams->bytes) {
        reject_arguments(program_name, "--head is more than --bytes");
    }
    if (streams->memory == MEMORY_MMAP && streams->gap % sizeof(double) != 0) {
        reject_arguments(program_name, "--gap is no multiple of 8");
    }
    if (streams->memory == MEMORY_MMAP && streams->gap < head) {
        reject_arguments(program_name, "--gap is less than --head");
    }
    if (streams->memory == MEMORY_MALLOC && (streams->gap != 0 || streams->huge != HUGE_SYSTEM)) {
        reject_arguments(program_name, "--gap and --huge are for --memory mmap");
    }
}

static void report(const struct streams *streams, unsigned long threads, unsigned long head) {
    double begin = streams->members[0].begin;
    double end = streams->members[0].end;
    double spent = 0;
    unsigned long long checksum = 0;
    for (unsigned long t = 0; t < threads; t++) {
        const struct member *member = &streams->members[t];
        begin = member->begin < begin ? member->begin : begin;
        end = member->end > end ? member->end : end;
        spent += member->end - member->begin;
        checksum = checksum_add(checksum, member->checksum);
    }
    /* update leaves the first element of each array as it is. */
    unsigned long worked = streams->elements - (streams->work == WORK_UPDATE ? 1 : 0);
    double elements = (double)streams->repeats * (double)streams->arrays * (double)worked;
    printf("{\"workload\": \"streams\", \"arrays\": %lu, \"threads\": %lu, \"bytes\": %lu, \"gap\": %lu, "
           "\"work\": \"%s\", \"memory\": \"%s\", \"huge\": \"%s\", \"head\": %lu, \"repeats\": %lu, "
           "\"distinct_starts\": %lu, \"huge_kib\": %lu, \"checksum\": \"%016llx\", \"seconds\": %.6f, "
           "\"ns_per_element\": %.4f}\n",
           streams->arrays, threads, streams->bytes, streams->gap, work_names[streams->work],
           memory_names[streams->memory], huge_names[streams->huge], head, streams->repeats,
           distinct_starts((void *const *)streams->members[0].arrays, streams->arrays),
           huge_kib(program_name), checksum, end - begin, spent / (double)threads / elements * 1e9);
}

int main(int argc, char **argv) {
    unsigned long arrays = 16;
    unsigned long threads = 1;
    unsigned long bytes = 1UL << 20;
    unsigned long gap = 0;
    unsigned long chosen_work = WORK_SUM;
    unsigned long memory = MEMORY_MALLOC;
    unsigned long huge = HUGE_SYSTEM;
    unsigned long head = 0;
    unsigned long repeats = 20000;
    const struct option_spec options[] = {
        {"arrays", "arrays of each thread", OPTION_COUNT, &arrays, 2, 4096, NULL},
        {"threads", "threads, each with its own arrays", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"bytes", "bytes in an array", OPTION_COUNT, &bytes, 64, 1UL << 36, NULL},
        {"gap", "mmap: bytes from an array's start to the next one's (default: --bytes)", OPTION_COUNT, &gap,
         64, 1UL << 36, NULL},
        {"work", "add up all arrays, or compute each from its neighbour", OPTION_CHOICE, &chosen_work, 0, 0,
         work_names},
        {"memory", "a block for each array, or a mapping for all of a thread's", OPTION_CHOICE, &memory, 0, 0,
         memory_names},
        {"huge", "mmap: huge pages: the system's setting, on, or off", OPTION_CHOICE, &huge, 0, 0,
         huge_names},
        {"head", "bytes of each array that are used (default: 16 KiB for all arrays)", OPTION_COUNT, &head,
         64, 1UL << 36, NULL},
        {"repeats", "timed passes", OPTION_COUNT, &repeats, 1, 1000000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads repeatedly iterate over the heads of many large arrays at once.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    if (head == 0) {
        head = ALL_HEADS_BYTES / arrays / LINE_BYTES * LINE_BYTES;
        head = head < LINE_BYTES ? LINE_BYTES : head;
    }
    if (memory == MEMORY_MMAP && gap == 0) {
        gap = bytes;
    }
    struct streams streams = {.arrays = arrays,
                              .bytes = bytes,
                              .gap = gap,
                              .elements = head / sizeof(double),
                              .repeats = repeats,
                              .work = (enum work)chosen_work,
                              .memory = (enum memory)memory,
                              .huge = (enum huge)huge};
    check_arguments(&streams, head);
    streams.members = checked(calloc(threads, sizeof *streams.members), program_name);
    for (unsigned long t = 0; t < threads; t++) {
        streams.members[t].blocks = checked(calloc(arrays, sizeof *streams.members[t].blocks), program_name);
        streams.members[t].arrays =
            checked(calloc(arrays + 1, sizeof *streams.members[t].arrays), program_name);
    }
    if (pthread_barrier_init(&streams.ready, NULL, (unsigned)threads) != 0) {
        fail(program_name, "cannot make a barrier");
    }
    (void)run_threads(program_name, threads, work, &streams);
    report(&streams, threads, head);

    (void)pthread_barrier_destroy(&streams.ready);
    for (unsigned long t = 0; t < threads; t++) {
        for (unsigned long k = 0; k < (memory == MEMORY_MMAP ? 1 : arrays); k++) {
            array_free(&streams.members[t].blocks[k]);
        }
        free(streams.members[t].blocks);
        free(streams.members[t].arrays);
    }
    free(streams.members);
    return 0;
}
