/*
 * limits: a program that first has small blocks, of which few stay, and then large ones; free memory of one
 * kind does not fit requests of the other. Runs in a control group that allows less than both together.
 */
#include "api.h"
#include "names.h"

#include <string.h>

#define SMALL_BYTES 480
#define SMALLS      (100 * MIB / SMALL_BYTES)
#define LARGE_BYTES (250 * KIB)
#define LARGES      (100 * MIB / LARGE_BYTES)
#define STAYS       64 /* one in so many */

static void *small[SMALLS], *large[LARGES];

static void *touched(size_t bytes) {
    void *block = malloc(bytes);
    CHECK(block != NULL);
    return memset(block, 1, bytes);
}

static void waves(const char *argument) {
    for (long wave = 0; wave < strtol(argument, NULL, 10); wave++) {
        for (size_t i = 0; i < SMALLS; i++) {
            small[i] = small[i] == NULL ? touched(SMALL_BYTES) : small[i];
        }
        for (size_t i = 0; i < SMALLS; i++) {
            if (i % STAYS != 0) {
                free(small[i]);
                small[i] = NULL;
            }
        }
        for (size_t i = 0; i < LARGES; i++) {
            large[i] = touched(LARGE_BYTES);
        }
        for (size_t i = 0; i < LARGES; i++) {
            free(large[i]);
        }
    }
    say("lived", 1);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {{"waves", waves}};
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
