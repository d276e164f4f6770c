/* Kernels that run as several processes, like the ranks of an MPI program between their messages: all forked
 * from one process, each with the whole problem in its own arrays.
 *
 * The arrays are allocated after the fork, by the program's malloc. All processes have the same history, and
 * do the same from then on. So an allocator that does not randomize addresses returns the same ones in all
 * of them, and the arrays compete in shared caches. */
#ifndef CALMALLOC_WORKLOADS_RANKS_H
#define CALMALLOC_WORKLOADS_RANKS_H

#include <stddef.h>

enum { CLASS_S, CLASS_W, CLASS_A, CLASSES };

struct kernel_options {
    unsigned long class;
    unsigned long processes;
    unsigned long iterations;
    unsigned long seed;
};

/* One of the processes, as its own kernel sees it. */
struct rank;

struct kernel {
    const char *name;
    const char *summary;
    const char *classes;    /* their sizes */
    const char *iterations; /* what one is, and how many by class */
    unsigned long iterations_of[CLASSES];
    unsigned long seed;
    /* In each process: allocates, makes the problem, rank_start, works, rank_stop, verifies, and stores what
     * came out. The result has no padding: all processes must have the same, byte by byte. */
    void (*run)(struct rank *rank, const struct kernel_options *options, void *result);
    size_t result_size;
    /* Of one process, in its timed part. */
    double (*operations)(const struct kernel_options *options, const void *result);
    /* Prints the members of a JSON object that say what came out. */
    void (*print)(const void *result);
};

/* The whole program: returns the status to end with. */
int ranks_main(const struct kernel *kernel, int argc, char **argv);

/* A block from malloc for an array; it is freed after the kernel's end. */
void *rank_array(struct rank *rank, size_t count, size_t size);

/* Waits until all processes are here. What each does up to rank_stop is timed. */
void rank_start(struct rank *rank);
void rank_stop(struct rank *rank);

/* These end the process, and the run with one line, unless a figure is what it should be: at most so much; or
 * the published one, but for a fraction of it that rounding explains. No figure that is not a number is. */
void rank_bound(struct rank *rank, const char *what, double figure, double most);
void rank_compare(struct rank *rank, const char *what, double figure, double published, double tolerance);

/* The benchmarks' random numbers, by their description: x becomes 5^13 x modulo 2^46, and is returned as a
 * fraction of 2^46. (Products wrap around at 2^64, a multiple of 2^46.) */
static inline double uniform_next(unsigned long long *x) {
    *x = (*x * 1220703125ULL) & ((1ULL << 46) - 1);
    return (double)*x * 0x1p-46;
}

#endif
