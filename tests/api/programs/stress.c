/*
 * Random operations of several threads, against a model of what each block must hold:
 * stress [seed=1] [seconds=2] [threads=4] [live_mib=200] [largest_mib=16] [rounds=0: as many as fit]
 *
 * At intervals all threads wait at a barrier, outside the allocator, whose counters must be consistent. Under
 * another malloc, without these counters, only the blocks are checked. With USE_CALM_NAMES it calls
 * calm_malloc etc., and can be built together with the allocator's sources and a sanitizer.
 */
#include "api.h"
#include "names.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define SLOTS          400
#define MAIL           64
#define SMALL          (8 * KIB) /* up to here every byte is filled and checked */
#define SAMPLE         32
#define MIN_ROUNDS     3 /* and operations, unless there is a server, which they may have to wait for */
#define MIN_OPERATIONS 12000

enum kind { PLAIN, ALIGNED };

struct shadow {
    unsigned char *block;
    size_t bytes; /* that are filled: what was asked for, or all that is usable */
    size_t asked, alignment;
    uint64_t mark;
    enum kind kind;
};

struct worker {
    pthread_t thread;
    size_t number;
    uint64_t random, operations, phase_left;
    size_t live;
    unsigned grow; /* how many of 100 empty slots are filled when met */
    bool running;
    struct shadow slots[SLOTS];
};

static struct worker workers[MAX_THREADS];

static struct {
    atomic_bool taken;
    struct shadow shadow;
} mail[MAIL];

static uint64_t seed = 1, threads = 4, live_mib = 200, largest_mib = 16, rounds_wanted = 0;
static double seconds = 2;
static size_t live_each;
static atomic_bool stopping, retiring;
static pthread_barrier_t parked, released;

/* ---- what a block must hold ---- */

__attribute__((noreturn)) static void broken(const struct worker *worker, const struct shadow *shadow,
                                             const char *what) {
    fprintf(stderr,
            "stress: %s: seed %llu, thread %zu, operation %llu, block %p of %zu bytes (asked %zu, %zu)\n",
            what, (unsigned long long)seed, worker->number, (unsigned long long)worker->operations,
            (void *)shadow->block, shadow->bytes, shadow->asked, shadow->alignment);
    abort();
}

static size_t stride_of(size_t bytes) {
    return bytes <= 256 * KIB ? 4 * KIB : bytes <= 2 * MIB ? 32 * KIB : 256 * KIB;
}

static void write_pattern(const struct shadow *shadow) {
    if (shadow->bytes <= SMALL) {
        fill(shadow->block, shadow->bytes, shadow->mark);
        return;
    }
    size_t within = shadow->mark % 100 * SAMPLE;
    for (size_t at = within; at + SAMPLE <= shadow->bytes; at += stride_of(shadow->bytes)) {
        fill(shadow->block + at, SAMPLE, shadow->mark + at);
    }
    fill(shadow->block + shadow->bytes - SAMPLE, SAMPLE, shadow->mark);
}

/* Of the first `limit` bytes, wherever they are now. */
static void check_pattern(const struct worker *worker, const struct shadow *shadow,
                          const unsigned char *block, size_t limit) {
    if (shadow->bytes <= SMALL) {
        if (!is_filled(block, limit, shadow->mark)) {
            broken(worker, shadow, "contents differ");
        }
        return;
    }
    size_t within = shadow->mark % 100 * SAMPLE, last = shadow->bytes - SAMPLE;
    for (size_t at = within; at + SAMPLE <= limit; at += stride_of(shadow->bytes)) {
        /* The last sample may have been written over this one. */
        if (at + SAMPLE <= last && !is_filled(block + at, SAMPLE, shadow->mark + at)) {
            broken(worker, shadow, "contents differ");
        }
    }
    if (limit == shadow->bytes && !is_filled(block + last, SAMPLE, shadow->mark)) {
        broken(worker, shadow, "the end differs");
    }
}

/* ---- the operations ---- */

static size_t random_below(struct worker *worker, size_t bound) {
    return next_random(&worker->random) % bound;
}

