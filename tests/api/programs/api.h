/*
 * What the programs of these tests share. Each runs under the library preloaded, linked or static, and, where
 * that makes sense, under the C library's own malloc: calmalloc's functions are weak, and governed() says
 * whether they are there.
 */
#ifndef CALM_TESTS_API_H
#define CALM_TESTS_API_H

#include "../../c/helpers/check.h"
#include "calmalloc.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CANNOT 77 /* exit status: the machine does not allow what the case is about */

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

#define MAX_THREADS 256

#if !defined USE_CALM_NAMES && !defined LINKED
#pragma weak calm_malloc
#pragma weak calm_free
#pragma weak calm_calloc
#pragma weak calm_realloc
#pragma weak calm_reallocarray
#pragma weak calm_aligned_alloc
#pragma weak calm_posix_memalign
#pragma weak calm_free_sized
#pragma weak calm_free_aligned_sized
#pragma weak calm_malloc_usable_size
#pragma weak calm_trim
#pragma weak calm_stats
#pragma weak calm_stats_json
#pragma weak calm_set
#pragma weak calm_get
#pragma weak calm_debug_block
#pragma weak calm_debug_heap
#endif

/* Whether malloc is calmalloc's, or its functions are at least there. */
bool governed(void);

/* Of the library, which must be there. Checks what holds at every moment. */
struct calm_stats stats_now(void);

/* A counter that calm_stats_json has, such as those of libcalmoffload; 0 if it has none of that name. */
uint64_t counter_named(const char *name);

/* Whether libcalmoffload's server did not answer in time. */
bool server_was_late(void);

/* Of the account of memory. What does not hold is excused where others than the program moved it: a server
 * that was late returns blocks later. At the case's end run_case says how many there were, and how many of
 * them were excused, for the test to run it again. */
bool account(bool holds);
#define CHECK_ACCOUNT(condition) CHECK(account(condition))

/* One line for the test: "name value". */
void say(const char *name, uint64_t value);

size_t resident_bytes(void); /* of the process, as the kernel counts */
size_t virtual_bytes(void);
size_t grown_since(size_t resident_before);
size_t number_of_threads(void);
double seconds_now(void);
void sleep_seconds(double seconds);

/* Bytes of /proc/self/smaps_rollup: "Private_Dirty", "Locked". */
size_t rollup_bytes(const char *name);

/* Out of the compiler's sight: what it knows of sizes and of freed blocks must not change the program. */
size_t opaque(size_t value);
void *hidden(void *pointer);

/* Values that depend on the place as well as on the mark: a shifted overlap does not look right. */
void fill(void *block, size_t bytes, uint64_t mark);
bool is_filled(const void *block, size_t bytes, uint64_t mark);
bool is_zero(const void *block, size_t bytes);

uint64_t next_random(uint64_t *state);

/* Allocates, fills, checks and frees blocks of many sizes. */
void use_blocks(uint64_t random, size_t operations);

/* Zeroed pages from the system: tables of the test's own, that the heap under test does not hold. */
void *own_pages(size_t bytes);

/* Runs it in so many threads at once, each with its number, and waits for them. */
void run_threads(size_t count, void (*body)(size_t thread));

/* Waits for a child and checks that it left by exit(0). */
void check_child(int child);

/* A little work for run_threads. */
void work_in_thread(size_t thread);

/* Forks a child that works, with threads, and ends; and waits for it. */
void fork_once(size_t i);

/* Denies a system call to this process from now on. Ends it with CANNOT where that is not allowed. */
void deny_call(int number, int error);

/* The number that a case has as its argument, or another where it has none. */
size_t number_or(const char *argument, size_t otherwise);

/* "cases NAME ARGUMENT...": the function of that name. */
struct test_case {
    const char *name;
    void (*run)(const char *argument);
};
int run_case(int argc, char **argv, const struct test_case *cases, size_t count);

#endif
