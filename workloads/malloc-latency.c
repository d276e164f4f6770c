/* The latency of the slowest calls of malloc and free while a program is working. Each thread has a live set
 * of blocks of mixed sizes. A step replaces a random block, so that lifetimes are random; at fixed intervals
 * of steps, a burst of additional blocks is allocated and then freed, oldest first. Every byte of a block is
 * written after its allocation and checked before it is freed, outside the timed calls.
 *
 * Every call is timed, except those that initially fill and finally empty the live set. Times are recorded
 * in histograms with buckets of less than 1 %. The histograms and all other data of the program are in
 * mappings that are resident in advance: only the blocks are allocated. The cost of reading the clock is
 * subtracted. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static const char program_name[] = "malloc-latency";

enum clock_kind { CLOCK_COUNTER, CLOCK_KERNEL };

static const char *const clock_names[] = {"counter", "monotonic", NULL};

enum {
    FINENESS = 7, /* bits of a time that tell buckets apart, behind its first one */
    BUCKETS = (64 - FINENESS + 1) << FINENESS,
};

/* Of times in ticks of the clock. Up to 2 << FINENESS each has a bucket of its own; from there on each
 * doubling has 1 << FINENESS of them. */
struct histogram {
    unsigned long long count;
    unsigned long long most;
    unsigned long long buckets[BUCKETS];
};

struct slot {
    unsigned char *block;
    size_t size;
    unsigned char mark;
};

/* Each thread's has pages of its own. */
struct worker {
    struct histogram mallocs;
    struct histogram frees;
    unsigned long allocations; /* those that were timed, and their bytes */
    unsigned long bytes;
    struct thread_cost cost;
    struct slot slots[]; /* the live set, and behind it the burst */
};

struct clock {
    enum clock_kind kind;
    double ns_per_tick;
    unsigned long long cost; /* ticks between two readings with nothing in between */
};

struct work {
    unsigned long steps;
    unsigned long blocks;
    unsigned long least;
    unsigned long most;
    unsigned long doublings;
    unsigned long burst;
    unsigned long every;
    unsigned long long think; /* ticks */
    struct clock clock;
    struct worker **workers;
};

static unsigned bucket_of(unsigned long long ticks) {
    if (ticks < 1ULL << FINENESS) {
        return (unsigned)ticks;
    }
    unsigned shift = 63 - (unsigned)__builtin_clzll(ticks) - FINENESS;
    return (shift << FINENESS) + (unsigned)(ticks >> shift);
}

/* The longest time that belongs to a bucket. */
static unsigned long long longest_in(unsigned bucket) {
    if (bucket < 2U << FINENESS) {
        return bucket;
    }
    unsigned shift = (bucket >> FINENESS) - 1;
    unsigned long long first = bucket - (shift << FINENESS);
    return ((first + 1) << shift) - 1; /* the last bucket's wraps around to the most there is */
}

static inline void record(struct histogram *histogram, unsigned long long ticks) {
    histogram->count++;
    histogram->most = ticks > histogram->most ? ticks : histogram->most;
    histogram->buckets[bucket_of(ticks)]++;
}

static void add(struct histogram *sum, const struct histogram *more) {
    sum->count += more->count;
    sum->most = more->most > sum->most ? more->most : sum->most;
    for (unsigned i = 0; i < BUCKETS; i++) {
        sum->buckets[i] += more->buckets[i];
    }
}

/* The time, in ticks, that all but so many in 10,000 of the calls stayed within. */
static unsigned long long all_but(const struct histogram *histogram, unsigned long long in_10000) {
    unsigned long long beyond = histogram->count * in_10000 / 10000;
    unsigned long long within = histogram->count - beyond;
    unsigned long long met = 0;
    for (unsigned i = 0; i < BUCKETS; i++) {
        met += histogram->buckets[i];
        if (met >= within) {
            unsigned long long longest = longest_in(i);
            return longest < histogram->most ? longest : histogram->most;
        }
    }
    return histogram->most;
}

/* Nothing before it is still under way when it is read, and nothing after it has begun. */
static inline unsigned long long read_clock(enum clock_kind kind) {
    if (kind == CLOCK_COUNTER) {
#if defined(__x86_64__)
        __builtin_ia32_lfence();
        unsigned long long ticks = __builtin_ia32_rdtsc();
        __builtin_ia32_lfence();
        return ticks;
#elif defined(__aarch64__)
        unsigned long long ticks;
        __asm__ volatile("isb\n\tmrs %0, cntvct_el0\n\tisb" : "=r"(ticks) : : "memory");
        return ticks;
#endif
    }
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000000000ULL + (unsigned long long)now.tv_nsec;
}

