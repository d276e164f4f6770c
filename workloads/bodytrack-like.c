/* A stand-in for bodytrack of the PARSEC suite: tracks a body in the pictures of several cameras.
 *
 * Kept: a pool of threads that live as long as the program and receive one kernel after another; for each
 * frame and camera, a picture and maps computed from it, in buffers of a third of a MiB that are freed when
 * the next frame's exist; an annealed particle filter, whose layers each allocate a vector for every
 * particle and drop those of the previous layer, so that the pool's threads free blocks of the main thread
 * and vice versa; and a short-lived vector of projected points for each likelihood. The working set is some
 * 10 MiB (the Ptlbmalloc2 paper's section 7.2 reports 30 MB for the original), with few calls into the
 * kernel. Left out: the recorded pictures (a moving figure of ten limbs is drawn instead), the body's
 * geometry (limbs are lines), and floating point (all numbers are integers, so the result does not depend on
 * threads). After: Bienia et al., "The PARSEC Benchmark Suite: Characterization and Architectural
 * Implications" (2008), the section on bodytrack. Written from that description; shares no code with the
 * program. */
#include "support.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "bodytrack-like";

enum {
    WIDTH = 640,
    HEIGHT = 480,
    PIXELS = WIDTH * HEIGHT,
    CAMERAS = 4,
    LIMBS = 10,
    JOINTS = LIMBS + 1,
    POSE = 2 + 2 * JOINTS, /* where the body is, and each joint against that */
    SAMPLES = 8,           /* of a limb, for the likelihood */
    NEAR = 6,              /* pixels that the map of edges is widened by */
};

struct point {
    int x;
    int y;
};

struct tracker;

/* Work for all: the pool calls the kernel with each number below count once. */
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t posted;
    pthread_cond_t finished;
    void (*kernel)(struct tracker *tracker, unsigned long number);
    unsigned long count;
    atomic_ulong next;
    unsigned long working;
    unsigned long round;
    bool ended;
};

struct tracker {
    unsigned long threads;
    unsigned long frames;
    unsigned long particles;
    unsigned long layers;
    struct pool pool;
    unsigned char *pictures[CAMERAS];
    unsigned char *edges[CAMERAS];
    unsigned char *near[CAMERAS];
    unsigned long frame;
    unsigned long layer;
    int **poses;       /* of the particles */
    int **former;      /* those that they are drawn from */
    uint64_t *weights; /* of the particles */
    uint64_t *sums;    /* of the weights of the former ones, up to and with each */
    unsigned long long checksum;
};

static void do_work(struct tracker *tracker) {
    struct pool *pool = &tracker->pool;
    unsigned long number;
    while ((number = atomic_fetch_add(&pool->next, 1)) < pool->count) {
        pool->kernel(tracker, number);
    }
}

/* The leading thread works too, and returns when all is done. */
static void run_kernel(struct tracker *tracker, unsigned long count,
                       void (*kernel)(struct tracker *tracker, unsigned long number)) {
    struct pool *pool = &tracker->pool;
    (void)pthread_mutex_lock(&pool->lock);
    pool->kernel = kernel;
    pool->count = count;
    atomic_store(&pool->next, 0);
    pool->working = tracker->threads - 1;
    pool->round++;
    (void)pthread_cond_broadcast(&pool->posted);
    (void)pthread_mutex_unlock(&pool->lock);
    do_work(tracker);
    (void)pthread_mutex_lock(&pool->lock);
    while (pool->working > 0) {
        (void)pthread_cond_wait(&pool->finished, &pool->lock);
    }
    (void)pthread_mutex_unlock(&pool->lock);
}

static void serve(struct tracker *tracker) {
    struct pool *pool = &tracker->pool;
    unsigned long seen = 0;
    (void)pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->round == seen && !pool->ended) {
            (void)pthread_cond_wait(&pool->posted, &pool->lock);
        }
        if (pool->ended) {
            break;
        }
        seen = pool->round;
        (void)pthread_mutex_unlock(&pool->lock);
        do_work(tracker);
        (void)pthread_mutex_lock(&pool->lock);
        if (--pool->working == 0) {
            (void)pthread_cond_signal(&pool->finished);
        }
    }
    (void)pthread_mutex_unlock(&pool->lock);
}

/* Where the body truly is in a frame: it walks to and fro, and its joints swing. */
static void true_pose(unsigned long frame, int pose[POSE]) {
    long step = (long)(frame % 40);
    pose[0] = (int)(WIDTH / 2 + 4 * (step < 20 ? step - 10 : 30 - step));
    pose[1] = HEIGHT / 2;
    for (int joint = 0; joint < JOINTS; joint++) {
        int swing = (int)((frame * (unsigned long)(joint + 1)) % 12);
        pose[2 + 2 * joint] = (joint % 3 - 1) * 40 + (swing < 6 ? swing : 12 - swing) * 2;
        pose[3 + 2 * joint] = joint * 28 - 150;
    }
}

/* The ends of a limb as a camera sees them: each camera looks from a side of its own. */
static struct point project(const int *pose, int joint, int camera) {
    int x = pose[2 + 2 * joint] * (4 - camera) / 4;
    int y = pose[3 + 2 * joint] * (8 - camera) / 8;
    return (struct point){pose[0] + x, pose[1] + y};
}

