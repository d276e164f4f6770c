/* A stand-in for streamcluster of the PARSEC suite: points of a stream gathered around few centres.
 *
 * Kept: the stream comes in blocks of points, each block a large array that is allocated, filled, clustered
 * and freed. A local search repeatedly computes how much a new centre at a random point would save, by
 * threads that each have a part of the points and meet at barriers; each such computation allocates and
 * frees working arrays of medium size. Calls are few: nearly all time is spent on distances. Left out: the
 * original's floating-point numbers (coordinates are integers, so that the result does not depend on the
 * number of threads), and its output file. After: Bienia et al., "The PARSEC Benchmark Suite:
 * Characterization and Architectural Implications" (2008), the section on streamcluster, and O'Callaghan et
 * al., "Streaming-Data Algorithms for High-Quality Clustering" (2002) for the search. Written from these
 * descriptions; shares no code with the program. */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "streamcluster-like";

enum { MOST_COORDINATE = 1000, CLOUDS = 16, SPREAD = 60 };

/* Points, and where they belong. A centre is the number of a point of the same set. */
struct points {
    unsigned long count;
    int *coordinates; /* of all points, one after another */
    unsigned long *weights;
    unsigned long *centres;
    long *costs; /* weight times squared distance to the centre */
};

struct stream {
    unsigned long threads;
    unsigned long total;
    unsigned long block;
    unsigned long dimensions;
    unsigned long least; /* centres of a block */
    unsigned long most;
    unsigned long long random; /* of the leading thread */
    int *clouds;
    pthread_barrier_t barrier;
    /* What the leading thread asks of all. */
    bool ended;
    struct points *points;
    unsigned long candidate;
    long *saved;         /* by thread: by moving single points to the candidate */
    long *closing;       /* by thread and centre: what the centre's closing would cost its other points */
    unsigned char *move; /* by point: nearer to the candidate */
    unsigned char *closed;
    bool opens;
    unsigned long questions;
    unsigned long long checksum;
    unsigned long centres_found;
};

static long squared_distance(const struct stream *stream, const struct points *points, unsigned long a,
                             unsigned long b) {
    const int *p = points->coordinates + a * stream->dimensions;
    const int *q = points->coordinates + b * stream->dimensions;
    int sum = 0; /* 1,000 dimensions of 1,000 squared are below 2^30 */
    for (unsigned long i = 0; i < stream->dimensions; i++) {
        sum += (p[i] - q[i]) * (p[i] - q[i]);
    }
    return sum;
}

static struct points *new_points(const struct stream *stream, unsigned long count) {
    struct points *points = checked(malloc(sizeof *points), program_name);
    points->count = count;
    points->coordinates = checked(malloc(count * stream->dimensions * sizeof(int)), program_name);
    points->weights = checked(malloc(count * sizeof(unsigned long)), program_name);
    points->centres = checked(malloc(count * sizeof(unsigned long)), program_name);
    points->costs = checked(malloc(count * sizeof(long)), program_name);
    return points;
}

static void drop_points(struct points *points) {
    free(points->costs);
    free(points->centres);
    free(points->weights);
    free(points->coordinates);
    free(points);
}

static void read_points(struct stream *stream, struct points *points) {
    for (unsigned long i = 0; i < points->count; i++) {
        const int *cloud = stream->clouds + random_next(&stream->random) % CLOUDS * stream->dimensions;
        int *at = points->coordinates + i * stream->dimensions;
        for (unsigned long d = 0; d < stream->dimensions; d++) {
            at[d] = cloud[d] + (int)random_between(&stream->random, 0, SPREAD);
        }
        points->weights[i] = 1;
    }
}

/* One thread's part of a question: first what it would bring, and once all know whether it is done, the
 * moves. */
static void weigh(struct stream *stream, unsigned long thread) {
    struct points *points = stream->points;
    unsigned long begin = points->count * thread / stream->threads;
    unsigned long end = points->count * (thread + 1) / stream->threads;
    long *closing = stream->closing + thread * points->count;
    long saved = 0; /* the threads' sums share a cache line */
    for (unsigned long i = begin; i < end; i++) {
        long cost = (long)points->weights[i] * squared_distance(stream, points, i, stream->candidate);
        stream->move[i] = cost < points->costs[i];
        if (stream->move[i]) {
            saved += points->costs[i] - cost;
        } else {
            closing[points->centres[i]] += cost - points->costs[i];
        }
    }
    stream->saved[thread] = saved;
}

