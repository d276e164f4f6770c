/*
 * Assertions: what a failed one prints, that locks in the wrong order, a lock that another thread holds, and
 * a heap that contradicts itself are found, and that memory is filled. In builds without them: that they
 * evaluate nothing.
 */
#include "api/allocator.h"
#include "base/assert.h"
#include "calmalloc.h"

#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

static int evaluated;

/* Runs a function in a child, which must abort and print all of these texts. */
static void expect_abort(void (*function)(void), const char *const *texts) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
        function();
        _Exit(0);
    }
    close(ends[1]);
    char printed[2048];
    size_t length = 0;
    for (ssize_t got; (got = read(ends[0], printed + length, sizeof printed - 1 - length)) > 0;) {
        length += (size_t)got;
    }
    close(ends[0]);
    printed[length] = '\0';
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT) {
        printf("status %d: %s\n", status, printed);
    }
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    for (; *texts != NULL; texts++) {
        if (strstr(printed, *texts) == NULL) {
            printf("%s\nlacks: %s\n", printed, *texts);
        }
        CHECK(strstr(printed, *texts) != NULL);
    }
}

#ifdef CALM_ASSERTIONS

static void fail_plainly(void) {
    calm_assert(1 + 1 == 3);
}

static void fail_with_values(void) {
    size_t small = 7;
    const void *large = (const void *)(uintptr_t)0x7f0012345678;
    calm_assert(small > 10, small, large, -1, 1 == 1);
}

static struct lock outer = LOCK_OF(LOCK_PURGER);
static struct lock inner = LOCK_OF(LOCK_HEAP);
static struct lock beside_inner = LOCK_OF(LOCK_HEAP);

static void lock_in_the_wrong_order(void) {
    lock_acquire(&inner);
    lock_acquire(&outer);
}

static void lock_two_of_a_rank(void) {
    lock_acquire(&inner);
    lock_acquire(&beside_inner);
}

static void *hold(void *lock) {
    lock_acquire(lock);
    return NULL;
}

static void release_what_another_holds(void) {
    pthread_t holder;
    CHECK(pthread_create(&holder, NULL, hold, &inner) == 0);
    CHECK(pthread_join(holder, NULL) == 0);
    /* Not a thread that got the holder's thread pointer. */
    lock_release(&inner);
}

static void release_what_is_free(void) {
    lock_release(&inner);
}

static void test_lock_order(void) {
    /* Each of these is in order; a lock that is only tried may be in any. */
    lock_acquire(&outer);
    lock_acquire(&inner);
    CHECK(lock_try(&beside_inner));
    lock_release(&beside_inner);
    lock_release(&inner);
    lock_release(&outer);
    lock_acquire(&outer);
    lock_release(&outer);
    const char *const order[] = {"lock.c", "lock->rank, rank, lock = ", NULL};
    expect_abort(lock_in_the_wrong_order, order);
    expect_abort(lock_two_of_a_rank, order);
    expect_abort(release_what_another_holds, (const char *const[]){"lock_is_mine(lock)", NULL});
    expect_abort(release_what_is_free, (const char *const[]){"lock.h", NULL});
}

static void corrupt_heap(void) {
    CHECK(calm_set("test_check", "1") == 0);
    calm_free(calm_malloc(100000));
    lock_acquire(&calm_arenas.of[0].lock);
    calm_arenas.of[0].heap.used_pages++;
    lock_release(&calm_arenas.of[0].lock);
    calm_free(calm_malloc(100000));
}

static void corrupt_before_fork(void) {
    calm_free(calm_malloc(100000));
    lock_acquire(&calm_arenas.of[0].lock);
    calm_arenas.of[0].heap.slab_dirty_pages++;
    lock_release(&calm_arenas.of[0].lock);
    CHECK(calm_set("test_check", "1000000000") == 0);
    fork();
}

static void test_heap_is_verified(void) {
    expect_abort(corrupt_heap, (const char *const[]){"walk.c", "used_pages", NULL});
    expect_abort(corrupt_before_fork, (const char *const[]){"walk.c", "slab_dirty_pages", NULL});
}

/* Runs that are freed from high addresses to low ones are one chain in their order: a walk must not need a
 * stack for it. */
static void *free_downwards(void *unused) {
    static void *blocks[4000];
    size_t count = sizeof blocks / sizeof *blocks;
    for (size_t i = 0; i < count; i++) {
        blocks[i] = calm_malloc(40000);
        CHECK(blocks[i] != NULL);
    }
    CHECK(calm_set("test_check", "100") == 0);
    for (size_t i = count; i > 1; i -= 2) {
        calm_free(blocks[i - 2]);
    }
    for (size_t i = 1; i < count; i += 2) {
        calm_free(blocks[i]);
    }
    CHECK(calm_set("test_check", "0") == 0);
    return unused;
}

static void test_walk_needs_little_stack(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, (size_t)64 << 10) == 0);
    CHECK(pthread_create(&thread, &attributes, free_downwards, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static bool is_filled(const unsigned char *block, size_t size, unsigned char with) {
    size_t i = 0;
    while (i < size && block[i] == with) {
        i++;
    }
    return i == size;
}

static void test_memory_is_filled(void) {
    for (int i = 0; i < 1000; i++) { /* from the heap, the depot and the cache */
        unsigned char *block = calm_malloc(200);
        CHECK(is_filled(block, 200, FILL_NEW));
        memset(block, 1, 200);
        if (i % 3 != 0) {
            calm_free(block);
            CHECK(is_filled(block, 200, FILL_FREED));
        }
        unsigned char *zeros = calm_calloc(1, 200);
        CHECK(is_filled(zeros, 200, 0));
        unsigned char *grown = calm_realloc(zeros, 300);
        CHECK(is_filled(grown, 200, 0));
        calm_free(grown);
    }
}

#endif

int main(void) {
    calm_free(calm_malloc(1));
#ifdef CALM_ASSERTIONS
    calm_assert(++evaluated == 1, evaluated);
    CHECK_EQUAL(evaluated, 1);
    expect_abort(fail_plainly,
                 (const char *const[]){"test_assert.c:", ": assertion failed: 1 + 1 == 3\n", NULL});
    expect_abort(fail_with_values, (const char *const[]){"small > 10; small, large, -1, 1 == 1 = 7, "
                                                         "0x7f0012345678, 0xffffffffffffffff, 1\n",
                                                         NULL});
    test_lock_order();
    test_heap_is_verified();
    if (!WATCHES_THREADS) {
        test_memory_is_filled();
        test_walk_needs_little_stack();
    }
#else
    calm_assert(++evaluated > 1, evaluated);
    CHECK_EQUAL(evaluated, 0);
    CHECK(calm_set("test_check", "1") == -1 && errno == ENOENT);
#endif
    (void)expect_abort;
    return 0;
}
