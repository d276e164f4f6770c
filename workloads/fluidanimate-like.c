/* A stand-in for fluidanimate of the PARSEC suite: a fluid of smoothed particles, animated frame by frame.
 *
 * Kept: a grid of cells, allocated as two large arrays before the first frame; cells that hold 16 particles
 * and are extended by further cells, small blocks that each thread keeps for the next frame and rarely
 * allocates; five phases of a frame with a barrier after each (rebuilding the grid, densities, forces,
 * collisions with the box, positions); slabs of the grid for each thread, and locks on cells, taken where a
 * neighbour's cells cross a border. There are almost no calls into the allocator after the first frame, and
 * much memory traffic: in the Ptlbmalloc2 paper (section 7.2), fluidanimate is affected only by the location
 * of its memory. Left out: the input file with its initial state (a block of fluid is dropped into the box),
 * and sums that depend on the order of threads: contributions are added as integers. After: Bienia et al.,
 * "The PARSEC Benchmark Suite: Characterization and Architectural Implications" (2008), the section on
 * fluidanimate. Written from that description; shares no code with the program. */
#include "support.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static const char program_name[] = "fluidanimate-like";

enum { CELL_PARTICLES = 16, AXES = 3 };

/* Lengths are in cells, times in frames. A sum of contributions is kept in units of 2^-32. */
static const double unit = 4294967296.0;
static const double gravity = -0.01;
static const double stiffness = 0.02;
static const double rest_density = 12;
static const double viscosity = 0.01;
static const double fastest = 0.45; /* so that a particle never passes a whole cell */

struct particle {
    uint32_t number;
    float position[AXES];
    float velocity[AXES];
    int64_t density;
    int64_t force[AXES];
};

struct cell {
    struct particle particles[CELL_PARTICLES];
    struct cell *more;
    unsigned count; /* of this and all further cells */
};

struct fluid {
    unsigned long threads;
    unsigned long particles;
    unsigned long frames;
    long side; /* cells along each axis */
    struct cell *now;
    struct cell *before;
    pthread_mutex_t *locks; /* of each cell */
    struct cell **spare;    /* by thread: further cells that wait */
    unsigned long *made;    /* by thread: further cells that were allocated */
    pthread_barrier_t barrier;
};

static long cell_number(const struct fluid *fluid, long x, long y, long z) {
    return (z * fluid->side + y) * fluid->side + x;
}

static long along(const struct fluid *fluid, float position) {
    long at = (long)position;
    return at < 0 ? 0 : at >= fluid->side ? fluid->side - 1 : at;
}

/* Slabs: the cells of a thread are those with begin <= z < end. */
static long slab(const struct fluid *fluid, unsigned long thread) {
    return fluid->side * (long)thread / (long)fluid->threads;
}

static struct particle *add_particle(struct fluid *fluid, unsigned long thread, struct cell *cell) {
    struct cell *last = cell;
    for (unsigned held = CELL_PARTICLES; held <= cell->count; held += CELL_PARTICLES) {
        if (last->more == NULL) {
            struct cell *more = fluid->spare[thread];
            if (more != NULL) {
                fluid->spare[thread] = more->more;
            } else {
                more = checked(malloc(sizeof *more), program_name);
                fluid->made[thread]++;
            }
            more->more = NULL;
            more->count = 0;
            last->more = more;
        }
        last = last->more;
    }
    return &last->particles[cell->count++ % CELL_PARTICLES];
}

static struct particle *particle_at(struct cell *cell, unsigned i) {
    for (; i >= CELL_PARTICLES; i -= CELL_PARTICLES) {
        cell = cell->more;
    }
    return &cell->particles[i];
}

static void clear(struct fluid *fluid, unsigned long thread, struct cell *cell) {
    while (cell->more != NULL) {
        struct cell *more = cell->more;
        cell->more = more->more;
        more->more = fluid->spare[thread];
        fluid->spare[thread] = more;
    }
    cell->count = 0;
}

