/* After CG of the NAS Parallel Benchmarks: the smallest eigenvalue of a sparse matrix, by inverse iteration.
 *
 * Kept: a symmetric matrix with a random pattern, made of outer products of sparse random vectors with
 * weights from 1 down to a tenth; each step of inverse iteration solved by 25 of the conjugate gradients
 * method's, without a preconditioner; rows stored one after another, so that nearly all time goes into a
 * product that reads one vector at random, by way of an array of columns, while two large arrays stream by.
 * Left out: the division of the matrix among the processes, and its messages.
 * The matrix is shift * I - M, positive definite, where the benchmark's is its negative: all is the same but
 * for signs.
 * Verified: by the residual of the last solution; from 15 steps on, by that of the eigenvector, and by the
 * published estimate.
 * After: Bailey et al., "The NAS Parallel Benchmarks" (1991), kernel CG, sharing no code with the
 * benchmark. */
#include "ranks.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { STEPS = 15, CG_STEPS = 25, SEED = 314159265 };

static const double least_weight = 0.1;
static const double most_residual = 1e-12;
static const double most_vector_residual = 1e-5;
static const double tolerance = 1e-10; /* of the published estimates */

static const struct problem {
    unsigned rows;
    unsigned entries; /* of a random vector, without that on the diagonal */
    double shift;
    double published; /* estimate of M's largest eigenvalue, which is shift less the smallest of the matrix */
} problems[CLASSES] = {
    {1400, 7, 10, 8.5971775078648},
    {7000, 8, 12, 10.362595087124},
    {14000, 11, 20, 17.130235054029},
};

struct matrix {
    unsigned rows;
    unsigned *begins; /* by row, and one after the last; one more while it is built */
    unsigned *columns;
    double *values;
};

struct vectors {
    double *x;
    double *z;
    double *p;
    double *q;
    double *r;
};

struct result {
    double estimate;
    double residual;        /* of the last solution, relative to its right side */
    double vector_residual; /* of the eigenvector, relative to its eigenvalue */
    unsigned long nonzeros;
    unsigned long published; /* how many published estimates it was compared with */
};

/* The random vectors that the matrix is made of: vector i has counts[i] entries, from i * width on. */
struct pattern {
    unsigned rows;
    unsigned width;
    unsigned *counts;
    unsigned *places;
    double *entries;
};

/* Draws entries and their places; of two at one place the first counts. The one at i is a half. */
static void draw_vector(const struct pattern *pattern, unsigned i, unsigned long long *random) {
    unsigned *places = pattern->places + (size_t)i * pattern->width;
    double *entries = pattern->entries + (size_t)i * pattern->width;
    unsigned limit = 1;
    while (limit < pattern->rows) {
        limit *= 2;
    }
    unsigned count = 0;
    while (count + 1 < pattern->width) {
        double entry = uniform_next(random);
        unsigned place = (unsigned)(limit * uniform_next(random));
        unsigned at = 0;
        while (at < count && places[at] != place) {
            at++;
        }
        if (place < pattern->rows && at == count) {
            places[count] = place;
            entries[count++] = entry;
        }
    }
    unsigned at = 0;
    while (at < count && places[at] != i) {
        at++;
    }
    places[at] = i;
    entries[at] = 0.5;
    pattern->counts[i] = at == count ? count + 1 : count;
}

/* Where vectors have an entry in a row: by row, the vectors in order. */
struct crossings {
    unsigned *begins;
    unsigned *vectors;
    unsigned *ats; /* at which of the vector's entries */
};

static void find_crossings(const struct pattern *pattern, struct crossings *crossings) {
    memset(crossings->begins, 0, (pattern->rows + 2UL) * sizeof(unsigned));
    for (unsigned i = 0; i < pattern->rows; i++) {
        for (unsigned at = 0; at < pattern->counts[i]; at++) {
            crossings->begins[pattern->places[(size_t)i * pattern->width + at] + 2]++;
        }
    }
    for (unsigned row = 2; row < pattern->rows + 2; row++) {
        crossings->begins[row] += crossings->begins[row - 1];
    }
    /* begins[row + 1] moves on while the row is filled, and ends where the next one begins. */
    for (unsigned i = 0; i < pattern->rows; i++) {
        for (unsigned at = 0; at < pattern->counts[i]; at++) {
            unsigned next = crossings->begins[pattern->places[(size_t)i * pattern->width + at] + 1]++;
            crossings->vectors[next] = i;
            crossings->ats[next] = at;
        }
    }
}

/* Adds up a row of the sum of outer products; returns its number of columns, in the order in which they come
 * up. */
