/*
 * The heap in isolation, compared with a model: blocks of all classes and large ones are allocated, freed,
 * resized and moved at random, while ranges are taken out to be purged and returned, purged or not. The
 * heap's counters are compared with a walk over all its pages.
 */

#include "heap_model.h"
#include "os/file.h"

#include <pthread.h>
#include <sys/resource.h>

static size_t steps = 20000;

static void resize(struct slot *slot) {
    struct span *span = heap_large_span(&heap, slot->block);
    CHECK(span != NULL);
    size_t pages = 1 + below(MAX_LARGE);
    size_t held = slot->bytes;
    bool resized = heap_resize_large(&heap, span, pages);
    CHECK(heap_large_span(&heap, slot->block) == span);
    if (!resized) {
        CHECK_EQUAL(span->pages * page_size, held);
        seen.refusals++;
        return;
    }
    /* Without a descriptor for the rest it stays longer than was asked. */
    CHECK(span->pages == pages || (span->pages > pages && span->pages * page_size == held));
    each_word(slot, (span->pages * page_size < held ? span->pages * page_size : held) - 8, false);
    slot->bytes = span->pages * page_size;
    fill(slot);
    seen.resizes++;
}

static void move(struct slot *slot) {
    struct span *span = heap_large_span(&heap, slot->block);
    bool zero = false;
    size_t pages = span->pages + below(4);
    unsigned char *to =
        heap_may_move(&heap) ? heap_take_large(&heap, pages, 1, RUN_FOR_MOVE, colored, &zero) : NULL;
    if (to == NULL) {
        seen.refusals++;
        return;
    }
    if (!vm_move_pages(slot->block, to, slot->bytes)) {
        CHECK(heap_put_large(&heap, to) == NULL);
        return;
    }
    heap_moved(&heap, span, heap_large_span(&heap, to));
    slot->block = to;
    check_filled(slot);
    slot->bytes = pages * page_size;
    fill(slot);
    seen.moves++;
}

/* Frees that name no block in use: each is reported, and changes nothing. */
static void misuse(void) {
    seen.misuses++;
    struct slot *slot = any_slot();
    if (slot->block == NULL) {
        void *foreign[] = {NULL, &heap, slot};
        void *one = foreign[below(3)];
        heap_put_blocks(&heap, &one, 1);
        expect_misuse(MISUSE_INVALID_FREE, one);
        CHECK(heap_put_large(&heap, one) == NULL);
        expect_misuse(MISUSE_INVALID_FREE, one);
        return;
    }
    void *inside = slot->block + 1 + below(slot->bytes - 1);
    heap_put_blocks(&heap, &inside, 1);
    expect_misuse(MISUSE_INVALID_FREE, inside);
    CHECK(heap_put_large(&heap, inside) == NULL);
    expect_misuse(MISUSE_INVALID_FREE, inside);
    if (batch_out) {
        return; /* what a batch holds counts as in use */
    }
    void *block = slot->block;
    check_filled(slot);
    slot->block = NULL;
    if (slot->size_class == 0) {
        put_large(&(struct slot){.block = block});
        CHECK(heap_put_large(&heap, block) == NULL);
        /* The page may be in the middle of a free run by now: then nothing is known of it. */
        expect_misuse(last_misuse(), block);
        heap_put_blocks(&heap, &block, 1);
        expect_misuse(last_misuse(), block);
    } else {
        heap_put_blocks(&heap, &block, 1);
        CHECK_EQUAL(new_misuses(), 0);
        bool open = heap.space.class_of[space_page(&heap.space, block)] != 0;
        heap_put_blocks(&heap, &block, 1);
        expect_misuse(open ? MISUSE_DOUBLE_FREE : last_misuse(), block);
    }
}