/* Calls a function for each cell of the thread's slab. */
static void for_slab(struct fluid *fluid, unsigned long thread,
                     void (*work)(struct fluid *fluid, unsigned long thread, long x, long y, long z)) {
    for (long z = slab(fluid, thread); z < slab(fluid, thread + 1); z++) {
        for (long y = 0; y < fluid->side; y++) {
            for (long x = 0; x < fluid->side; x++) {
                work(fluid, thread, x, y, z);
            }
        }
    }
}

static void clear_cell(struct fluid *fluid, unsigned long thread, long x, long y, long z) {
    clear(fluid, thread, &fluid->now[cell_number(fluid, x, y, z)]);
}

/* Puts the particles of a cell of the frame before into those of this frame; the neighbours' as well. */
static void sort_cell(struct fluid *fluid, unsigned long thread, long x, long y, long z) {
    struct cell *from = &fluid->before[cell_number(fluid, x, y, z)];
    for (unsigned i = 0; i < from->count; i++) {
        struct particle moved = *particle_at(from, i);
        moved.density = 0;
        for (int axis = 0; axis < AXES; axis++) {
            moved.force[axis] = 0;
        }
        long number = cell_number(fluid, along(fluid, moved.position[0]), along(fluid, moved.position[1]),
                                  along(fluid, moved.position[2]));
        (void)pthread_mutex_lock(&fluid->locks[number]);
        *add_particle(fluid, thread, &fluid->now[number]) = moved;
        (void)pthread_mutex_unlock(&fluid->locks[number]);
    }
}

static double square_between(const struct particle *a, const struct particle *b) {
    double sum = 0;
    for (int axis = 0; axis < AXES; axis++) {
        double difference = (double)a->position[axis] - (double)b->position[axis];
        sum += difference * difference;
    }
    return sum;
}

static void add_density(struct particle *a, struct particle *b) {
    double near = 1 - square_between(a, b);
    if (near > 0) {
        int64_t more = (int64_t)(near * near * near * unit);
        a->density += more;
        b->density += more;
    }
}

static double pressure(const struct particle *particle) {
    return stiffness * ((double)particle->density / unit - rest_density);
}

/* The lower number first, so that the sum is the same whoever finds the pair. */
static void add_force(struct particle *a, struct particle *b) {
    if (a->number > b->number) {
        struct particle *swap = a;
        a = b;
        b = swap;
    }
    double near = 1 - square_between(a, b);
    if (near <= 0) {
        return;
    }
    double push = (pressure(a) + pressure(b)) * near / rest_density;
    for (int axis = 0; axis < AXES; axis++) {
        double apart = (double)a->position[axis] - (double)b->position[axis];
        double slower = (double)b->velocity[axis] - (double)a->velocity[axis];
        int64_t force = (int64_t)((push * apart + viscosity * slower * near) * unit);
        a->force[axis] += force;
        b->force[axis] -= force;
    }
}

/* Each pair of particles of one cell or of neighbours, once; the other cell is not the lower one. Of a shared
 * pair both locks are held, the lower cell's first. */
static void meet(struct fluid *fluid, long one, long other, bool shared,
                 void (*add)(struct particle *a, struct particle *b)) {
    struct cell *a = &fluid->now[one];
    struct cell *b = &fluid->now[other];
    if (a->count == 0 || b->count == 0) {
        return;
    }
    if (shared) {
        (void)pthread_mutex_lock(&fluid->locks[one]);
        if (one != other) {
            (void)pthread_mutex_lock(&fluid->locks[other]);
        }
    }
    for (unsigned i = 0; i < a->count; i++) {
        struct particle *p = particle_at(a, i);
        for (unsigned j = one == other ? i + 1 : 0; j < b->count; j++) {
            add(p, particle_at(b, j));
        }
    }
    if (shared) {
        (void)pthread_mutex_unlock(&fluid->locks[one]);
        if (one != other) {
            (void)pthread_mutex_unlock(&fluid->locks[other]);
        }
    }
}

