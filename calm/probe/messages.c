#include "messages.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <x86intrin.h>
#endif

/*
 * A sample of a round trip is a batch of them, since the clock is not free; short, so that most are over
 * before anything interrupts them. Medians then bear what a busy machine does to the others.
 */
enum { ATOMICS = 4096, ROUND_TRIPS = 64, SAMPLES_MOST = 201, SAMPLES_LEAST = 5 };
enum { SPINS_BEFORE_YIELD = 4096, NAP_NS = 50000, CLOCK_NS_LEAST = 10000000 };
#define PART_NS ((uint64_t)250 * 1000000) /* of the two parts of a pair's time */
#define STOP    UINT32_MAX
#define LINE    128 /* two cache lines: what is fetched ahead is the neighbour */

struct spread {
    unsigned count;
    double ns[SAMPLES_MOST];
};

struct pair {
    _Alignas(LINE) _Atomic(uint32_t) line;  /* odd: a message; even: its answer */
    _Alignas(LINE) _Atomic(uint32_t) sleep; /* the number of the latest wake; the futex */
    _Alignas(LINE) _Atomic(uint32_t) awake; /* the number of the latest one answered */
    _Alignas(LINE) struct cpu_pair cpus;
    _Atomic(bool) refused; /* a CPU is not to be had */
    struct spread round_trip;
    struct spread wake;
    struct spread wake_round_trip;
};

/* A CPU's number, which begins with a digit; moves at behind it. CPU_SETSIZE for anything else. */
static unsigned parse_cpu(const char **at) {
    unsigned cpu = 0;
    if (**at < '0' || **at > '9') {
        return CPU_SETSIZE;
    }
    for (; **at >= '0' && **at <= '9'; (*at)++) {
        cpu = cpu < CPU_SETSIZE ? cpu * 10 + (unsigned)(**at - '0') : cpu;
    }
    return cpu < CPU_SETSIZE ? cpu : CPU_SETSIZE;
}

size_t messages_parse(const char *text, struct cpu_pair *pairs, size_t most) {
    for (size_t count = 0; count < most;) {
        struct cpu_pair *pair = &pairs[count++];
        pair->a = parse_cpu(&text);
        if (pair->a == CPU_SETSIZE || *text++ != ':') {
            return 0;
        }
        pair->b = parse_cpu(&text);
        if (pair->b == CPU_SETSIZE || pair->a == pair->b) {
            return 0;
        }
        if (*text == '\0') {
            return count;
        }
        if (*text++ != ',') {
            return 0;
        }
    }
    return 0;
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static uint64_t reference_cycles(void) {
#ifdef __x86_64__
    return __rdtsc();
#else
    return 0;
#endif
}

static void nap(uint64_t ns) {
    struct timespec time = {.tv_sec = (time_t)(ns / 1000000000U), .tv_nsec = (long)(ns % 1000000000U)};
    nanosleep(&time, NULL);
}

static bool is_full(const struct spread *spread) {
    return spread->count == SAMPLES_MOST;
}

static void add(struct spread *spread, double ns) {
    if (!is_full(spread)) {
        spread->ns[spread->count++] = ns;
    }
}

static bool keep_to(struct pair *pair, unsigned cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) {
        atomic_store(&pair->refused, true);
        return false;
    }
    return true;
}