static void step(size_t number) {
    /* Grows and shrinks in waves. */
    bool grow = number / 1000 % 2 == 0;
    struct slot *slot = &slots[SMALL_SLOTS + below(SLOTS - SMALL_SLOTS)];
    size_t dice = below(100);
    if (dice < 5) {
        purge();
    } else if (dice < 8) {
        misuse();
    } else if (slot->block != NULL && dice < 16) {
        move(slot);
    } else if (slot->block != NULL && dice < 32) {
        resize(slot);
    } else if (slot->block == NULL && dice < (grow ? 60 : 40)) {
        take_large(slot);
    } else if (dice < (grow ? 80 : 60)) {
        take_small();
    } else {
        put_some(1 + below(grow ? 12 : 40));
    }
    CHECK_EQUAL(new_misuses(), 0);
}

/* ways: of the cache by whose colors blocks are spread; 0: none. */
static void run_model(uint64_t seed, size_t address_space, bool huge, unsigned ways, bool refuses) {
    marks_blocks = true;
    random_state = seed * 0x9e3779b97f4a7c15U | 1;
    memset(&seen, 0, sizeof seen);
    memset(slots, 0, sizeof slots);
    batch_out = false;
    CHECK(start_heap(address_space));
    heap.runs.region_pages = huge ? HUGE_PAGES : 0;
    if (ways > 0) {
        spread(ways);
    }
    for (size_t number = 0; number < steps; number++) {
        step(number);
        if (number % STEPS_PER_WALK == 0) {
            check_heap();
        }
    }
    check_all_given_back();
    printf("seed %llu, %zu MiB: %zu blocks, %zu large, %zu zero, %zu refused, %zu resized, %zu moved, %zu "
           "batches, %zu pages purged, %zu ranges not, %zu misuses\n",
           (unsigned long long)seed, address_space / MIB, seen.blocks, seen.large, seen.zeros, seen.refusals,
           seen.resizes, seen.moves, seen.batches, seen.purged, seen.kept, seen.misuses);
    CHECK(seen.blocks > 0 && seen.large > 0 && seen.zeros > 0 && seen.purged > 0);
    CHECK(seen.moves > 0 || !pages_can_move());
    CHECK(seen.misuses > 0 && seen.kept > 0);
    CHECK(!refuses || seen.refusals > steps / 100);
    end_heap();
    marks_blocks = false;
}

/* ---- memory that runs out ---- */

#define MANY 4096

static void *many[MANY];

/* Pages one by one, so that it is descriptors, not pages, that run out; and then everything else is refused
 * or done without. */
static void test_descriptors_run_out(void) {
    CHECK(start_heap(2048 * page_size));
    bool zero;
    size_t count = 0;
    while (count < MANY &&
           (many[count] = heap_take_large(&heap, 1, 1, RUN_FOR_ANY, colored, &zero)) != NULL) {
        count++;
    }
    CHECK(count >= 1000 && count < MANY);
    heap_walk(&heap, NULL, 0);
    /* Every second one: each free page is a run of its own. */
    for (size_t i = 0; i < count; i += 2) {
        CHECK(heap_put_large(&heap, many[i]) == NULL);
    }
    heap_walk(&heap, NULL, 0);
    void *blocks[300];
    size_t got = heap_take_blocks(&heap, 1, blocks, 300);
    heap_walk(&heap, NULL, 0);
    heap_take_dirty(&heap, &batch, SIZE_MAX, PURGE_SPLIT);
    heap_walk(&heap, &batch, 0);
    purge_ranges(batch.ranges, batch.count);
    heap_put_back(&heap, &batch);
    heap_walk(&heap, NULL, 0);
    heap_put_blocks(&heap, blocks, got);
    for (size_t i = 1; i < count; i += 2) {
        CHECK(heap_put_large(&heap, many[i]) == NULL);
    }
    CHECK_EQUAL(new_misuses(), 0);
    check_all_given_back();
    end_heap();
}

