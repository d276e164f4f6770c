#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "ranks.h"

#include "support.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_PROCESSES = 64, MOST_ARRAYS = 32, MOST_RESULT = 512 };

/* What a process tells the others' parent, in memory that both see. */
struct report {
    double begin;
    double end;
    bool finished;
    char failure[160];
    size_t arrays;
    uintptr_t addresses[MOST_ARRAYS];
    _Alignas(max_align_t) unsigned char result[MOST_RESULT];
};

struct rank {
    struct report *report;
    void *arrays[MOST_ARRAYS];
    /* Pipes: a byte from each process that is ready, and one for each when all are. Whoever will write no
     * more closes its end, so that a process which died before is an end of file to those who wait for it. */
    int ready[2];
    int start[2];
};

static _Noreturn void give_up(struct rank *rank, const char *why) {
    (void)snprintf(rank->report->failure, sizeof rank->report->failure, "%s", why);
    exit(1);
}

void rank_bound(struct rank *rank, const char *what, double figure, double most) {
    if (!(figure <= most)) {
        struct report *report = rank->report;
        (void)snprintf(report->failure, sizeof report->failure, "wrong: %s is %.13g, more than %.13g", what,
                       figure, most);
        exit(1);
    }
}

void rank_compare(struct rank *rank, const char *what, double figure, double published, double tolerance) {
    if (!(fabs(figure - published) <= tolerance * fabs(published))) {
        struct report *report = rank->report;
        (void)snprintf(report->failure, sizeof report->failure, "wrong: %s is %.13g, not %.13g as published",
                       what, figure, published);
        exit(1);
    }
}

void *rank_array(struct rank *rank, size_t count, size_t size) {
    struct report *report = rank->report;
    if (report->arrays == MOST_ARRAYS) {
        give_up(rank, "more arrays than the report has room for");
    }
    void *array = malloc(count * size);
    if (array == NULL) {
        give_up(rank, "out of memory");
    }
    rank->arrays[report->arrays] = array;
    report->addresses[report->arrays++] = (uintptr_t)array;
    return array;
}

static ssize_t read_byte(int pipe) {
    char byte;
    ssize_t got = -1;
    do {
        got = read(pipe, &byte, 1);
    } while (got < 0 && errno == EINTR);
    return got;
}

void rank_start(struct rank *rank) {
    if (write(rank->ready[1], "", 1) != 1) {
        give_up(rank, "cannot tell that it is ready");
    }
    (void)close(rank->ready[1]);
    if (read_byte(rank->start[0]) != 1) {
        exit(1); /* another has failed, and said why */
    }
    rank->report->begin = now_seconds();
}

void rank_stop(struct rank *rank) {
    rank->report->end = now_seconds();
}

static _Noreturn void run_rank(const struct kernel *kernel, const struct kernel_options *options,
                               struct rank *rank) {
    /* A measurement that is cut short leaves nothing running. */
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)close(rank->ready[0]);
    (void)close(rank->start[1]);
    kernel->run(rank, options, rank->report->result);
    for (size_t i = rank->report->arrays; i > 0; i--) {
        free(rank->arrays[i - 1]);
    }
    rank->report->finished = true;
    exit(0);
}

/* Lets all go once all are ready. If one of them ended before, the rest end too. */
static void start_together(struct rank *rank, unsigned long processes) {
    static const char bytes[MOST_PROCESSES];
    (void)close(rank->ready[1]);
    unsigned long ready = 0;
    while (ready < processes && read_byte(rank->ready[0]) == 1) {
        ready++;
    }
    if (ready == processes) {
        (void)!write(rank->start[1], bytes, processes);
    }
    (void)close(rank->start[1]);
}

/* Where several failed, the first that says why speaks for all. */
static void wait_for_all(const struct kernel *kernel, const pid_t *children, const struct report *reports,
                         unsigned long processes) {
    char failure[sizeof reports->failure] = "";
    for (unsigned long i = 0; i < processes; i++) {
        int status = 0;
        while (waitpid(children[i], &status, 0) < 0 && errno == EINTR) {
        }
        if (failure[0] != '\0') {
            continue;
        }
        if (WIFSIGNALED(status)) {
            (void)snprintf(failure, sizeof failure, "process %lu was ended by signal %d", i,
                           WTERMSIG(status));
        } else if (reports[i].failure[0] != '\0') {
            (void)snprintf(failure, sizeof failure, "%s", reports[i].failure);
        }
    }
    for (unsigned long i = 0; i < processes && failure[0] == '\0'; i++) {
        if (!reports[i].finished) {
            (void)snprintf(failure, sizeof failure, "process %lu ended too early", i);
        } else if (memcmp(reports[i].result, reports[0].result, kernel->result_size) != 0) {
            (void)snprintf(failure, sizeof failure, "process %lu has another result than process 0", i);
        }
    }
    if (failure[0] != '\0') {
        fail(kernel->name, failure);
    }
}

