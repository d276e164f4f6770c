/* Common parts of all workloads: options, threads that start together, a clock. */
#ifndef CALMALLOC_WORKLOADS_SUPPORT_H
#define CALMALLOC_WORKLOADS_SUPPORT_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

enum option_kind {
    OPTION_COUNT,   /* a decimal number in [least, most] */
    OPTION_SECONDS, /* the same with up to three decimals; value, least and most are in milliseconds */
    OPTION_CHOICE,  /* one of the words in choices, stored as its index */
    OPTION_FLAG,    /* takes no value, stores 1 */
    OPTION_PATH,    /* any text, stored as its address; 0 if there is none */
    OPTION_TEXT,    /* the same, for text that is not a file's name; the default is printed */
};

struct option_spec {
    const char *name;
    const char *help;
    enum option_kind kind;
    unsigned long *value; /* holds the default until an argument replaces it */
    unsigned long least;
    unsigned long most;
    const char *const *choices; /* ends with NULL */
};

struct program_spec {
    const char *name;
    const char *summary;
    const struct option_spec *options;
    size_t option_count;
    bool positional; /* the options are given by position, without their names */
};

/* Parses the arguments; exits with 0 for --help, and with 2 and one line on stderr for an invalid argument.
 */
void options_parse(const struct program_spec *program, int argc, char **argv);

/* Prints one line and ends the process with status 1. */
_Noreturn void fail(const char *program, const char *what);

/* The same with status 2, for arguments that cannot be combined. */
_Noreturn void reject_arguments(const char *program, const char *what);

/* Ends the process if block is NULL: a run without enough memory is worthless. */
void *checked(void *block, const char *program);

/* Writes mark to every byte of a block; checks that every byte still has it. */
void block_fill(void *block, size_t size, unsigned char mark);
bool block_holds(const void *block, size_t size, unsigned char mark);

double now_seconds(void);

void sleep_seconds(double seconds);

/* Runs body in count threads that start together, and returns the seconds from the first start to the last
 * end. */
double run_threads(const char *program, unsigned long count, void (*body)(unsigned long thread, void *shared),
                   void *shared);

/* Pins the calling thread to one of its permitted CPUs: number modulo their count. */
void pin_thread(const char *program, unsigned long number);

/* The cost of one thread, independent of the process's other threads. */
struct thread_cost {
    double user_s;
    double system_s;
    unsigned long minor_faults;
    unsigned long involuntary_switches;
};

/* The cost of the calling thread since its start. */
struct thread_cost thread_cost_now(void);

/* Adds the cost of the calling thread since before. */
void thread_cost_add_since(struct thread_cost *sum, const struct thread_cost *before);

void thread_cost_add(struct thread_cost *sum, const struct thread_cost *more);

/* A small generator (splitmix64), so that runs repeat exactly with any C library. */
unsigned long long random_next(unsigned long long *state);

/* A uniformly distributed number in [least, most]. */
unsigned long random_between(unsigned long long *state, unsigned long least, unsigned long most);

/* Adds a number to a checksum, which depends on the order. */
unsigned long long checksum_add(unsigned long long checksum, unsigned long long number);

#endif
