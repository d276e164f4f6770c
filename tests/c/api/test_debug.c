/*
 * What the allocator tells a debugger: what each kind of pointer is, also while the heap's locks are held, in
 * a signal handler that interrupted the heap, within a fork, and of a heap whose records are damaged.
 */
#include "calmalloc.h"

#include "api/instance.h"
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

static void check_says(const char *text, const char *part) {
    if (strstr(text, part) == NULL) {
        fprintf(stderr, "no \"%s\" in: %s\n", part, text);
        _Exit(1);
    }
}

static void check_block(const void *pointer, const char *part) {
    check_says(calm_debug_block(pointer), part);
}

/* A block that is so described; NULL if none is. */
static char *find_block(char *const *blocks, size_t count, const char *part) {
    for (size_t i = 0; i < count; i++) {
        if (strstr(calm_debug_block(blocks[i]), part) != NULL) {
            return blocks[i];
        }
    }
    return NULL;
}

static char *new_block(size_t bytes) {
    char *block = calm_malloc(bytes);
    CHECK(block != NULL);
    memset(block, 1, bytes);
    return block;
}

static void quiet_start(void) {
    CHECK(calm_set("background", "off") == 0);
}

/* ---- each kind of pointer ---- */

/* The library's constructor has started it. */
static void test_before_the_start(void) {
    atomic_store(&calm_ready, false);
    check_block(NULL, "0x0: NULL");
    check_block(&free, "not in a heap of calmalloc");
    check_says(calm_debug_heap(), "has not started");
}

/* As for a program that asks before that. */
static void test_foreign_before_the_start(void) {
    int local;
    atomic_store(&calm_ready, false);
    memset(&calm_arenas, 0, sizeof calm_arenas);
    atomic_store(&calm_caches.mode, CACHE_UNREADY);
    CHECK_EQUAL(calm_malloc_usable_size(&local), 0);
    CHECK(calm_malloc(100) != NULL);
}

static void test_foreign(void) {
    quiet_start();
    int local;
    check_block(&local, "not in a heap of calmalloc");
    check_block(NULL, "0x0: NULL");
    check_block((const void *)(uintptr_t)0x123456789abcdef, "0x123456789abcdef: not in a heap of calmalloc");
    check_block((const void *)UINTPTR_MAX, "not in a heap of calmalloc");
    check_block(&calm_arenas, "not in a heap of calmalloc");
    const struct segment *first = &calm_arenas.of[0].heap.space.segment[0];
    check_block(first->region.base + first->region.reserved - 1, "only reserved");
    CHECK(first->region.committed < first->region.reserved);
}

static void test_small(void) {
    quiet_start();
    char *used = new_block(64), *cached = new_block(64);
    check_block(used, ": in use: a block of 64 bytes; slab 0x");
    check_block(used, "blocks in use or cached; dirty page");
    check_block(used + 47, ": in use: 47 bytes into the block 0x");
    calm_free(cached);
    if (atomic_load(&calm_caches.mode) != CACHE_OFF) {
        check_block(cached, ": free, in CPU cache ");
        check_block(cached + 1, ": free, in CPU cache ");
    }
    check_block(used, ": in use: ");
    calm_trim(0);
    check_block(cached, ": free, in its slab: a block of 64 bytes");
    calm_free(used);
}

/* As if a thread had freed it twice, with another block in between. */
static void test_freed_twice(void) {
    quiet_start();
    char *one = new_block(64), *two = new_block(64);
    calm_free(one);
    calm_free(two);
    calm_free(one);
    check_block(one, "freed again: 2 times in all");
    check_block(two, ": free, in CPU cache ");
}

/* More than the caches hold: what they have no room for goes to the depots. */
static void test_depot(void) {
    enum { BLOCKS = 2000 };
    static char *blocks[BLOCKS];
    quiet_start();
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = new_block(64);
    }
    CHECK(find_block(blocks, BLOCKS, ": free, ") == NULL);
    for (size_t i = 0; i < BLOCKS; i++) {
        calm_free(blocks[i]);
    }
    CHECK(find_block(blocks, BLOCKS, ": in use") == NULL);
    CHECK(find_block(blocks, BLOCKS, ": free, in depot ") != NULL);
    CHECK(find_block(blocks, BLOCKS, ": free, in CPU cache ") != NULL);
}