/* What there is can be had to the last page, and again once it was given back. */
static void take_all_twice(void) {
    size_t before = 0;
    for (int round = 0; round < 2; round++) {
        size_t pages = 0;
        size_t count = 0;
        bool zero;
        for (size_t size = 256; size > 0; size /= 2) {
            while (count < MANY &&
                   (many[count] = heap_take_large(&heap, size, 1, RUN_FOR_ANY, colored, &zero)) != NULL) {
                memset(many[count++], 0xA5, size * page_size);
                pages += size;
            }
        }
        heap_walk(&heap, NULL, 0);
        CHECK_EQUAL(heap.used_pages, pages);
        CHECK(pages * page_size >= MIB);
        CHECK(round == 0 || pages == before);
        before = pages;
        void *block;
        CHECK_EQUAL(heap_take_blocks(&heap, 20, &block, 1), 0);
        CHECK(!heap_resize_large(&heap, heap_large_span(&heap, many[0]), 100000));
        while (count > 0) {
            CHECK(heap_put_large(&heap, many[--count]) == NULL);
        }
    }
    check_all_given_back();
}

static void test_address_space_runs_out(void) {
    CHECK(start_heap(8 * MIB));
    take_all_twice();
    end_heap();
}

static size_t process_kib(const char *name) {
    static char text[4096];
    CHECK(file_read("/proc/self/status", text, sizeof text) > 0);
    const char *line = strstr(text, name);
    CHECK(line != NULL);
    return strtoull(line + strlen(name), NULL, 10);
}

/* Of what is used already, and so much more. */
static void limit(int resource, const char *used, size_t more) {
    struct rlimit limit;
    CHECK(getrlimit(resource, &limit) == 0);
    limit.rlim_cur = (process_kib(used) << 10) + more;
    CHECK(setrlimit(resource, &limit) == 0);
}

/* An address belongs to the segment that holds it, whatever the order of their addresses; one byte outside
 * does not. */
static void check_segments_are_found(void) {
    const struct space *space = &heap.space;
    size_t segments = atomic_load(&space->segments);
    for (size_t i = 0; i < segments; i++) {
        const struct segment *segment = &space->segment[i];
        uintptr_t base = (uintptr_t)segment->region.base;
        if (base == 0) {
            continue;
        }
        uintptr_t end = base + segment->region.reserved;
        uint32_t last = segment->first_page + (uint32_t)(segment->region.reserved / space->page_size) - 1;
        CHECK_EQUAL(space_page_elsewhere(space, base), segment->first_page);
        CHECK_EQUAL(space_page_elsewhere(space, end - 1), last);
        CHECK(space_address(space, last) ==
              segment->region.base + segment->region.reserved - space->page_size);
        CHECK(space_page_elsewhere(space, base - 1) != segment->first_page);
        CHECK(space_page_elsewhere(space, end) != last);
        CHECK(space_is_usable(space, segment->first_page) && !space_is_usable(space, last + 1));
    }
    for (size_t i = 1; i < segments; i++) {
        for (int order = 0; order < SEGMENT_ORDERS; order++) {
            const struct segment *last = &space->segment[space->order[order][i - 1]];
            const struct segment *next = &space->segment[space->order[order][i]];
            CHECK(next->region.base == NULL || (order == BY_ADDRESS ? last->region.base < next->region.base
                                                                    : last->first_page < next->first_page));
        }
    }
    CHECK_EQUAL(space_page_elsewhere(space, 0), 0);
    CHECK_EQUAL(space_page_elsewhere(space, (uintptr_t)space), 0);
}

/* Address space by the segment, where a great range cannot be had. */
static void test_limited_address_space(void) {
    steps /= 5;
    limit(RLIMIT_AS, "VmSize:", 24 * MIB);
    CHECK(start_heap((size_t)1 << 36));
    CHECK_EQUAL(atomic_load(&heap.space.segments), 0);
    take_all_twice();
    CHECK(atomic_load(&heap.space.segments) > 1);
    check_segments_are_found();
    end_heap();
    run_model(7, (size_t)1 << 36, false, 0, false);
}

struct looked_up {
    void *block;
    uint32_t page;
    _Atomic(bool) stop;
};

