/*
 * Programs with one known trouble each, for `calm explain`. They reach their state, print
 * "ready PID LIVE" (whose memory it is, and the bytes of blocks that it holds), and wait for input.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB   (1UL << 20)
#define TOTAL (48 * MIB)

static void ready_and_wait(size_t live) {
    char byte;
    dprintf(1, "ready %d %zu\n", (int)getpid(), live);
    if (read(0, &byte, 1) <= 0) {
        _exit(0);
    }
}

static void *filled(size_t size) {
    return memset(malloc(size), 0x5a, size);
}

/* Holds ever more blocks, all allocated in one place. */
static void leak(void) {
    size_t live = 0;
    for (size_t step = 4 * MIB;; step = TOTAL) {
        for (size_t end = live + step; live < end; live += 200) {
            filled(200);
        }
        ready_and_wait(live);
    }
}

/* Frees all that it had but the newest block. */
static void retention(void) {
    enum { SIZE = 4000 };
    static void *blocks[TOTAL / SIZE];
    size_t count = sizeof blocks / sizeof blocks[0];
    for (size_t i = 0; i < count; i++) {
        blocks[i] = filled(SIZE);
    }
    for (size_t i = 0; i < count - 1; i++) {
        free(blocks[i]);
    }
    ready_and_wait(SIZE);
}

/* Keeps every 16th small block. */
static void fragmentation(void) {
    enum { SIZE = 64 };
    static void *blocks[TOTAL / SIZE];
    size_t count = sizeof blocks / sizeof blocks[0];
    for (size_t i = 0; i < count; i++) {
        blocks[i] = filled(SIZE);
    }
    for (size_t i = 0; i < count; i++) {
        if (i % 16 != 0) {
            free(blocks[i]);
        }
    }
    ready_and_wait(TOTAL / 16);
}

/* Many threads that idle, each after it freed a few blocks of many sizes. */
enum { THREADS = 128, SIZES = 64, EACH = 7 };
static pthread_barrier_t done;

static void *use_and_idle(void *unused) {
    void *blocks[SIZES * EACH];
    for (size_t i = 0; i < SIZES * EACH; i++) {
        blocks[i] = filled(24 + i % SIZES * 16);
    }
    for (size_t i = 0; i < SIZES * EACH; i++) {
        free(blocks[i]);
    }
    pthread_barrier_wait(&done);
    pause();
    return unused;
}

static void caches(void) {
    pthread_attr_t small;
    pthread_t thread;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 64 << 10);
    pthread_barrier_init(&done, NULL, THREADS + 1);
    for (int i = 0; i < THREADS; i++) {
        if (pthread_create(&thread, &small, use_and_idle, NULL) != 0) {
            exit(1);
        }
    }
    pthread_barrier_wait(&done);
    ready_and_wait(0);
}

/* Has memory that it mapped itself. */
static void mappings(void) {
    filled(1000); /* else there may be no heap yet */
    memset(mmap(NULL, TOTAL, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 0x5a, TOTAL);
    ready_and_wait(0);
}

/* A child that only has what its parent had. */
static void forked(void) {
    enum { SIZE = 1000 };
    for (size_t i = 0; i < TOTAL / SIZE; i++) {
        filled(SIZE);
    }
    pid_t child = fork();
    if (child == 0) {
        ready_and_wait(TOTAL);
        _exit(0);
    }
    waitpid(child, NULL, 0);
}

/* Touches one page of each huge page. */
static void huge(void) {
    const size_t huge_page = 2 * MIB;
    char *memory = mmap(NULL, TOTAL + huge_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(memory, TOTAL + huge_page, MADV_HUGEPAGE);
    for (size_t at = 0; at < TOTAL + huge_page; at += huge_page) {
        memset(memory + at, 0x5a, 4096);
    }
    ready_and_wait(0);
}

/* A heap that changes all the time. */
static void *change(void *unused) {
    static _Thread_local void *blocks[4096];
    for (unsigned i = 0, random = 1;; i++) {
        random = random * 1664525 + 1013904223;
        free(blocks[random >> 20]);
        blocks[random >> 20] = malloc(16 + (random >> 8) % 2000);
    }
    return unused;
}

static void busy(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, change, NULL);
    pthread_create(&thread, NULL, change, NULL);
    ready_and_wait(0);
}

static const struct {
    const char *name;
    void (*run)(void);
} troubles[] = {
    {"leak", leak},     {"retention", retention}, {"fragmentation", fragmentation},
    {"caches", caches}, {"mappings", mappings},   {"forked", forked},
    {"huge", huge},     {"busy", busy},
};

int main(int argc, char **argv) {
    for (size_t i = 0; argc == 2 && i < sizeof troubles / sizeof troubles[0]; i++) {
        if (strcmp(argv[1], troubles[i].name) == 0) {
            troubles[i].run();
            return 0;
        }
    }
    return 2;
}
