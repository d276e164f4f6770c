/* The overflow stack: blocks pushed by several threads come out once and complete; a full stack is reported,
 * not overrun. */
#include "offload/overflow.h"

#include "os/vm.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include "check.h"

#define THREADS 4
#define MOST    ((size_t)64 << 10)
#define BATCH   7

static struct overflow overflow;
static size_t batches = 20000;

static void *block(size_t number) {
    return (void *)((number + 1) * 16);
}

/* Last in, first out; a push that does not fit changes nothing. */
static void test_alone(void) {
    void *blocks[BATCH];
    CHECK(address_range_reserve(&overflow.region, MOST * sizeof(void *)));
    CHECK(overflow_is_empty(&overflow));
    CHECK_EQUAL(overflow_pop(&overflow, blocks, BATCH), 0);
    for (size_t i = 0; i < MOST; i++) {
        void *pushed = block(i);
        CHECK(overflow_push(&overflow, &pushed, 1));
    }
    void *too_much[] = {block(0), block(1)};
    CHECK(!overflow_push(&overflow, too_much, 2));
    CHECK_EQUAL(atomic_load(&overflow.count), MOST);
    for (size_t left = MOST; left > 0;) {
        size_t count = overflow_pop(&overflow, blocks, BATCH);
        CHECK_EQUAL(count, left < BATCH ? left : BATCH);
        left -= count;
        for (size_t i = 0; i < count; i++) {
            CHECK(blocks[i] == block(left + i));
        }
    }
    CHECK(overflow_is_empty(&overflow));
}

static size_t resident_pages(void) {
    static unsigned char pages[MOST * sizeof(void *) / 4096 + 1];
    size_t bytes = overflow.region.committed;
    CHECK(mincore(overflow.region.base, bytes, pages) == 0);
    size_t resident = 0;
    for (size_t i = 0; i < bytes / vm_page_size(); i++) {
        resident += pages[i] & 1;
    }
    return resident;
}

/* Emptied, it holds no memory, and works as before. */
static void test_gives_back(void) {
    for (int round = 0; round < 2; round++) {
        void *pushed = block(1);
        for (size_t i = 0; i < MOST; i++) {
            CHECK(overflow_push(&overflow, &pushed, 1));
        }
        CHECK(resident_pages() > 0);
        while (overflow_pop(&overflow, &pushed, 1) > 0) {
        }
        CHECK_EQUAL(resident_pages(), 0);
    }
}

/* While somebody pushes, the server goes on with other work. */
static void test_busy(void) {
    void *some = block(2);
    CHECK(overflow_push(&overflow, &some, 1));
    lock_acquire(&overflow.lock);
    CHECK_EQUAL(overflow_pop(&overflow, &some, 1), 0);
    lock_release(&overflow.lock);
    CHECK_EQUAL(overflow_pop(&overflow, &some, 1), 1);
}

static void *push_all(void *argument) {
    size_t thread = (size_t)(uintptr_t)argument;
    errno = 1234;
    for (size_t i = 0; i < batches; i++) {
        void *blocks[BATCH];
        for (size_t j = 0; j < BATCH; j++) {
            blocks[j] = block((i * BATCH + j) * THREADS + thread);
        }
        while (!overflow_push(&overflow, blocks, BATCH)) {
            sched_yield();
        }
    }
    CHECK_EQUAL(errno, 1234);
    return NULL;
}

static void test_threads(void) {
    size_t all = batches * BATCH * THREADS;
    unsigned char *seen = calloc(all, 1);
    pthread_t threads[THREADS];
    CHECK(seen != NULL);
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, push_all, (void *)i) == 0);
    }
    for (size_t popped = 0; popped < all;) {
        void *blocks[100];
        size_t count = overflow_pop(&overflow, blocks, 100);
        for (size_t i = 0; i < count; i++) {
            size_t number = (size_t)(uintptr_t)blocks[i] / 16 - 1;
            CHECK(number < all && !seen[number]);
            seen[number] = 1;
        }
        popped += count;
        if (count == 0) {
            sched_yield();
        }
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(overflow_is_empty(&overflow));
    free(seen);
}

int main(void) {
    batches = check_rounds(batches);
    test_alone();
    test_gives_back();
    test_busy();
    test_threads();
    return 0;
}