/* Pages within a slab that some blocks keep. */
static void test_pages_of_a_slab(void) {
    enum { BLOCKS = 400 };
    static char *blocks[BLOCKS];
    enum { APART = 16 }; /* so that pages between are free */
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE) / 4;
    char in_use[64];
    char in_slab[64];
    snprintf(in_use, sizeof in_use, ": in use: a block of %zu", bytes);
    snprintf(in_slab, sizeof in_slab, ": free, in its slab: a block of %zu bytes", bytes);
    quiet_start();
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = new_block(bytes);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        if (i % APART != 0) {
            calm_free(blocks[i]);
        }
    }
    calm_trim(0);
    char *clean = NULL;
    for (size_t i = 0; i < BLOCKS; i++) {
        const char *text = calm_debug_block(blocks[i]);
        check_says(text, i % APART == 0 ? in_use : ": free");
        check_says(text, i % APART == 0 ? "dirty page" : "");
        if (i % APART != 0 && strstr(text, "clean page") != NULL) {
            check_says(text, in_slab);
            clean = blocks[i];
        }
    }
    CHECK(clean != NULL);
}

static void test_large(void) {
    quiet_start();
    char *blocks[4];
    for (size_t i = 0; i < 4; i++) {
        blocks[i] = new_block(3 * MIB);
        check_block(blocks[i], ": in use: a large block of 3");
        /* Any page within it: only the first and the last lead to its descriptor. */
        check_block(blocks[i] + 1, ": in use: 1 bytes into the large block 0x");
        check_block(blocks[i] + 1000000, ": in use: 1000000 bytes into the large block 0x");
        check_block(blocks[i] + 3 * MIB - 1, ": in use: 3145727 bytes into the large block 0x");
        size_t page = calm_arenas.of[0].heap.space.page_size;
        if ((uintptr_t)blocks[i] % page != 0) {
            check_block(blocks[i] - 16, ": in use: 16 bytes before the large block 0x");
        }
    }
    calm_free(blocks[1]);
    check_block(blocks[1], ": free: in a dirty run of ");
    check_block(blocks[1] + 2 * MIB, ": free: in a dirty run of ");
    calm_trim(0);
    check_block(blocks[1] + 2 * MIB, ": free: in a clean run of ");
    check_block(blocks[2], ": in use");
    const char *text = calm_debug_heap();
    check_says(text, "large blocks: 3;");
    check_says(text, "the heap's lock: free\n");
    check_says(text, "the purger's lock: free\n");
}

/* ---- under locks ---- */

struct holder {
    pthread_t thread;
    const void *pointer;
    pthread_barrier_t held, done;
};

static struct lock *const *holders_locks;

static void *hold(void *argument) {
    struct holder *holder = argument;
    holder->pointer = thread_pointer();
    for (struct lock *const *lock = holders_locks; *lock != NULL; lock++) {
        lock_acquire(*lock);
    }
    pthread_barrier_wait(&holder->held);
    pthread_barrier_wait(&holder->done);
    for (struct lock *const *lock = holders_locks; *lock != NULL; lock++) {
        lock_release(*lock);
    }
    return NULL;
}

static void check_locked(const void *used, const void *large, const char *owner) {
    check_block(used, ": in use: a block of 64 bytes");
    check_block(used, "; the heap's lock is held");
    check_block(large, ": in use: a large block");
    const char *text = calm_debug_heap();
    check_says(text, "the heap's lock: held by thread 0x");
    check_says(text, "the purger's lock: held by thread 0x");
    check_says(text, "the lock of CPU cache 0: held by thread 0x");
    check_says(text, "bin of class 3: held by thread 0x");
    check_says(text, owner);
}

static const char *handlers_used, *handlers_large;
static volatile sig_atomic_t handled;

static void handle(int signal) {
    (void)signal;
    check_locked(handlers_used, handlers_large, ", the caller");
    handled = 1;
}

static void test_locked(void) {
    quiet_start();
    char *used = new_block(64), *large = new_block(MIB);
    CHECK(calm_arenas.depots[0].bins != NULL);
    static struct lock *locks[5];
    locks[0] = &calm_arenas.purger.lock;
    locks[1] = &calm_caches.states[0].lock;
    locks[2] = &calm_arenas.depots[0].bins[3].lock;
    locks[3] = &calm_arenas.of[0].lock;
    holders_locks = locks;
    struct holder holder;
    CHECK(pthread_barrier_init(&holder.held, NULL, 2) == 0);
    CHECK(pthread_barrier_init(&holder.done, NULL, 2) == 0);
    CHECK(pthread_create(&holder.thread, NULL, hold, &holder) == 0);
    pthread_barrier_wait(&holder.held);
    char owner[64];
    snprintf(owner, sizeof owner, "the heap's lock: held by thread %p\n", holder.pointer);
    check_locked(used, large, owner);
    pthread_barrier_wait(&holder.done);
    CHECK(pthread_join(holder.thread, NULL) == 0);

    /* And in a handler that interrupted the thread which holds them. */
    handlers_used = used;
    handlers_large = large;
    CHECK(signal(SIGUSR1, handle) != SIG_ERR);
    for (size_t i = 0; i < 4; i++) {
        lock_acquire(locks[i]);
    }
    CHECK(raise(SIGUSR1) == 0 && handled == 1);
    for (size_t i = 0; i < 4; i++) {
        lock_release(locks[i]);
    }
    check_says(calm_debug_heap(), "the heap's lock: free\n");
    calm_free(used);
    calm_free(large);
}