/* Between two readings, without what they cost. Two CPUs' counters may differ a little. */
static inline unsigned long long between(const struct clock *clock, unsigned long long begin,
                                         unsigned long long end) {
    return end > begin + clock->cost ? end - begin - clock->cost : 0;
}

struct instant {
    unsigned long long ticks;
    double seconds;
};

/* Both clocks at once: of several tries the one that was interrupted least. */
static struct instant instant_now(enum clock_kind kind) {
    enum { TRIES = 20 };
    struct instant best = {0, 0};
    unsigned long long least = ~0ULL;
    for (unsigned i = 0; i < TRIES; i++) {
        unsigned long long before = read_clock(kind);
        double seconds = now_seconds();
        unsigned long long took = read_clock(kind) - before;
        if (took < least) {
            least = took;
            best = (struct instant){before + took / 2, seconds};
        }
    }
    return best;
}

/* The histogram is one that is empty, and is emptied again. */
static struct clock calibrate(enum clock_kind kind, struct histogram *readings) {
    enum { READINGS = 100000 };
    static const double calibration_s = 0.05;
    struct clock clock = {.kind = kind, .ns_per_tick = 1};
    struct instant begin = instant_now(kind);
    for (unsigned i = 0; i < READINGS; i++) {
        unsigned long long before = read_clock(kind);
        unsigned long long after = read_clock(kind);
        record(readings, between(&clock, before, after));
    }
    clock.cost = all_but(readings, 5000);
    memset(readings, 0, sizeof *readings);
    if (kind == CLOCK_COUNTER) {
        while (now_seconds() < begin.seconds + calibration_s) {
        }
        struct instant end = instant_now(kind);
        clock.ns_per_tick = (end.seconds - begin.seconds) * 1e9 / (double)(end.ticks - begin.ticks);
    }
    return clock;
}

static void *map(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        fail(program_name, "out of memory");
    }
    /* Resident from here on: its faults are none of the blocks'. */
    return memset(memory, 0, bytes);
}

static size_t random_size(const struct work *work, unsigned long long *random) {
    unsigned long doubling = random_next(random) % work->doublings;
    unsigned long least = work->least << doubling;
    return random_between(random, least, doubling + 1 == work->doublings ? work->most : 2 * least - 1);
}

static void draw(const struct work *work, struct slot *slot, unsigned long long *random) {
    slot->size = random_size(work, random);
    slot->mark = (unsigned char)random_next(random);
}

static void check(const struct slot *slot) {
    if (!block_holds(slot->block, slot->size, slot->mark)) {
        fail(program_name, "a block does not hold what was written to it");
    }
}

static void birth(const struct work *work, struct worker *worker, struct slot *slot,
                  unsigned long long *random) {
    draw(work, slot, random);
    unsigned long long begin = read_clock(work->clock.kind);
    void *block = malloc(slot->size);
    unsigned long long end = read_clock(work->clock.kind);
    record(&worker->mallocs, between(&work->clock, begin, end));
    slot->block = checked(block, program_name);
    block_fill(slot->block, slot->size, slot->mark);
    worker->allocations++;
    worker->bytes += slot->size;
}

static void death(const struct work *work, struct worker *worker, struct slot *slot) {
    check(slot);
    unsigned long long begin = read_clock(work->clock.kind);
    free(slot->block);
    unsigned long long end = read_clock(work->clock.kind);
    record(&worker->frees, between(&work->clock, begin, end));
}

static void think(const struct work *work) {
    if (work->think > 0) {
        unsigned long long begin = read_clock(work->clock.kind);
        while (read_clock(work->clock.kind) - begin < work->think) {
        }
    }
}

static void live(unsigned long thread, void *shared) {
    const struct work *work = shared;
    struct worker *worker = work->workers[thread];
    unsigned long long random = thread;
    for (unsigned long i = 0; i < work->blocks; i++) {
        struct slot *slot = &worker->slots[i];
        draw(work, slot, &random);
        slot->block = checked(malloc(slot->size), program_name);
        block_fill(slot->block, slot->size, slot->mark);
    }
    struct slot *burst = &worker->slots[work->blocks];
    struct thread_cost before = thread_cost_now();
    for (unsigned long step = 1; step <= work->steps; step++) {
        struct slot *slot = &worker->slots[random_between(&random, 0, work->blocks - 1)];
        death(work, worker, slot);
        birth(work, worker, slot, &random);
        think(work);
        if (step % work->every == 0) {
            for (unsigned long i = 0; i < work->burst; i++) {
                birth(work, worker, &burst[i], &random);
            }
            for (unsigned long i = 0; i < work->burst; i++) {
                death(work, worker, &burst[i]);
            }
        }
    }
    thread_cost_add_since(&worker->cost, &before);
    for (unsigned long i = 0; i < work->blocks; i++) {
        check(&worker->slots[i]);
        free(worker->slots[i].block);
    }
}