static void meet_neighbours(struct fluid *fluid, unsigned long thread, long x, long y, long z,
                            void (*add)(struct particle *a, struct particle *b)) {
    long one = cell_number(fluid, x, y, z);
    long begin = slab(fluid, thread);
    long end = slab(fluid, thread + 1);
    for (long w = z - 1; w <= z + 1; w++) {
        for (long v = y - 1; v <= y + 1; v++) {
            for (long u = x - 1; u <= x + 1; u++) {
                bool within =
                    u >= 0 && v >= 0 && w >= 0 && u < fluid->side && v < fluid->side && w < fluid->side;
                if (!within || cell_number(fluid, u, v, w) < one) {
                    continue;
                }
                /* Who has the slab below writes this one's first layer, as this one writes the next's. */
                bool shared = z == begin || w == end;
                meet(fluid, one, cell_number(fluid, u, v, w), shared, add);
            }
        }
    }
}

static void find_densities(struct fluid *fluid, unsigned long thread, long x, long y, long z) {
    meet_neighbours(fluid, thread, x, y, z, add_density);
}

static void find_forces(struct fluid *fluid, unsigned long thread, long x, long y, long z) {
    meet_neighbours(fluid, thread, x, y, z, add_force);
}

static double within(double value, double most) {
    return value > most ? most : value < -most ? -most : value;
}

/* A wall that is left behind pushes back. */
static void collide(struct fluid *fluid, unsigned long thread, long x, long y, long z) {
    (void)thread;
    struct cell *cell = &fluid->now[cell_number(fluid, x, y, z)];
    double far = (double)fluid->side;
    for (unsigned i = 0; i < cell->count; i++) {
        struct particle *particle = particle_at(cell, i);
        for (int axis = 0; axis < AXES; axis++) {
            double at = particle->position[axis];
            double push = at < 0.2 ? 0.2 - at : at > far - 0.2 ? far - 0.2 - at : 0;
            particle->force[axis] += (int64_t)(0.5 * push * unit);
        }
    }
}

static void advance(struct fluid *fluid, unsigned long thread, long x, long y, long z) {
    (void)thread;
    struct cell *cell = &fluid->now[cell_number(fluid, x, y, z)];
    double far = (double)fluid->side - 0.001;
    for (unsigned i = 0; i < cell->count; i++) {
        struct particle *particle = particle_at(cell, i);
        for (int axis = 0; axis < AXES; axis++) {
            double speed = particle->velocity[axis] + (double)particle->force[axis] / unit;
            speed = within(speed + (axis == 1 ? gravity : 0), fastest);
            double at = particle->position[axis] + speed;
            particle->velocity[axis] = (float)speed;
            particle->position[axis] = (float)(at < 0 ? 0 : at > far ? far : at);
        }
    }
}

static void animate(unsigned long thread, void *shared) {
    struct fluid *fluid = shared;
    for (unsigned long frame = 0; frame < fluid->frames; frame++) {
        (void)pthread_barrier_wait(&fluid->barrier);
        if (thread == 0) {
            struct cell *swap = fluid->now;
            fluid->now = fluid->before;
            fluid->before = swap;
        }
        (void)pthread_barrier_wait(&fluid->barrier);
        for_slab(fluid, thread, clear_cell);
        (void)pthread_barrier_wait(&fluid->barrier);
        for_slab(fluid, thread, sort_cell);
        (void)pthread_barrier_wait(&fluid->barrier);
        for_slab(fluid, thread, find_densities);
        (void)pthread_barrier_wait(&fluid->barrier);
        for_slab(fluid, thread, find_forces);
        (void)pthread_barrier_wait(&fluid->barrier);
        for_slab(fluid, thread, collide);
        (void)pthread_barrier_wait(&fluid->barrier);
        for_slab(fluid, thread, advance);
    }
}

/* Every page is written at once: a page that is read first costs an interrupt when it is written later. */
static struct cell *new_grid(size_t cells) {
    struct cell *grid = checked(malloc(cells * sizeof *grid), program_name);
    for (size_t i = 0; i < cells; i++) {
        grid[i].more = NULL;
        grid[i].count = 0;
    }
    return grid;
}

