/* The address space: segments are added and removed while other threads look up addresses in the others. */
#include "heap/space.h"
#include "os/random.h"

#include <pthread.h>
#include <sched.h>
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
}

/* In a segment of which all else is released. */
static struct {
    char *base;
    uint32_t page;
} middle;
static _Atomic(bool) has_middle;
static _Atomic(size_t) looks[READERS];
static void *look_up(void *number) {
    while (!atomic_load(&stop)) {
        for (int i = 0; i < STAYING; i++) {
            check_found(staying[i].base, staying[i].page);
        }
        if (atomic_load(&has_middle)) {
            check_found(middle.base, middle.page);
        }
        /* Where a system call waits for a CPU each time, as in gVisor and in emulators, readers that never
         * rest would let it wait for milliseconds. */
        if (atomic_fetch_add(&looks[(uintptr_t)number], 1) % 1000 == 0) {
            check_nap(100000);
        }
    }
    return NULL;
}

static void wait_for_readers(size_t times) {
    for (size_t i = 0; i < READERS; i++) {
        size_t before = atomic_load(&looks[i]);
        while (atomic_load(&looks[i]) < before + times) {
            sched_yield();
        }
    }
}

/* Each segment is in both orders, in its place: what is not there is found all the same, by a longer search.
 */
static void check_order(void) {
    size_t count = atomic_load(&space.segments);
    uintptr_t last[SEGMENT_ORDERS] = {0};
    CHECK(count == 0 || space.segment[count - 1].region.base != NULL);
    for (size_t i = 0; i < count; i++) {
        for (int order = 0; order < SEGMENT_ORDERS; order++) {
            uint8_t number = atomic_load(&space.order[order][i]);
            CHECK(number < count);
            const struct segment *segment = &space.segment[number];
            uintptr_t key = order == BY_ADDRESS ? atomic_load(&segment->base) : segment->first_page;
            CHECK(segment->region.base == NULL || key > last[order]);
            CHECK(i == 0 || key >= last[order]);
            last[order] = key;
        }
    }
}

static uint32_t end_of_numbers(void) {
    uint32_t end = 1;
    for (size_t i = 0; i < atomic_load(&space.segments); i++) {
        const struct segment *segment = &space.segment[i];
        uint32_t pages = (uint32_t)(segment->region.reserved / vm_page_size());
        end = segment->region.base != NULL && segment->first_page + pages > end ? segment->first_page + pages
                                                                                : end;
    }
    return end;
}

static size_t filled_slots(void) {
    size_t filled = 0;
    for (size_t i = 0; i < atomic_load(&space.segments); i++) {
        filled += space.segment[i].region.base != NULL;
    }
    return filled;
}

/* A new segment, as none has so much left. */
static uint32_t add_segment(size_t pages, size_t *got) {
    size_t before = filled_slots();
    uint32_t first = space_extend(&space, pages, got);
    CHECK(first != 0 && *got >= pages);
    CHECK_EQUAL(filled_slots(), before + 1);
    return first;
}

static uint64_t next_random(uint64_t *random) {
    *random += RANDOM_GOLDEN_RATIO;
    return random_mix(*random);
}

static void check_gone(const char *base, uint32_t page, size_t pages) {
    CHECK(!space_is_usable(&space, page) && !space_is_usable(&space, page + (uint32_t)pages - 1));
    CHECK_EQUAL(space_page(&space, base), 0);
    CHECK_EQUAL(space_page(&space, base + pages * vm_page_size() - 1), 0);
    check_order();
}

static void release(char *base, uint32_t page, size_t pages) {
    CHECK(space_release(&space, page, pages));
    check_gone(base, page, pages);
}

/* A whole segment goes at once, or in parts, of which any may be first. */
static void release_in_parts(uint64_t *random, char *base, uint32_t first, size_t pages) {
    size_t parts = 1 + next_random(random) % 3;
    size_t each = pages / parts;
    size_t from = next_random(random) % parts;
    for (size_t i = 0; i < parts; i++) {
        size_t part = (from + i * 2) % parts; /* of two the same twice */
        part = parts == 2 ? (from + i) % 2 : part;
        size_t skip = part * each;
        size_t count = part == parts - 1 ? pages - skip : each;
        release(base + skip * vm_page_size(), first + (uint32_t)skip, count);
    }
}

