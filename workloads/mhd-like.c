/* A stand-in for EulerMHD, the program of section 3.3 of Valat, "Impact of the Operating System Memory
 * Allocation on CPU Intensive Applications": ideal magnetohydrodynamics on a periodic Cartesian mesh,
 * explicit, with an array for each quantity. Its loops access all arrays at the same index: 8 or 12 of them,
 * the number of ways of today's L1 caches. The scheme is first-order finite volumes with the local
 * Lax-Friedrichs flux, one direction after the other, written from the published formulas. */
#include "arrays.h"
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char program_name[] = "mhd-like";

enum memory { MEMORY_MALLOC, MEMORY_ALIGNED, MEMORY_PADDED };
enum problem { PROBLEM_VORTEX, PROBLEM_WAVE_X, PROBLEM_WAVE_Y };
enum arrays { ARRAYS_8, ARRAYS_12 };

static const char *const memory_names[] = {"malloc", "aligned", "padded", NULL};
static const char *const problem_names[] = {"vortex", "wave-x", "wave-y", NULL};
static const char *const arrays_names[] = {"8", "12", NULL};

/* What is conserved comes first; of the vectors, x, y and z follow each other. */
enum { DENSITY, MOMENTUM, ENERGY = MOMENTUM + 3, FIELD, CONSERVED = FIELD + 3 };
/* What follows from that, and may have arrays of its own. */
enum { VELOCITY = CONSERVED, PRESSURE = VELOCITY + 3, MOST_ARRAYS };

static const double heat_ratio = 5.0 / 3;
static const double courant = 0.4;
static const double wave_height = 0.1;
static const double two_pi = 6.28318530717958647692;
/* Of the sums that must not change, as a part of them: rounding is all that may. */
static const double tolerance = 1e-10;

struct mesh {
    unsigned long grid;
    bool kept; /* velocity and pressure have arrays */
    double *of[MOST_ARRAYS];
};

/* Quantities of one cell; pressure is the total one, of gas and field. */
struct cell {
    double conserved[CONSERVED];
    double velocity[3];
    double pressure;
};

struct flux {
    double of[CONSERVED];
};

static inline double square_of(const double *vector) {
    return vector[0] * vector[0] + vector[1] * vector[1] + vector[2] * vector[2];
}

static inline void derive(struct cell *cell) {
    const double *u = cell->conserved;
    double part = 1 / u[DENSITY];
    for (int d = 0; d < 3; d++) {
        cell->velocity[d] = u[MOMENTUM + d] * part;
    }
    double magnetic = 0.5 * square_of(u + FIELD);
    double kinetic = 0.5 * square_of(u + MOMENTUM) * part;
    cell->pressure = (heat_ratio - 1) * (u[ENERGY] - kinetic - magnetic) + magnetic;
}

static inline void load(const struct mesh *mesh, size_t at, bool kept, struct cell *cell) {
    for (int q = 0; q < CONSERVED; q++) {
        cell->conserved[q] = mesh->of[q][at];
    }
    if (kept) {
        for (int d = 0; d < 3; d++) {
            cell->velocity[d] = mesh->of[VELOCITY + d][at];
        }
        cell->pressure = mesh->of[PRESSURE][at];
    } else {
        derive(cell);
    }
}

static inline double gas_pressure(const struct cell *cell) {
    return cell->pressure - 0.5 * square_of(cell->conserved + FIELD);
}

/* How fast the fastest signal goes along an axis: with the fluid, and in it the fast magnetosonic wave. */
static inline double signal_speed(const struct cell *cell, int axis) {
    const double *field = cell->conserved + FIELD;
    double part = 1 / cell->conserved[DENSITY];
    double sound = heat_ratio * gas_pressure(cell) * part;
    double sum = sound + square_of(field) * part;
    double root = sum * sum - 4 * sound * field[axis] * field[axis] * part;
    return fabs(cell->velocity[axis]) + sqrt(0.5 * (sum + sqrt(root > 0 ? root : 0)));
}

static inline void flux_in(const struct cell *cell, int axis, struct flux *flux) {
    const double *u = cell->conserved;
    const double *velocity = cell->velocity;
    double along = velocity[axis];
    double field = u[FIELD + axis];
    double work = velocity[0] * u[FIELD] + velocity[1] * u[FIELD + 1] + velocity[2] * u[FIELD + 2];
    flux->of[DENSITY] = u[DENSITY] * along;
    for (int d = 0; d < 3; d++) {
        flux->of[MOMENTUM + d] = u[MOMENTUM + d] * along - u[FIELD + d] * field;
        flux->of[FIELD + d] = u[FIELD + d] * along - velocity[d] * field;
    }
    flux->of[MOMENTUM + axis] += cell->pressure;
    flux->of[ENERGY] = (u[ENERGY] + cell->pressure) * along - field * work;
}

