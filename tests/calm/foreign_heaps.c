/*
 * Heaps whose contents are known, for the readers of foreign allocators. It prints what it holds and what the
 * allocator itself reports, a "name value" a line, then "ready", and waits for input.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB     (1UL << 20)
#define THREADS 4
#define MOST    20000

static void *blocks[MOST];
static pthread_barrier_t before, after;

static void *filled(size_t size) {
    return memset(malloc(size), 0x5a, size);
}

static void *fill_cache(void *unused) {
    void *mine[100];
    for (int i = 0; i < 100; i++) {
        mine[i] = filled(112);
    }
    for (int i = 0; i < 100; i++) {
        free(mine[i]);
    }
    pthread_barrier_wait(&before);
    pthread_barrier_wait(&after);
    return unused;
}

static void *free_all(void *unused) {
    for (int i = 0; i < MOST; i++) {
        free(blocks[i]);
    }
    return fill_cache(unused);
}

static void start(void *(*run)(void *), int count) {
    pthread_t thread;
    pthread_barrier_init(&before, NULL, (unsigned)count + 1);
    pthread_barrier_init(&after, NULL, (unsigned)count + 1);
    for (int i = 0; i < count; i++) {
        pthread_create(&thread, NULL, run, NULL);
    }
    pthread_barrier_wait(&before);
}

/* Every tenth block stays; 10 MiB stay; 30 MiB are freed; four threads have free blocks in their caches. */
static void mixed(void) {
    int small = 0;
    int medium = 0;
    for (int i = 0; i < MOST; i++) {
        blocks[i] = filled(i % 7 != 0 ? 64 : 512);
    }
    for (int i = 0; i < MOST; i++) {
        if (i % 10 != 0) {
            free(blocks[i]);
        } else if (i % 7 != 0) {
            small++;
        } else {
            medium++;
        }
    }
    char *large = filled(10 * MIB);
    char *freed = filled(30 * MIB);
    free(freed);
    start(fill_cache, THREADS);
    printf("blocks_64 %d\nblocks_512 %d\nlarge %zu\nlive %zu\n", small, medium, (size_t)10 * MIB,
           (size_t)small * 64 + (size_t)medium * 512 + 10 * MIB);
    printf("address %zu\naddress_large %zu\n", (uintptr_t)blocks[0], (uintptr_t)large);
}

/* Another thread frees the blocks that this one allocated. */
static void remote(void) {
    for (int i = 0; i < MOST; i++) {
        blocks[i] = filled(i % 64 != 0 ? 320 : 100000);
    }
    start(free_all, 1);
    printf("live 0\n");
}

static void *churn(void *unused) {
    void *mine[512] = {0};
    for (unsigned i = 0, random = 1;; i++) {
        random = random * 1664525 + 1013904223;
        free(mine[random >> 23]);
        mine[random >> 23] = filled(8 + (random >> 8) % (i % 64 != 0 ? 2000 : 200000));
        if (i == 100000) {
            pthread_barrier_wait(&before);
        }
    }
    return unused;
}

static void busy(void) {
    start(churn, 2);
}

static void report_jemalloc(void) {
    int (*control)(const char *, void *, size_t *, void *, size_t) = dlsym(RTLD_DEFAULT, "mallctl");
    static const char *const names[] = {"stats.allocated", "stats.active", "stats.arenas.4096.tcache_bytes",
                                        "stats.arenas.4096.pdirty", "stats.arenas.4096.internal"};
    if (control == NULL) {
        return;
    }
    uint64_t epoch = 1;
    size_t bytes = sizeof epoch;
    control("epoch", &epoch, &bytes, &epoch, sizeof epoch);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t value = 0;
        bytes = sizeof value;
        if (control(names[i], &value, &bytes, NULL, 0) == 0) {
            printf("%s %zu\n", names[i], value);
        }
    }
}

int main(int argc, char **argv) {
    static char buffer[4096];
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
    if (argc != 2) {
        return 2;
    }
    if (strcmp(argv[1], "mixed") == 0) {
        mixed();
    } else if (strcmp(argv[1], "remote") == 0) {
        remote();
    } else {
        busy();
    }
    report_jemalloc();
    printf("ready 0\n");
    fflush(stdout);
    char byte;
    return read(0, &byte, 1) < 0;
}
