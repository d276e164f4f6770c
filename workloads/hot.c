/* One chain of calls at a time, in many short runs: what the caches' fast paths take, free of all else. */
#define _GNU_SOURCE /* RTLD_DEFAULT, before glibc 2.36 */
#include "support.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RUN_STEPS  20000
#define MAX_BLOCKS 1000
#define MAX_RUNS   10000
#define WARM_UP    2

/* C++'s operators, by their names in the Itanium ABI: new, delete with a size, and both with an alignment.
 * They are the preloaded allocator's, or else the C++ library's, which is opened for them. */
static void *(*new_plain)(size_t size);
static void (*delete_sized)(void *block, size_t size);
static void *(*new_aligned)(size_t size, size_t alignment);
static void (*delete_aligned)(void *block, size_t size, size_t alignment);

static void *find_operator(const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    if (found == NULL) {
        void *library = dlopen("libstdc++.so.6", RTLD_NOW);
        found = library == NULL ? NULL : dlsym(library, name);
    }
    if (found == NULL) {
        (void)fprintf(stderr, "hot: no C++ library is installed\n");
        exit(1);
    }
    return found;
}

static void find_operators(void) {
    *(void **)&new_plain = find_operator("_Znwm");
    *(void **)&delete_sized = find_operator("_ZdlPvm");
    *(void **)&new_aligned = find_operator("_ZnwmSt11align_val_t");
    *(void **)&delete_aligned = find_operator("_ZdlPvmSt11align_val_t");
}

struct loop {
    const char *name;
    unsigned (*run)(const struct loop *loop); /* returns the steps that it made */
    unsigned steps;                           /* of one run, at least */
    unsigned size;
    unsigned count;                                   /* of blocks that live at once */
    enum order { FORWARD, BACKWARD, SHUFFLED } order; /* in which they are freed */
};

static const struct loop no_loop;
static char *blocks[MAX_BLOCKS];
static unsigned orders[3][MAX_BLOCKS];
static unsigned short sizes[RUN_STEPS];
static unsigned short slots[RUN_STEPS];

/* Hides a value from the compiler. */
static inline void *opaque(void *value) {
    __asm__ volatile("" : "+r"(value));
    return value;
}

static inline void touch(void *block) {
    *(volatile char *)block = 1;
}

/* The analyzer does not see through opaque, nor that an order has each block once. */
/* NOLINTBEGIN(clang-analyzer-unix.Malloc) */

static unsigned pair(const struct loop *loop) {
    for (unsigned i = 0; i < loop->steps; i++) {
        char *block = opaque(malloc(loop->size));
        touch(block);
        free(block);
    }
    return loop->steps;
}

static unsigned zeroed_pair(const struct loop *loop) {
    for (unsigned i = 0; i < loop->steps; i++) {
        char *block = opaque(calloc(1, loop->size));
        touch(block);
        free(block);
    }
    return loop->steps;
}

static unsigned sized_pair(const struct loop *loop) {
    for (unsigned i = 0; i < loop->steps; i++) {
        char *block = opaque(new_plain(loop->size));
        touch(block);
        delete_sized(block, loop->size);
    }
    return loop->steps;
}

static unsigned aligned_pair(const struct loop *loop) {
    for (unsigned i = 0; i < loop->steps; i++) {
        char *block = opaque(new_aligned(loop->size, 64));
        touch(block);
        delete_aligned(block, loop->size, 64);
    }
    return loop->steps;
}

/* Sets of blocks, all allocated and then all freed; a size of 0 is one of 16 to 256 for each block. */
static unsigned set(const struct loop *loop) {
    const unsigned *order = orders[loop->order];
    unsigned done = 0;
    for (; done < loop->steps; done += loop->count) {
        for (unsigned i = 0; i < loop->count; i++) {
            blocks[i] = malloc(loop->size != 0 ? loop->size : 16 + sizes[i] % 241U);
            touch(blocks[i]);
        }
        for (unsigned i = 0; i < loop->count; i++) {
            free(blocks[order[i]]);
        }
    }
    return done;
}