static void follow(struct stream *stream, unsigned long thread) {
    struct points *points = stream->points;
    unsigned long begin = points->count * thread / stream->threads;
    unsigned long end = points->count * (thread + 1) / stream->threads;
    for (unsigned long i = begin; stream->opens && i < end; i++) {
        if (stream->move[i] || stream->closed[points->centres[i]]) {
            points->centres[i] = stream->candidate;
            points->costs[i] =
                (long)points->weights[i] * squared_distance(stream, points, i, stream->candidate);
        }
    }
}

static void help(struct stream *stream, unsigned long thread) {
    for (;;) {
        (void)pthread_barrier_wait(&stream->barrier);
        if (stream->ended) {
            return;
        }
        weigh(stream, thread);
        (void)pthread_barrier_wait(&stream->barrier);
        (void)pthread_barrier_wait(&stream->barrier);
        follow(stream, thread);
        (void)pthread_barrier_wait(&stream->barrier);
    }
}

/* What a centre at the candidate would save, where a centre costs so much; centres that are then not worth
 * their cost are closed. */
static long find_gain(struct stream *stream, const unsigned char *open, long price) {
    unsigned long count = stream->points->count;
    long gain = -price;
    for (unsigned long t = 0; t < stream->threads; t++) {
        gain += stream->saved[t];
    }
    for (unsigned long centre = 0; centre < count; centre++) {
        if (!open[centre] || centre == stream->candidate) {
            continue;
        }
        long cost = 0;
        for (unsigned long t = 0; t < stream->threads; t++) {
            cost += stream->closing[t * count + centre];
        }
        stream->closed[centre] = cost < price;
        gain += cost < price ? price - cost : 0;
    }
    return gain;
}

/* Opens a centre at the candidate if that saves anything; returns how much. */
static long ask(struct stream *stream, struct points *points, unsigned char *open, unsigned long candidate,
                long price) {
    stream->points = points;
    stream->candidate = candidate;
    stream->saved = checked(calloc(stream->threads, sizeof(long)), program_name);
    stream->closing = checked(calloc(stream->threads * points->count, sizeof(long)), program_name);
    stream->move = checked(malloc(points->count), program_name);
    stream->closed = checked(calloc(points->count, 1), program_name);
    (void)pthread_barrier_wait(&stream->barrier);
    weigh(stream, 0);
    (void)pthread_barrier_wait(&stream->barrier);
    long gain = find_gain(stream, open, price);
    stream->opens = gain > 0;
    (void)pthread_barrier_wait(&stream->barrier);
    follow(stream, 0);
    (void)pthread_barrier_wait(&stream->barrier);
    for (unsigned long i = 0; stream->opens && i < points->count; i++) {
        open[i] = (open[i] && !stream->closed[i]) || i == candidate;
    }
    stream->questions++;
    free(stream->closed);
    free(stream->move);
    free(stream->closing);
    free(stream->saved);
    return gain > 0 ? gain : 0;
}

static unsigned long count_open(const struct points *points, const unsigned char *open) {
    unsigned long count = 0;
    for (unsigned long i = 0; i < points->count; i++) {
        count += open[i];
    }
    return count;
}

/* One centre at the first point: the search opens others. */
static long start_search(struct stream *stream, struct points *points, unsigned char *open) {
    long sum = 0;
    memset(open, 0, points->count);
    open[0] = 1;
    for (unsigned long i = 0; i < points->count; i++) {
        points->centres[i] = 0;
        points->costs[i] = (long)points->weights[i] * squared_distance(stream, points, i, 0);
        sum += points->costs[i];
    }
    return sum;
}

/* Finds a price at which a local search ends with a number of centres in range, by halving. */
static void cluster(struct stream *stream, struct points *points, unsigned char *open) {
    long low = 0;
    long high = start_search(stream, points, open);
    for (int halving = 0; halving < 12 && low + 1 < high; halving++) {
        long price = low + (high - low) / 2;
        (void)start_search(stream, points, open);
        for (unsigned long question = 0; question < 6 * stream->most; question++) {
            (void)ask(stream, points, open, random_next(&stream->random) % points->count, price);
        }
        unsigned long found = count_open(points, open);
        if (found > stream->most) {
            low = price;
        } else if (found < stream->least) {
            high = price;
        } else {
            return;
        }
    }
}

