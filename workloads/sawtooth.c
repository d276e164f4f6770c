/* Programs that build something, free all of it, and build again: compilers, queries, batches. Each thread
 * allocates blocks up to a number of bytes, and writes to all of them; holds them for a time; frees them in
 * some order; rests for a time; and repeats. During these times it sleeps, or does other work.
 *
 * With one thread, that is the program's first thread, and no other is started. Times and faults are those
 * of the threads alone. Remaining memory is read when all threads still exist and have been idle for some
 * time. */
#include "support.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_PROCESSES 64

static const char program_name[] = "sawtooth";

enum order { ORDER_FIFO, ORDER_LIFO, ORDER_RANDOM, ORDER_ALTERNATE };
enum pause { PAUSE_SLEEP, PAUSE_WORK };
/* Rests of the given time, or of that time on average (exponential); and every second tooth of a quarter. */
enum pattern { PATTERN_REGULAR, PATTERN_RANDOM, PATTERN_TWO_SIZES };

static const char *const order_names[] = {"fifo", "lifo", "random", "alternate", NULL};
static const char *const pause_names[] = {"sleep", "work", NULL};
static const char *const pattern_names[] = {"regular", "random", "two-sizes", NULL};

struct teeth {
    unsigned long share; /* bytes of a thread at once */
    unsigned long least;
    unsigned long most;
    unsigned long rounds;
    double hold_s;
    double rest_s;
    enum order order;
    enum pause pause;
    enum pattern pattern;
    pthread_mutex_t lock;
    pthread_barrier_t end;
    unsigned long allocations;
    double seconds; /* the longest of any thread */
    struct thread_cost cost;
};

/* Resident before the first block is. */
static void *map(size_t bytes) {
    void *memory =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) {
        fail(program_name, "out of memory");
    }
    return memory;
}

static void take_a_while(enum pause pause, double seconds) {
    if (seconds <= 0) {
        return;
    }
    if (pause == PAUSE_SLEEP) {
        sleep_seconds(seconds);
        return;
    }
    unsigned long long random = 1;
    for (double end = now_seconds() + seconds; now_seconds() < end;) {
        for (int i = 0; i < 1000; i++) {
            (void)random_next(&random);
        }
    }
}

/* Of a thread at once, at most: a fifth more than of the average size, so that the share seldom is cut. */
static unsigned long max_blocks(const struct teeth *teeth) {
    double average = ((double)teeth->least + (double)teeth->most) / 2;
    return (unsigned long)((double)teeth->share / average * 1.2) + 64;
}

static unsigned long build(const struct teeth *teeth, unsigned long share, void **blocks,
                           unsigned long long *random) {
    unsigned long count = 0;
    for (unsigned long bytes = 0; bytes < share && count < max_blocks(teeth); count++) {
        size_t size = random_between(random, teeth->least, teeth->most);
        blocks[count] = memset(checked(malloc(size), program_name), 1, size);
        bytes += size;
    }
    return count;
}

static void swap(void **blocks, unsigned long a, unsigned long b) {
    void *block = blocks[a];
    blocks[a] = blocks[b];
    blocks[b] = block;
}

static void free_all(const struct teeth *teeth, void **blocks, unsigned long count,
                     unsigned long long *random) {
    for (unsigned long i = count; teeth->order == ORDER_RANDOM && i > 1; i--) {
        swap(blocks, i - 1, random_between(random, 0, i - 1));
    }
    for (unsigned long i = 0; i < count; i++) {
        switch (teeth->order) {
        case ORDER_FIFO:
        case ORDER_RANDOM:
            free(blocks[i]);
            break;
        case ORDER_LIFO:
            free(blocks[count - 1 - i]);
            break;
        case ORDER_ALTERNATE: /* every second one, then the rest */
            free(blocks[i < (count + 1) / 2 ? 2 * i : 2 * (i - (count + 1) / 2) + 1]);
            break;
        }
    }
}

