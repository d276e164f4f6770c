/* A library that is initialized before all others (DF_1_INITFIRST, and the last of that kind): its fork
 * handlers, which allocate, run while the allocator's are done. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

static _Atomic(uint64_t) handled;

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

__attribute__((constructor)) static void start(void) {
    if (pthread_atfork(allocate, allocate, allocate) != 0) {
        abort();
    }
}

uint64_t forks_first_handled(void);
uint64_t forks_first_handled(void) {
    return atomic_load(&handled);
}