static unsigned add_up_row(const struct pattern *pattern, const struct crossings *crossings, unsigned row,
                           const double *weights, double *sums, bool *there, unsigned *columns) {
    unsigned count = 0;
    for (unsigned c = crossings->begins[row]; c < crossings->begins[row + 1]; c++) {
        const size_t vector = crossings->vectors[c];
        const unsigned *places = pattern->places + vector * pattern->width;
        const double *entries = pattern->entries + vector * pattern->width;
        double scale = weights[vector] * entries[crossings->ats[c]];
        for (unsigned at = 0; at < pattern->counts[vector]; at++) {
            unsigned column = places[at];
            if (!there[column]) {
                there[column] = true;
                sums[column] = 0;
                columns[count++] = column;
            }
            sums[column] += scale * entries[at];
        }
    }
    return count;
}

/* The matrix is symmetric: a row's sums are a column's, and as rows come in order, so do the columns of each
 * row that their sums go to. */
static void build(struct rank *rank, const struct problem *problem, unsigned long seed,
                  struct matrix *matrix) {
    unsigned rows = problem->rows;
    struct pattern pattern = {.rows = rows, .width = problem->entries + 1};
    size_t most = (size_t)rows * pattern.width;
    pattern.counts = rank_array(rank, rows, sizeof *pattern.counts);
    pattern.places = rank_array(rank, most, sizeof *pattern.places);
    pattern.entries = rank_array(rank, most, sizeof *pattern.entries);
    struct crossings crossings = {
        .begins = rank_array(rank, rows + 2UL, sizeof *crossings.begins),
        .vectors = rank_array(rank, most, sizeof *crossings.vectors),
        .ats = rank_array(rank, most, sizeof *crossings.ats),
    };
    double *weights = rank_array(rank, rows, sizeof *weights);
    double *sums = rank_array(rank, rows, sizeof *sums);
    bool *there = rank_array(rank, rows, sizeof *there);
    unsigned *columns = rank_array(rank, rows, sizeof *columns);
    memset(there, 0, rows * sizeof *there);

    unsigned long long random = seed;
    (void)uniform_next(&random); /* the benchmark's first number goes elsewhere */
    double ratio = pow(least_weight, 1.0 / rows);
    for (unsigned i = 0; i < rows; i++) {
        draw_vector(&pattern, i, &random);
        weights[i] = i == 0 ? 1 : weights[i - 1] * ratio;
    }
    find_crossings(&pattern, &crossings);
    memset(matrix->begins, 0, (rows + 2UL) * sizeof(unsigned));
    for (unsigned pass = 0; pass < 2; pass++) {
        for (unsigned row = 0; row < rows; row++) {
            unsigned count = add_up_row(&pattern, &crossings, row, weights, sums, there, columns);
            if (pass == 0) {
                matrix->begins[row + 2] = count;
            }
            for (unsigned c = 0; c < count; c++) {
                unsigned column = columns[c];
                there[column] = false;
                if (pass == 1) {
                    unsigned next = matrix->begins[column + 1]++;
                    double diagonal = column == row ? problem->shift - least_weight : 0;
                    matrix->columns[next] = row;
                    matrix->values[next] = diagonal - sums[column];
                }
            }
        }
        for (unsigned row = 2; pass == 0 && row < rows + 2; row++) {
            matrix->begins[row] += matrix->begins[row - 1];
        }
    }
}

static void multiply(const struct matrix *matrix, const double *restrict vector, double *restrict product) {
    for (unsigned row = 0; row < matrix->rows; row++) {
        double sum = 0;
        for (unsigned k = matrix->begins[row]; k < matrix->begins[row + 1]; k++) {
            sum += matrix->values[k] * vector[matrix->columns[k]];
        }
        product[row] = sum;
    }
}

