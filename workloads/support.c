#define _GNU_SOURCE /* RUSAGE_THREAD */
#include "support.h"

#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { MOST_OPTIONS = 16 };

static const char *value_name(const struct option_spec *option) {
    switch (option->kind) {
    case OPTION_COUNT:
    case OPTION_SECONDS:
        return "N";
    case OPTION_PATH:
        return "PATH";
    case OPTION_TEXT:
        return "TEXT";
    default:
        return "WORD";
    }
}

static void print_choices(FILE *stream, const struct option_spec *option) {
    for (size_t i = 0; option->choices[i] != NULL; i++) {
        (void)fprintf(stream, "%s%s", i == 0 ? "" : "|", option->choices[i]);
    }
}

static void print_help(const struct program_spec *program) {
    printf("usage: %s", program->name);
    for (size_t i = 0; program->positional && i < program->option_count; i++) {
        printf(" [%s", program->options[i].name);
    }
    for (size_t i = 0; program->positional && i < program->option_count; i++) {
        printf("]");
    }
    printf("%s\n%s\n\n", program->positional ? "" : " [options]", program->summary);
    for (size_t i = 0; i < program->option_count; i++) {
        const struct option_spec *option = &program->options[i];
        char label[64];
        if (program->positional) {
            (void)snprintf(label, sizeof label, "%s", option->name);
        } else if (option->kind == OPTION_FLAG) {
            (void)snprintf(label, sizeof label, "--%s", option->name);
        } else {
            (void)snprintf(label, sizeof label, "--%s %s", option->name, value_name(option));
        }
        printf("  %-16s %s", label, option->help);
        if (option->kind == OPTION_COUNT && *option->value != 0) {
            printf(" (default %lu)", *option->value);
        } else if (option->kind == OPTION_SECONDS) {
            printf(" (default %g)", (double)*option->value / 1e3);
        } else if (option->kind == OPTION_CHOICE) {
            printf(": ");
            print_choices(stdout, option);
            printf(" (default %s)", option->choices[*option->value]);
        } else if (option->kind == OPTION_TEXT && *option->value != 0) {
            printf(" (default %s)", (const char *)*option->value);
        }
        printf("\n");
    }
    printf("  %-16s print this help\n", "--help");
}

static _Noreturn void reject(const struct program_spec *program, const struct option_spec *option,
                             const char *text) {
    (void)fprintf(stderr, "%s: %s%s: '%s' is not ", program->name, program->positional ? "" : "--",
                  option->name, text);
    if (option->kind == OPTION_CHOICE) {
        (void)fprintf(stderr, "one of ");
        print_choices(stderr, option);
    } else if (option->kind == OPTION_SECONDS) {
        (void)fprintf(stderr, "a number from %.3f to %lu", (double)option->least / 1e3, option->most / 1000);
    } else {
        (void)fprintf(stderr, "a number from %lu to %lu", option->least, option->most);
    }
    (void)fprintf(stderr, "\n");
    exit(2);
}

static void store(const struct program_spec *program, const struct option_spec *option, const char *text) {
    if (option->kind == OPTION_FLAG) {
        *option->value = 1;
        return;
    }
    if (option->kind == OPTION_PATH || option->kind == OPTION_TEXT) {
        *option->value = (unsigned long)text;
        return;
    }
    if (option->kind == OPTION_CHOICE) {
        for (size_t i = 0; option->choices[i] != NULL; i++) {
            if (strcmp(text, option->choices[i]) == 0) {
                *option->value = i;
                return;
            }
        }
        reject(program, option, text);
    }
    /* Not by strtoul, which would take a sign, and turn "-1" into a huge number. */
    static const char digits[] = "0123456789";
    size_t whole = strspn(text, digits);
    const char *decimals = option->kind == OPTION_SECONDS && text[whole] == '.' ? text + whole + 1 : "";
    size_t places = strspn(decimals, digits);
    bool has_point = decimals[0] != '\0';
    if (whole == 0 || places > 3 || text[whole + has_point + places] != '\0') {
        reject(program, option, text);
    }
    unsigned long unit = option->kind == OPTION_SECONDS ? 1000 : 1;
    unsigned long number = 0;
    for (size_t i = 0; i < whole; i++) {
        if (__builtin_mul_overflow(number, 10, &number) ||
            __builtin_add_overflow(number, (unsigned long)(text[i] - '0'), &number)) {
            reject(program, option, text);
        }
    }
    if (__builtin_mul_overflow(number, unit, &number)) {
        reject(program, option, text);
    }
    for (size_t i = 0; i < places; i++) {
        unit /= 10;
        number += (unsigned long)(decimals[i] - '0') * unit;
    }
    if (number < option->least || number > option->most) {
        reject(program, option, text);
    }
    *option->value = number;
}

void options_parse(const struct program_spec *program, int argc, char **argv) {
    struct option table[MOST_OPTIONS + 2] = {{.name = "help", .val = 'h'}};
    if (program->option_count > MOST_OPTIONS) {
        fail(program->name, "more options than the table has room for");
    }
    for (size_t i = 0; !program->positional && i < program->option_count; i++) {
        table[i + 1] = (struct option){
            .name = program->options[i].name,
            .has_arg = program->options[i].kind == OPTION_FLAG ? no_argument : required_argument,
        };
    }
    int index = 0;
    for (int c = 0; (c = getopt_long(argc, argv, "", table, &index)) != -1;) {
        if (c == '?') {
            exit(2); /* getopt_long has said why */
        }
        if (c == 'h') {
            print_help(program);
            exit(0);
        }
        store(program, &program->options[index - 1], optarg);
    }
    size_t given = (size_t)(argc - optind);
    if (given > (program->positional ? program->option_count : 0)) {
        (void)fprintf(stderr, "%s: too many arguments: '%s'\n", program->name, argv[argc - 1]);
        exit(2);
    }
    for (size_t i = 0; i < given; i++) {
        store(program, &program->options[i], argv[optind + (int)i]);
    }
}

