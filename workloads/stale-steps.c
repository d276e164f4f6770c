/* Steps of stale-reads' operations.
 *
 * In every operation, chance decides how the pages are populated (on which CPU first), which readers may
 * touch them and for how long, and what becomes of memory that is given up: preferably, it is reused at once
 * for something else. */
#define _GNU_SOURCE /* mincore, pread */
#include "stale-steps.h"
#include "paging.h"
#include "support.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

enum { CHECKED_PAGES = 8 };

/* Once in so many times. */
bool chance(struct changer *changer, unsigned long one_in) {
    return random_next(&changer->random) % one_in == 0;
}

size_t bytes_of(const struct changer *changer, unsigned long pages) {
    return pages * changer->test->page;
}

char *page_at(const struct changer *changer, unsigned home, unsigned long page) {
    return changer->slot->homes[home] + bytes_of(changer, page);
}

uint64_t load_at(const char *at) {
    return __atomic_load_n((const uint64_t *)at, __ATOMIC_RELAXED);
}

static void store_at(char *at, uint64_t number) {
    uint64_t *word = (uint64_t *)at;
    __atomic_store_n(word, number, __ATOMIC_RELAXED);
}

void put_stamps(const struct changer *changer, char *page, unsigned slot, unsigned long number,
                uint64_t generation) {
    for (unsigned long word = 0; word < changer->test->words; word++) {
        store_at(page + stamp_offset(changer->test, word), stamp_of(slot, number, word, generation));
    }
}

_Noreturn void refused(const char *call) {
    char line[128];
    (void)snprintf(line, sizeof line, "%s: %s", call, strerror(errno));
    fail(program_name, line);
}

void *mapped(char *at, size_t bytes, int flags, int descriptor, off_t offset) {
    void *got = mmap(at, bytes, PROT_READ | PROT_WRITE, flags, descriptor, offset);
    /* Kernels before 4.17 take MAP_FIXED_NOREPLACE for a wish. */
    if (got == MAP_FAILED || (at != NULL && got != at)) {
        refused("mmap");
    }
    return got;
}

static void wander(struct changer *changer) {
    pin_thread(program_name, random_between(&changer->random, 0, changer->test->cpus - 1));
}

/* Memory that is taken. Nobody else writes it: what is found in it came through a translation of what its
 * frames were before. */

static void check_taken(const struct changer *changer, unsigned long page) {
    const struct test *test = changer->test;
    unsigned owner = MOST_SLOTS + (unsigned)changer->number;
    char *start = changer->taken + bytes_of(changer, page);
    struct finding finding = {.operation = changer->taken_by,
                              .what = "memory that no other thread uses has changed",
                              .slot = changer->slot,
                              .page = page,
                              .there = true};
    for (unsigned long word = 0; word < test->words + MOST_READERS; word++) {
        bool stamp = word < test->words;
        finding.at = start + (stamp ? stamp_offset(test, word) : mark_offset(test, word - test->words));
        finding.found = load_at(finding.at);
        uint64_t expected = stamp ? stamp_of(owner, page, word, changer->taken_generation) : 0;
        if (finding.found != expected) {
            expect_number(&finding, expected);
            report(test, &finding);
        }
    }
}

