/* After FT of the NAS Parallel Benchmarks: diffusion on a periodic grid, solved by Fourier transforms.
 *
 * Kept: a random state, transformed once; for each step in time, the spectrum multiplied by what the step
 * leaves of it, transformed back, and summed up at 1,024 points; transforms axis by axis, 16 lines at once,
 * copied to a small array, transformed there (radix 2, from one array to another and back) and copied back.
 * Where lines run across, each copy strides by a power of two, which caches of few ways bear least.
 * Left out: the division of the grid among the processes, and its transposition by messages.
 * Verified: the state is what its transform's inverse gives, and has the energy that Parseval's theorem
 * demands; one long step leads to where the short ones did; the sums are the published ones, in the steps for
 * which there are any.
 * After: Bailey et al., "The NAS Parallel Benchmarks" (1991), kernel FT, sharing no code with the
 * benchmark. The transform is Stockham's, by its textbook description. */
#include "ranks.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { AXES = 3, LINES = 16, SUMMED = 1024, PUBLISHED_STEPS = 6, SEED = 314159265 };

static const double pi = 3.14159265358979323846;
static const double diffusivity = 1e-6;
static const double tolerance = 1e-12;

struct number {
    double re;
    double im;
};

/* Lengths are powers of two. The first axis is the one whose neighbours lie next to each other. */
static const struct problem {
    size_t lengths[AXES];
    struct number published[PUBLISHED_STEPS];
} problems[CLASSES] = {
    {{64, 64, 64},
     {{5.546087004964e2, 4.845363331978e2},
      {5.546385409189e2, 4.865304269511e2},
      {5.546148406171e2, 4.883910722336e2},
      {5.545423607415e2, 4.901273169046e2},
      {5.544255039624e2, 4.917475857993e2},
      {5.542683411902e2, 4.932597244941e2}}},
    {{128, 128, 32},
     {{5.673612178944e2, 5.293246849175e2},
      {5.631436885271e2, 5.282149986629e2},
      {5.594024089970e2, 5.270996558037e2},
      {5.560698047020e2, 5.260027904925e2},
      {5.530898991250e2, 5.249400845633e2},
      {5.504159734538e2, 5.239212247086e2}}},
    {{256, 256, 128},
     {{5.046735008193e2, 5.114047905510e2},
      {5.059412319734e2, 5.098809666433e2},
      {5.069376896287e2, 5.098144042213e2},
      {5.077892868474e2, 5.101336130759e2},
      {5.085233095391e2, 5.104914655194e2},
      {5.091487099959e2, 5.107917842803e2}}},
};

struct grid {
    size_t lengths[AXES];
    size_t points;
    struct number *state;
    struct number *spectrum;
    double *decay;        /* what a step leaves of each point of the spectrum */
    struct number *roots; /* of unity, of the order of the longest axis: the first half of them */
    size_t longest;
    struct number *lines; /* room to transform in, twice */
    struct number *other_lines;
};

struct result {
    struct number sum; /* after the last step */
    double inverse_error;
    double energy_error;
    double sum_error;        /* to that of a single step of the same time */
    unsigned long published; /* how many published sums were compared */
};

static struct number times(struct number a, struct number b) {
    return (struct number){.re = a.re * b.re - a.im * b.im, .im = a.re * b.im + a.im * b.re};
}

/* One of Stockham's passes over LINES lines, which lie interleaved. It joins transforms of half the length;
 * the results come out in order, without bits reversed. */
static void pass(const struct grid *grid, const struct number *restrict from, struct number *restrict to,
                 size_t half, size_t stride, double sign) {
    size_t step = grid->longest / (2 * half);
    for (size_t j = 0; j < half; j++) {
        struct number root = grid->roots[j * step];
        root.im *= sign;
        const struct number *low = from + j * stride * LINES;
        const struct number *high = low + half * stride * LINES;
        struct number *sums = to + 2 * j * stride * LINES;
        struct number *differences = sums + stride * LINES;
        for (size_t k = 0; k < stride * LINES; k++) {
            struct number a = low[k];
            struct number b = high[k];
            sums[k] = (struct number){.re = a.re + b.re, .im = a.im + b.im};
            differences[k] = times((struct number){.re = a.re - b.re, .im = a.im - b.im}, root);
        }
    }
}

/* Transforms the lines in grid->lines, and returns where they are then. */
static struct number *transform_lines(const struct grid *grid, size_t length, double sign) {
    struct number *from = grid->lines;
    struct number *to = grid->other_lines;
    for (size_t half = length / 2, stride = 1; half > 0; half /= 2, stride *= 2) {
        pass(grid, from, to, half, stride, sign);
        struct number *swap = from;
        from = to;
        to = swap;
    }
    return from;
}