static size_t random_size(struct worker *worker) {
    size_t dice = random_below(worker, 1000);
    size_t most =
        dice < 500
            ? 512
            : (dice < 720
                   ? 8 * KIB
                   : (dice < 880 ? 64 * KIB
                                 : (dice < 980 ? 512 * KIB : (dice < 996 ? 4 * MIB : largest_mib * MIB))));
    size_t bytes = random_below(worker, most + 1);
    if (random_below(worker, 8) == 0) {
        /* At and beside a power of two. */
        size_t power = 1;
        while (power * 2 <= bytes) {
            power *= 2;
        }
        bytes = power + random_below(worker, 3) - 1;
    }
    return bytes;
}

static void check_new(const struct worker *worker, const struct shadow *shadow) {
    if (shadow->block == NULL) {
        broken(worker, shadow, "NULL");
    }
    if ((uintptr_t)shadow->block % shadow->alignment != 0) {
        broken(worker, shadow, "not aligned");
    }
    if (malloc_usable_size(shadow->block) < shadow->asked) {
        broken(worker, shadow, "less is usable than was asked for");
    }
}

static void check_zero(struct worker *worker, const struct shadow *shadow) {
    bool all = shadow->asked <= 256 * KIB || random_below(worker, 8) == 0;
    size_t stride = all ? 4 * KIB : 64 * KIB;
    for (size_t at = 0; at < shadow->asked; at += stride) {
        size_t left = shadow->asked - at, here = all ? stride : 64;
        if (!is_zero(shadow->block + at, here < left ? here : left)) {
            broken(worker, shadow, "calloc's block is not zero");
        }
    }
}

/* Fills what was asked for, now and then all that is usable. */
static void take(struct worker *worker, struct shadow *shadow) {
    shadow->mark = next_random(&worker->random);
    shadow->bytes = shadow->asked;
    if (random_below(worker, 4) == 0) {
        shadow->bytes = malloc_usable_size(shadow->block);
    }
    worker->live += shadow->asked;
    write_pattern(shadow);
}

static void allocate(struct worker *worker, struct shadow *shadow) {
    size_t bytes = random_size(worker), way = random_below(worker, 100);
    *shadow = (struct shadow){.asked = bytes, .alignment = 16, .kind = PLAIN};
    if (way < 55) {
        shadow->block = malloc(bytes);
    } else if (way < 75) {
        size_t count = 1 + random_below(worker, 7);
        shadow->asked = bytes / count * count;
        shadow->block = calloc(count, bytes / count);
        check_new(worker, shadow);
        check_zero(worker, shadow);
    } else if (way < 80) {
        shadow->block = realloc(NULL, bytes);
    } else if (way < 85) {
        shadow->asked = bytes / 3 * 3;
        shadow->block = reallocarray(NULL, 3, bytes / 3);
    } else {
        size_t most = random_below(worker, 50) == 0 ? 18 : 9;
        shadow->alignment = (size_t)16 << random_below(worker, most);
        shadow->kind = ALIGNED;
        if (way < 92) {
            shadow->block = aligned_alloc(shadow->alignment, bytes);
        } else {
            void *block = NULL;
            int error = posix_memalign(&block, shadow->alignment, bytes);
            if (error != 0) {
                broken(worker, shadow, "posix_memalign failed");
            }
            shadow->block = block;
        }
    }
    check_new(worker, shadow);
    take(worker, shadow);
}

static void release(struct worker *worker, struct shadow *shadow) {
    check_pattern(worker, shadow, shadow->block, shadow->bytes);
    worker->live -= shadow->asked;
    errno = 4321;
    if (!HAS_SIZED_FREES || random_below(worker, 4) != 0) {
        free(shadow->block);
    } else if (shadow->kind == PLAIN) {
        free_sized(shadow->block, shadow->asked);
    } else {
        free_aligned_sized(shadow->block, shadow->alignment, shadow->asked);
    }
    if (errno != 4321) {
        broken(worker, shadow, "free changed errno");
    }
    shadow->block = NULL;
}

