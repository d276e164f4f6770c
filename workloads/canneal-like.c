/* A stand-in for canneal of the PARSEC suite: simulated annealing that shortens the wires of a chip.
 *
 * Kept: a netlist of hundreds of thousands of elements, each of a few small blocks (the element, its name,
 * its inputs, a growing list of outputs), which one thread builds, with lookups by name, before the measured
 * work begins. Then threads swap the positions of random elements, almost without allocation: only the
 * blocks' locations in memory matter, since each move follows pointers to elements all over the heap. Left
 * out: the input file, and races. The original swaps by atomic instructions, and a move may see others half
 * done; here moves are evaluated in batches of distinct pairs against the same state, and then executed, so
 * that the result does not depend on threads. After: Bienia et al., "The PARSEC Benchmark Suite:
 * Characterization and Architectural Implications" (2008), the section on canneal. Written from that
 * description; shares no code with the program. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "canneal-like";

enum { MOST_NAME = 24 };

struct place {
    int x;
    int y;
};

struct element {
    char *name;
    struct place *place;
    struct element *next; /* of the same bucket */
    struct element **inputs;
    struct element **outputs;
    unsigned input_count;
    unsigned output_count;
    unsigned output_room;
};

struct netlist {
    struct element **elements; /* by number */
    struct element **buckets;  /* by name */
    struct place *places;
    unsigned long count;
    unsigned long bucket_count;
};

struct annealing {
    const struct netlist *netlist;
    unsigned long threads;
    unsigned long steps;
    unsigned long moves; /* of a step */
    unsigned long batch; /* pairs that are weighed at once */
    pthread_barrier_t barrier;
    unsigned char *accepted; /* one for each pair of a batch */
    unsigned long *made;     /* by thread */
};

static void name_of(unsigned long number, char name[MOST_NAME]) {
    /* As tools that make netlists name things: what they are alike in comes first. */
    (void)snprintf(name, MOST_NAME, "net_%010lx", number);
}

static unsigned long bucket_of(const struct netlist *netlist, const char *name) {
    unsigned long long hash = 0;
    for (; *name != '\0'; name++) {
        hash = hash * 31 + (unsigned char)*name;
    }
    return hash % netlist->bucket_count;
}

static struct element *new_element(struct netlist *netlist, const char *name, unsigned long number) {
    struct element *element = checked(calloc(1, sizeof *element), program_name);
    size_t size = strlen(name) + 1;
    element->name = checked(malloc(size), program_name);
    memcpy(element->name, name, size);
    element->place = &netlist->places[number];
    unsigned long bucket = bucket_of(netlist, name);
    element->next = netlist->buckets[bucket];
    netlist->buckets[bucket] = element;
    return element;
}

static struct element *find(const struct netlist *netlist, const char *name) {
    struct element *element = netlist->buckets[bucket_of(netlist, name)];
    while (element != NULL && strcmp(element->name, name) != 0) {
        element = element->next;
    }
    return element;
}

static void add_output(struct element *element, struct element *output) {
    if (element->output_count == element->output_room) {
        element->output_room = element->output_room == 0 ? 1 : 2 * element->output_room;
        element->outputs =
            checked(realloc(element->outputs, element->output_room * sizeof(struct element *)), program_name);
    }
    element->outputs[element->output_count++] = output;
}

