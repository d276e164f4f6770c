/* After MG of the NAS Parallel Benchmarks: Poisson's equation on a periodic grid, by multigrid's V-cycles.
 *
 * Kept: charges of +1 and -1 at ten points each, drawn by chance; stencils of 27 points for the operator, the
 * smoother, the restriction and the interpolation; arrays for the solution and the residual on each level,
 * down to two points along an axis, with a layer around each that repeats the opposite side. Nearly all time
 * goes into passes over two or three arrays of the finest level, nine rows of one beside one of the others.
 * Left out: the division of the grid among the processes, and its messages.
 * Verified: all charges are there; each cycle reduces the residual; after four cycles it is as published.
 * After: Bailey et al., "The NAS Parallel Benchmarks" (1991), kernel MG, sharing no code with the
 * benchmark. */
#include "ranks.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum {
    CHARGES = 10,
    MOST_LEVELS = 8,
    MOST_ROW = (1 << MOST_LEVELS) + 2,
    PUBLISHED_CYCLES = 4,
    SEED = 314159265
};

/* A cycle leaves this much of the residual at most, until rounding keeps it from becoming smaller. */
static const double most_left = 0.5;
static const double rounding = 1e-12;

static const double tolerance = 1e-8; /* of the published residuals */

/* A stencil's weights: of the point itself, and of those that share a face, an edge, or a corner with it. */
struct stencil {
    double centre;
    double face;
    double edge;
    double corner;
};

/* The operator is subtracted wherever it is used. */
static const struct stencil minus_operator = {8.0 / 3, 0, -1.0 / 6, -1.0 / 12};
static const struct stencil smoother = {-3.0 / 8, 1.0 / 32, -1.0 / 64, 0};
static const struct stencil restriction = {1.0 / 2, 1.0 / 4, 1.0 / 8, 1.0 / 16};

static const struct problem {
    size_t n;         /* points along each axis */
    double published; /* residual after four cycles */
} problems[CLASSES] = {
    {32, 0.5307707005734e-4},
    {128, 0.6467329375339e-5},
    {256, 0.2433365309069e-5},
};

/* Points 1 to n along each axis, between the layers 0 and n + 1. */
struct level {
    size_t n;
    double *solution;
    double *residual;
};

struct multigrid {
    unsigned levels;
    struct level at[MOST_LEVELS]; /* the finest first; the next has half as many points along an axis */
    double *charge;
};

struct result {
    double before; /* the residual's norm */
    double after;
    double worst;            /* what a cycle has left of it, at most */
    unsigned long published; /* how many published residuals it was compared with */
};

static size_t points(size_t n) {
    return (n + 2) * (n + 2) * (n + 2);
}

static size_t row_at(size_t n, size_t z, size_t y) {
    return (z * (n + 2) + y) * (n + 2);
}

/* Copies each side to the layer beyond the opposite one, axis by axis, so that edges and corners come along.
 */
static void wrap(double *array, size_t n) {
    size_t row = n + 2;
    size_t plane = row * row;
    for (size_t z = 1; z <= n; z++) {
        for (size_t y = 1; y <= n; y++) {
            double *at = array + row_at(n, z, y);
            at[0] = at[n];
            at[n + 1] = at[1];
        }
        memcpy(array + row_at(n, z, 0), array + row_at(n, z, n), row * sizeof *array);
        memcpy(array + row_at(n, z, n + 1), array + row_at(n, z, 1), row * sizeof *array);
    }
    memcpy(array, array + n * plane, plane * sizeof *array);
    memcpy(array + (n + 1) * plane, array + plane, plane * sizeof *array);
}

/* Sums over the rows around one: those next to it, and those diagonal to it. */
static void sum_rows_around(const double *middle, size_t row, size_t plane, double *restrict beside,
                            double *restrict diagonal) {
    for (size_t x = 0; x < row; x++) {
        beside[x] = middle[x - row] + middle[x + row] + middle[x - plane] + middle[x + plane];
        diagonal[x] = middle[x - plane - row] + middle[x - plane + row] + middle[x + plane - row] +
                      middle[x + plane + row];
    }
}

static inline double at_point(const struct stencil *s, const double *middle, const double *beside,
                              const double *diagonal, size_t x) {
    return s->centre * middle[x] + s->face * (middle[x - 1] + middle[x + 1] + beside[x]) +
           s->edge * (beside[x - 1] + beside[x + 1] + diagonal[x]) +
           s->corner * (diagonal[x - 1] + diagonal[x + 1]);
}