/* Through the face between two cells: the mean of theirs, and what keeps that stable. */
static inline void flux_between(const struct cell *low, const struct cell *high, int axis,
                                struct flux *flux) {
    struct flux of_low;
    struct flux of_high;
    flux_in(low, axis, &of_low);
    flux_in(high, axis, &of_high);
    double speed = fmax(signal_speed(low, axis), signal_speed(high, axis));
    for (int q = 0; q < CONSERVED; q++) {
        flux->of[q] = 0.5 * (of_low.of[q] + of_high.of[q] - speed * (high->conserved[q] - low->conserved[q]));
    }
}

static inline void apply(const struct mesh *mesh, size_t at, double part, const struct flux *in,
                         const struct flux *out) {
    for (int q = 0; q < CONSERVED; q++) {
        mesh->of[q][at] += part * (in->of[q] - out->of[q]);
    }
}

/* Row by row, in place: what flows in through a cell's low face is remembered from the cell before it. */
static inline void sweep_x_of(const struct mesh *mesh, double part, bool kept) {
    size_t grid = mesh->grid;
    for (size_t row = 0; row < grid * grid; row += grid) {
        struct cell cell;
        struct cell next;
        struct flux in;
        struct flux out;
        struct flux first;
        load(mesh, row + grid - 1, kept, &next);
        load(mesh, row, kept, &cell);
        flux_between(&next, &cell, 0, &first);
        in = first;
        for (size_t i = 0; i + 1 < grid; i++) {
            load(mesh, row + i + 1, kept, &next);
            flux_between(&cell, &next, 0, &out);
            apply(mesh, row + i, part, &in, &out);
            in = out;
            cell = next;
        }
        apply(mesh, row + grid - 1, part, &in, &first);
    }
}

/* Also row by row: what flows in through the cells' low faces is kept for a row of them. */
static inline void sweep_y_of(const struct mesh *mesh, double part, bool kept, struct flux *first,
                              struct flux *in) {
    size_t grid = mesh->grid;
    struct cell cell;
    struct cell next;
    for (size_t i = 0; i < grid; i++) {
        load(mesh, (grid - 1) * grid + i, kept, &cell);
        load(mesh, i, kept, &next);
        flux_between(&cell, &next, 1, &first[i]);
        in[i] = first[i];
    }
    for (size_t row = 0; row < (grid - 1) * grid; row += grid) {
        for (size_t i = 0; i < grid; i++) {
            struct flux out;
            load(mesh, row + i, kept, &cell);
            load(mesh, row + grid + i, kept, &next);
            flux_between(&cell, &next, 1, &out);
            apply(mesh, row + i, part, &in[i], &out);
            in[i] = out;
        }
    }
    for (size_t i = 0; i < grid; i++) {
        apply(mesh, (grid - 1) * grid + i, part, &in[i], &first[i]);
    }
}

static void keep(const struct mesh *mesh) {
    for (size_t at = 0; mesh->kept && at < mesh->grid * mesh->grid; at++) {
        struct cell cell;
        load(mesh, at, false, &cell);
        for (int d = 0; d < 3; d++) {
            mesh->of[VELOCITY + d][at] = cell.velocity[d];
        }
        mesh->of[PRESSURE][at] = cell.pressure;
    }
}

static void sweep_x(const struct mesh *mesh, double part) {
    if (mesh->kept) {
        sweep_x_of(mesh, part, true);
    } else {
        sweep_x_of(mesh, part, false);
    }
    keep(mesh);
}

static void sweep_y(const struct mesh *mesh, double part, struct flux *first, struct flux *in) {
    if (mesh->kept) {
        sweep_y_of(mesh, part, true, first, in);
    } else {
        sweep_y_of(mesh, part, false, first, in);
    }
    keep(mesh);
}

static double fastest(const struct mesh *mesh) {
    double speed = 0;
    for (size_t at = 0; at < mesh->grid * mesh->grid; at++) {
        struct cell cell;
        load(mesh, at, mesh->kept, &cell);
        /* Not greater is also what is no number at all. */
        if (!(cell.conserved[DENSITY] > 0) || !(gas_pressure(&cell) > 0)) {
            fail(program_name, "a cell has no positive density and pressure");
        }
        speed = fmax(speed, fmax(signal_speed(&cell, 0), signal_speed(&cell, 1)));
    }
    return speed;
}

