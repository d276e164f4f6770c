/*
 * soak SECONDS [CYCLES]: a small service. Sessions of mixed lifetimes arrive steadily, in bursts, or not at
 * all. After each phase, the resident memory of the process is compared with the memory of its sessions. It
 * runs for at least SECONDS and CYCLES. Time is counted in ticks, in each of which every worker does the
 * same work, however slow the machine is.
 */
#include "api.h"
#include "names.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define WORKERS  3
#define SESSIONS 6000 /* of each worker */
#define BLOCKS   24   /* of a session, at most */

struct session {
    uint64_t end; /* tick; 0: not in use */
    uint32_t count;
    uint32_t bytes[BLOCKS];
    unsigned char *blocks[BLOCKS];
};

static struct table {
    pthread_mutex_t lock;
    struct session *sessions;
    size_t last;
} tables[WORKERS];

static const struct {
    uint64_t ticks;
    unsigned opened;                        /* sessions for each tick of a worker */
} phases[] = {{250, 6}, {75, 60}, {75, 1}}; /* steady, a burst, quiet; then nothing comes */
#define PHASES    (sizeof phases / sizeof phases[0])
#define TICK_S    0.002
#define IDLE_S    0.9 /* without change, at least */
#define SETTLED_B MIB /* less is no change */

/* Written while the workers wait. */
static unsigned opened_each_tick;
static uint64_t tick_now;
static bool stop;
static pthread_barrier_t begin, done;
static _Atomic(uint64_t) live, opened;

static uint32_t block_bytes(uint64_t *random) {
    uint64_t dice = next_random(random) % 1000, of = next_random(random);
    if (dice < 700) {
        return (uint32_t)(16 + of % 500);
    }
    if (dice < 960) {
        return (uint32_t)(500 + of % 6000);
    }
    return (uint32_t)(dice < 998 ? 6000 + of % 60000 : 300000 + of % 1500000);
}

/* Most are short; a few stay for seconds; fewer still outlive several cycles. */
static uint64_t lifetime(uint64_t *random) {
    uint64_t dice = next_random(random) % 1000, of = next_random(random);
    return 1 + (dice < 900 ? of % 40 : (dice < 995 ? of % 800 : of % 9000));
}

static void close_session(struct session *session) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < session->count; i++) {
        size_t head = session->bytes[i] < 256 ? session->bytes[i] : 256;
        CHECK(is_filled(session->blocks[i], head, (uintptr_t)session->blocks[i]));
        bytes += session->bytes[i];
        free(session->blocks[i]);
    }
    session->end = 0;
    atomic_fetch_sub(&live, bytes);
}

static void open_session(struct session *session, uint64_t now, uint64_t *random) {
    uint64_t bytes = 0;
    session->end = now + lifetime(random);
    session->count = (uint32_t)(4 + next_random(random) % (BLOCKS - 3));
    /* What stays long is small, as tables of sessions are. */
    if (session->end > now + 1000) {
        session->count = 4;
    }
    for (uint32_t i = 0; i < session->count; i++) {
        session->bytes[i] = block_bytes(random);
        session->blocks[i] = malloc(session->bytes[i]);
        CHECK(session->blocks[i] != NULL);
        memset(session->blocks[i], 1, session->bytes[i]);
        size_t head = session->bytes[i] < 256 ? session->bytes[i] : 256;
        fill(session->blocks[i], head, (uintptr_t)session->blocks[i]);
        bytes += session->bytes[i];
    }
    atomic_fetch_add(&live, bytes);
}

/* Of the worker's own table, or, as often, of another's. */
static void close_ended(struct table *table, uint64_t now) {
    CHECK(pthread_mutex_lock(&table->lock) == 0);
    for (size_t i = 0; i < SESSIONS; i++) {
        if (table->sessions[i].end != 0 && table->sessions[i].end <= now) {
            close_session(&table->sessions[i]);
        }
    }
    CHECK(pthread_mutex_unlock(&table->lock) == 0);
}

static void open_some(struct table *table, size_t count, uint64_t now, uint64_t *random) {
    CHECK(pthread_mutex_lock(&table->lock) == 0);
    for (size_t i = 0; i < SESSIONS && count > 0; i++) {
        table->last = (table->last + 1) % SESSIONS;
        if (table->sessions[table->last].end == 0) {
            open_session(&table->sessions[table->last], now, random);
            atomic_fetch_add(&opened, 1);
            count--;
        }
    }
    CHECK(pthread_mutex_unlock(&table->lock) == 0);
}