/* The first thread that fails speaks for all, and ends them. */
_Noreturn void fail(const char *program, const char *what) {
    static atomic_flag failed = ATOMIC_FLAG_INIT;
    while (atomic_flag_test_and_set(&failed)) {
        (void)pause();
    }
    (void)fprintf(stderr, "%s: %s\n", program, what);
    exit(1);
}

_Noreturn void reject_arguments(const char *program, const char *what) {
    (void)fprintf(stderr, "%s: %s\n", program, what);
    exit(2);
}

void *checked(void *block, const char *program) {
    if (block == NULL) {
        fail(program, "out of memory");
    }
    return block;
}

void block_fill(void *block, size_t size, unsigned char mark) {
    memset(block, mark, size);
}

bool block_holds(const void *block, size_t size, unsigned char mark) {
    const unsigned char *bytes = block;
    /* Each byte is like the one before it, and the first is the mark. */
    return size == 0 || (bytes[0] == mark && memcmp(bytes, bytes + 1, size - 1) == 0);
}

double now_seconds(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void sleep_seconds(double seconds) {
    double end = now_seconds() + seconds;
    struct timespec until = {.tv_sec = (time_t)end, .tv_nsec = (long)((end - (double)(time_t)end) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
    }
}

struct team {
    pthread_barrier_t start;
    void (*body)(unsigned long thread, void *shared);
    void *shared;
};

struct member {
    struct team *team;
    unsigned long number;
    pthread_t thread;
    /* The members read the clock: the thread that waits for them may get a busy CPU too late. */
    double begin;
    double end;
};

static void *run_member(void *argument) {
    struct member *member = argument;
    (void)pthread_barrier_wait(&member->team->start);
    member->begin = now_seconds();
    member->team->body(member->number, member->team->shared);
    member->end = now_seconds();
    return NULL;
}

double run_threads(const char *program, unsigned long count, void (*body)(unsigned long thread, void *shared),
                   void *shared) {
    struct team team = {.body = body, .shared = shared};
    if (pthread_barrier_init(&team.start, NULL, (unsigned)count) != 0) {
        fail(program, "cannot make a barrier");
    }
    struct member *members = checked(calloc(count, sizeof *members), program);
    for (unsigned long i = 0; i < count; i++) {
        members[i].team = &team;
        members[i].number = i;
        if (pthread_create(&members[i].thread, NULL, run_member, &members[i]) != 0) {
            fail(program, "cannot start a thread");
        }
    }
    double begin = 0;
    double end = 0;
    for (unsigned long i = 0; i < count; i++) {
        (void)pthread_join(members[i].thread, NULL);
        begin = i == 0 || members[i].begin < begin ? members[i].begin : begin;
        end = members[i].end > end ? members[i].end : end;
    }
    double seconds = end - begin;
    free(members);
    (void)pthread_barrier_destroy(&team.start);
    return seconds;
}

static double seconds_of(struct timeval time) {
    return (double)time.tv_sec + (double)time.tv_usec * 1e-6;
}

struct thread_cost thread_cost_now(void) {
    struct rusage usage;
    (void)getrusage(RUSAGE_THREAD, &usage);
    return (struct thread_cost){
        .user_s = seconds_of(usage.ru_utime),
        .system_s = seconds_of(usage.ru_stime),
        .minor_faults = (unsigned long)usage.ru_minflt,
        .involuntary_switches = (unsigned long)usage.ru_nivcsw,
    };
}

void thread_cost_add_since(struct thread_cost *sum, const struct thread_cost *before) {
    struct thread_cost now = thread_cost_now();
    sum->user_s += now.user_s - before->user_s;
    sum->system_s += now.system_s - before->system_s;
    sum->minor_faults += now.minor_faults - before->minor_faults;
    sum->involuntary_switches += now.involuntary_switches - before->involuntary_switches;
}

void thread_cost_add(struct thread_cost *sum, const struct thread_cost *more) {
    sum->user_s += more->user_s;
    sum->system_s += more->system_s;
    sum->minor_faults += more->minor_faults;
    sum->involuntary_switches += more->involuntary_switches;
}

unsigned long long random_next(unsigned long long *state) {
    unsigned long long z = *state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
}

unsigned long random_between(unsigned long long *state, unsigned long least, unsigned long most) {
    return least + (unsigned long)(random_next(state) % (most - least + 1));
}

unsigned long long checksum_add(unsigned long long checksum, unsigned long long number) {
    unsigned long long state = checksum ^ number;
    return random_next(&state);
}

void pin_thread(const char *program, unsigned long number) {
    static cpu_set_t allowed; /* not of the calling thread, which may have been pinned before */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    (void)pthread_mutex_lock(&lock);
    if (CPU_COUNT(&allowed) == 0 && sched_getaffinity(getpid(), sizeof allowed, &allowed) != 0) {
        fail(program, "cannot find out which CPUs there are");
    }
    (void)pthread_mutex_unlock(&lock);
    unsigned long left = number % (unsigned long)CPU_COUNT(&allowed);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &allowed) || left-- > 0) {
        cpu++;
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one) != 0) {
        fail(program, "cannot pin a thread");
    }
}
