/* After EP of the NAS Parallel Benchmarks: pairs of normally distributed numbers, counted by square annuli.
 *
 * Kept: the generator of uniform numbers; batches of 65,536 pairs, whose numbers are first drawn into one
 * array; Marsaglia's polar method; the counts and the two sums. It is the one kernel here whose memory
 * fits in a CPU's own caches, whatever the class.
 * Left out: the division of one problem among the processes.
 * Verified: the published sums, after as many batches as they are of; after any number, what chance allows of
 * the pairs accepted, of those in each annulus, and of the sums.
 * After: Bailey et al., "The NAS Parallel Benchmarks" (1991), kernel EP, sharing no code with the
 * benchmark. */
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { PAIRS = 65536, ANNULI = 12, SEED = 271828183 };

/* How far a count or a sum may lie from what is expected, in standard deviations. */
static const double luck = 6;

static const double tolerance = 1e-8; /* of the published sums */

struct result {
    double sums[2];
    unsigned long counts[ANNULI];
    unsigned long published; /* how many of the published sums were compared */
};

/* All classes have one sequence of batches: a larger one goes through the sums of the smaller ones. */
static const struct problem {
    unsigned long batches;
    double published[2]; /* sums after so many */
} problems[CLASSES] = {
    {256, {-3.247834652034740e3, -6.958407078382297e3}},
    {512, {-2.863319731645753e3, -6.320053679109499e3}},
    {4096, {-4.295875165629892e3, -1.580732573678431e4}},
};

static void count_batch(const double *uniform, struct result *result) {
    for (size_t i = 0; i < PAIRS; i++) {
        double x = 2 * uniform[2 * i] - 1;
        double y = 2 * uniform[2 * i + 1] - 1;
        double square = x * x + y * y;
        if (square <= 1) {
            double stretch = sqrt(-2 * log(square) / square);
            x *= stretch;
            y *= stretch;
            /* An odd fraction of 2^46 is no nearer to a half than 2^-46, so nothing is above 11.2. */
            double larger = fabs(x) > fabs(y) ? fabs(x) : fabs(y);
            result->counts[(unsigned)larger]++;
            result->sums[0] += x;
            result->sums[1] += y;
        }
    }
}

/* How far from what is expected of n trials that succeed with probability p each, in standard deviations; to
 * which 1 is added, for where none is expected. */
static double distance(double successes, double n, double p) {
    return fabs(successes - n * p) / (sqrt(n * p * (1 - p)) + 1);
}

static void verify(struct rank *rank, const struct kernel_options *options, const struct result *result) {
    double accepted = 0;
    for (unsigned i = 0; i < ANNULI; i++) {
        accepted += (double)result->counts[i];
    }
    double in_circle = distance(accepted, (double)options->iterations * PAIRS, atan(1));
    rank_bound(rank, "the distance of the pairs in the circle from their expectation", in_circle, luck);
    for (unsigned i = 0; i < ANNULI; i++) {
        /* Both numbers of a pair are below i with the square of one's probability. */
        double inner = erf(i / sqrt(2));
        double outer = erf((i + 1) / sqrt(2));
        double in_annulus = distance((double)result->counts[i], accepted, outer * outer - inner * inner);
        rank_bound(rank, "the distance of the pairs in an annulus from their expectation", in_annulus, luck);
    }
    for (unsigned i = 0; i < 2; i++) {
        rank_bound(rank, "the distance of a sum from 0", fabs(result->sums[i]) / sqrt(accepted), luck);
    }
}

static double operations(const struct kernel_options *options, const void *result) {
    (void)result;
    return 2.0 * PAIRS * (double)options->iterations; /* uniform numbers */
}

static void print(const void *stored) {
    const struct result *result = stored;
    printf("\"sum_x\": %.15e, \"sum_y\": %.15e, \"counts\": [", result->sums[0], result->sums[1]);
    for (unsigned i = 0; i < ANNULI; i++) {
        printf("%s%lu", i == 0 ? "" : ", ", result->counts[i]);
    }
    printf("], \"published\": %lu", result->published);
}

static void draw_batch(double *uniform, unsigned long long *random) {
    for (size_t i = 0; i < 2UL * PAIRS; i++) {
        uniform[i] = uniform_next(random);
    }
}

static void run(struct rank *rank, const struct kernel_options *options, void *stored) {
    struct result *result = stored;
    double *uniform = rank_array(rank, 2UL * PAIRS, sizeof *uniform);
    unsigned long long random = options->seed;
    struct result untimed = {0};
    draw_batch(uniform, &random);
    count_batch(uniform, &untimed);

    double sums[CLASSES][2] = {{0}};
    random = options->seed;
    rank_start(rank);
    for (unsigned long batch = 1; batch <= options->iterations; batch++) {
        draw_batch(uniform, &random);
        count_batch(uniform, result);
        for (unsigned c = 0; c < CLASSES; c++) {
            if (batch == problems[c].batches) {
                memcpy(sums[c], result->sums, sizeof sums[c]);
            }
        }
    }
    rank_stop(rank);

    verify(rank, options, result);
    for (unsigned c = 0; c < CLASSES; c++) {
        if (options->seed == SEED && options->iterations >= problems[c].batches) {
            const double *published = problems[c].published;
            result->published++;
            rank_compare(rank, "the first sum", sums[c][0], published[0], tolerance);
            rank_compare(rank, "the second sum", sums[c][1], published[1], tolerance);
        }
    }
}

static const struct kernel kernel = {
    .name = "ep-like",
    .summary = "Processes draw pairs of normally distributed numbers, and count them by size.",
    .classes = "2^24, 2^25 or 2^28 pairs; an array of 1 MiB",
    .iterations = "batches of 65,536 pairs (default by class: 256, 512, 4096)",
    .iterations_of = {256, 512, 4096},
    .seed = SEED,
    .run = run,
    .result_size = sizeof(struct result),
    .operations = operations,
    .print = print,
};

int main(int argc, char **argv) {
    return ranks_main(&kernel, argc, argv);
}