static void *serve(void *argument) {
    size_t number = (size_t)(uintptr_t)argument;
    uint64_t random = number + 17;
    for (;;) {
        pthread_barrier_wait(&begin);
        if (stop) {
            return NULL;
        }
        open_some(&tables[number], opened_each_tick, tick_now, &random);
        if (tick_now % 4 == 0) {
            close_ended(&tables[(number + tick_now / 4) % WORKERS], tick_now);
        }
        pthread_barrier_wait(&done);
    }
}

struct excess {
    uint64_t bytes, live;
};

static size_t before;

/* Held above what the sessions hold. */
static struct excess excess_now(void) {
    uint64_t held = atomic_load(&live), grown = grown_since(before);
    return (struct excess){grown > held ? grown - held : 0, held};
}

/* Nothing comes, for a while, and until nothing more is given back. */
static struct excess excess_once_idle(void) {
    struct excess least = excess_now();
    double start = seconds_now();
    for (double until = start + IDLE_S; seconds_now() < until && seconds_now() < start + TIMEOUT_S;) {
        sleep_seconds(0.02);
        struct excess now = excess_now();
        if (now.bytes + SETTLED_B < least.bytes) {
            least = now;
            until = seconds_now() + IDLE_S;
        }
    }
    return excess_now();
}

int main(int argc, char **argv) {
    static char out[4096];
    setvbuf(stdout, out, _IOFBF, sizeof out);
    CHECK(argc >= 2);
    double seconds = strtod(argv[1], NULL), start = seconds_now();
    pthread_t threads[WORKERS];
    for (size_t i = 0; i < WORKERS; i++) {
        CHECK(pthread_mutex_init(&tables[i].lock, NULL) == 0);
        tables[i].sessions = own_pages(SESSIONS * sizeof(struct session));
        /* Resident before what grows is counted. */
        memset(tables[i].sessions, 0, SESSIONS * sizeof(struct session));
    }
    CHECK(pthread_barrier_init(&begin, NULL, WORKERS + 1) == 0);
    CHECK(pthread_barrier_init(&done, NULL, WORKERS + 1) == 0);
    before = resident_bytes();
    for (uintptr_t i = 0; i < WORKERS; i++) {
        CHECK(pthread_create(&threads[i], NULL, serve, (void *)i) == 0);
    }
    uint64_t cycles = 0, busy_worst = 0, max_live = 0;
    uint64_t min_cycles = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    while (seconds_now() - start < seconds || cycles < min_cycles) {
        uint64_t cycle_live = 0, cycle_grown = 0;
        for (size_t at = 0; at < PHASES; at++) {
            opened_each_tick = phases[at].opened;
            for (uint64_t end = tick_now + phases[at].ticks; tick_now < end;) {
                sleep_seconds(TICK_S);
                tick_now++;
                pthread_barrier_wait(&begin);
                pthread_barrier_wait(&done);
                uint64_t held = atomic_load(&live), grown = grown_since(before);
                cycle_live = held > cycle_live ? held : cycle_live;
                cycle_grown = grown > cycle_grown ? grown : cycle_grown;
            }
        }
        struct excess idle = excess_once_idle();
        uint64_t busy = cycle_grown * 100 / (cycle_live + 1);
        busy_worst = busy > busy_worst ? busy : busy_worst;
        max_live = cycle_live > max_live ? cycle_live : max_live;
        printf("cycle %llu %llu %llu %llu %llu\n", (unsigned long long)cycles, (unsigned long long)cycle_live,
               (unsigned long long)cycle_grown, (unsigned long long)idle.live,
               (unsigned long long)idle.bytes);
        fflush(stdout);
        if (governed()) {
            struct calm_stats stats = stats_now();
            CHECK(stats.cached <= stats.cached_limit && stats.purge_failures == 0);
        }
        cycles++;
    }
    stop = true;
    pthread_barrier_wait(&begin);
    for (size_t i = 0; i < WORKERS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    say("cycles", cycles);
    say("opened", atomic_load(&opened));
    say("max_live", max_live);
    say("busy_percent", busy_worst);
    for (size_t i = 0; i < WORKERS; i++) {
        close_ended(&tables[i], UINT64_MAX);
    }
    CHECK_EQUAL(atomic_load(&live), 0);
    if (governed()) {
        calm_trim(0);
        say("left", stats_now().in_use);
    }
    return 0;
}