static void resize(struct worker *worker, struct shadow *shadow) {
    size_t bytes = random_size(worker);
    if (random_below(worker, 3) == 0) {
        bytes = shadow->asked + random_below(worker, shadow->asked / 2 + 64);
    }
    bytes += bytes == 0;
    check_pattern(worker, shadow, shadow->block, shadow->bytes);
    struct shadow before = *shadow;
    shadow->block =
        random_below(worker, 2) == 0 ? realloc(before.block, bytes) : reallocarray(before.block, bytes, 1);
    shadow->asked = bytes;
    shadow->alignment = 16;
    shadow->kind = PLAIN;
    check_new(worker, shadow);
    /* realloc keeps what was asked for; what was used beyond it may be gone. */
    size_t kept = before.asked < bytes ? before.asked : bytes;
    check_pattern(worker, &before, shadow->block, kept < before.bytes ? kept : before.bytes);
    worker->live -= before.asked;
    take(worker, shadow);
}

/* Exchanges the block for the one in the slot, which another thread may have put there. */
static void exchange(struct worker *worker, struct shadow *shadow) {
    size_t box = random_below(worker, MAIL);
    if (atomic_exchange_explicit(&mail[box].taken, true, memory_order_acquire)) {
        return;
    }
    struct shadow other = mail[box].shadow;
    mail[box].shadow = *shadow;
    atomic_store_explicit(&mail[box].taken, false, memory_order_release);
    worker->live -= shadow->asked;
    *shadow = other;
    if (other.block != NULL) {
        worker->live += other.asked;
        check_pattern(worker, &other, other.block, other.bytes);
    }
}

static void release_all(struct worker *worker) {
    for (size_t i = 0; i < SLOTS; i++) {
        if (worker->slots[i].block != NULL) {
            release(worker, &worker->slots[i]);
        }
    }
}

static void operate(struct worker *worker) {
    worker->operations++;
    if (worker->phase_left-- == 0) {
        static const unsigned grows[] = {95, 50, 10, 80};
        worker->phase_left = 50 + random_below(worker, 3000);
        worker->grow = grows[random_below(worker, 4)];
        if (random_below(worker, 6) == 0) {
            release_all(worker);
        }
    }
    struct shadow *shadow = &worker->slots[random_below(worker, SLOTS)];
    if (shadow->block == NULL) {
        if (random_below(worker, 100) < worker->grow && worker->live < live_each) {
            allocate(worker, shadow);
        }
        return;
    }
    size_t what = random_below(worker, 100);
    if (worker->live > live_each || what < 60) {
        if (worker->live > live_each || random_below(worker, 100) >= worker->grow) {
            release(worker, shadow);
        }
    } else if (what < 80) {
        resize(worker, shadow);
    } else {
        exchange(worker, shadow);
    }
}

static void *work(void *argument) {
    struct worker *worker = argument;
    for (;;) {
        for (size_t left = 300 + random_below(worker, 3000); left > 0; left--) {
            operate(worker);
        }
        pthread_barrier_wait(&parked);
        pthread_barrier_wait(&released);
        if (atomic_load(&stopping) || (atomic_load(&retiring) && worker->number % 2 == 1)) {
            return NULL;
        }
    }
}

/* ---- the account ---- */

/* Everything that only ever counts up. */
static void check_counts_up(const struct calm_stats *before, const struct calm_stats *now) {
    const uint64_t *first = &before->dirtied, *second = &now->dirtied;
    for (size_t i = 0; i <= (size_t)(&before->heap_locks_contended - &before->dirtied); i++) {
        CHECK(first[i] <= second[i]);
    }
}

/* While the others work: only what holds at every moment. */
static void *observe(void *unused) {
    struct calm_stats before = stats_now();
    while (!atomic_load(&stopping)) {
        struct calm_stats now = stats_now();
        check_counts_up(&before, &now);
        before = now;
        sleep_seconds(0.0005);
    }
    return unused;
}

/* A thread of the library's, a helper or a server, may be about to purge. */
static bool has_helper(void) {
    char value[8] = "";
    CHECK(calm_get("background", value, sizeof value) > 0);
    return strcmp(value, "on") == 0 || counter_named("offload_sleeps") > 0;
}