/* Returns the time that has gone by in the fluid. */
static double solve(const struct mesh *mesh, unsigned long steps, struct flux *first, struct flux *in) {
    double time = 0;
    for (unsigned long step = 0; step < steps; step++) {
        /* As parts of a cell's width, which is one part in grid of the whole. */
        double part = courant / fastest(mesh);
        if (step % 2 == 0) {
            sweep_x(mesh, part);
            sweep_y(mesh, part, first, in);
        } else {
            sweep_y(mesh, part, first, in);
            sweep_x(mesh, part);
        }
        time += part / (double)mesh->grid;
    }
    return time;
}

/* A circularly polarized Alfven wave along an axis is a solution whatever its height. Where velocity and
 * field swing together it goes against the field, one length in one unit of time. */
static void wave_at(double along, double *sideways, double *upward) {
    *sideways = wave_height * sin(two_pi * along);
    *upward = wave_height * cos(two_pi * along);
}

static void begin_cell(const struct mesh *mesh, enum problem problem, size_t at, double x, double y) {
    double density = 1;
    double pressure = 0.1;
    double velocity[3] = {0};
    double field[3] = {0};
    if (problem == PROBLEM_VORTEX) {
        /* That of Orszag and Tang. */
        density = heat_ratio * heat_ratio;
        pressure = heat_ratio;
        velocity[0] = field[0] = -sin(two_pi * y);
        velocity[1] = sin(two_pi * x);
        field[1] = sin(2 * two_pi * x);
    } else {
        int axis = problem == PROBLEM_WAVE_X ? 0 : 1;
        field[axis] = 1;
        wave_at(axis == 0 ? x : y, &field[1 - axis], &field[2]);
        velocity[1 - axis] = field[1 - axis];
        velocity[2] = field[2];
    }
    mesh->of[DENSITY][at] = density;
    for (int d = 0; d < 3; d++) {
        mesh->of[MOMENTUM + d][at] = density * velocity[d];
        mesh->of[FIELD + d][at] = field[d];
    }
    mesh->of[ENERGY][at] =
        pressure / (heat_ratio - 1) + 0.5 * density * square_of(velocity) + 0.5 * square_of(field);
}

static void begin(const struct mesh *mesh, enum problem problem) {
    double width = 1 / (double)mesh->grid;
    for (size_t j = 0; j < mesh->grid; j++) {
        for (size_t i = 0; i < mesh->grid; i++) {
            begin_cell(mesh, problem, j * mesh->grid + i, ((double)i + 0.5) * width,
                       ((double)j + 0.5) * width);
        }
    }
    keep(mesh);
}

/* The mean distance of a wave's field from where it ought to be by now, as a part of its height. */
static double wave_error(const struct mesh *mesh, enum problem problem, double time) {
    int axis = problem == PROBLEM_WAVE_X ? 0 : 1;
    double sum = 0;
    for (size_t j = 0; j < mesh->grid; j++) {
        for (size_t i = 0; i < mesh->grid; i++) {
            size_t at = j * mesh->grid + i;
            double sideways;
            double upward;
            wave_at(((double)(axis == 0 ? i : j) + 0.5) / (double)mesh->grid + time, &sideways, &upward);
            sum += hypot(mesh->of[FIELD + 1 - axis][at] - sideways, mesh->of[FIELD + 2][at] - upward);
        }
    }
    return sum / ((double)mesh->grid * (double)mesh->grid) / wave_height;
}

struct sums {
    double of[CONSERVED];
    double size; /* the sum of what has a sign, without it */
};

/* Row by row, for rounding errors grow with the length of a sum. */
static struct sums sums_of(const struct mesh *mesh) {
    struct sums sums = {0};
    for (int q = 0; q < CONSERVED; q++) {
        for (size_t row = 0; row < mesh->grid; row++) {
            const double *values = mesh->of[q] + row * mesh->grid;
            double sum = 0;
            double size = 0;
            for (size_t i = 0; i < mesh->grid; i++) {
                sum += values[i];
                size += fabs(values[i]);
            }
            sums.of[q] += sum;
            sums.size += size;
        }
    }
    return sums;
}

static unsigned long long checksum_of(const struct mesh *mesh) {
    unsigned long long checksum = 0;
    for (int q = 0; q < CONSERVED; q++) {
        for (size_t at = 0; at < mesh->grid * mesh->grid; at++) {
            unsigned long long bits;
            memcpy(&bits, &mesh->of[q][at], sizeof bits);
            checksum = checksum_add(checksum, bits);
        }
    }
    return checksum;
}