/* As a thread does that frees the block. */
static void *look_up(void *argument) {
    struct looked_up *this = argument;
    while (!atomic_load(&this->stop)) {
        CHECK_EQUAL(space_page(&heap.space, this->block), this->page);
        CHECK(space_is_usable(&heap.space, this->page));
        CHECK(heap_large_span(&heap, this->block)->base == this->block);
    }
    return NULL;
}

static void *take_pages_of(size_t pages) {
    bool zero;
    unsigned char *block = heap_take_large(&heap, pages, 1, RUN_FOR_ANY, colored, &zero);
    if (block != NULL) {
        block[0] = block[pages * page_size - 1] = 1;
    }
    return block;
}

/* Each block is longer than the last, which is free by then: its segment goes where address space is short,
 * unless something in it is in use. No search for a block elsewhere is wasted. */
static void test_free_segments_make_room(void) {
    enum { LIMIT = 64 * MIB, STEP = 256 };
    limit(RLIMIT_AS, "VmSize:", (size_t)LIMIT);
    CHECK(start_heap((size_t)1 << 36));
    struct looked_up looked_up = {.block = take_pages_of(1)};
    looked_up.page = space_page(&heap.space, looked_up.block);
    pthread_attr_t small_stack;
    pthread_t reader;
    CHECK(pthread_attr_init(&small_stack) == 0 && pthread_attr_setstacksize(&small_stack, 256 << 10) == 0);
    CHECK(pthread_create(&reader, &small_stack, look_up, &looked_up) == 0);
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
    size_t room = limit.rlim_cur - (process_kib("VmSize:") << 10); /* a sanitizer's own memory grows, too */
    size_t most = 0;
    for (int round = 0; round < 20; round++) {
        size_t pages = 0;
        for (void *block = NULL; (block = take_pages_of(pages + STEP)) != NULL;) {
            pages += STEP;
            put_pages(block);
            heap_walk(&heap, NULL, 0);
        }
        CHECK(round < 2 || pages == most);
        most = pages;
    }
    CHECK(most * page_size >= room / 4 * 3);
    check_segments_are_found();

    void *block = take_pages_of(most);
    void *beside = take_pages_of(1);
    put_pages(block);
    size_t segments = atomic_load(&heap.space.segments);
    CHECK(take_pages_of(LIMIT / page_size) == NULL);
    CHECK(atomic_load(&heap.space.segments) <= segments);
    CHECK(heap_large_span(&heap, beside)->base == beside);
    put_pages(beside);
    atomic_store(&looked_up.stop, true);
    CHECK(pthread_join(reader, NULL) == 0);
    put_pages(looked_up.block);
    CHECK(take_pages_of(LIMIT / page_size) == NULL);
    CHECK_EQUAL(atomic_load(&heap.space.segments), 0);
    end_heap();
}

/* Memory that the kernel refuses to make usable. */
static void test_limited_data(void) {
    CHECK(start_heap((size_t)1 << 30));
    limit(RLIMIT_DATA, "VmData:", 16 * MIB);
    take_all_twice();
    steps /= 5;
    for (size_t number = 0; number < steps; number++) {
        step(number);
        if (number % STEPS_PER_WALK == 0) {
            check_heap();
        }
    }
    check_all_given_back();
}

int main(void) {
    prepare_heaps();
    uint64_t seed = random_state;
    steps = check_rounds(steps);

    run_model(seed, (size_t)1 << 40, false, 0, false);
    run_model(seed + 1, 8 * MIB, false, 0, true);
    run_model(seed + 2, 64 * MIB, false, 0, false);
    run_model(seed + 3, (size_t)1 << 40, true, 0, false);
    run_model(seed + 4, 8 * MIB, true, 2, true);
    run_model(seed + 5, (size_t)1 << 40, true, 1, false);
    test_descriptors_run_out();
    test_address_space_runs_out();
    in_child(test_limited_address_space);
    in_child(test_free_segments_make_room);
    in_child(test_limited_data);
    return 0;
}
