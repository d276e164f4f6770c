/*
 * Colors that are found by timing, in a cache that is simulated and in the machine's own.
 *
 * The simulated cache needs frame numbers: its tests are skipped, with a message, if the kernel hides them.
 */
#include "colored/eviction.h"

#include "os/random.h"

#include "blocks.h"
#include "test_clock.h"

/* ---- a cache that is simulated ---- */

bool __real_eviction_can_time(void);
bool __wrap_eviction_can_time(void);
bool __real_eviction_open(struct eviction *eviction, const void *base, size_t pages, size_t bytes_of_page,
                          const struct hardware_cache *cache, size_t colors);
bool __wrap_eviction_open(struct eviction *eviction, const void *base, size_t pages, size_t bytes_of_page,
                          const struct hardware_cache *cache, size_t colors);
bool __real_eviction_evicts(void *eviction, uint32_t page, const uint32_t *walked, size_t count);
bool __wrap_eviction_evicts(void *eviction, uint32_t page, const uint32_t *walked, size_t count);

/* NULL: the machine's own is timed. Else the color of a page by its frame, of which the cache has as many as
 * ways. */
static size_t (*simulated)(uint64_t frame);
static size_t times_opened;
static uint64_t *simulated_frames; /* of the surplus */

static size_t by_frame(uint64_t frame) {
    return frame % COLORS;
}

/* As behind a hypervisor that deals out its own frames. */
static size_t by_another_number(uint64_t frame) {
    return random_mix(frame) % COLORS;
}

/* A page of its own color each: none drives another out. */
static size_t by_none(uint64_t frame) {
    return frame;
}

bool __wrap_eviction_can_time(void) {
    return simulated != NULL || __real_eviction_can_time();
}

bool __wrap_eviction_open(struct eviction *eviction, const void *base, size_t pages, size_t bytes_of_page,
                          const struct hardware_cache *cache, size_t colors) {
    times_opened++;
    if (simulated == NULL) {
        return __real_eviction_open(eviction, base, pages, bytes_of_page, cache, colors);
    }
    free(simulated_frames);
    simulated_frames = calloc(pages, sizeof *simulated_frames);
    CHECK(simulated_frames != NULL);
    CHECK_EQUAL(pagemap_frames("", base, pages, simulated_frames), 0);
    return true;
}

bool __wrap_eviction_evicts(void *eviction, uint32_t page, const uint32_t *walked, size_t count) {
    if (simulated == NULL) {
        return __real_eviction_evicts(eviction, page, walked, count);
    }
    size_t fighting = 0;
    for (size_t i = 0; i < count; i++) {
        fighting += simulated(simulated_frames[walked[i]]) == simulated(simulated_frames[page]);
    }
    return fighting >= WAYS;
}

/* ---- the tests ---- */

/* Pages of one color as simulated lie as many places apart as there are colors, but for those that are said
 * to be elsewhere. */
static void check_timed(const char *block, size_t pages) {
    struct calm_colored stats = stats_of(block);
    uint64_t frames[512];
    size_t misplaced = 0;
    CHECK(pages <= sizeof frames / sizeof frames[0]);
    CHECK_EQUAL(stats.source, CALM_COLORED_TIMED);
    CHECK_EQUAL(stats.pages, pages);
    CHECK_EQUAL(stats.colors, COLORS);
    CHECK_EQUAL(pagemap_frames("", block, pages, frames), 0);
    for (size_t place = 0; place < COLORS; place++) {
        size_t of[COLORS] = {0};
        size_t most = 0;
        size_t all = 0;
        for (size_t i = place; i < pages; i += COLORS) {
            size_t here = ++of[simulated(frames[i])];
            most = here > most ? here : most;
            all++;
        }
        misplaced += all - most;
    }
    CHECK_EQUAL(stats.pages_misplaced, misplaced);
    CHECK_EQUAL(misplaced, 0);
}

/* The cache can confirm frames only if there are enough pages of each color among those that the kernel
 * gives, which on a machine that has run for some time is a matter of chance. */
static char *take_believed(size_t bytes) {
    for (int tries = 0; tries < 100; tries++) {
        char *block = take(bytes, 2);
        if (stats_of(block).source == CALM_COLORED_FRAMES) {
            return block;
        }
        calm_colored_free(block);
    }
    CHECK(!"frames are believed");
    return NULL;
}

