/* What the small programs of these tests share: assertions, blocks with patterns, figures for the test to
 * read. */
#ifndef CALM_TESTS_CASES_H
#define CALM_TESTS_CASES_H

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../../c/helpers/check.h"

#define CANNOT 77 /* exit status: the machine does not allow what the case is about */

#define KIB (1UL << 10)
#define MIB (1UL << 20)

#define MAX_THREADS 64

/* One line for the test: "name value". */
void say(const char *name, size_t value);

size_t resident_bytes(void); /* of the process, as the kernel counts */
size_t grown_since(size_t resident_before);

void fill(void *block, size_t bytes, unsigned char mark);
void check_filled(const void *block, size_t bytes, unsigned char mark);

/* Runs it in so many threads at once, each with its number, and waits for them. */
void run_threads(size_t count, void (*body)(size_t thread));

/* `count` blocks that are filled; then freed in some order. */
enum order { IN_ORDER, REVERSED, RANDOM };
struct blocks {
    void **rows;
    size_t count, bytes;
};
struct blocks allocate_blocks(size_t count, size_t bytes);
void free_blocks(struct blocks *blocks, enum order order);

/*
 * To be called by a thread whose own arena is not the one that is measured: it allocates.
 *
 * glibc's own figures agree with each other: every heap's in malloc_info(3), its total, mallinfo2(3).
 */
void check_accounting(void);

/* Denies process_madvise(2) to this process from now on. Ends it with CANNOT where that is not allowed. */
void deny_process_madvise(void);

/* Likewise madvise(MADV_WIPEONFORK), with the error of a kernel that does not know it. */
void deny_wipe_on_fork(void);

#endif