static long futex(_Atomic(uint32_t) *word, int operation, uint32_t value) {
    return syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

/*
 * Until the word has the value, the deadline, or the other thread's refusal. Whoever the other thread waits
 * behind on its CPU may be helped by a yield on ours only by chance, but ours then is not held for nothing.
 */
static bool await(struct pair *pair, const _Atomic(uint32_t) *word, uint32_t value, uint64_t deadline) {
    for (unsigned spins = 1;; spins++) {
        if (atomic_load_explicit(word, memory_order_acquire) == value) {
            return true;
        }
        if (spins % SPINS_BEFORE_YIELD == 0) {
            if (now_ns() >= deadline || atomic_load(&pair->refused)) {
                return false;
            }
            sched_yield();
        }
    }
}

static void send_messages(struct pair *pair) {
    uint64_t deadline = now_ns() + PART_NS;
    uint32_t number = 0;
    /* The first batch has the other thread's start in it. */
    for (bool first = true; !is_full(&pair->round_trip); first = false) {
        uint64_t start = now_ns();
        for (unsigned i = 0; i < ROUND_TRIPS; i++) {
            number += 2;
            atomic_store_explicit(&pair->line, number - 1, memory_order_release);
            if (!await(pair, &pair->line, number, deadline)) {
                return;
            }
        }
        uint64_t end = now_ns();
        if (!first) {
            add(&pair->round_trip, (double)(end - start) / ROUND_TRIPS);
        }
        if (end >= deadline) {
            return;
        }
    }
}

/* Wakes that found nobody asleep yet are no samples. */
static void send_wakes(struct pair *pair) {
    uint64_t deadline = now_ns() + PART_NS;
    for (uint32_t number = 1; !is_full(&pair->wake) && now_ns() < deadline; number++) {
        nap(NAP_NS);
        uint64_t start = now_ns();
        atomic_store(&pair->sleep, number);
        bool woken = futex(&pair->sleep, FUTEX_WAKE, 1) == 1;
        uint64_t called = now_ns();
        if (!await(pair, &pair->awake, number, deadline)) {
            return;
        }
        if (woken) {
            add(&pair->wake, (double)(called - start));
            add(&pair->wake_round_trip, (double)(now_ns() - start));
        }
    }
}

static void *client(void *argument) {
    struct pair *pair = argument;
    if (keep_to(pair, pair->cpus.a)) {
        send_messages(pair);
    }
    atomic_store(&pair->line, STOP);
    if (!atomic_load(&pair->refused)) {
        send_wakes(pair);
    }
    atomic_store(&pair->sleep, STOP);
    futex(&pair->sleep, FUTEX_WAKE, 1);
    return NULL;
}

static void *server(void *argument) {
    struct pair *pair = argument;
    if (!keep_to(pair, pair->cpus.b)) {
        return NULL;
    }
    for (unsigned spins = 1;; spins++) {
        uint32_t seen = atomic_load_explicit(&pair->line, memory_order_acquire);
        if (seen == STOP) {
            break;
        }
        if (seen % 2 == 1) {
            /* Only if it is still there: the last word is the client's. */
            atomic_compare_exchange_strong_explicit(&pair->line, &seen, seen + 1, memory_order_release,
                                                    memory_order_relaxed);
            spins = 0;
        } else if (spins % SPINS_BEFORE_YIELD == 0) {
            sched_yield();
        }
    }
    for (uint32_t seen, last = 0; (seen = atomic_load(&pair->sleep)) != STOP;) {
        if (seen == last) {
            futex(&pair->sleep, FUTEX_WAIT, last);
        } else {
            last = seen;
            atomic_store_explicit(&pair->awake, seen, memory_order_release);
        }
    }
    return NULL;
}

static bool measure_pair(struct pair *pair) {
    pthread_t threads[2];
    if (pthread_create(&threads[0], NULL, server, pair) != 0) {
        return false;
    }
    bool started = pthread_create(&threads[1], NULL, client, pair) == 0;
    if (!started) {
        atomic_store(&pair->line, STOP);
        atomic_store(&pair->sleep, STOP);
        futex(&pair->sleep, FUTEX_WAKE, 1);
    } else {
        pthread_join(threads[1], NULL);
    }
    pthread_join(threads[0], NULL);
    return started;
}

static void measure_atomic(struct pair *pair, struct spread *spread) {
    while (!is_full(spread)) {
        uint64_t start = now_ns();
        for (unsigned i = 0; i < ATOMICS; i++) {
            atomic_fetch_add(&pair->line, 1);
        }
        add(spread, (double)(now_ns() - start) / ATOMICS);
    }
    atomic_store(&pair->line, 0);
}

static int by_size(const void *a, const void *b) {
    double first = *(const double *)a;
    double second = *(const double *)b;
    return (first > second) - (first < second);
}

static void write_spread(struct json *json, const char *name, struct spread *spread) {
    if (spread->count < SAMPLES_LEAST) {
        json_null(json, name);
        return;
    }
    qsort(spread->ns, spread->count, sizeof spread->ns[0], by_size);
    json_begin(json, name);
    json_real(json, "median", spread->ns[spread->count / 2]);
    json_real(json, "low", spread->ns[spread->count / 10]);
    json_real(json, "high", spread->ns[spread->count - 1 - spread->count / 10]);
    json_uint(json, "samples", spread->count);
    json_end(json);
}

static void write_pair(struct json *json, struct pair *pair) {
    char name[32];
    snprintf(name, sizeof name, "%u:%u", pair->cpus.a, pair->cpus.b);
    if (atomic_load(&pair->refused)) {
        json_null(json, name);
        return;
    }
    json_begin(json, name);
    write_spread(json, "round_trip_ns", &pair->round_trip);
    write_spread(json, "wake_ns", &pair->wake);
    write_spread(json, "wake_round_trip_ns", &pair->wake_round_trip);
    json_end(json);
}

static struct pair *new_pair(struct cpu_pair cpus) {
    struct pair *pair = aligned_alloc(LINE, sizeof *pair);
    if (pair != NULL) {
        *pair = (struct pair){.cpus = cpus};
    }
    return pair;
}

bool messages_measure(struct json *json, const struct cpu_pair *pairs, size_t count) {
    uint64_t clock = now_ns();
    uint64_t cycles = reference_cycles();
    bool whole = true;
    struct spread atomic = {0};
    struct pair *alone = new_pair((struct cpu_pair){0});
    if (alone == NULL) {
        return false;
    }
    measure_atomic(alone, &atomic);
    free(alone);
    write_spread(json, "atomic_ns", &atomic);
    json_begin(json, "pairs");
    for (size_t i = 0; i < count && whole; i++) {
        struct pair *pair = new_pair(pairs[i]);
        whole = pair != NULL && measure_pair(pair);
        if (whole) {
            write_pair(json, pair);
        }
        free(pair);
    }
    json_end(json);
    if (now_ns() - clock < CLOCK_NS_LEAST) {
        nap(CLOCK_NS_LEAST);
    }
    cycles = reference_cycles() - cycles;
    if (cycles == 0) {
        json_null(json, "reference_mhz");
    } else {
        json_real(json, "reference_mhz", (double)cycles / (double)(now_ns() - clock) * 1e3);
    }
    return whole;
}