/* The places of the elements are a square, at first in the order of their numbers. */
static void build(struct netlist *netlist, unsigned long count) {
    *netlist = (struct netlist){.count = count, .bucket_count = count | 1};
    netlist->elements = checked(calloc(count, sizeof(struct element *)), program_name);
    netlist->buckets = checked(calloc(netlist->bucket_count, sizeof(struct element *)), program_name);
    netlist->places = checked(calloc(count, sizeof *netlist->places), program_name);
    int side = 1;
    while ((unsigned long)side * (unsigned long)side < count) {
        side++;
    }
    char name[MOST_NAME];
    for (unsigned long i = 0; i < count; i++) {
        netlist->places[i] = (struct place){(int)(i % (unsigned long)side), (int)(i / (unsigned long)side)};
        name_of(i, name);
        netlist->elements[i] = new_element(netlist, name, i);
    }
    unsigned long long random = 1;
    for (unsigned long i = 0; i < count; i++) {
        struct element *element = netlist->elements[i];
        element->input_count = (unsigned)random_between(&random, 1, 5);
        element->inputs = checked(malloc(element->input_count * sizeof(struct element *)), program_name);
        for (unsigned k = 0; k < element->input_count; k++) {
            name_of(random_next(&random) % count, name);
            element->inputs[k] = find(netlist, name);
            add_output(element->inputs[k], element);
        }
    }
}

static void dispose(struct netlist *netlist) {
    for (unsigned long i = 0; i < netlist->count; i++) {
        struct element *element = netlist->elements[i];
        free(element->inputs);
        free(element->outputs);
        free(element->name);
        free(element);
    }
    free(netlist->elements);
    free(netlist->buckets);
    free(netlist->places);
}

static long distance(const struct place *a, const struct place *b) {
    return labs((long)a->x - b->x) + labs((long)a->y - b->y);
}

/* The length of an element's wires if it were at a place; a wire to other stays as it is. */
static long wires(const struct element *element, const struct place *place, const struct element *other) {
    long sum = 0;
    for (unsigned k = 0; k < element->input_count; k++) {
        const struct place *there = element->inputs[k] == other ? element->place : element->inputs[k]->place;
        sum += element->inputs[k] == element ? 0 : distance(place, there);
    }
    for (unsigned k = 0; k < element->output_count; k++) {
        const struct place *there =
            element->outputs[k] == other ? element->place : element->outputs[k]->place;
        sum += element->outputs[k] == element ? 0 : distance(place, there);
    }
    return sum;
}

static long wires_now(const struct element *element) {
    return wires(element, element->place, NULL);
}