/* The centres become points themselves, as heavy as all that belong to them. */
static void keep_centres(const struct stream *stream, const struct points *points, const unsigned char *open,
                         struct points *kept) {
    unsigned long *numbers = checked(malloc(points->count * sizeof(unsigned long)), program_name);
    for (unsigned long i = 0; i < points->count; i++) {
        if (open[i]) {
            numbers[i] = kept->count++;
            memcpy(kept->coordinates + numbers[i] * stream->dimensions,
                   points->coordinates + i * stream->dimensions, stream->dimensions * sizeof(int));
            kept->weights[numbers[i]] = 0;
        }
    }
    for (unsigned long i = 0; i < points->count; i++) {
        kept->weights[numbers[points->centres[i]]] += points->weights[i];
    }
    free(numbers);
}

static void lead(struct stream *stream) {
    unsigned long blocks = (stream->total + stream->block - 1) / stream->block;
    /* A search may end with a number of centres out of range, so there is room for all that is asked for. */
    struct points *kept = new_points(stream, blocks * (6 * stream->most + 1));
    kept->count = 0;
    for (unsigned long left = stream->total; left > 0;) {
        unsigned long count = left < stream->block ? left : stream->block;
        struct points *points = new_points(stream, count);
        unsigned char *open = checked(calloc(count, 1), program_name);
        read_points(stream, points);
        cluster(stream, points, open);
        keep_centres(stream, points, open, kept);
        free(open);
        drop_points(points);
        left -= count;
    }
    unsigned char *open = checked(calloc(kept->count + 1, 1), program_name);
    cluster(stream, kept, open);
    stream->centres_found = count_open(kept, open);
    for (unsigned long i = 0; i < kept->count; i++) {
        stream->checksum = checksum_add(stream->checksum, kept->centres[i]);
        stream->checksum = checksum_add(stream->checksum, (unsigned long long)kept->costs[i]);
    }
    free(open);
    drop_points(kept);
    stream->ended = true;
    (void)pthread_barrier_wait(&stream->barrier);
}

static void run_thread(unsigned long thread, void *shared) {
    if (thread == 0) {
        lead(shared);
    } else {
        help(shared, thread);
    }
}

int main(int argc, char **argv) {
    struct stream stream = {
        .threads = 2, .total = 32768, .block = 8192, .dimensions = 128, .least = 10, .most = 20, .random = 1};
    const struct option_spec options[] = {
        {"threads", "threads that each have a part of the points", OPTION_COUNT, &stream.threads, 1, 1024,
         NULL},
        {"points", "points of the stream", OPTION_COUNT, &stream.total, 1, 1000000000, NULL},
        {"block", "points clustered at a time", OPTION_COUNT, &stream.block, 1, 1000000, NULL},
        {"dimensions", "coordinates of a point", OPTION_COUNT, &stream.dimensions, 1, 1000, NULL},
        {"least", "minimum number of centres of a block", OPTION_COUNT, &stream.least, 1, 1000, NULL},
        {"most", "maximum number of centres of a block", OPTION_COUNT, &stream.most, 1, 1000, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads gather the points of a stream around few centres, block by block.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (stream.least > stream.most) {
        reject_arguments(program_name, "--least is more than --most");
    }

    stream.clouds = checked(malloc(CLOUDS * stream.dimensions * sizeof(int)), program_name);
    for (unsigned long i = 0; i < CLOUDS * stream.dimensions; i++) {
        stream.clouds[i] = (int)random_between(&stream.random, 0, MOST_COORDINATE - SPREAD);
    }
    if (pthread_barrier_init(&stream.barrier, NULL, (unsigned)stream.threads) != 0) {
        fail(program_name, "cannot make a barrier");
    }
    double seconds = run_threads(program_name, stream.threads, run_thread, &stream);
    (void)pthread_barrier_destroy(&stream.barrier);
    free(stream.clouds);
    printf("{\"workload\": \"streamcluster-like\", \"threads\": %lu, \"points\": %lu, \"block\": %lu, "
           "\"dimensions\": %lu, \"least\": %lu, \"most\": %lu, \"questions\": %lu, \"centres\": %lu, "
           "\"checksum\": \"%016llx\", \"seconds\": %.6f}\n",
           stream.threads, stream.total, stream.block, stream.dimensions, stream.least, stream.most,
           stream.questions, stream.centres_found, stream.checksum, seconds);
    return 0;
}