static int by_number(const void *a, const void *b) {
    double first = *(const double *)a;
    double second = *(const double *)b;
    return (first > second) - (first < second);
}

static void print(const struct kernel *kernel, const struct kernel_options *options, const char *class,
                  const struct report *reports) {
    double seconds[MOST_PROCESSES];
    bool equal = true;
    for (unsigned long i = 0; i < options->processes; i++) {
        seconds[i] = reports[i].end - reports[i].begin;
        equal = equal && reports[i].arrays == reports[0].arrays &&
                memcmp(reports[i].addresses, reports[0].addresses,
                       reports[0].arrays * sizeof reports[0].addresses[0]) == 0;
    }
    qsort(seconds, options->processes, sizeof seconds[0], by_number);
    double slowest = seconds[options->processes - 1];
    double median = (seconds[(options->processes - 1) / 2] + seconds[options->processes / 2]) / 2;
    double operations = kernel->operations(options, reports[0].result) * (double)options->processes;
    printf(
        "{\"workload\": \"%s\", \"class\": \"%s\", \"processes\": %lu, \"iterations\": %lu, \"seed\": %lu, "
        "\"seconds\": %.6f, \"seconds_median\": %.6f, \"mop_s\": %.3f, \"equal_addresses\": %s, "
        "\"page_offsets\": [",
        kernel->name, class, options->processes, options->iterations, options->seed, slowest, median,
        operations * 1e-6 / slowest, equal ? "true" : "false");
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < reports[0].arrays; i++) {
        printf("%s%lu", i == 0 ? "" : ", ", (unsigned long)(reports[0].addresses[i] % page));
    }
    printf("], ");
    kernel->print(reports[0].result);
    printf("}\n");
}

int ranks_main(const struct kernel *kernel, int argc, char **argv) {
    static const char *const classes[] = {"S", "W", "A", NULL};
    struct kernel_options options = {.processes = 1, .seed = kernel->seed};
    const struct option_spec specs[] = {
        {"class", kernel->classes, OPTION_CHOICE, &options.class, 0, 0, classes},
        {"processes", "processes, each with the whole problem in its own arrays", OPTION_COUNT,
         &options.processes, 1, MOST_PROCESSES, NULL},
        {"iterations", kernel->iterations, OPTION_COUNT, &options.iterations, 1, 1000000, NULL},
        {"seed",
         "seed of the random numbers, odd; only results of the default are compared with published ones",
         OPTION_COUNT, &options.seed, 1, (1UL << 46) - 1, NULL},
    };
    const struct program_spec program = {
        .name = kernel->name,
        .summary = kernel->summary,
        .options = specs,
        .option_count = sizeof specs / sizeof specs[0],
    };
    options_parse(&program, argc, argv);
    if (options.seed % 2 == 0) {
        reject_arguments(kernel->name, "--seed is even: the numbers would repeat too soon");
    }
    if (options.iterations == 0) {
        options.iterations = kernel->iterations_of[options.class];
    }
    if (kernel->result_size > MOST_RESULT) {
        fail(kernel->name, "a larger result than the report has room for");
    }

    size_t bytes = options.processes * sizeof(struct report);
    struct report *reports = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct rank rank = {0};
    pid_t children[MOST_PROCESSES];
    if (reports == MAP_FAILED || pipe(rank.ready) != 0 || pipe(rank.start) != 0) {
        fail(kernel->name, "cannot get what the processes share");
    }
    for (unsigned long i = 0; i < options.processes; i++) {
        rank.report = &reports[i];
        children[i] = fork();
        if (children[i] < 0) {
            fail(kernel->name, "cannot start a process");
        }
        if (children[i] == 0) {
            run_rank(kernel, &options, &rank);
        }
    }
    start_together(&rank, options.processes);
    wait_for_all(kernel, children, reports, options.processes);
    print(kernel, &options, classes[options.class], reports);
    (void)munmap(reports, bytes);
    return 0;
}