/* A block of fluid in half of the box, as dense as its rest. */
static void pour(struct fluid *fluid) {
    unsigned long long random = 1;
    for (unsigned long i = 0; i < fluid->particles; i++) {
        struct particle particle = {.number = (uint32_t)i};
        for (int axis = 0; axis < AXES; axis++) {
            double part = (double)(random_next(&random) >> 11) / 9007199254740992.0;
            particle.position[axis] = (float)(part * (double)fluid->side * (axis == 0 ? 0.5 : 0.999));
        }
        long number = cell_number(fluid, along(fluid, particle.position[0]),
                                  along(fluid, particle.position[1]), along(fluid, particle.position[2]));
        *add_particle(fluid, 0, &fluid->now[number]) = particle;
    }
}

static unsigned long long find_checksum(const struct fluid *fluid) {
    unsigned long long sum = 0;
    for (long i = 0; i < fluid->side * fluid->side * fluid->side; i++) {
        for (unsigned k = 0; k < fluid->now[i].count; k++) {
            const struct particle *particle = particle_at(&fluid->now[i], k);
            unsigned long long one = particle->number;
            for (int axis = 0; axis < AXES; axis++) {
                one = checksum_add(one, (unsigned long long)(particle->position[axis] * 65536));
            }
            sum += one; /* particles lie in a cell as threads have put them there */
        }
    }
    return sum;
}

static void dispose(struct fluid *fluid) {
    for (long i = 0; i < fluid->side * fluid->side * fluid->side; i++) {
        clear(fluid, 0, &fluid->now[i]);
        clear(fluid, 0, &fluid->before[i]);
        (void)pthread_mutex_destroy(&fluid->locks[i]);
    }
    for (unsigned long t = 0; t < fluid->threads; t++) {
        while (fluid->spare[t] != NULL) {
            struct cell *more = fluid->spare[t]->more;
            free(fluid->spare[t]);
            fluid->spare[t] = more;
        }
    }
    free(fluid->made);
    free(fluid->spare);
    free(fluid->locks);
    free(fluid->before);
    free(fluid->now);
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long particles = 60000;
    unsigned long frames = 8;
    const struct option_spec options[] = {
        {"threads", "threads, each with a slab of the grid", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"particles", "particles of the fluid", OPTION_COUNT, &particles, 1, 100000000, NULL},
        {"frames", "frames of the animation", OPTION_COUNT, &frames, 1, 1000000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads animate a fluid of particles in a grid of cells.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct fluid fluid = {.threads = threads, .particles = particles, .frames = frames, .side = 2};
    while ((double)(fluid.side * fluid.side * fluid.side) / 2 * rest_density < (double)particles) {
        fluid.side++;
    }
    size_t cells = (size_t)fluid.side * (size_t)fluid.side * (size_t)fluid.side;
    fluid.now = new_grid(cells);
    fluid.before = new_grid(cells);
    fluid.locks = checked(calloc(cells, sizeof(pthread_mutex_t)), program_name);
    fluid.spare = checked(calloc(threads, sizeof(struct cell *)), program_name);
    fluid.made = checked(calloc(threads, sizeof(unsigned long)), program_name);
    for (size_t i = 0; i < cells; i++) {
        (void)pthread_mutex_init(&fluid.locks[i], NULL);
    }
    if (pthread_barrier_init(&fluid.barrier, NULL, (unsigned)threads) != 0) {
        fail(program_name, "cannot make a barrier");
    }
    pour(&fluid);
    double seconds = run_threads(program_name, threads, animate, &fluid);

    unsigned long long checksum = find_checksum(&fluid);
    unsigned long further = 0;
    for (unsigned long t = 0; t < threads; t++) {
        further += fluid.made[t];
    }
    (void)pthread_barrier_destroy(&fluid.barrier);
    dispose(&fluid);
    printf("{\"workload\": \"fluidanimate-like\", \"threads\": %lu, \"particles\": %lu, \"frames\": %lu, "
           "\"cells\": %zu, \"further_cells\": %lu, \"checksum\": \"%016llx\", \"seconds\": %.6f}\n",
           threads, particles, frames, cells, further, checksum, seconds);
    return 0;
}