static bool inside(struct point point) {
    return point.x >= 0 && point.x < WIDTH && point.y >= 0 && point.y < HEIGHT;
}

static struct point between(struct point a, struct point b, int part, int parts) {
    return (struct point){a.x + (b.x - a.x) * part / parts, a.y + (b.y - a.y) * part / parts};
}

/* A figure of bright limbs before a dark and noisy ground. */
static void take_picture(struct tracker *tracker, unsigned long camera) {
    unsigned char *picture = checked(malloc(PIXELS), program_name);
    unsigned long long random = tracker->frame * CAMERAS + camera;
    for (size_t at = 0; at < PIXELS; at += 8) {
        uint64_t noise = random_next(&random) & 0x0f0f0f0f0f0f0f0fULL;
        memcpy(picture + at, &noise, sizeof noise);
    }
    int pose[POSE];
    true_pose(tracker->frame, pose);
    for (int limb = 0; limb < LIMBS; limb++) {
        struct point a = project(pose, limb, (int)camera);
        struct point b = project(pose, limb + 1, (int)camera);
        for (int i = 0; i <= 200; i++) {
            struct point at = between(a, b, i, 200);
            for (int width = -4; width <= 4; width++) {
                struct point wide = {at.x + width, at.y};
                if (inside(wide)) {
                    picture[wide.y * WIDTH + wide.x] = 200;
                }
            }
        }
    }
    free(tracker->pictures[camera]);
    tracker->pictures[camera] = picture;
}

static void find_edges(struct tracker *tracker, unsigned long camera) {
    const unsigned char *picture = tracker->pictures[camera];
    unsigned char *edges = checked(calloc(PIXELS, 1), program_name);
    for (size_t at = WIDTH + 1; at < PIXELS - WIDTH - 1; at++) {
        int across = picture[at + 1] - picture[at - 1];
        int down = picture[at + WIDTH] - picture[at - WIDTH];
        edges[at] = across * across + down * down > 10000;
    }
    free(tracker->edges[camera]);
    tracker->edges[camera] = edges;
}

/* Each pixel: how near an edge is in its row, from NEAR down to 0. */
static void widen_edges(struct tracker *tracker, unsigned long camera) {
    const unsigned char *edges = tracker->edges[camera];
    unsigned char *near = checked(malloc(PIXELS), program_name);
    int from = 0;
    for (size_t at = 0; at < PIXELS; at++) {
        from = edges[at] ? NEAR : from > 0 ? from - 1 : 0;
        near[at] = (unsigned char)from;
    }
    from = 0;
    for (size_t at = PIXELS; at-- > 0;) {
        from = edges[at] ? NEAR : from > 0 ? from - 1 : 0;
        near[at] = near[at] > from ? near[at] : (unsigned char)from;
    }
    free(tracker->near[camera]);
    tracker->near[camera] = near;
}

/* How well a pose fits the pictures: edges are near its limbs' sides, and its limbs are bright. */
static unsigned long likeness(const struct tracker *tracker, const int *pose) {
    struct point *points = checked(malloc((size_t)LIMBS * SAMPLES * sizeof *points), program_name);
    unsigned long sum = 0;
    for (int camera = 0; camera < CAMERAS; camera++) {
        for (int i = 0; i < LIMBS * SAMPLES; i++) {
            struct point a = project(pose, i / SAMPLES, camera);
            struct point b = project(pose, i / SAMPLES + 1, camera);
            points[i] = between(a, b, i % SAMPLES, SAMPLES);
        }
        for (int i = 0; i < LIMBS * SAMPLES; i++) {
            if (inside(points[i])) {
                size_t at = (size_t)points[i].y * WIDTH + (size_t)points[i].x;
                sum += tracker->near[camera][at] + (tracker->pictures[camera][at] > 100 ? NEAR : 0);
            }
        }
    }
    free(points);
    return sum;
}

