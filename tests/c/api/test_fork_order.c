/* Fork handlers that are registered before the allocator starts: they run while it holds all its locks. */
#include "calmalloc.h"

#include "api/instance.h"
#include "arena/arena.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define BLOCKS 64
#define FORKS  20

/* In an older glibc, and in musl, a handler that forks waits forever. */
#if defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 36)
#define FORKS_WITHIN true
#else
#define FORKS_WITHIN false
#endif

static unsigned handled, held;
static bool forks_within;
static atomic_bool stop;

/* A block of each kind: more than a cache holds. */
static void use_heap(void) {
    static const size_t sizes[] = {40, 3000, 40 << 10, 300 << 10};
    void *blocks[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = calm_malloc(sizes[i % 4]);
        CHECK(blocks[i] != NULL);
        memset(blocks[i], 1, 8);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        calm_free(blocks[i]);
    }
}

static void fork_once(void) {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        use_heap();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void handle(void) {
    handled++;
    held += arena_is_held(&calm_arenas);
    use_heap();
}

static void before(void) {
    handle();
    if (forks_within) { /* as a signal handler might */
        forks_within = false;
        fork_once();
        forks_within = true;
    }
}

static void register_handlers(void) {
    CHECK(!allocator_is_ready());
    CHECK(pthread_atfork(before, handle, handle) == 0);
}

__attribute__((section(".init_array.00000"), used)) static void (*const first)(void) = register_handlers;

static void *use_until_stopped(void *unused) {
    while (!atomic_load(&stop)) {
        use_heap();
    }
    return unused;
}

int main(void) {
    pthread_t thread;
    CHECK(calm_set("background", "off") == 0); /* ThreadSanitizer allows no threads in a child */
    CHECK(pthread_create(&thread, NULL, use_until_stopped, NULL) == 0);
    for (unsigned i = 0; i < FORKS; i++) {
        forks_within = FORKS_WITHIN && i % 2 != 0;
        fork_once();
    }
    atomic_store(&stop, true);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQUAL(handled, (2 + FORKS_WITHIN) * FORKS); /* two each, and two more for a fork within */
    CHECK_EQUAL(held, handled);
    return 0;
}