/* All threads have the same rests. */
static double next_rest_s(const struct teeth *teeth, unsigned long long *random) {
    if (teeth->pattern != PATTERN_RANDOM) {
        return teeth->rest_s;
    }
    return -log((double)random_between(random, 1, 1000000) / 1e6) * teeth->rest_s;
}

static void work(unsigned long thread, void *shared) {
    struct teeth *teeth = shared;
    unsigned long long rests = 1;
    void **blocks = map(max_blocks(teeth) * sizeof(void *));
    unsigned long long random = thread;
    unsigned long allocations = 0;
    struct thread_cost before = thread_cost_now();
    double begin = now_seconds();
    for (unsigned long round = 0; round < teeth->rounds; round++) {
        bool is_low = teeth->pattern == PATTERN_TWO_SIZES && round % 2 == 1;
        unsigned long count = build(teeth, is_low ? teeth->share / 4 : teeth->share, blocks, &random);
        allocations += count;
        take_a_while(teeth->pause, teeth->hold_s);
        free_all(teeth, blocks, count, &random);
        take_a_while(teeth->pause, round + 1 < teeth->rounds ? next_rest_s(teeth, &rests) : 0);
    }
    double seconds = now_seconds() - begin;
    (void)pthread_mutex_lock(&teeth->lock);
    thread_cost_add_since(&teeth->cost, &before);
    teeth->allocations += allocations;
    teeth->seconds = seconds > teeth->seconds ? seconds : teeth->seconds;
    (void)pthread_mutex_unlock(&teeth->lock);
}

/* Of a field of /proc/self/statm, in KiB. */
static long resident_kib(void) {
    char text[256];
    int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (length <= 0) {
        fail(program_name, "cannot read /proc/self/statm");
    }
    (void)close(file);
    text[length] = '\0';
    char *rest;
    (void)strtol(text, &rest, 10); /* the size; what is resident comes second */
    return strtol(rest, NULL, 10) * (sysconf(_SC_PAGESIZE) / 1024);
}

static void work_and_live_on(unsigned long thread, void *shared) {
    struct teeth *teeth = shared;
    work(thread, shared);
    (void)pthread_barrier_wait(&teeth->end);
    (void)pthread_barrier_wait(&teeth->end);
}

struct readings {
    struct teeth *teeth;
    double after_s;
    long before_kib;
    long freed_kib;
    long after_kib;
};

static void read_after(struct readings *readings) {
    readings->freed_kib = resident_kib();
    sleep_seconds(readings->after_s);
    readings->after_kib = resident_kib();
}

/* Beside the threads: reads what they leave. */
static void *watch(void *argument) {
    struct readings *readings = argument;
    (void)pthread_barrier_wait(&readings->teeth->end);
    read_after(readings);
    (void)pthread_barrier_wait(&readings->teeth->end);
    return NULL;
}

/* Forked before anything is allocated, as the workers of a server are. True in a child. */
static bool fork_others(unsigned long processes, pid_t *children) {
    for (unsigned long i = 1; i < processes; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            return true;
        }
        if (children[i] < 0) {
            fail(program_name, "cannot start a process");
        }
    }
    return false;
}

static void wait_for_others(unsigned long processes, const pid_t *children) {
    for (unsigned long i = 1; i < processes; i++) {
        int status = 0;
        if (waitpid(children[i], &status, 0) != children[i] || status != 0) {
            fail(program_name, "a process failed");
        }
    }
}

