/* What every workload needs besides its own loop: options, threads that start together, a clock. */
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
    OPTION_PATH,    /* any text, stored as its address; 0 when there is none */
    OPTION_TEXT,    /* the same, where the text names no file; the default is printed */
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

/* Stores what the arguments say; exits 0 for --help, and 2 with one line on stderr for a bad argument. */
void options_parse(const struct program_spec *program, int argc, char **argv);

/* Prints one line and ends the process with status 1. */
_Noreturn void fail(const char *program, const char *what);

/* The same with status 2, for arguments that do not go together. */
_Noreturn void reject_arguments(const char *program, const char *what);

/* malloc and its kin return NULL only in a run that is worthless: ends the process then. */
void *checked(void *block, const char *program);

/* Writes mark to every byte of a block, and tells whether every byte still has it. */
void block_fill(void *block, size_t size, unsigned char mark);
bool block_holds(const void *block, size_t size, unsigned char mark);

double now_seconds(void);

void sleep_seconds(double seconds);

/* Runs body(argument) in count threads that start at once, and returns the seconds from the first's start
 * to the last's end. */
double run_threads(const char *program, unsigned long count, void (*body)(unsigned long thread, void *shared),
                   void *shared);

/* Keeps the calling thread on one of the CPUs that it may run on: the first for number 0, and around. */
void pin_thread(const char *program, unsigned long number);

/* What a thread has cost by itself, whatever the process's other threads do. */
struct thread_cost {
    double user_s;
    double system_s;
    unsigned long minor_faults;
    unsigned long involuntary_switches;
};

/* Of the calling thread, since its start. */
struct thread_cost thread_cost_now(void);

/* Adds what the calling thread has cost since a moment. */
void thread_cost_add_since(struct thread_cost *sum, const struct thread_cost *before);

/* Adds what another sum has. */
void thread_cost_add(struct thread_cost *sum, const struct thread_cost *more);

/* A small generator (splitmix64): a run must repeat exactly, whatever the C library. */
unsigned long long random_next(unsigned long long *state);

/* A number in [least, most], all alike. */
unsigned long random_between(unsigned long long *state, unsigned long least, unsigned long most);

/* Takes one more number into a checksum, in an order that counts. */
unsigned long long checksum_add(unsigned long long checksum, unsigned long long number);

#endif