static double dot(const double *a, const double *b, unsigned count) {
    double sum = 0;
    for (unsigned i = 0; i < count; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

/* Solves matrix * z = x, and returns the residual's norm. */
static double solve(const struct matrix *matrix, const struct vectors *v) {
    unsigned rows = matrix->rows;
    for (unsigned i = 0; i < rows; i++) {
        v->z[i] = 0;
        v->r[i] = v->x[i];
        v->p[i] = v->x[i];
    }
    double rho = dot(v->r, v->r, rows);
    for (unsigned step = 0; step < CG_STEPS; step++) {
        multiply(matrix, v->p, v->q);
        double alpha = rho / dot(v->p, v->q, rows);
        for (unsigned i = 0; i < rows; i++) {
            v->z[i] += alpha * v->p[i];
            v->r[i] -= alpha * v->q[i];
        }
        double before = rho;
        rho = dot(v->r, v->r, rows);
        double beta = rho / before;
        for (unsigned i = 0; i < rows; i++) {
            v->p[i] = v->r[i] + beta * v->p[i];
        }
    }
    /* r has been carried along; this is what is left in truth. */
    multiply(matrix, v->z, v->q);
    double sum = 0;
    for (unsigned i = 0; i < rows; i++) {
        double difference = v->x[i] - v->q[i];
        sum += difference * difference;
    }
    return sqrt(sum);
}

/* One step of inverse iteration: stores the estimate, and the solution, normalized, as the next right side.
 */
static void iterate(const struct matrix *matrix, const struct vectors *v, double shift,
                    struct result *result) {
    unsigned rows = matrix->rows;
    double residual = solve(matrix, v);
    result->residual = residual / sqrt(dot(v->x, v->x, rows));
    result->estimate = shift - 1 / dot(v->x, v->z, rows);
    double scale = 1 / sqrt(dot(v->z, v->z, rows));
    for (unsigned i = 0; i < rows; i++) {
        v->x[i] = scale * v->z[i];
    }
}

static void fill(double *vector, unsigned count, double value) {
    for (unsigned i = 0; i < count; i++) {
        vector[i] = value;
    }
}

/* Floating-point operations. */
static double operations(const struct kernel_options *options, const void *stored) {
    const struct result *result = stored;
    double rows = problems[options->class].rows;
    double product = 2.0 * (double)result->nonzeros;
    return (double)options->iterations * ((CG_STEPS + 1) * product + CG_STEPS * 10 * rows + 12 * rows);
}

static void print(const void *stored) {
    const struct result *result = stored;
    printf("\"nonzeros\": %lu, \"eigenvalue\": %.13e, \"residual\": %.3e, "
           "\"vector_residual\": %.3e, \"published\": %lu",
           result->nonzeros, result->estimate, result->residual, result->vector_residual, result->published);
}

static void verify(struct rank *rank, const struct kernel_options *options, const struct matrix *matrix,
                   const struct vectors *v, struct result *result) {
    const struct problem *problem = &problems[options->class];
    rank_bound(rank, "the residual of the last solution", result->residual, most_residual);
    double smallest = problem->shift - result->estimate;
    multiply(matrix, v->x, v->q);
    for (unsigned i = 0; i < matrix->rows; i++) {
        v->r[i] = v->q[i] - smallest * v->x[i];
    }
    result->vector_residual = sqrt(dot(v->r, v->r, matrix->rows)) / smallest;
    if (options->iterations < STEPS) {
        return;
    }
    rank_bound(rank, "the residual of the eigenvector", result->vector_residual, most_vector_residual);
    if (options->seed == SEED) {
        result->published = 1;
        rank_compare(rank, "the eigenvalue", result->estimate, problem->published, tolerance);
    }
}

static void run(struct rank *rank, const struct kernel_options *options, void *stored) {
    struct result *result = stored;
    const struct problem *problem = &problems[options->class];
    unsigned rows = problem->rows;
    size_t width = problem->entries + 1;
    size_t most = rows * width * width;
    struct matrix matrix = {
        .rows = rows,
        .begins = rank_array(rank, rows + 2UL, sizeof *matrix.begins),
        .columns = rank_array(rank, most, sizeof *matrix.columns),
        .values = rank_array(rank, most, sizeof *matrix.values),
    };
    const struct vectors vectors = {
        .x = rank_array(rank, rows, sizeof(double)),
        .z = rank_array(rank, rows, sizeof(double)),
        .p = rank_array(rank, rows, sizeof(double)),
        .q = rank_array(rank, rows, sizeof(double)),
        .r = rank_array(rank, rows, sizeof(double)),
    };
    build(rank, problem, options->seed, &matrix);
    result->nonzeros = matrix.begins[rows];
    fill(vectors.x, rows, 1);
    iterate(&matrix, &vectors, problem->shift, result);

    fill(vectors.x, rows, 1);
    rank_start(rank);
    for (unsigned long i = 0; i < options->iterations; i++) {
        iterate(&matrix, &vectors, problem->shift, result);
    }
    rank_stop(rank);

    verify(rank, options, &matrix, &vectors, result);
}

static const struct kernel kernel = {
    .name = "cg-like",
    .summary = "Processes compute the smallest eigenvalue of a sparse matrix by conjugate gradients.",
    .classes = "1400, 7000 or 14000 rows; 0.9, 6 or 21 MiB of matrix",
    .iterations = "steps of inverse iteration (default by class: 15, 15, 15)",
    .iterations_of = {STEPS, STEPS, STEPS},
    .seed = SEED,
    .run = run,
    .result_size = sizeof(struct result),
    .operations = operations,
    .print = print,
};

int main(int argc, char **argv) {
    return ranks_main(&kernel, argc, argv);
}