/* By default frames are believed if the cache agrees, and else it is asked. */
static void test_whom_to_believe(void) {
    enum { PAGES = 128 };
    simulated = by_frame;
    char *block = take_believed(PAGES * page_bytes);
    for (size_t i = 0; i < PAGES; i++) {
        CHECK_EQUAL(color_now(block + i * page_bytes), (stats_of(block).first_color + i) % COLORS);
    }
    calm_colored_free(block);
    block = take(PAGES * page_bytes, 2 | CALM_COLORED_TIMED);
    check_timed(block, PAGES);
    calm_colored_free(block);

    simulated = by_another_number;
    block = take(PAGES * page_bytes, 2);
    check_timed(block, PAGES);
    calm_colored_free(block);
    times_opened = 0;
    block = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES); /* who asks for frames gets them */
    CHECK_EQUAL(stats_of(block).source, CALM_COLORED_FRAMES);
    calm_colored_free(block);
    block = take(page_bytes, 4); /* of too many colors */
    CHECK_EQUAL(stats_of(block).source, CALM_COLORED_FRAMES);
    calm_colored_free(block);
    CHECK_EQUAL(times_opened, 0);

    /* Where frames say nothing. */
    put_empty_pagemap(poor_root);
    put_memory(poor_root, (size_t)1 << 40);
    block = take_from(poor_root, PAGES * page_bytes, 2);
    check_timed(block, PAGES);
    calm_colored_free(block);

    simulated = by_none;
    CHECK_EQUAL(why_not(root, page_bytes, 2), EAGAIN);
    times_opened = 0;
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_TIMED), EAGAIN);
    CHECK(times_opened > 1); /* what is wrong once may be right the next time */
    simulated = NULL;
}

/* Of a cache that answers nothing, a larger block may be asked for longer: each reading of the clock is a
 * second later. */
static void test_time_grows_with_the_block(void) {
    const size_t sizes[] = {(size_t)1 << 20, (size_t)32 << 20};
    uint64_t looked[2];
    simulated = by_none;
    for (size_t i = 0; i < 2; i++) {
        uint64_t before = clock_readings();
        clock_set_step(1000 * CLOCK_MS);
        CHECK_EQUAL(why_not(root, sizes[i], 2 | CALM_COLORED_TIMED), EAGAIN);
        clock_set_step(0);
        looked[i] = clock_readings() - before;
    }
    CHECK(looked[0] > 10 && looked[0] <= 12);
    CHECK_EQUAL(looked[1], looked[0] + 10);
    simulated = NULL;
}

/* On the machine's own cache. Whether colors can be told there is the machine's affair. */
static void test_by_time(void) {
    enum { BYTES = 1 << 20 };
    char *block = calm_colored_alloc(BYTES, 2 | CALM_COLORED_TIMED);
    if (block == NULL) {
        CHECK(errno == EAGAIN || errno == ENOTSUP || errno == ENOMEM);
        printf("left out: by time: %s\n", strerror(errno));
        return;
    }
    struct calm_colored stats = stats_of(block);
    CHECK_EQUAL(stats.source, CALM_COLORED_TIMED);
    CHECK_EQUAL(stats.pages, BYTES / page_bytes);
    CHECK(stats.colors > 1 && stats.first_color < stats.colors);
    CHECK(stats.pages_misplaced <= stats.pages / 2);
    for (size_t i = 0; i < BYTES; i++) {
        CHECK(block[i] == 0);
    }
    memset(block, 1, BYTES);
    calm_colored_free(block);
    CHECK_EQUAL(mappings_of(block, BYTES), 0);
}

/* The search asks for the time before each question. */
static void test_time_is_bounded(void) {
    uint64_t before = clock_readings();
    clock_set_step(1000 * CLOCK_MS);
    errno = 0;
    char *block = calm_colored_alloc(1 << 20, 2 | CALM_COLORED_TIMED);
    int error = errno;
    clock_set_step(0);
    CHECK(block == NULL);
    CHECK(error == EAGAIN || error == ENOTSUP || error == ENOMEM);
    CHECK(clock_readings() - before <= 12);
}

int main(void) {
    make_machines();
    test_by_time();
    clock_stop(); /* from here on what is found out by time has the time that it needs */
    test_time_is_bounded();
    if (frames_are_shown()) {
        in_child(test_whom_to_believe);
        in_child(test_time_grows_with_the_block);
    }
    remove_machines();
    return 0;
}