/* target = base + stencil * array. Base and target may be the same. */
static void add_stencil(double *target, const double *base, struct stencil stencil, const double *array,
                        size_t n) {
    size_t row = n + 2;
    double beside[MOST_ROW] = {0};
    double diagonal[MOST_ROW] = {0};
    for (size_t z = 1; z <= n; z++) {
        for (size_t y = 1; y <= n; y++) {
            size_t begin = row_at(n, z, y);
            sum_rows_around(array + begin, row, row * row, beside, diagonal);
            for (size_t x = 1; x <= n; x++) {
                target[begin + x] = base[begin + x] + at_point(&stencil, array + begin, beside, diagonal, x);
            }
        }
    }
    wrap(target, n);
}

/* Each coarse point is the average around the fine point of twice its number. */
static void restrict_residual(const struct level *fine, const struct level *coarse) {
    size_t row = fine->n + 2;
    double beside[MOST_ROW] = {0};
    double diagonal[MOST_ROW] = {0};
    for (size_t z = 1; z <= coarse->n; z++) {
        for (size_t y = 1; y <= coarse->n; y++) {
            const double *middle = fine->residual + row_at(fine->n, 2 * z, 2 * y);
            double *target = coarse->residual + row_at(coarse->n, z, y);
            sum_rows_around(middle, row, row * row, beside, diagonal);
            for (size_t x = 1; x <= coarse->n; x++) {
                target[x] = at_point(&restriction, middle, beside, diagonal, 2 * x);
            }
        }
    }
    wrap(coarse->residual, coarse->n);
}

/* Adds the coarse solution to the fine one: linear between the points of even numbers. */
static void interpolate(const struct level *coarse, const struct level *fine) {
    for (size_t z = 1; z <= fine->n; z++) {
        for (size_t y = 1; y <= fine->n; y++) {
            /* The same row four times, where y and z are both even. */
            const double *rows[4] = {
                coarse->solution + row_at(coarse->n, z / 2, y / 2),
                coarse->solution + row_at(coarse->n, z / 2, (y + 1) / 2),
                coarse->solution + row_at(coarse->n, (z + 1) / 2, y / 2),
                coarse->solution + row_at(coarse->n, (z + 1) / 2, (y + 1) / 2),
            };
            double *target = fine->solution + row_at(fine->n, z, y);
            double before = (rows[0][0] + rows[1][0] + rows[2][0] + rows[3][0]) / 4;
            for (size_t x = 1; x <= coarse->n; x++) {
                double here = (rows[0][x] + rows[1][x] + rows[2][x] + rows[3][x]) / 4;
                target[2 * x - 1] += (before + here) / 2;
                target[2 * x] += here;
                before = here;
            }
        }
    }
    wrap(fine->solution, fine->n);
}

static void clear(double *array, size_t n) {
    memset(array, 0, points(n) * sizeof *array);
}

/* Improves the solution by one V-cycle: down to the coarsest level with the residual, up with what mends it.
 * The residual is that of the solution before and after. */
static void cycle(const struct multigrid *grid) {
    for (unsigned l = 1; l < grid->levels; l++) {
        restrict_residual(&grid->at[l - 1], &grid->at[l]);
    }
    const struct level *coarsest = &grid->at[grid->levels - 1];
    clear(coarsest->solution, coarsest->n);
    add_stencil(coarsest->solution, coarsest->solution, smoother, coarsest->residual, coarsest->n);
    for (unsigned l = grid->levels - 1; l > 0; l--) {
        const struct level *level = &grid->at[l - 1];
        const double *right_side = grid->charge;
        if (l > 1) {
            clear(level->solution, level->n);
            right_side = level->residual;
        }
        interpolate(&grid->at[l], level);
        add_stencil(level->residual, right_side, minus_operator, level->solution, level->n);
        add_stencil(level->solution, level->solution, smoother, level->residual, level->n);
    }
    const struct level *finest = &grid->at[0];
    add_stencil(finest->residual, grid->charge, minus_operator, finest->solution, finest->n);
}

/* The root of the mean square. */
static double norm(const double *array, size_t n) {
    double sum = 0;
    for (size_t z = 1; z <= n; z++) {
        for (size_t y = 1; y <= n; y++) {
            const double *row = array + row_at(n, z, y);
            for (size_t x = 1; x <= n; x++) {
                sum += row[x] * row[x];
            }
        }
    }
    return sqrt(sum / ((double)n * (double)n * (double)n));
}

