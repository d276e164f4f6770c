/*
 * A library that allocates when it is loaded and frees when it is unloaded, in the thread that does so. With
 * HOG it uses that many bytes of the limited thread-local memory for libraries that are loaded late.
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