/* ---- within a fork ---- */

static const char *forked_block;
static bool in_fork, looked;

/* Before the allocator's own handler, hence while the child holds the locks. */
static void look_in_child(void) {
    if (in_fork) {
        check_block(forked_block, ": in use: a block of 64 bytes");
        check_block(forked_block, "; the heap's lock is held");
        check_says(calm_debug_heap(), "the heap's lock: held by thread 0x");
        check_says(calm_debug_heap(), ", the caller, over a fork");
        looked = true;
    }
}

/* Before constructors, of which the allocator's registers its handlers. */
__attribute__((no_sanitize_address)) static void register_first(void) {
    pthread_atfork(NULL, NULL, look_in_child);
}
__attribute__((section(".init_array.00000"),
               used)) static void (*const before_constructors)(void) = register_first;

static void test_fork(void) {
    quiet_start();
    forked_block = new_block(64);
    static struct lock *no_locks[1];
    holders_locks = no_locks;
    struct holder holder;
    CHECK(pthread_barrier_init(&holder.held, NULL, 2) == 0);
    CHECK(pthread_barrier_init(&holder.done, NULL, 2) == 0);
    CHECK(pthread_create(&holder.thread, NULL, hold, &holder) == 0);
    pthread_barrier_wait(&holder.held);
    in_fork = true;
    pid_t child = fork();
    CHECK(child >= 0);
    in_fork = false;
    if (child == 0) {
        CHECK(looked);
        check_says(calm_debug_heap(), "the heap's lock: free\n");
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    pthread_barrier_wait(&holder.done);
    CHECK(pthread_join(holder.thread, NULL) == 0);
}

/* ---- damaged records ---- */

static uint64_t random_state;

static uint64_t next_random(void) {
    return check_random(&random_state);
}

/* A random word at a random place of a record. Small numbers are likelier to pass for sound ones. */
static void damage(void *record, size_t bytes) {
    uint64_t word = next_random() >> (next_random() % 64);
    size_t size = (size_t)1 << next_random() % 4;
    memcpy((char *)record + next_random() % (bytes / size) * size, &word, size);
}

static void test_damaged(void) {
    quiet_start();
    enum { BLOCKS = 500 };
    static char *blocks[BLOCKS];
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = new_block(1 + next_random() % (i % 20 == 0 ? 3 * MIB : 3000));
    }
    for (size_t i = 0; i < BLOCKS; i += 2) {
        calm_free(blocks[i]);
    }
    struct space *space = &calm_arenas.of[0].heap.space;
    size_t pages = space->segment[0].region.committed >> space->page_shift;
    for (uint64_t round = check_rounds(2000); round > 0; round--) {
        damage(span_at(&space->spans, 1), (space->spans.end - 1) * space->spans.span_bytes);
        damage(space->span_of, pages * sizeof *space->span_of);
        damage(space->class_of, pages);
        damage(calm_arenas.depots[0].bins, calm_all_classes.count * sizeof(struct depot_bin));
        if (atomic_load(&calm_caches.states[0].open)) {
            damage(calm_caches.base, 3 * STACK_BOTTOM_AT);
        }
        for (int i = 0; i < 10; i++) {
            const char *pointer = blocks[next_random() % BLOCKS] + next_random() % MIB;
            CHECK(strlen(calm_debug_block(pointer)) > 20);
        }
        if (round % 100 == 0) {
            check_says(calm_debug_heap(), "large blocks: ");
        }
    }
    for (uint64_t round = check_rounds(2000); round > 0; round--) {
        damage(space->segment, sizeof space->segment);
        damage(space->order, sizeof space->order);
        damage(&space->spans.end, sizeof space->spans.end);
        CHECK(strlen(calm_debug_block(blocks[next_random() % BLOCKS])) > 20);
    }
}

int main(void) {
    random_state = check_seed(0xDEB6);
    in_child(test_before_the_start);
    in_child(test_foreign_before_the_start);
    if (!WATCHES_THREADS) {
        in_child(test_foreign);
        in_child(test_small);
        in_child(test_freed_twice);
        in_child(test_depot);
        in_child(test_pages_of_a_slab);
        in_child(test_large);
        in_child(test_damaged);
        in_child(test_fork);
    }
    in_child(test_locked);
    return 0;
}