/* A block of a random size replaces one at random. */
static unsigned replace(const struct loop *loop) {
    for (unsigned i = 0; i < loop->steps; i++) {
        unsigned slot = slots[i] % loop->count;
        free(blocks[slot]);
        blocks[slot] = malloc(16 + sizes[i]);
        touch(blocks[slot]);
    }
    for (unsigned i = 0; i < loop->count; i++) {
        free(blocks[i]);
        blocks[i] = NULL;
    }
    return loop->steps;
}

/* Sets that another thread frees, which spins until there is one, or until there is no loop. */
static _Atomic(const struct loop *) to_free;

static void *free_sets(void *unused) {
    const struct loop *loop;
    while ((loop = atomic_load_explicit(&to_free, memory_order_acquire)) != &no_loop) {
        for (unsigned i = 0; loop != NULL && i < loop->count; i++) {
            free(blocks[i]);
        }
        if (loop != NULL) {
            atomic_store_explicit(&to_free, NULL, memory_order_release);
        }
    }
    return unused;
}

static unsigned remote(const struct loop *loop) {
    unsigned done = 0;
    for (; done < loop->steps; done += loop->count) {
        for (unsigned i = 0; i < loop->count; i++) {
            blocks[i] = malloc(loop->size);
            touch(blocks[i]);
        }
        atomic_store_explicit(&to_free, loop, memory_order_release);
        while (atomic_load_explicit(&to_free, memory_order_acquire) != NULL) {
        }
    }
    return done;
}

/* From one size to another by a step: one byte, one step of 64, or doubling (a step of 0); each step is a
 * realloc, and a malloc and a free come with each way from end to end. */
static unsigned grow(const struct loop *loop) {
    unsigned done = 0;
    for (; done < loop->steps;) {
        size_t size = 16;
        char *block = malloc(size);
        while (size < loop->size) {
            size = loop->count != 0 ? size + loop->count : size * 2;
            char *moved = realloc(block, size);
            touch(moved);
            block = moved;
            ++done;
        }
        free(block);
    }
    return done;
}

static unsigned shrink(const struct loop *loop) {
    unsigned done = 0;
    for (; done < loop->steps;) {
        size_t size = loop->size;
        char *block = malloc(size);
        while (size > 16) {
            size = loop->count != 0 ? size - loop->count : size / 2;
            char *moved = realloc(block, size);
            touch(moved);
            block = moved;
            ++done;
        }
        free(block);
    }
    return done;
}

/* malloc(100), two reallocs and a free. */
static unsigned twice_grown(const struct loop *loop) {
    for (unsigned i = 0; i < loop->steps; i++) {
        char *block = opaque(malloc(100));
        touch(block);
        block = opaque(realloc(block, 220));
        block = opaque(realloc(block, 500));
        free(block);
    }
    return loop->steps;
}

/* NOLINTEND(clang-analyzer-unix.Malloc) */

