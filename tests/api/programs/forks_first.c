/* A library that is initialized before all others (DF_1_INITFIRST; the last such library counts). Its fork
 * handlers, which allocate, and optionally fork, run after the allocator's have run. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static _Atomic(uint64_t) handled;
static bool nests;

static void allocate(void) {
    static const size_t sizes[] = {40, 3000, 40000, 300000};
    void *blocks[64];
    for (size_t i = 0; i < 64; i++) {
        blocks[i] = malloc(sizes[i % 4]);
        if (blocks[i] == NULL) {
            abort();
        }
    }
    for (size_t i = 0; i < 64; i++) {
        free(blocks[i]);
    }
    atomic_fetch_add(&handled, 1);
}

/* As a signal handler might. */
static void fork_within(void) {
    int status;
    nests = false;
    pid_t child = fork();
    if (child == 0) {
        allocate();
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        abort();
    }
    nests = true;
}

static void before(void) {
    allocate();
    if (nests) {
        fork_within();
    }
}

__attribute__((constructor)) static void start(void) {
    if (pthread_atfork(before, allocate, allocate) != 0) {
        abort();
    }
}

uint64_t forks_first_handled(void);
uint64_t forks_first_handled(void) {
    return atomic_load(&handled);
}

void forks_first_nest(void);
void forks_first_nest(void) {
    nests = true;
}