/* Transforms along one axis, in place. Across the first axis, lines next to each other start next to each
 * other. */
static void transform_axis(const struct grid *grid, struct number *values, unsigned axis, double sign) {
    size_t length = grid->lengths[axis];
    size_t along = axis == 0 ? 1 : axis == 1 ? grid->lengths[0] : grid->lengths[0] * grid->lengths[1];
    size_t across = axis == 0 ? length : 1;
    /* A block is of the fewest points that whole groups of lines have for themselves; it starts with their
     * starts. */
    size_t starts = axis == 0 ? length * LINES : along;
    size_t block = axis == 0 ? length * LINES : along * length;
    for (size_t begin = 0; begin < grid->points; begin += block) {
        for (size_t first = begin; first < begin + starts; first += across * LINES) {
            struct number *start = values + first;
            for (size_t i = 0; i < length; i++) {
                for (size_t line = 0; line < LINES; line++) {
                    grid->lines[i * LINES + line] = start[i * along + line * across];
                }
            }
            const struct number *done = transform_lines(grid, length, sign);
            for (size_t i = 0; i < length; i++) {
                for (size_t line = 0; line < LINES; line++) {
                    start[i * along + line * across] = done[i * LINES + line];
                }
            }
        }
    }
}

static void transform(const struct grid *grid, struct number *values) {
    for (unsigned axis = 0; axis < AXES; axis++) {
        transform_axis(grid, values, axis, 1);
    }
}

/* Up to the number of points, by which what comes out is too large. */
static void transform_back(const struct grid *grid, struct number *values) {
    for (unsigned axis = AXES; axis > 0; axis--) {
        transform_axis(grid, values, axis - 1, -1);
    }
}

static struct number draw(unsigned long long *random) {
    double re = uniform_next(random);
    return (struct number){.re = re, .im = uniform_next(random)};
}

static void draw_state(const struct grid *grid, struct number *values, unsigned long seed) {
    unsigned long long random = seed;
    for (size_t i = 0; i < grid->points; i++) {
        values[i] = draw(&random);
    }
}

/* Frequencies from the middle of an axis on are negative. */
static double frequency(size_t i, size_t length) {
    return i < length / 2 ? (double)i : (double)i - (double)length;
}

/* What has not decayed of each point of the spectrum, after some steps. */
static void find_decay(const struct grid *grid, double steps) {
    double rate = -4 * pi * pi * diffusivity * steps;
    size_t i = 0;
    for (size_t z = 0; z < grid->lengths[2]; z++) {
        for (size_t y = 0; y < grid->lengths[1]; y++) {
            for (size_t x = 0; x < grid->lengths[0]; x++) {
                double a = frequency(x, grid->lengths[0]);
                double b = frequency(y, grid->lengths[1]);
                double c = frequency(z, grid->lengths[2]);
                grid->decay[i++] = exp(rate * (a * a + b * b + c * c));
            }
        }
    }
}

static void find_roots(const struct grid *grid) {
    for (size_t i = 0; i < grid->longest / 2; i++) {
        double angle = 2 * pi * (double)i / (double)grid->longest;
        grid->roots[i] = (struct number){.re = cos(angle), .im = sin(angle)};
    }
}

static struct number step(const struct grid *grid) {
    for (size_t i = 0; i < grid->points; i++) {
        grid->spectrum[i].re *= grid->decay[i];
        grid->spectrum[i].im *= grid->decay[i];
        grid->state[i] = grid->spectrum[i];
    }
    transform_back(grid, grid->state);
    struct number sum = {0};
    for (size_t j = 1; j <= SUMMED; j++) {
        size_t x = j & (grid->lengths[0] - 1);
        size_t y = (3 * j) & (grid->lengths[1] - 1);
        size_t z = (5 * j) & (grid->lengths[2] - 1);
        const struct number *at = &grid->state[(z * grid->lengths[1] + y) * grid->lengths[0] + x];
        sum.re += at->re / (double)grid->points;
        sum.im += at->im / (double)grid->points;
    }
    return sum;
}

static double energy(const struct grid *grid, const struct number *values) {
    double sum = 0;
    for (size_t i = 0; i < grid->points; i++) {
        sum += values[i].re * values[i].re + values[i].im * values[i].im;
    }
    return sum;
}

