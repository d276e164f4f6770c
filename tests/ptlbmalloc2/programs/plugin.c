/* A library that allocates when it is loaded and frees when it is unloaded, in the thread that does so. */
#include "cases.h"

#define BLOCKS 20

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