/* Who is drawn again, in proportion to weights: a new vector, with noise that falls from layer to layer. */
static void draw_particle(struct tracker *tracker, unsigned long number) {
    unsigned long long random =
        (tracker->frame * tracker->layers + tracker->layer) * tracker->particles + number + 1;
    uint64_t wanted = random_next(&random) % tracker->sums[tracker->particles - 1];
    unsigned long low = 0;
    for (unsigned long high = tracker->particles - 1; low < high;) {
        unsigned long middle = (low + high) / 2;
        if (tracker->sums[middle] > wanted) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    int *pose = checked(malloc(POSE * sizeof(int)), program_name);
    int noise = 1 + (int)(8 >> (tracker->layer < 8 ? tracker->layer : 8));
    for (int i = 0; i < POSE; i++) {
        pose[i] = tracker->former[low][i] + (int)random_between(&random, 0, 2UL * (unsigned)noise) - noise;
    }
    tracker->poses[number] = pose;
}

static void weigh_particle(struct tracker *tracker, unsigned long number) {
    unsigned long found = likeness(tracker, tracker->poses[number]);
    unsigned long most = 2UL * NEAR * CAMERAS * LIMBS * SAMPLES;
    /* Steeper in the later layers: annealing. */
    uint64_t weight = 1;
    for (unsigned long i = 0; i < 2 + (tracker->layer < 3 ? tracker->layer : 3); i++) {
        weight = 1 + weight * found * 512 / most;
    }
    tracker->weights[number] = weight;
}

static void drop_particle(struct tracker *tracker, unsigned long number) {
    free(tracker->former[number]);
    tracker->former[number] = NULL;
}

static void track_frame(struct tracker *tracker) {
    run_kernel(tracker, CAMERAS, take_picture);
    run_kernel(tracker, CAMERAS, find_edges);
    run_kernel(tracker, CAMERAS, widen_edges);
    for (tracker->layer = 0; tracker->layer < tracker->layers; tracker->layer++) {
        int **former = tracker->poses;
        tracker->poses = tracker->former;
        tracker->former = former;
        uint64_t sum = 0;
        for (unsigned long i = 0; i < tracker->particles; i++) {
            sum += tracker->weights[i];
            tracker->sums[i] = sum;
        }
        run_kernel(tracker, tracker->particles, draw_particle);
        run_kernel(tracker, tracker->particles, weigh_particle);
        run_kernel(tracker, tracker->particles, drop_particle);
    }
    for (unsigned long i = 0; i < tracker->particles; i++) {
        tracker->checksum = checksum_add(tracker->checksum, tracker->weights[i]);
    }
}

static void run_thread(unsigned long thread, void *shared) {
    struct tracker *tracker = shared;
    if (thread != 0) {
        serve(tracker);
        return;
    }
    for (tracker->frame = 0; tracker->frame < tracker->frames; tracker->frame++) {
        track_frame(tracker);
    }
    (void)pthread_mutex_lock(&tracker->pool.lock);
    tracker->pool.ended = true;
    (void)pthread_cond_broadcast(&tracker->pool.posted);
    (void)pthread_mutex_unlock(&tracker->pool.lock);
}

/* The first particles know the first frame's pose. */
static void prepare(struct tracker *tracker) {
    tracker->poses = checked(calloc(tracker->particles, sizeof(int *)), program_name);
    tracker->former = checked(calloc(tracker->particles, sizeof(int *)), program_name);
    tracker->weights = checked(calloc(tracker->particles, sizeof(uint64_t)), program_name);
    tracker->sums = checked(calloc(tracker->particles, sizeof(uint64_t)), program_name);
    for (unsigned long i = 0; i < tracker->particles; i++) {
        tracker->poses[i] = checked(malloc(POSE * sizeof(int)), program_name);
        true_pose(0, tracker->poses[i]);
        tracker->weights[i] = 1;
    }
}

/* Of all particles, how far the best fitting one's body is from the truth, in pixels. */
static long final_error(const struct tracker *tracker) {
    unsigned long best = 0;
    for (unsigned long i = 1; i < tracker->particles; i++) {
        best = tracker->weights[i] > tracker->weights[best] ? i : best;
    }
    int pose[POSE];
    true_pose(tracker->frames - 1, pose);
    return labs((long)tracker->poses[best][0] - pose[0]) + labs((long)tracker->poses[best][1] - pose[1]);
}

static void dispose(struct tracker *tracker) {
    for (unsigned long i = 0; i < tracker->particles; i++) {
        free(tracker->poses[i]);
    }
    for (int camera = 0; camera < CAMERAS; camera++) {
        free(tracker->pictures[camera]);
        free(tracker->edges[camera]);
        free(tracker->near[camera]);
    }
    free(tracker->poses);
    free(tracker->former);
    free(tracker->weights);
    free(tracker->sums);
}

int main(int argc, char **argv) {
    struct tracker tracker = {
        .threads = 2,
        .frames = 40,
        .particles = 1000,
        .layers = 5,
        .pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
                 .posted = PTHREAD_COND_INITIALIZER,
                 .finished = PTHREAD_COND_INITIALIZER},
    };
    const struct option_spec options[] = {
        {"threads", "threads of the pool, including the leading one", OPTION_COUNT, &tracker.threads, 1, 4096,
         NULL},
        {"frames", "pictures of each camera", OPTION_COUNT, &tracker.frames, 1, 1000000, NULL},
        {"particles", "poses to try in each layer", OPTION_COUNT, &tracker.particles, 1, 100000, NULL},
        {"layers", "annealing layers of a frame", OPTION_COUNT, &tracker.layers, 1, 100, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "A pool of threads tracks a figure in the pictures of four cameras.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    prepare(&tracker);
    double seconds = run_threads(program_name, tracker.threads, run_thread, &tracker);
    long error = final_error(&tracker);
    dispose(&tracker);
    printf("{\"workload\": \"bodytrack-like\", \"threads\": %lu, \"frames\": %lu, \"particles\": %lu, "
           "\"layers\": %lu, \"final_error\": %ld, \"checksum\": \"%016llx\", \"seconds\": %.6f}\n",
           tracker.threads, tracker.frames, tracker.particles, tracker.layers, error, tracker.checksum,
           seconds);
    return 0;
}
