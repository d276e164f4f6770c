/* The address space: segments are added and removed while other threads look up addresses in the others. */
#include "heap/space.h"
#include "os/random.h"

#include <pthread.h>
#include <sys/mman.h>

#include "check.h"

#define READERS     2
#define STAYING     3
#define SPACE_BYTES ((size_t)512 << 20) /* too few for one great range */
#define HOLE_BYTES  ((size_t)1 << 30)   /* as large as any segment */

static struct space space;
static _Atomic(bool) stop;

/* In segments that stay. */
static struct {
    char *base;
    uint32_t page;
} staying[STAYING];

static void check_found(const char *base, uint32_t page) {
    CHECK_EQUAL(space_page(&space, base), page);
    CHECK_EQUAL(space_page(&space, base + vm_page_size() - 1), page);
    CHECK(space_is_usable(&space, page));
    CHECK(space_address(&space, page) == base);
}

static void *look_up(void *unused) {
    while (!atomic_load(&stop)) {
        for (int i = 0; i < STAYING; i++) {
            check_found(staying[i].base, staying[i].page);
        }
    }
    return unused;
}

/* Each segment is in the index, in its place: what is not there is found all the same, by a longer search. */
static void check_index(void) {
    size_t count = atomic_load(&space.segments);
    uintptr_t last = 0;
    for (size_t i = 0; i < count; i++) {
        uint8_t number = atomic_load(&space.by_address[i]);
        CHECK(number < count);
        uintptr_t base = atomic_load(&space.segment[number].base);
        CHECK(base > last);
        last = base;
    }
}

/* A new segment, as none has so much left. */
static uint32_t add_segment(size_t pages, size_t *got) {
    size_t before = atomic_load(&space.segments);
    uint32_t first = space_extend(&space, pages, got);
    CHECK(first != 0 && *got >= pages);
    CHECK_EQUAL(atomic_load(&space.segments), before + 1);
    return first;
}

static uint64_t next_random(uint64_t *random) {
    *random += RANDOM_GOLDEN_RATIO;
    return random_mix(*random);
}

/* The next segment often lies where the last one lay, and is longer or shorter. */
static void come_and_go(uint64_t *random, size_t rounds) {
    size_t bytes = 0;
    void *in_the_way = MAP_FAILED;
    for (size_t i = 0; i < rounds; i++) {
        size_t segments = atomic_load(&space.segments);
        size_t page_end = space.page_end;
        size_t got;
        size_t pages = space.page_end + next_random(random) % 2000;
        uint32_t first = add_segment(pages, &got);
        char *base = space_address(&space, first);
        check_found(base, first);
        check_index();
        base[0] = base[got * vm_page_size() - 1] = 1;
        uint32_t end;
        CHECK_EQUAL(space_last(&space, &end), first);
        CHECK_EQUAL(end, first + got);
        space_drop_last(&space);
        CHECK_EQUAL(atomic_load(&space.segments), segments);
        CHECK_EQUAL(space.page_end, page_end);
        CHECK(!space_is_usable(&space, first));
        CHECK_EQUAL(space_page(&space, base), 0);
        check_index();
        if (in_the_way != MAP_FAILED) {
            CHECK(munmap(in_the_way, bytes) == 0);
        }
        bytes = (1 + next_random(random) % 64) * vm_page_size();
        in_the_way = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
}

int main(void) {
    uint64_t random = check_seed(1);
    CHECK(space_init(&space, SPACE_BYTES, 1));
    CHECK_EQUAL(atomic_load(&space.segments), 0);
    uint32_t end;
    CHECK_EQUAL(space_last(&space, &end), 0);
    void *hole = NULL;
    for (int i = 0; i < STAYING; i++) {
        size_t got;
        if (i == STAYING - 1) {
            /* Some segments lie on each side of it, and those to come in between once it is gone. */
            hole = mmap(NULL, HOLE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            CHECK(hole != MAP_FAILED);
        }
        staying[i].page = add_segment(i == 0 ? 1 : space.page_end + 1, &got);
        staying[i].base = space_address(&space, staying[i].page);
    }
    pthread_t readers[READERS];
    for (int i = 0; i < READERS; i++) {
        CHECK(pthread_create(&readers[i], NULL, look_up, NULL) == 0);
    }
    come_and_go(&random, check_rounds(10000));
    CHECK(munmap(hole, HOLE_BYTES) == 0);
    come_and_go(&random, check_rounds(10000));
    atomic_store(&stop, true);
    for (int i = 0; i < READERS; i++) {
        CHECK(pthread_join(readers[i], NULL) == 0);
    }
    return 0;
}
