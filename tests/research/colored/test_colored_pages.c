/* What colored memory does with single pages: reads their frames, moves them, and times which evict each
 * other. */
#include "colored/eviction.h"
#include "colored/page_mover.h"

#include "os/mman.h"

#include <sys/mman.h>

#include "blocks.h"

static void test_pagemap(void) {
    uint64_t frames[3] = {0, 0, 0};
    char *pages = mmap(NULL, 3 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    pages[0] = pages[2 * page_bytes] = 1;
    errno = KEPT_ERRNO;
    int error = pagemap_frames("", pages, 3, frames);
    CHECK_EQUAL(pagemap_frames("/nowhere", pages, 3, frames), ENOENT);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    CHECK(error == 0 || error == (has_pagemap() ? EPERM : ENOENT));
    if (error == 0) {
        CHECK_EQUAL(pagemap_frames("", pages, 3, frames), 0);
        CHECK(frames[0] != PAGEMAP_ABSENT && frames[2] != PAGEMAP_ABSENT && frames[0] != frames[2]);
        CHECK_EQUAL(frames[1], PAGEMAP_ABSENT);
        CHECK_EQUAL(frames[0] % COLORS, color_now(pages));
    }
    CHECK(munmap(pages, 3 * page_bytes) == 0);
}

/* Paths of files that no path can name. */
static void test_a_root_that_is_too_long(void) {
    static char name[5000];
    uint64_t frame;
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    for (size_t length = 4000; length < sizeof name; length++) {
        name[length - 1] = 'a';
        if (length == 4000) {
            memset(name, 'a', length);
            name[0] = '/';
        }
        CHECK_EQUAL(pagemap_frames(name, NULL, 1, &frame), ENAMETOOLONG);
        CHECK_EQUAL(hardware_caches_read(name, caches, MAX_HARDWARE_CACHES), 0);
    }
}

/* A pagemap's entries for the pages from one that is nowhere. */
static void test_entries(void) {
    const uint64_t present = (uint64_t)1 << 63;
    const uint64_t flags = (uint64_t)1 << 61 | (uint64_t)1 << 55;
    const uint64_t largest = ((uint64_t)1 << 55) - 1;
    const uint64_t some[] = {present | 5, 0, present, present | flags | largest, flags | 3};
    const uint64_t hidden[] = {present, 0, present | flags, present, present};
    const void *start = (const void *)(16 * page_bytes);
    uint64_t frames[6];
    char path[128];
    snprintf(path, sizeof path, "%s/proc/self/pagemap", poor_root);
    put_at(poor_root, "", "/proc/self/pagemap");
    int file = open(path, O_RDWR | O_CLOEXEC);
    CHECK(file >= 0);
    CHECK(pwrite(file, some, sizeof some, 16 * sizeof *some) == sizeof some);
    CHECK_EQUAL(pagemap_frames(poor_root, start, 5, frames), 0);
    CHECK_EQUAL(frames[0], 5);
    CHECK_EQUAL(frames[1], PAGEMAP_ABSENT);
    CHECK_EQUAL(frames[2], 0); /* the first frame of the machine, as others are shown */
    CHECK_EQUAL(frames[3], largest);
    CHECK_EQUAL(frames[4], PAGEMAP_ABSENT);
    CHECK_EQUAL(pagemap_frames(poor_root, start, 6, frames), EIO); /* it ends before */
    CHECK(pwrite(file, hidden, sizeof hidden, 16 * sizeof *hidden) == sizeof hidden);
    CHECK_EQUAL(pagemap_frames(poor_root, start, 5, frames), EPERM);
    CHECK_EQUAL(pagemap_frames(poor_root, (const char *)start + page_bytes, 1, frames), 0);
    CHECK(close(file) == 0);
    CHECK(unlink(path) == 0);
}

/* What is moved leaves its address ours; and what cannot be moved takes none of the mappings. */
static void test_moves_of_pages(void) {
    struct page_mover mover = {.descriptor = -1};
    char *pages = mmap(NULL, 2 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *home = mmap(NULL, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && home != MAP_FAILED);
    memset(pages, 7, 2 * page_bytes);
    size_t moved = pages_can_move() ? 1 : 0;
    CHECK_EQUAL(page_mover_move(&mover, pages, home), moved == 1 ? 0 : ENOTSUP);
    CHECK_EQUAL(mover.mappings, moved);
    CHECK(home[0] == (moved == 1 ? 7 : 0) && home[page_bytes - 1] == home[0]);
    unsigned char resident[2];
    CHECK(mincore(pages, 2 * page_bytes, resident) == 0); /* ENOMEM, if a part is not mapped */
    CHECK((resident[0] & 1) == 1 - moved && (resident[1] & 1) == 1);
    for (size_t i = 0; i < MAX_PAGE_MAPPINGS + 1; i++) {
        CHECK_EQUAL(page_mover_move(&mover, pages + 1, home), ENOTSUP); /* no page begins there */
    }
    CHECK_EQUAL(mover.mappings, moved);
    page_mappings_return(moved);
    CHECK(munmap(pages, 2 * page_bytes) == 0 && munmap(home, page_bytes) == 0);
}

/* Above what any load takes, and below. */
static void test_votes(void) {
    static char page[4096];
    struct eviction eviction = {.base = page, .page_bytes = sizeof page, .line_bytes = 64};
    eviction.miss_cycles = UINT64_MAX;
    CHECK(!eviction_evicts(&eviction, 0, NULL, 0));
    eviction.miss_cycles = 0;
    CHECK(eviction_evicts(&eviction, 0, NULL, 0));
}

/* A load after no others finds its line, and one after four times what the cache holds does not, where the
 * cache can be seen at all. Other programs on the machine may once spoil how a hit was told from a miss. Then
 * the caller measures again, and so does this test. */
static void test_evictions(void) {
    enum { ASKED = 20, ROUNDS = 50 };
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    size_t count = hardware_caches_read("", caches, MAX_HARDWARE_CACHES);
    size_t at = 0;
    while (at < count && caches[at].level != 2) {
        at++;
    }
    size_t colors = at < count ? hardware_cache_way_bytes(&caches[at]) / page_bytes : 0;
    if (!eviction_can_time() || colors == 0 || colors > 64) {
        puts("left out: evictions cannot be timed");
        return;
    }
    size_t pages = 4 * colors * caches[at].ways + 1;
    char *base = mmap(NULL, pages * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint32_t *walked = calloc(pages, sizeof *walked);
    CHECK(base != MAP_FAILED && walked != NULL);
    memset(base, 1, pages * page_bytes);
    for (size_t i = 0; i + 1 < pages; i++) {
        walked[i] = (uint32_t)i + 1;
    }
    size_t seen = 0; /* rounds */
    size_t few = 0;  /* evictions after no loads, in all rounds, */
    size_t many = 0; /* and after all of them */
    bool told = false;
    for (size_t round = 0; round < ROUNDS && !told; round++) {
        struct eviction eviction;
        if (!eviction_open(&eviction, base, pages, page_bytes, &caches[at], colors)) {
            continue;
        }
        size_t few_before = few;
        size_t many_before = many;
        for (size_t i = 0; i < ASKED; i++) {
            few += eviction_evicts(&eviction, 0, walked, 0);
            many += eviction_evicts(&eviction, 0, walked, pages - 1);
        }
        seen++;
        told = few - few_before < ASKED / 2 && many - many_before > ASKED / 2;
    }
    CHECK(told || seen <= ROUNDS / 2 || many > few);
    if (!told) {
        puts("left out: the cache is not seen");
    }
    free(walked);
    CHECK(munmap(base, pages * page_bytes) == 0);
}

int main(void) {
    make_machines();
    test_pagemap();
    test_entries();
    test_a_root_that_is_too_long();
    test_moves_of_pages();
    test_votes();
    test_evictions();
    remove_machines();
    return 0;
}