void give_up_taken(struct changer *changer) {
    for (unsigned long page = 0; page < changer->taken_pages; page++) {
        check_taken(changer, page);
    }
    size_t bytes = bytes_of(changer, changer->taken_pages);
    changer->taken_pages = 0;
    changer->taken_generation++;
    changer->taken_by = changer->operation;
    if (bytes == 0) {
        return;
    }
    if (!changer->test->available[OP_DONTNEED] || chance(changer, 4)) {
        (void)mapped(changer->taken, bytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    } else if (madvise(changer->taken, bytes, MADV_DONTNEED) != 0) {
        refused("madvise(MADV_DONTNEED)");
    }
}

static void take(struct changer *changer, unsigned long pages) {
    unsigned owner = MOST_SLOTS + (unsigned)changer->number;
    for (; pages > 0 && changer->taken_pages < FLUSHED_PAGES; pages--) {
        unsigned long page = changer->taken_pages++;
        put_stamps(changer, changer->taken + bytes_of(changer, page), owner, page, changer->taken_generation);
    }
}

/* Steps: between open_slot and settle nothing is true of the slot. */

void open_slot(struct changer *changer) {
    const struct test *test = changer->test;
    struct slot *slot = changer->slot;
    slot_open(slot);
    memcpy(changer->before, slot->now, sizeof changer->before);
    for (unsigned home = 0; test->plant == PLANT_READ && home < HOMES; home++) {
        unsigned long pages = slot->now[home].kind == KIND_ABSENT ? 0 : slot->now[home].pages;
        for (unsigned long i = 0; i < pages * test->words; i++) {
            size_t offset = bytes_of(changer, i / test->words) + stamp_offset(test, i % test->words);
            store_at(changer->planted[home] + offset, load_at(slot->homes[home] + offset));
        }
    }
}

static char *planted_in(const struct changer *changer, unsigned home) {
    const struct view *view = &changer->slot->now[home];
    switch (changer->test->plant) {
    case PLANT_READ:
        return changer->before[home].kind == KIND_ABSENT ? NULL : changer->planted[home];
    case PLANT_WRITE:
        return view->writes == WRITES_NONE ? NULL : changer->planted[home];
    case PLANT_STRAY:
        return view->writes == WRITES_LAND ? changer->taken : NULL;
    case PLANT_LOSE:
        return view->durable ? changer->planted[home] : NULL;
    default:
        return NULL;
    }
}

/* By the changer's CPU, and by what the kernel finds in its page tables. */
static void inspect(struct changer *changer) {
    const struct test *test = changer->test;
    struct slot *slot = changer->slot;
    for (unsigned home = 0; home < HOMES && slot->homes[home] != NULL; home++) {
        const struct view *view = &slot->now[home];
        uint64_t window = atomic_load_explicit(&slot->window, memory_order_relaxed);
        for (unsigned long i = 0; i < CHECKED_PAGES && view->pages > 0; i++) {
            unsigned long page = (unsigned long)(window + i) % view->pages;
            unsigned long word = random_between(&changer->random, 0, test->words - 1);
            struct finding finding = {.operation = changer->operation, .slot = slot, .page = page};
            finding.at = page_at(changer, home, page) + stamp_offset(test, word);
            finding.there = try_load(finding.at, &finding.found);
            bool right = word_right(slot, view, page, word, finding.there, finding.found);
            finding.what = "stale read by the changer";
            if (right && view->kind != KIND_ABSENT && test->self >= 0) {
                finding.there = true_load(test, finding.at, &finding.found);
                right = word_right(slot, view, page, word, finding.there, finding.found);
                finding.what = "stale write by the changer";
            }
            if (!right) {
                expect(&finding, view, word);
                report(test, &finding);
            }
        }
    }
}

/* Gives the audience time to look, as much as it needs or not. */
static void await_audience(struct changer *changer) {
    struct slot *slot = changer->slot;
    double deadline = now_seconds() + 0.02;
    for (unsigned turn = 0; now_seconds() < deadline; turn++) {
        uint64_t looked = atomic_load_explicit(&slot->looked, memory_order_relaxed);
        if ((looked & changer->audience) == changer->audience) {
            return;
        }
        if (turn < 16) {
            (void)sched_yield();
        } else {
            sleep_seconds(1e-4);
        }
    }
}

static uint64_t everyone(const struct test *test) {
    return test->readers == MOST_READERS ? UINT64_MAX : (UINT64_C(1) << test->readers) - 1;
}

void settle(struct changer *changer) {
    struct slot *slot = changer->slot;
    if (!chance(changer, 4)) {
        take(changer, slot->now[0].pages);
    }
    for (unsigned home = 0; home < HOMES; home++) {
        slot->now[home].operation = changer->operation;
        slot->now[home].left =
            slot->now[home].kind == KIND_ABSENT && changer->before[home].kind != KIND_ABSENT;
        slot->now[home].planted = planted_in(changer, home);
    }
    slot_publish(slot, changer->audience);
    if (chance(changer, 4)) {
        inspect(changer);
    }
    if (!chance(changer, 4)) {
        await_audience(changer);
    }
    if (chance(changer, 3)) {
        changer->audience = everyone(changer->test);
    }
    if (chance(changer, 8)) {
        wander(changer);
    }
}

/* After something that must not show: what was true is, and all may look at it anew. */
void look_again(struct changer *changer) {
    open_slot(changer);
    settle(changer);
}

/* Nobody: the pages stay whoever's made them. One: they are that reader's alone. */
void choose_readers(struct changer *changer) {
    const struct test *test = changer->test;
    atomic_store_explicit(&changer->slot->window, random_next(&changer->random) / 2, memory_order_relaxed);
    if (chance(changer, 2)) {
        changer->audience = everyone(test);
        return;
    }
    changer->audience = 0;
    for (unsigned long readers = random_between(&changer->random, 0, 2); readers > 0; readers--) {
        changer->audience |= UINT64_C(1) << random_between(&changer->random, 0, test->readers - 1);
    }
}

/* Stamps all pages of a home that is mapped and writable. */
void stamp(struct changer *changer, unsigned home) {
    const struct test *test = changer->test;
    struct slot *slot = changer->slot;
    struct view *view = &slot->now[home];
    view->kind = KIND_STAMPED;
    view->generation = ++slot->generation;
    unsigned long way = random_between(&changer->random, 0, 3);
    if (way == 0) {
        wander(changer);
    }
    bool by_kernel = way == 1 && test->self >= 0 && view->pages <= CHECKED_PAGES;
    for (unsigned long page = 0; page < view->pages; page++) {
        unsigned long number = view->same ? 0 : page;
        if (!by_kernel) {
            put_stamps(changer, page_at(changer, home, page), slot->number, number, view->generation);
            continue;
        }
        for (unsigned long word = 0; word < test->words; word++) {
            char *at = page_at(changer, home, page) + stamp_offset(test, word);
            if (!true_store(test, at, stamp_of(slot->number, number, word, view->generation))) {
                refused("writing to /proc/self/mem");
            }
        }
    }
}

/* A step by itself. */
void stamp_anew(struct changer *changer) {
    open_slot(changer);
    stamp(changer, 0);
    settle(changer);
}

/* Few pages as often as many. */
unsigned long some_pages(struct changer *changer) {
    unsigned long most = changer->slot->most_pages;
    unsigned long halvings = 0;
    while (most >> (halvings + 1) > 0) {
        halvings++;
    }
    return random_between(&changer->random, 1, most >> random_between(&changer->random, 0, halvings));
}

/* What readers wrote must lie where they wrote it: a mark elsewhere has come through a stale translation. */
void check_marks(struct changer *changer, unsigned home) {
    const struct test *test = changer->test;
    struct slot *slot = changer->slot;
    unsigned long pages = slot->now[home].pages;
    for (unsigned long i = 0; i < CHECKED_PAGES && i < pages; i++) {
        unsigned long page = pages <= CHECKED_PAGES ? i : random_between(&changer->random, 0, pages - 1);
        for (unsigned long reader = 0; reader < test->readers; reader++) {
            const char *at = page_at(changer, home, page) + mark_offset(test, reader);
            uint64_t found = load_at(at);
            if (!mark_belongs(found, slot->number, page, reader)) {
                struct finding finding = {.operation = changer->operation,
                                          .what = "write into another page",
                                          .slot = slot,
                                          .page = page,
                                          .at = at,
                                          .there = true,
                                          .found = found};
                expect_text(&finding, "a mark of this page and reader");
                report(test, &finding);
            }
        }
    }
}

/* In one call or in two. */
bool advise(struct changer *changer, unsigned home, int advice) {
    unsigned long pages = changer->slot->now[home].pages;
    unsigned long cut = chance(changer, 2) ? pages : random_between(&changer->random, 1, pages);
    char *at = page_at(changer, home, 0);
    return madvise(at, bytes_of(changer, cut), advice) == 0 &&
           (cut == pages ||
            madvise(at + bytes_of(changer, cut), bytes_of(changer, pages - cut), advice) == 0);
}

void advise_or_fail(struct changer *changer, unsigned home, int advice, const char *call) {
    if (!advise(changer, home, advice)) {
        refused(call);
    }
}

void unmap(struct changer *changer, unsigned home) {
    struct view *view = &changer->slot->now[home];
    unsigned long cut = chance(changer, 2) ? view->pages : random_between(&changer->random, 1, view->pages);
    char *at = page_at(changer, home, 0);
    if (munmap(at, bytes_of(changer, cut)) != 0 ||
        (cut < view->pages &&
         munmap(at + bytes_of(changer, cut), bytes_of(changer, view->pages - cut)) != 0)) {
        refused("munmap");
    }
    view->kind = KIND_ABSENT;
    view->writes = WRITES_FAULT;
    view->durable = false;
}

/* Anonymous memory of as many pages as the view says, over what is there. Nothing may be there if it is a
 * hole: nobody else maps anything while threads run, and if somebody did, that must not be taken for a stale
 * page. */
void map_anonymous(struct changer *changer, unsigned home, bool hole) {
    struct slot *slot = changer->slot;
    struct view *view = &slot->now[home];
    int flags = hole ? MAP_FIXED_NOREPLACE : MAP_FIXED;
    bool shared = changer->test->plant == PLANT_SHARE && changer->operation == OP_FORK;
    flags |= MAP_ANONYMOUS | MAP_NORESERVE | (shared ? MAP_SHARED : MAP_PRIVATE);
    (void)mapped(slot->homes[home], bytes_of(changer, view->pages), flags, -1, 0);
    view->kind = KIND_ZERO;
    view->writes = WRITES_LAND;
    view->same = false;
    view->durable = false;
    if (home == 0) {
        slot->backing = BACKING_ANONYMOUS;
    }
}

void renew(struct changer *changer) {
    struct slot *slot = changer->slot;
    open_slot(changer);
    slot->now[0].pages = slot->huge ? slot->most_pages : some_pages(changer);
    map_anonymous(changer, 0, false);
    if (slot->huge) {
        bool huge = changer->operation != OP_HUGE && chance(changer, 2);
        (void)madvise(slot->homes[0], bytes_of(changer, slot->most_pages),
                      huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
    if (!chance(changer, 4)) {
        stamp(changer, 0);
    }
    settle(changer);
}

/* Begins with stamped anonymous memory: the slot's, with all that has happened to it, or fresh. */
void have_stamped(struct changer *changer) {
    struct slot *slot = changer->slot;
    if (slot->backing == BACKING_ANONYMOUS && slot->now[0].kind == KIND_STAMPED && chance(changer, 2)) {
        return;
    }
    renew(changer);
    if (slot->now[0].kind != KIND_STAMPED) {
        stamp_anew(changer);
    }
}

off_t file_offset(const struct changer *changer, unsigned half, unsigned long page) {
    return (off_t)bytes_of(changer, (changer->slot->number * 2UL + half) * MOST_PAGES + page);
}

void read_page(const struct changer *changer, int descriptor, off_t offset) {
    if (pread(descriptor, changer->buffer, changer->test->page, offset) != (ssize_t)changer->test->page) {
        refused("reading a file");
    }
}

/* Maps the half of the slot's range of a file that is not mapped, so stamped that no CPU has its translation.
 */
void map_file(struct changer *changer, enum backing backing, bool shared) {
    const struct test *test = changer->test;
    struct slot *slot = changer->slot;
    int descriptor = test->files[backing];
    unsigned half = 1 - slot->now[0].half;
    unsigned long pages = some_pages(changer);
    uint64_t generation = ++slot->generation;
    for (unsigned long page = 0; page < pages; page++) {
        off_t offset = file_offset(changer, half, page);
        read_page(changer, descriptor, offset);
        put_stamps(changer, changer->buffer, slot->number, page, generation);
        if (pwrite(descriptor, changer->buffer, test->page, offset) != (ssize_t)test->page) {
            refused("writing a file");
        }
    }
    open_slot(changer);
    (void)mapped(slot->homes[0], bytes_of(changer, pages), MAP_FIXED | (shared ? MAP_SHARED : MAP_PRIVATE),
                 descriptor, file_offset(changer, half, 0));
    slot->backing = backing;
    slot->now[0] = (struct view){
        .kind = KIND_STAMPED, .writes = WRITES_LAND, .half = half, .pages = pages, .generation = generation};
}

/* One of the files that there are. */
enum backing some_file(struct changer *changer) {
    bool memory = changer->test->files[BACKING_MEMORY_FILE] >= 0;
    return memory && chance(changer, 2) ? BACKING_MEMORY_FILE : BACKING_DISK_FILE;
}

unsigned long pages_not_there(struct changer *changer) {
    unsigned char there[MOST_PAGES];
    unsigned long pages = changer->slot->now[0].pages;
    unsigned long found = 0;
    if (mincore(changer->slot->homes[0], bytes_of(changer, pages), there) != 0) {
        return 0;
    }
    for (unsigned long page = 0; page < pages; page++) {
        found += (there[page] & 1) == 0;
    }
    return found;
}