/* All threads are parked. */
static struct calm_stats check_quiet(uint64_t round) {
    struct calm_stats now = stats_now();
    double until = seconds_now() + TIMEOUT_S;
    while (now.dirty > now.dirty_limit && has_helper() && seconds_now() < until) {
        sleep_seconds(0.005);
        now = stats_now();
    }
    if (now.dirty > now.dirty_limit || now.cached > now.cached_limit || now.purge_failures != 0 ||
        now.footprint > now.reserved) {
        fprintf(stderr,
                "stress: seed %llu, round %llu: dirty %llu of %llu, cached %llu of %llu, footprint %llu, "
                "reserved "
                "%llu, %llu purges failed\n",
                (unsigned long long)seed, (unsigned long long)round, (unsigned long long)now.dirty,
                (unsigned long long)now.dirty_limit, (unsigned long long)now.cached,
                (unsigned long long)now.cached_limit, (unsigned long long)now.footprint,
                (unsigned long long)now.reserved, (unsigned long long)now.purge_failures);
        abort();
    }
    return now;
}

static void check_trim(uint64_t *random) {
    size_t keep = next_random(random) % 3 == 0 ? 0 : next_random(random) % (8 * MIB);
    struct calm_stats before = stats_now();
    size_t given = calm_trim(keep);
    struct calm_stats after = stats_now();
    /* A server that does not answer in time does not trim. */
    CHECK(after.dirty <= keep || server_was_late());
    CHECK(after.purged - before.purged >= given || server_was_late());
    uint64_t asked = after.purges_request - before.purges_request;
    CHECK(asked == 1 || given == 0);
    CHECK(given > 0 || before.dirty + before.cached <= keep + before.cached_limit);
}

static uint64_t live_bytes(void) {
    uint64_t live = 0;
    for (size_t i = 0; i < threads; i++) {
        live += workers[i].live;
    }
    for (size_t i = 0; i < MAIL; i++) {
        live += mail[i].shadow.block != NULL ? mail[i].shadow.asked : 0;
    }
    return live;
}

static void start_workers(void) {
    for (size_t i = 0; i < threads; i++) {
        if (!workers[i].running) {
            workers[i].running = true;
            CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
        }
    }
}

static void join_worker(struct worker *worker) {
    CHECK(pthread_join(worker->thread, NULL) == 0);
    worker->running = false;
}

static void read_arguments(int argc, char **argv) {
    struct {
        const char *name;
        uint64_t *value;
    } settings[] = {{"seed=", &seed},
                    {"threads=", &threads},
                    {"live_mib=", &live_mib},
                    {"largest_mib=", &largest_mib},
                    {"rounds=", &rounds_wanted}};
    for (int i = 1; i < argc; i++) {
        bool known = false;
        if (strncmp(argv[i], "seconds=", 8) == 0) {
            seconds = strtod(argv[i] + 8, NULL);
            continue;
        }
        for (size_t j = 0; j < sizeof settings / sizeof settings[0]; j++) {
            size_t length = strlen(settings[j].name);
            if (strncmp(argv[i], settings[j].name, length) == 0) {
                *settings[j].value = strtoull(argv[i] + length, NULL, 10);
                known = true;
            }
        }
        CHECK(known);
    }
    CHECK(threads >= 1 && threads <= MAX_THREADS);
    live_each = live_mib * MIB / threads;
}

/* However slow the machine is. While the workers are parked. */
static bool has_done_enough(uint64_t rounds, bool served) {
    uint64_t done = 0;
    for (size_t i = 0; i < threads; i++) {
        done += workers[i].operations;
    }
    return done > MIN_OPERATIONS && (rounds >= MIN_ROUNDS || served);
}