/* The extremes of all numbers so far, the most extreme first. */
struct extremes {
    double numbers[CHARGES];
    size_t places[CHARGES];
};

static void offer(struct extremes *extremes, double number, size_t place) {
    if (number <= extremes->numbers[CHARGES - 1]) {
        return;
    }
    unsigned i = CHARGES - 1;
    for (; i > 0 && extremes->numbers[i - 1] < number; i--) {
        extremes->numbers[i] = extremes->numbers[i - 1];
        extremes->places[i] = extremes->places[i - 1];
    }
    extremes->numbers[i] = number;
    extremes->places[i] = place;
}

/* A number is drawn for each point; the points of the ten largest and of the ten smallest are charged. */
static void place_charges(double *charge, size_t n, unsigned long seed) {
    struct extremes largest = {0};
    struct extremes smallest = {0};
    unsigned long long random = seed;
    for (size_t z = 1; z <= n; z++) {
        for (size_t y = 1; y <= n; y++) {
            for (size_t x = 1; x <= n; x++) {
                double number = uniform_next(&random);
                offer(&largest, number, row_at(n, z, y) + x);
                offer(&smallest, 1 - number, row_at(n, z, y) + x);
            }
        }
    }
    clear(charge, n);
    for (unsigned i = 0; i < CHARGES; i++) {
        charge[largest.places[i]] = 1;
        charge[smallest.places[i]] = -1;
    }
    wrap(charge, n);
}

/* From no solution, whose residual is the charge. */
static double begin(const struct multigrid *grid) {
    const struct level *finest = &grid->at[0];
    clear(finest->solution, finest->n);
    memcpy(finest->residual, grid->charge, points(finest->n) * sizeof(double));
    return norm(finest->residual, finest->n);
}

static void run(struct rank *rank, const struct kernel_options *options, void *stored) {
    struct result *result = stored;
    const struct problem *problem = &problems[options->class];
    struct multigrid grid = {.charge = rank_array(rank, points(problem->n), sizeof(double))};
    size_t n = problem->n;
    do {
        grid.at[grid.levels++] = (struct level){
            .n = n,
            .solution = rank_array(rank, points(n), sizeof(double)),
            .residual = rank_array(rank, points(n), sizeof(double)),
        };
        n /= 2;
    } while (n > 1);
    const struct level *finest = &grid.at[0];
    place_charges(grid.charge, finest->n, options->seed);
    (void)begin(&grid);
    cycle(&grid);

    result->before = begin(&grid);
    double left = result->before;
    double published_left = 0;
    rank_start(rank);
    for (unsigned long i = 1; i <= options->iterations; i++) {
        cycle(&grid);
        double before = left;
        left = norm(finest->residual, finest->n);
        if (before > rounding * result->before) {
            result->worst = fmax(result->worst, left / before);
        }
        if (i == PUBLISHED_CYCLES) {
            published_left = left;
        }
    }
    rank_stop(rank);

    result->after = left;
    double expected = sqrt(2.0 * CHARGES / pow((double)problem->n, 3));
    rank_bound(rank, "the error of the charges' norm", fabs(result->before / expected - 1), rounding);
    rank_bound(rank, "what a cycle leaves of the residual", result->worst, most_left);
    rank_bound(rank, "the residual after the last cycle", left, most_left * result->before);
    if (options->seed == SEED && options->iterations >= PUBLISHED_CYCLES) {
        result->published = 1;
        rank_compare(rank, "the residual after four cycles", published_left, problem->published, tolerance);
    }
}

/* As the benchmark counts them. */
static double operations(const struct kernel_options *options, const void *result) {
    (void)result;
    return 58 * pow((double)problems[options->class].n, 3) * (double)options->iterations;
}

static void print(const void *stored) {
    const struct result *result = stored;
    printf("\"residual_before\": %.13e, \"residual\": %.13e, \"worst_cycle\": %.4f, \"published\": %lu",
           result->before, result->after, result->worst, result->published);
}

static const struct kernel kernel = {
    .name = "mg-like",
    .summary = "Processes solve Poisson's equation by cycles over ever coarser grids.",
    .classes = "32^3, 128^3 or 256^3 points; three arrays of 307 KiB, 17 MiB or 131 MiB, and smaller ones",
    .iterations = "cycles (default by class: 4, 4, 4)",
    .iterations_of = {4, 4, 4},
    .seed = SEED,
    .run = run,
    .result_size = sizeof(struct result),
    .operations = operations,
    .print = print,
};

int main(int argc, char **argv) {
    return ranks_main(&kernel, argc, argv);
}