/* The next segment often lies where the last one lay, and is longer or shorter. */
static void come_and_go(uint64_t *random, size_t rounds) {
    size_t bytes = 0;
    void *in_the_way = MAP_FAILED;
    for (size_t i = 0; i < rounds; i++) {
        size_t segments = atomic_load(&space.segments);
        uint32_t end = end_of_numbers();
        size_t got;
        size_t pages = end + 64 * 3 + next_random(random) % 2000;
        uint32_t first = add_segment(pages, &got);
        char *base = space_address(&space, first);
        check_found(base, first);
        check_order();
        base[0] = base[got * vm_page_size() - 1] = 1;
        release_in_parts(random, base, first, got);
        CHECK_EQUAL(atomic_load(&space.segments), segments);
        CHECK_EQUAL(end_of_numbers(), end);
        if (in_the_way != MAP_FAILED) {
            CHECK(munmap(in_the_way, bytes) == 0);
        }
        bytes = (1 + next_random(random) % 64) * vm_page_size();
        in_the_way = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    }
    CHECK(in_the_way == MAP_FAILED || munmap(in_the_way, bytes) == 0);
}

/* A block stays where it is, and is found, while all around it goes; its neighbours are guards then. */
static void shrink_around(uint64_t *random, size_t rounds) {
    for (size_t i = 0; i < rounds; i++) {
        size_t got;
        uint32_t first = add_segment(end_of_numbers() + 512, &got);
        size_t before = next_random(random) % (got / 2);
        before = before < 64 ? 0 : before;
        middle.page = first + (uint32_t)before;
        middle.base = space_address(&space, middle.page);
        middle.base[0] = 7;
        atomic_store(&has_middle, true);
        wait_for_readers(1);
        size_t after = got - before - 1;
        bool end_first = next_random(random) % 2 == 0;
        if (end_first) {
            release(middle.base + vm_page_size(), middle.page + 1, after);
        }
        if (before > 0) {
            release(middle.base - before * vm_page_size(), first, before);
        }
        if (!end_first) {
            release(middle.base + vm_page_size(), middle.page + 1, after);
        }
        CHECK_EQUAL(middle.base[0], 7);
        check_found(middle.base, middle.page);
        CHECK(space_address(&space, middle.page) == middle.base);
        wait_for_readers(1);
        atomic_store(&has_middle, false);
        wait_for_readers(2);
        release(middle.base, middle.page, 1);
    }
}

int main(void) {
    uint64_t random = check_seed(1);
    CHECK(space_init(&space, SPACE_BYTES, 1));
    CHECK_EQUAL(atomic_load(&space.segments), 0);
    void *hole = NULL;
    for (int i = 0; i < STAYING; i++) {
        size_t got;
        if (i == STAYING - 1) {
            /* Some segments lie on each side of it, and those to come in between once it is gone. */
            hole = mmap(NULL, HOLE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            CHECK(hole != MAP_FAILED);
        }
        staying[i].page = add_segment(i == 0 ? 1 : end_of_numbers() + 1, &got);
        staying[i].base = space_address(&space, staying[i].page);
    }
    pthread_t readers[READERS];
    for (int i = 0; i < READERS; i++) {
        CHECK(pthread_create(&readers[i], NULL, look_up, (void *)(uintptr_t)i) == 0);
    }
    come_and_go(&random, check_rounds(10000));
    CHECK(munmap(hole, HOLE_BYTES) == 0);
    come_and_go(&random, check_rounds(10000));
    shrink_around(&random, check_rounds(200));
    atomic_store(&stop, true);
    for (int i = 0; i < READERS; i++) {
        CHECK(pthread_join(readers[i], NULL) == 0);
    }
    return 0;
}