static const struct loop loops[] = {
    {"pair-16", pair, RUN_STEPS, 16, 0, FORWARD},
    {"pair-48", pair, RUN_STEPS, 48, 0, FORWARD},
    {"pair-256", pair, RUN_STEPS, 256, 0, FORWARD},
    {"pair-1024", pair, RUN_STEPS, 1024, 0, FORWARD},
    {"set-10", set, RUN_STEPS, 48, 10, FORWARD},
    {"set-100", set, RUN_STEPS, 48, 100, FORWARD},
    {"set-100-reversed", set, RUN_STEPS, 48, 100, BACKWARD},
    {"set-100-random", set, RUN_STEPS, 48, 100, SHUFFLED},
    {"set-1000", set, RUN_STEPS, 0, 1000, FORWARD},
    {"set-1000-reversed", set, RUN_STEPS, 0, 1000, BACKWARD},
    {"set-1000-random", set, RUN_STEPS, 0, 1000, SHUFFLED},
    {"replace-1000", replace, RUN_STEPS, 0, 1000, FORWARD},
    {"calloc-64", zeroed_pair, RUN_STEPS, 64, 0, FORWARD},
    {"calloc-200", zeroed_pair, RUN_STEPS, 200, 0, FORWARD},
    {"calloc-1024", zeroed_pair, RUN_STEPS, 1024, 0, FORWARD},
    {"realloc-twice", twice_grown, RUN_STEPS / 4, 0, 0, FORWARD},
    {"grow-by-1", grow, RUN_STEPS, 1024, 1, FORWARD},
    {"grow-by-64", grow, RUN_STEPS, 1040, 64, FORWARD},
    {"grow-doubling", grow, RUN_STEPS, 1024, 0, FORWARD},
    {"shrink-by-64", shrink, RUN_STEPS, 1040, 64, FORWARD},
    {"shrink-halving", shrink, RUN_STEPS, 1024, 0, FORWARD},
    {"sized-48", sized_pair, RUN_STEPS, 48, 0, FORWARD},
    {"aligned-64", aligned_pair, RUN_STEPS, 64, 0, FORWARD},
    {"remote-1000", remote, RUN_STEPS, 48, 1000, FORWARD},
};
#define LOOPS (sizeof loops / sizeof *loops)

/* Sizes and slots at random; orders of the loop's own length. */
static void prepare(unsigned count) {
    unsigned long long random = 1;
    for (unsigned i = 0; i < RUN_STEPS; i++) {
        sizes[i] = (unsigned short)random_between(&random, 0, 1008);
        slots[i] = (unsigned short)random_between(&random, 0, MAX_BLOCKS - 1);
    }
    for (unsigned i = 0; i < count && i < MAX_BLOCKS; i++) {
        orders[FORWARD][i] = i;
        orders[BACKWARD][i] = count - 1 - i;
        unsigned other = (unsigned)random_between(&random, 0, i);
        orders[SHUFFLED][i] = orders[SHUFFLED][other];
        orders[SHUFFLED][other] = i;
    }
}

static int compare(const void *a, const void *b) {
    double left = *(const double *)a;
    double right = *(const double *)b;
    return (left > right) - (left < right);
}

int main(int argc, char **argv) {
    static const char *names[LOOPS + 1];
    for (size_t i = 0; i < LOOPS; i++) {
        names[i] = loops[i].name;
    }
    unsigned long chosen = 0;
    unsigned long runs = 60;
    const struct option_spec options[] = {
        {"loop", "the chain of calls", OPTION_CHOICE, &chosen, .choices = names},
        {"runs", "short runs that are timed", OPTION_COUNT, &runs, 1, MAX_RUNS, NULL},
    };
    const struct program_spec program = {
        "hot", "Times one chain of calls: minimum and median, in ns for a step.", options, 2, false,
    };
    options_parse(&program, argc, argv);
    const struct loop *loop = &loops[chosen];
    prepare(loop->count);
    if (loop->run == sized_pair || loop->run == aligned_pair) {
        find_operators();
    }
    pthread_t thread;
    if (loop->run == remote) {
        (void)pthread_create(&thread, NULL, free_sets, NULL);
    }
    static double times[MAX_RUNS];
    unsigned long steps = 0;
    for (unsigned long i = 0; i < WARM_UP + runs; i++) {
        double start = now_seconds();
        unsigned done = loop->run(loop);
        if (i >= WARM_UP) {
            times[i - WARM_UP] = (now_seconds() - start) * 1e9 / done;
        }
        steps += done;
    }
    atomic_store(&to_free, &no_loop);
    qsort(times, runs, sizeof *times, compare);
    printf("{\"steps\": %lu, \"min_ns\": %.3f, \"median_ns\": %.3f}\n", steps, times[0], times[runs / 2]);
    return 0;
}