static void print_times(const char *call, const struct histogram *histogram, double ns_per_tick) {
    static const struct {
        const char *name;
        unsigned long long beyond; /* in 10,000 */
    } quantiles[] = {{"p50", 5000}, {"p99", 100}, {"p99_9", 10}, {"p99_99", 1}};
    for (size_t i = 0; i < sizeof quantiles / sizeof quantiles[0]; i++) {
        printf("\"%s_%s_ns\": %.1f, ", call, quantiles[i].name,
               (double)all_but(histogram, quantiles[i].beyond) * ns_per_tick);
    }
    printf("\"%s_max_ns\": %.1f, ", call, (double)histogram->most * ns_per_tick);
}

int main(int argc, char **argv) {
    unsigned long threads = 1;
    unsigned long steps = 2000000;
    unsigned long blocks = 10000;
    unsigned long least = 16;
    unsigned long most = 65536;
    unsigned long burst = 1000;
    unsigned long every = 10000;
    unsigned long think_ns = 0;
    unsigned long clock_kind = CLOCK_COUNTER;
    const struct option_spec options[] = {
        {"threads", "threads, each with its own blocks", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"steps", "blocks of the live set that each thread renews", OPTION_COUNT, &steps, 1, 1000000000000,
         NULL},
        {"blocks", "blocks in a thread's live set", OPTION_COUNT, &blocks, 1, 100000000, NULL},
        {"min", "minimum bytes in a block", OPTION_COUNT, &least, 1, 1UL << 30, NULL},
        {"max", "maximum bytes in a block; each doubling from --min on is as likely", OPTION_COUNT, &most, 1,
         1UL << 30, NULL},
        {"burst", "blocks that a burst allocates, and frees again", OPTION_COUNT, &burst, 0, 100000000, NULL},
        {"every", "steps from one burst to the next", OPTION_COUNT, &every, 1, 1000000000000, NULL},
        {"think", "ns that a thread spends on other things after each step", OPTION_COUNT, &think_ns, 0,
         1000000000, NULL},
        {"clock", "the CPU's counter, or the kernel's clock", OPTION_CHOICE, &clock_kind, 0, 0, clock_names},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary =
            "Threads renew blocks of mixed sizes, now and then in bursts, and time every malloc and free.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (least > most) {
        reject_arguments(program_name, "--min is more than --max");
    }

    struct work work = {
        .steps = steps,
        .blocks = blocks,
        .least = least,
        .most = most,
        .doublings = 1,
        .burst = burst,
        .every = every,
    };
    while (least << (work.doublings + 1) <= most) {
        work.doublings++;
    }
    work.workers = map(threads * sizeof(struct worker *));
    for (unsigned long t = 0; t < threads; t++) {
        work.workers[t] = map(sizeof(struct worker) + (blocks + burst) * sizeof(struct slot));
    }
    work.clock = calibrate((enum clock_kind)clock_kind, &work.workers[0]->mallocs);
    work.think = (unsigned long long)((double)think_ns / work.clock.ns_per_tick);
    double seconds = run_threads(program_name, threads, live, &work);

    struct worker *all = map(sizeof *all);
    for (unsigned long t = 0; t < threads; t++) {
        add(&all->mallocs, &work.workers[t]->mallocs);
        add(&all->frees, &work.workers[t]->frees);
        all->allocations += work.workers[t]->allocations;
        all->bytes += work.workers[t]->bytes;
        thread_cost_add(&all->cost, &work.workers[t]->cost);
    }
    printf("{\"workload\": \"malloc-latency\", \"threads\": %lu, \"steps\": %lu, \"blocks\": %lu, "
           "\"min\": %lu, \"max\": %lu, \"burst\": %lu, \"every\": %lu, \"think\": %lu, \"clock\": \"%s\", "
           "\"allocations\": %lu, \"bytes\": %lu, \"seconds\": %.6f, ",
           threads, steps, blocks, least, most, burst, every, think_ns, clock_names[clock_kind],
           all->allocations, all->bytes, seconds);
    print_times("malloc", &all->mallocs, work.clock.ns_per_tick);
    print_times("free", &all->frees, work.clock.ns_per_tick);
    printf("\"clock_cost_ns\": %.1f, \"client_user_s\": %.6f, \"client_system_s\": %.6f, "
           "\"client_minor_faults\": %lu, \"client_involuntary_switches\": %lu}\n",
           (double)work.clock.cost * work.clock.ns_per_tick, all->cost.user_s, all->cost.system_s,
           all->cost.minor_faults, all->cost.involuntary_switches);
    return 0;
}
