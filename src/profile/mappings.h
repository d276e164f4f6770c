/*
 * The process's mappings that hold the code of a file. pprof needs them to name
 * the functions at an address. Called by pprof.c. The functions take the
 * loader's lock, and so must not be called within malloc. They allocate
 * nothing.
 */
#ifndef CALM_PROFILE_MAPPINGS_H
#define CALM_PROFILE_MAPPINGS_H

#include <stddef.h>
#include <stdint.h>

#define MAX_MAPPINGS       4096
#define MAX_BUILD_ID_BYTES 32

struct mapping {
    uintptr_t start;
    uintptr_t limit;
    uint64_t offset;
    size_t build_id_bytes; /* 0: none */
    unsigned char build_id[MAX_BUILD_ID_BYTES];
};

/* In the order of their addresses. */
struct mappings {
    size_t count;
    struct mapping of[MAX_MAPPINGS];
};

/* Fills `mappings`, which is all zero before. Calls `take` with the file name
 * of each mapping. Leaves out mappings after the first MAX_MAPPINGS. */
void mappings_read(struct mappings *mappings, void (*take)(void *context, const char *name), void *context);

/* Returns the mapping at an address, NULL if there is none. */
struct mapping *mappings_find(struct mappings *mappings, uintptr_t address);

#endif