int main(int argc, char **argv) {
    unsigned long processes = 1;
    unsigned long threads = 1;
    unsigned long bytes = 100UL << 20;
    unsigned long least = 16;
    unsigned long most = 512;
    unsigned long rounds = 20;
    unsigned long hold_ms = 0;
    unsigned long rest_ms = 0;
    unsigned long after_ms = 500;
    unsigned long order = ORDER_FIFO;
    unsigned long pause = PAUSE_SLEEP;
    unsigned long pattern = PATTERN_REGULAR;
    const struct option_spec options[] = {
        {"processes", "processes that each do all of this", OPTION_COUNT, &processes, 1, MAX_PROCESSES, NULL},
        {"threads", "threads that build and free", OPTION_COUNT, &threads, 1, 4096, NULL},
        {"bytes", "maximum total bytes of all threads", OPTION_COUNT, &bytes, 1, 1UL << 40, NULL},
        {"min", "minimum bytes in a block", OPTION_COUNT, &least, 1, 1UL << 40, NULL},
        {"max", "maximum bytes in a block", OPTION_COUNT, &most, 1, 1UL << 40, NULL},
        {"rounds", "times that they build and free", OPTION_COUNT, &rounds, 1, 1000000000, NULL},
        {"hold", "seconds from the last allocation to the first free", OPTION_SECONDS, &hold_ms, 0,
         1000000000, NULL},
        {"rest", "seconds from the last free to the next allocation", OPTION_SECONDS, &rest_ms, 0, 1000000000,
         NULL},
        {"pause", "what threads do in these times", OPTION_CHOICE, &pause, 0, 0, pause_names},
        {"pattern", "rests of one length, or random ones; or every second time a quarter of the bytes",
         OPTION_CHOICE, &pattern, 0, 0, pattern_names},
        {"order", "free oldest first, newest first, at random, or every second one first", OPTION_CHOICE,
         &order, 0, 0, order_names},
        {"after", "seconds from the last free to the final reading", OPTION_SECONDS, &after_ms, 0, 1000000000,
         NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "Threads build something, free all of it, and build again.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);
    if (least > most) {
        reject_arguments(program_name, "--min is more than --max");
    }

    struct teeth teeth = {
        .share = bytes / threads,
        .least = least,
        .most = most,
        .rounds = rounds,
        .hold_s = (double)hold_ms / 1000,
        .rest_s = (double)rest_ms / 1000,
        .order = (enum order)order,
        .pause = (enum pause)pause,
        .pattern = (enum pattern)pattern,
        .lock = PTHREAD_MUTEX_INITIALIZER,
    };
    pid_t children[MAX_PROCESSES];
    bool is_child = fork_others(processes, children);
    struct readings readings = {.teeth = &teeth, .after_s = (double)after_ms / 1000};
    readings.before_kib = resident_kib();
    if (threads == 1) {
        work(0, &teeth);
        read_after(&readings);
    } else {
        pthread_t watcher;
        if (pthread_barrier_init(&teeth.end, NULL, (unsigned)threads + 1) != 0 ||
            pthread_create(&watcher, NULL, watch, &readings) != 0) {
            fail(program_name, "cannot start a thread");
        }
        (void)run_threads(program_name, threads, work_and_live_on, &teeth);
        (void)pthread_join(watcher, NULL);
    }
    if (is_child) {
        return 0;
    }
    wait_for_others(processes, children);

    printf(
        "{\"workload\": \"sawtooth\", \"threads\": %lu, \"bytes\": %lu, \"min\": %lu, \"max\": %lu, "
        "\"rounds\": %lu, \"hold_s\": %.3f, \"rest_s\": %.3f, \"pause\": \"%s\", \"order\": \"%s\", "
        "\"allocations\": %lu, \"seconds\": %.6f, \"user_s\": %.6f, \"system_s\": %.6f, "
        "\"minor_faults\": %lu, \"rss_before_kib\": %ld, \"rss_freed_kib\": %ld, \"rss_after_kib\": %ld}\n",
        threads, bytes, least, most, rounds, teeth.hold_s, teeth.rest_s, pause_names[pause],
        order_names[order], teeth.allocations, teeth.seconds, teeth.cost.user_s, teeth.cost.system_s,
        teeth.cost.minor_faults, readings.before_kib, readings.freed_kib, readings.after_kib);
    return 0;
}