static struct array have_array(enum memory memory, size_t bytes, unsigned long number, unsigned long count) {
    switch (memory) {
    case MEMORY_ALIGNED:
        return array_aligned(program_name, bytes);
    case MEMORY_PADDED:
        return array_padded(program_name, bytes, number, count);
    default:
        return array_malloc(program_name, bytes);
    }
}

int main(int argc, char **argv) {
    unsigned long grid = 512;
    unsigned long steps = 10;
    unsigned long arrays = ARRAYS_12;
    unsigned long memory = MEMORY_MALLOC;
    unsigned long problem = PROBLEM_VORTEX;
    const struct option_spec options[] = {
        {"grid", "cells along each side of the mesh", OPTION_COUNT, &grid, 4, 32768, NULL},
        {"steps", "steps in time", OPTION_COUNT, &steps, 1, 1000000000, NULL},
        {"arrays", "the conserved quantities only, or also velocity and pressure", OPTION_CHOICE, &arrays, 0,
         0, arrays_names},
        {"memory", "from the allocator, at page boundaries, or padded by hand", OPTION_CHOICE, &memory, 0, 0,
         memory_names},
        {"problem", "the vortex of Orszag and Tang, or an Alfven wave along an axis", OPTION_CHOICE, &problem,
         0, 0, problem_names},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Solves the equations of ideal magnetohydrodynamics on a square mesh.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    unsigned long count = arrays == ARRAYS_8 ? CONSERVED : MOST_ARRAYS;
    struct mesh mesh = {.grid = grid, .kept = arrays == ARRAYS_12};
    struct array blocks[MOST_ARRAYS] = {0};
    void *starts[MOST_ARRAYS] = {0};
    for (unsigned long k = 0; k < count; k++) {
        blocks[k] = have_array((enum memory)memory, grid * grid * sizeof(double), k, count);
        starts[k] = mesh.of[k] = blocks[k].start;
    }
    /* Not the allocator's: this is not what is asked about. */
    struct array rows = array_mapped(program_name, 2 * grid * sizeof(struct flux), HUGE_SYSTEM);
    struct flux *first = rows.start;

    begin(&mesh, (enum problem)problem);
    struct sums before = sums_of(&mesh);
    double seconds = now_seconds();
    double time = solve(&mesh, steps, first, first + grid);
    seconds = now_seconds() - seconds;
    (void)fastest(&mesh); /* checks every cell */
    struct sums after = sums_of(&mesh);

    double mass_error = fabs(after.of[DENSITY] / before.of[DENSITY] - 1);
    double energy_error = fabs(after.of[ENERGY] / before.of[ENERGY] - 1);
    /* The others may be zero, where cells cancel each other out. */
    double other_error = 0;
    for (int q = 0; q < CONSERVED; q++) {
        other_error = fmax(other_error, fabs(after.of[q] - before.of[q]) / before.size);
    }
    if (!(mass_error < tolerance) || !(energy_error < tolerance) || !(other_error < tolerance)) {
        fail(program_name, "what must be conserved is not");
    }
    char error[32] = "null";
    if (problem != PROBLEM_VORTEX) {
        (void)snprintf(error, sizeof error, "%.6f", wave_error(&mesh, (enum problem)problem, time));
    }
    printf("{\"workload\": \"mhd-like\", \"grid\": %lu, \"steps\": %lu, \"arrays\": %lu, \"memory\": \"%s\", "
           "\"problem\": \"%s\", \"distinct_starts\": %lu, \"time\": %.6f, \"mass\": %.9f, \"energy\": %.9f, "
           "\"mass_error\": %.3g, \"energy_error\": %.3g, \"wave_error\": %s, \"checksum\": \"%016llx\", "
           "\"seconds\": %.6f, \"ns_per_cell\": %.3f}\n",
           grid, steps, count, memory_names[memory], problem_names[problem], distinct_starts(starts, count),
           time, after.of[DENSITY] / ((double)grid * (double)grid),
           after.of[ENERGY] / ((double)grid * (double)grid), mass_error, energy_error, error,
           checksum_of(&mesh), seconds, seconds / ((double)steps * (double)grid * (double)grid) * 1e9);
    array_free(&rows);
    for (unsigned long k = 0; k < count; k++) {
        array_free(&blocks[k]);
    }
    return 0;
}