/* Goes there and back once more, and to the last step at once. */
static void verify(struct rank *rank, const struct grid *grid, const struct kernel_options *options,
                   struct result *result) {
    double points = (double)grid->points;
    draw_state(grid, grid->spectrum, options->seed);
    double before = energy(grid, grid->spectrum);
    transform(grid, grid->spectrum);
    result->energy_error = fabs(energy(grid, grid->spectrum) / points / before - 1);
    rank_bound(rank, "the error of the energy of the transform", result->energy_error, tolerance);

    memcpy(grid->state, grid->spectrum, grid->points * sizeof *grid->state);
    transform_back(grid, grid->state);
    unsigned long long random = options->seed;
    for (size_t i = 0; i < grid->points; i++) {
        struct number was = draw(&random);
        double error =
            fmax(fabs(grid->state[i].re / points - was.re), fabs(grid->state[i].im / points - was.im));
        rank_bound(rank, "the error of the inverse of the transform", error, tolerance);
        result->inverse_error = fmax(result->inverse_error, error);
    }

    find_decay(grid, (double)options->iterations);
    struct number sum = step(grid);
    result->sum_error = hypot(sum.re - result->sum.re, sum.im - result->sum.im) / hypot(sum.re, sum.im);
    rank_bound(rank, "the error of the last sum", result->sum_error, tolerance * (double)options->iterations);
}

static void run(struct rank *rank, const struct kernel_options *options, void *stored) {
    struct result *result = stored;
    const struct problem *problem = &problems[options->class];
    struct grid grid = {.points = 1};
    for (unsigned axis = 0; axis < AXES; axis++) {
        grid.lengths[axis] = problem->lengths[axis];
        grid.points *= problem->lengths[axis];
        grid.longest = grid.lengths[axis] > grid.longest ? grid.lengths[axis] : grid.longest;
    }
    grid.spectrum = rank_array(rank, grid.points, sizeof *grid.spectrum);
    grid.state = rank_array(rank, grid.points, sizeof *grid.state);
    grid.decay = rank_array(rank, grid.points, sizeof *grid.decay);
    grid.lines = rank_array(rank, grid.longest * LINES, sizeof *grid.lines);
    grid.other_lines = rank_array(rank, grid.longest * LINES, sizeof *grid.other_lines);
    grid.roots = rank_array(rank, grid.longest / 2, sizeof *grid.roots);
    find_roots(&grid);
    find_decay(&grid, 1);
    draw_state(&grid, grid.spectrum, options->seed);
    draw_state(&grid, grid.state, options->seed);

    struct number sums[PUBLISHED_STEPS];
    rank_start(rank);
    transform(&grid, grid.spectrum);
    for (unsigned long i = 0; i < options->iterations; i++) {
        result->sum = step(&grid);
        if (i < PUBLISHED_STEPS) {
            sums[i] = result->sum;
        }
    }
    rank_stop(rank);

    verify(rank, &grid, options, result);
    for (unsigned long i = 0; options->seed == SEED && i < options->iterations && i < PUBLISHED_STEPS; i++) {
        const struct number *published = &problem->published[i];
        result->published++;
        rank_compare(rank, "the real part of a sum", sums[i].re, published->re, tolerance);
        rank_compare(rank, "the imaginary part of a sum", sums[i].im, published->im, tolerance);
    }
}

/* Floating-point operations: five for each point and halving of a transform, two to decay. */
static double operations(const struct kernel_options *options, const void *result) {
    (void)result;
    double points = 1;
    double halvings = 0;
    for (unsigned axis = 0; axis < AXES; axis++) {
        double length = (double)problems[options->class].lengths[axis];
        points *= length;
        halvings += log2(length);
    }
    double steps = (double)options->iterations;
    return points * (5 * halvings * (steps + 1) + 2 * steps);
}

static void print(const void *stored) {
    const struct result *result = stored;
    printf("\"sum\": [%.12e, %.12e], \"inverse_error\": %.3e, \"energy_error\": %.3e, \"sum_error\": %.3e, "
           "\"published\": %lu",
           result->sum.re, result->sum.im, result->inverse_error, result->energy_error, result->sum_error,
           result->published);
}

static const struct kernel kernel = {
    .name = "ft-like",
    .summary = "Processes solve a diffusion equation by three-dimensional Fourier transforms.",
    .classes = "64^3, 128^2 * 32 or 256^2 * 128 points; two arrays of 4, 8 or 128 MiB, one of half as much",
    .iterations = "steps in time (default by class: 6, 6, 6)",
    .iterations_of = {6, 6, 6},
    .seed = SEED,
    .run = run,
    .result_size = sizeof(struct result),
    .operations = operations,
    .print = print,
};

int main(int argc, char **argv) {
    return ranks_main(&kernel, argc, argv);
}