/* Table 1 of "Ptlbmalloc2". */
static uint64_t threshold_of(uint64_t footprint) {
    char text[32];
    CHECK(calm_get("memory_per_cpu", text, sizeof text) > 0);
    uint64_t gib = strtoull(strcmp(text, "auto") == 0 ? "8" : text, NULL, 10);
    uint64_t base = footprint < 500000    ? 100000
                    : footprint < 1000000 ? footprint / 2
                                          : footprint / 10 + 400000;
    return gib < 2 ? base * gib / 2 : gib > 16 ? base * gib / 16 : base;
}

int main(int argc, char **argv) {
    static char out[4096];
    setvbuf(stdout, out, _IOFBF, sizeof out);
    read_arguments(argc, argv);
    bool account = governed();
    uint64_t random = seed, rounds = 0, operations = 0, least_threshold = UINT64_MAX, max_live = 0;
    struct calm_stats first = {0}, last = {0};
    if (account) {
        first = last = stats_now();
    }
    CHECK(pthread_barrier_init(&parked, NULL, (unsigned)threads + 1) == 0);
    CHECK(pthread_barrier_init(&released, NULL, (unsigned)threads + 1) == 0);
    for (size_t i = 0; i < threads; i++) {
        workers[i].number = i;
        workers[i].random = seed * 1000003 + i;
    }
    pthread_t observer;
    if (account) {
        CHECK(pthread_create(&observer, NULL, observe, NULL) == 0);
    }
    double start = seconds_now();
    start_workers();
    for (bool more = true; more; rounds++) {
        pthread_barrier_wait(&parked);
        uint64_t live = live_bytes();
        max_live = live > max_live ? live : max_live;
        if (account) {
            struct calm_stats now = check_quiet(rounds);
            CHECK(now.in_use >= live);
            check_counts_up(&last, &now);
            last = now;
            uint64_t threshold = threshold_of(now.footprint);
            least_threshold = threshold < least_threshold ? threshold : least_threshold;
            if (next_random(&random) % 8 == 0) {
                check_trim(&random);
            }
        }
        more = rounds_wanted > 0 ? rounds + 1 < rounds_wanted
                                 : seconds_now() - start < seconds ||
                                       !has_done_enough(rounds, counter_named("offload_calls") > 0);
        atomic_store(&stopping, !more);
        atomic_store(&retiring, rounds % 8 == 7);
        bool retire = more && rounds % 8 == 7;
        pthread_barrier_wait(&released);
        for (size_t i = 1; retire && i < threads; i += 2) {
            join_worker(&workers[i]);
        }
        if (retire) {
            start_workers();
        }
    }
    for (size_t i = 0; i < threads; i++) {
        join_worker(&workers[i]);
        operations += workers[i].operations;
    }
    if (account) {
        CHECK(pthread_join(observer, NULL) == 0);
    }
    /* All of it by one thread. */
    for (size_t i = 0; i < threads; i++) {
        release_all(&workers[i]);
    }
    for (size_t i = 0; i < MAIL; i++) {
        workers[0].live += mail[i].shadow.block != NULL ? mail[i].shadow.asked : 0;
        if (mail[i].shadow.block != NULL) {
            release(&workers[0], &mail[i].shadow);
        }
    }
    say("rounds", rounds);
    say("operations", operations);
    say("max_live", max_live);
    if (!account) {
        return 0;
    }
    last = check_quiet(rounds);
    uint64_t purges = last.purges_limit - first.purges_limit, dirtied = last.dirtied - first.dirtied;
    /* A purge gives back a quarter of the threshold, at least; the least seen may not be the least there was.
     */
    uint64_t worth = least_threshold / 2 / 4, most = worth == 0 ? UINT64_MAX : dirtied / worth + 16;
    say("purges", purges);
    say("max_purges", most);
    say("dirtied", dirtied);
    say("purged", last.purged - first.purged);
    say("least_threshold", least_threshold);
    CHECK(purges <= most);
    calm_trim(0);
    last = stats_now();
    say("in_use_first", first.in_use);
    say("in_use_last", last.in_use);
    CHECK(last.dirty == 0 || server_was_late());
    CHECK(last.cached == 0 || server_was_late());
    CHECK(last.in_use <= first.in_use + 256 * KIB); /* nothing is lost */
    return 0;
}
