/*
 * The process's mappings that hold code of a file: what pprof needs to name the functions at an address.
 * Called by pprof.c. Not from within malloc: takes the loader's lock. Allocates nothing.
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

/* Fills it, all zero before, and calls take with the file name of each mapping. Those beyond the first
 * MAX_MAPPINGS are left out. */
void mappings_read(struct mappings *mappings, void (*take)(void *context, const char *name), void *context);

/* NULL if there is none at the address. */
struct mapping *mappings_find(struct mappings *mappings, uintptr_t address);

#endif
