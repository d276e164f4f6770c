/*
 * calm-messages: what a message between two CPUs costs, for `calm calibrate messages`. Writes one JSON
 * object: reference_mhz    of the time stamp counter; null where there is none atomic_ns        an atomic
 * read-modify-write of a cache line that no other CPU has pairs            by "a:b", each null where its CPUs
 * cannot be used round_trip_ns       there and back, by a cache line that both poll wake_ns             what
 * it costs the waker to wake a thread that sleeps on a futex wake_round_trip_ns  from before that to the
 * woken thread's answer Each figure has median, low and high (the first and last deciles) and samples; it is
 * null where there are too few. Half a second for each pair at most.
 */
#include "files.h"
#include "json.h"

#include <err.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#ifdef __x86_64__
#include <x86intrin.h>
#endif

/*
 * A sample of a round trip is a batch of them, since the clock is not free; a short one, so that most end
 * before anything interrupts them. The median ignores the others.
 */
enum { MAX_PAIRS = 64 };
enum { ATOMICS = 4096, ROUND_TRIPS = 64, MAX_SAMPLES = 201, MIN_SAMPLES = 5 };
enum { SPINS_BEFORE_YIELD = 4096, NAP_NS = 50000, MIN_CLOCK_NS = 10000000 };
#define PART_NS ((uint64_t)250 * 1000000) /* of the two parts of a pair's time */
#define STOP    UINT32_MAX
#define LINE    128 /* two cache lines: the prefetcher fetches the neighbour */

struct cpu_pair {
    unsigned a; /* sends, and wakes */
    unsigned b; /* answers, and sleeps */
};

struct spread {
    unsigned count;
    double ns[MAX_SAMPLES];
};

struct pair {
    _Alignas(LINE) _Atomic(uint32_t) line;  /* odd: a message; even: its answer */
    _Alignas(LINE) _Atomic(uint32_t) sleep; /* the number of the latest wake; the futex */
    _Alignas(LINE) _Atomic(uint32_t) awake; /* the number of the latest one answered */
    _Alignas(LINE) struct cpu_pair cpus;
    _Atomic(bool) refused; /* a CPU may not be used */
    struct spread round_trip;
    struct spread wake;
    struct spread wake_round_trip;
};

/* A CPU's number, which begins with a digit; moves at behind it. */
static bool parse_cpu(const char **at, unsigned *cpu) {
    char *end;
    unsigned long number = strtoul(*at, &end, 10);
    bool valid = **at >= '0' && **at <= '9' && number < CPU_SETSIZE;
    *cpu = (unsigned)number;
    *at = end;
    return valid;
}

/* Moves at behind a character that must be there. */
static bool skip(const char **at, char character) {
    bool found = **at == character;
    *at += found;
    return found;
}

/* Reads "0:1,0:2"; the number of pairs. 0: the text is something else. */
static size_t parse_pairs(const char *text, struct cpu_pair pairs[MAX_PAIRS]) {
    for (size_t count = 0; count < MAX_PAIRS;) {
        struct cpu_pair *pair = &pairs[count++];
        if (!parse_cpu(&text, &pair->a) || !skip(&text, ':') || !parse_cpu(&text, &pair->b) ||
            pair->a == pair->b) {
            return 0;
        }
        if (*text == '\0') {
            return count;
        }
        if (!skip(&text, ',')) {
            return 0;
        }
    }
    return 0;
}

static uint64_t now_ns(void) {
    return clock_ns(CLOCK_MONOTONIC);
}

static uint64_t reference_cycles(void) {
#ifdef __x86_64__
    return __rdtsc();
#else
    return 0;
#endif
}

static void nap(long ns) {
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

static bool is_full(const struct spread *spread) {
    return spread->count == MAX_SAMPLES;
}

static void add(struct spread *spread, double ns) {
    spread->ns[spread->count++] = ns;
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

/* Until the word has the value, the deadline, or the other thread's refusal. */
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

/* Wakes that found no thread asleep yet are no samples. */
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
            /* Only if it is still there: the client may have written STOP. */
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

static void measure_pair(struct pair *pair) {
    pthread_t threads[2];
    if ((errno = pthread_create(&threads[0], NULL, server, pair)) != 0 ||
        (errno = pthread_create(&threads[1], NULL, client, pair)) != 0) {
        err(1, "pthread_create");
    }
    pthread_join(threads[1], NULL);
    pthread_join(threads[0], NULL);
}

static void measure_atomic(struct pair *pair, struct spread *spread) {
    while (!is_full(spread)) {
        uint64_t start = now_ns();
        for (unsigned i = 0; i < ATOMICS; i++) {
            atomic_fetch_add(&pair->line, 1);
        }
        add(spread, (double)(now_ns() - start) / ATOMICS);
    }
}

static int by_size(const void *a, const void *b) {
    double difference = *(const double *)a - *(const double *)b;
    return (difference > 0) - (difference < 0);
}

static void write_spread(struct json *json, const char *name, struct spread *spread) {
    if (spread->count < MIN_SAMPLES) {
        json_null(json, name);
        return;
    }
    qsort(spread->ns, spread->count, sizeof spread->ns[0], by_size);
    json_begin(json, name);
    json_real(json, "median", spread->ns[spread->count / 2]);
    json_real(json, "low", spread->ns[spread->count / 10]);
    json_real(json, "high", spread->ns[spread->count - 1 - spread->count / 10]);
    json_int(json, "samples", spread->count);
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

static void measure(struct json *json, const struct cpu_pair *pairs, size_t count) {
    static struct pair pair;
    struct spread atomic = {0};
    uint64_t clock = now_ns();
    uint64_t cycles = reference_cycles();
    measure_atomic(&pair, &atomic);
    write_spread(json, "atomic_ns", &atomic);
    json_begin(json, "pairs");
    for (size_t i = 0; i < count; i++) {
        pair = (struct pair){.cpus = pairs[i]};
        measure_pair(&pair);
        write_pair(json, &pair);
    }
    json_end(json);
    if (now_ns() - clock < MIN_CLOCK_NS) {
        nap(MIN_CLOCK_NS);
    }
    cycles = reference_cycles() - cycles;
    double mhz = (double)cycles / (double)(now_ns() - clock) * 1e3;
    json_real(json, "reference_mhz", cycles == 0 ? -1 : mhz);
}

int main(int argc, char **argv) {
    struct cpu_pair pairs[MAX_PAIRS];
    size_t count = argc == 2 ? parse_pairs(argv[1], pairs) : 0;
    if (count == 0) {
        errx(2, "takes at most %d pairs of CPUs as 0:1,0:2", MAX_PAIRS);
    }
    /* A killed caller leaves nothing running. */
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    struct json json = {.file = stdout};
    json_begin(&json, NULL);
    measure(&json, pairs, count);
    json_end(&json);
    putchar('\n');
    if (fclose(stdout) != 0) {
        err(1, "output");
    }
    return 0;
}
