/*
 * A library that allocates as it is loaded and frees as it is unloaded, in whatever thread does that. With
 * HOG it takes that many bytes of the little thread-local memory that is left for libraries that come late.
 */
#include "api.h"

#define BLOCKS 20

#ifdef HOG
__thread char hogged[HOG] __attribute__((tls_model("initial-exec")));
char *hog_address(void);

char *hog_address(void) {
    return hogged;
}
#endif

static void *blocks[BLOCKS];

__attribute__((constructor)) static void load(void) {
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(40 * KIB);
        CHECK(blocks[i] != NULL);
        *(volatile char *)blocks[i] = (char)i;
    }
}

__attribute__((destructor)) static void unload(void) {
    for (size_t i = 0; i < BLOCKS; i++) {
        CHECK(*(volatile char *)blocks[i] == (char)i);
        free(blocks[i]);
    }
}

size_t plugin_held_bytes(void);

size_t plugin_held_bytes(void) {
    return blocks[BLOCKS - 1] == NULL ? 0 : BLOCKS * 40 * KIB;
}