static unsigned long common_divisor(unsigned long a, unsigned long b) {
    while (b != 0) {
        unsigned long rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Steps through all elements in an order of no pattern, so that no element is twice in a batch. */
struct order {
    unsigned long first;
    unsigned long stride;
};

static struct order draw_order(unsigned long long *random, unsigned long count) {
    struct order order = {random_next(random) % count, 0};
    do {
        order.stride = 1 + random_next(random) % count;
    } while (common_divisor(order.stride, count) != 1);
    return order;
}

static struct element *element_at(const struct netlist *netlist, struct order order, unsigned long i) {
    unsigned __int128 place = (unsigned __int128)order.stride * i + order.first;
    return netlist->elements[(unsigned long)(place % netlist->count)];
}

/* Metropolis' rule: the trailing zeros of random bits are as the exponential distribution's, in units. */
static bool accepts(long longer, unsigned long temperature, unsigned long long bits) {
    return longer < 0 ||
           (unsigned long)longer < temperature * (unsigned long)__builtin_ctzll(bits | 1ULL << 62);
}

static void anneal(unsigned long thread, void *shared) {
    struct annealing *annealing = shared;
    const struct netlist *netlist = annealing->netlist;
    unsigned long made = 0; /* the threads' counts share a cache line */
    unsigned long temperature = 1 + (unsigned long)netlist->places[netlist->count - 1].y / 2;
    unsigned long long random = 2; /* the same in all threads */
    for (unsigned long step = 0; step < annealing->steps; step++) {
        for (unsigned long move = 0; move < annealing->moves; move += annealing->batch) {
            unsigned long left = annealing->moves - move;
            unsigned long pairs = left < annealing->batch ? left : annealing->batch;
            unsigned long begin = pairs * thread / annealing->threads;
            unsigned long end = pairs * (thread + 1) / annealing->threads;
            struct order order = draw_order(&random, netlist->count);
            unsigned long long chance = random_next(&random);
            for (unsigned long i = begin; i < end; i++) {
                const struct element *a = element_at(netlist, order, 2 * i);
                const struct element *b = element_at(netlist, order, 2 * i + 1);
                long longer = wires(a, b->place, b) - wires_now(a) + wires(b, a->place, a) - wires_now(b);
                /* Of a wire between the two, neither end has moved against the other. */
                unsigned long long state = chance + i;
                annealing->accepted[i] = accepts(longer, temperature, random_next(&state));
            }
            (void)pthread_barrier_wait(&annealing->barrier);
            for (unsigned long i = begin; i < end; i++) {
                if (annealing->accepted[i]) {
                    struct element *a = element_at(netlist, order, 2 * i);
                    struct element *b = element_at(netlist, order, 2 * i + 1);
                    struct place *place = a->place;
                    a->place = b->place;
                    b->place = place;
                    made++;
                }
            }
            (void)pthread_barrier_wait(&annealing->barrier);
        }
        temperature = temperature * 3 / 4;
    }
    annealing->made[thread] = made;
}

static unsigned long total_length(const struct netlist *netlist) {
    unsigned long sum = 0;
    for (unsigned long i = 0; i < netlist->count; i++) {
        sum += (unsigned long)wires_now(netlist->elements[i]);
    }
    return sum / 2; /* each wire has two ends */
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long elements = 250000;
    unsigned long steps = 12;
    unsigned long moves = 80000;
    unsigned long batch = 2000;
    const struct option_spec options[] = {
        {"threads", "threads that evaluate and execute moves", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"elements", "elements of the netlist", OPTION_COUNT, &elements, 2, 100000000, NULL},
        {"steps", "steps of decreasing temperature", OPTION_COUNT, &steps, 1, 1000000, NULL},
        {"moves", "moves evaluated in a step", OPTION_COUNT, &moves, 1, 1000000000, NULL},
        {"batch", "moves evaluated against the same state", OPTION_COUNT, &batch, 1, 1000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Builds a netlist of small blocks, in which threads swap elements to shorten wires.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (2 * batch > elements) {
        reject_arguments(program_name, "--batch is more than half of --elements");
    }

    struct netlist netlist;
    double begin = now_seconds();
    build(&netlist, elements);
    double built = now_seconds() - begin;
    unsigned long before = total_length(&netlist);
    struct annealing annealing = {
        .netlist = &netlist,
        .threads = threads,
        .steps = steps,
        .moves = moves,
        .batch = batch,
        .accepted = checked(calloc(batch, 1), program_name),
        .made = checked(calloc(threads, sizeof *annealing.made), program_name),
    };
    if (pthread_barrier_init(&annealing.barrier, NULL, (unsigned)threads) != 0) {
        fail(program_name, "cannot make a barrier");
    }
    double seconds = run_threads(program_name, threads, anneal, &annealing);
    unsigned long made = 0;
    for (unsigned long t = 0; t < threads; t++) {
        made += annealing.made[t];
    }
    unsigned long after = total_length(&netlist);
    unsigned long long checksum = 0;
    for (unsigned long i = 0; i < elements; i++) {
        checksum = checksum_add(checksum, (unsigned long long)(netlist.elements[i]->place - netlist.places));
    }
    free(annealing.made);
    free(annealing.accepted);
    (void)pthread_barrier_destroy(&annealing.barrier);
    dispose(&netlist);
    printf("{\"workload\": \"canneal-like\", \"threads\": %lu, \"elements\": %lu, \"steps\": %lu, \"moves\": "
           "%lu, \"batch\": %lu, \"swaps\": %lu, \"wires_before\": %lu, \"wires_after\": %lu, "
           "\"checksum\": \"%016llx\", \"build_seconds\": %.6f, \"seconds\": %.6f}\n",
           threads, elements, steps, moves, batch, made, before, after, checksum, built, seconds);
    return 0;
}
