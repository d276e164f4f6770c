/* The operations of stale-reads except fork: each removes, moves, replaces, protects, copies, reclaims or
 * merges pages by system calls, and leaves the slot stamped. */
#define _GNU_SOURCE /* mremap, syscall */
#include "stale-steps.h"
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of newer systems than the oldest that has a C library to build with. */
#ifndef MADV_COLD
#define MADV_COLD    20
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

enum { MOST_MERGED = 16 };

static unsigned long change_munmap(struct changer *changer) {
    have_stamped(changer);
    open_slot(changer);
    unmap(changer, 0);
    if (chance(changer, 2)) {
        settle(changer);
        open_slot(changer);
    }
    map_anonymous(changer, 0, true);
    if (chance(changer, 2)) {
        settle(changer);
        open_slot(changer);
    }
    stamp(changer, 0);
    settle(changer);
    return changer->slot->now[0].pages;
}

static unsigned long change_dontneed(struct changer *changer) {
    have_stamped(changer);
    open_slot(changer);
    advise_or_fail(changer, 0, MADV_DONTNEED, "madvise(MADV_DONTNEED)");
    changer->slot->now[0].kind = KIND_ZERO;
    if (chance(changer, 2)) {
        settle(changer);
        open_slot(changer);
    }
    stamp(changer, 0);
    settle(changer);
    return changer->slot->now[0].pages;
}

/* To the other home; back over what has been mapped here meanwhile, or not. */
static unsigned long change_mremap(struct changer *changer) {
    struct slot *slot = changer->slot;
    have_stamped(changer);
    size_t bytes = bytes_of(changer, slot->now[0].pages);
    open_slot(changer);
    int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
    bool stays = chance(changer, 4) &&
                 mremap(slot->homes[0], bytes, bytes, flags | MREMAP_DONTUNMAP, slot->homes[1]) != MAP_FAILED;
    if (!stays && mremap(slot->homes[0], bytes, bytes, flags, slot->homes[1]) == MAP_FAILED) {
        refused("mremap");
    }
    slot->now[1] = slot->now[0];
    slot->now[0].kind = stays ? KIND_ZERO : KIND_ABSENT;
    slot->now[0].writes = stays ? WRITES_LAND : WRITES_FAULT;
    settle(changer);
    open_slot(changer);
    if (slot->now[0].kind == KIND_ABSENT && chance(changer, 2)) {
        map_anonymous(changer, 0, true);
    }
    if (slot->now[0].kind == KIND_ZERO) {
        stamp(changer, 0);
        settle(changer);
        open_slot(changer);
    }
    if (slot->now[0].kind == KIND_ABSENT || chance(changer, 2)) {
        if (mremap(slot->homes[1], bytes, bytes, flags, slot->homes[0]) == MAP_FAILED) {
            refused("mremap");
        }
        slot->now[0] = slot->now[1];
        slot->now[1].kind = KIND_ABSENT;
        slot->now[1].writes = WRITES_FAULT;
    } else {
        unmap(changer, 1);
    }
    settle(changer);
    stamp_anew(changer);
    return slot->now[0].pages;
}

static unsigned long change_mmap(struct changer *changer) {
    unsigned long pages = 0;
    for (unsigned i = 0; i < 3; i++) {
        if (chance(changer, 2)) {
            map_file(changer, some_file(changer), chance(changer, 2));
            settle(changer);
        } else {
            renew(changer);
        }
        pages += changer->slot->now[0].pages;
    }
    stamp_anew(changer);
    return pages;
}

static void protect(struct changer *changer, int protection) {
    struct view *view = &changer->slot->now[0];
    if (mprotect(changer->slot->homes[0], bytes_of(changer, view->pages), protection) != 0) {
        refused("mprotect");
    }
    view->kind = protection == PROT_NONE ? KIND_ABSENT : KIND_STAMPED;
    view->writes = (protection & PROT_WRITE) != 0 ? WRITES_LAND : WRITES_FAULT;
}

static unsigned long change_mprotect(struct changer *changer) {
    static const int protections[] = {PROT_READ, PROT_NONE, PROT_READ | PROT_WRITE};
    have_stamped(changer);
    for (unsigned i = 0; i < 3; i++) {
        unsigned long chosen = i == 2 ? 2 : random_between(&changer->random, 0, 2);
        open_slot(changer);
        protect(changer, protections[chosen]);
        if (chosen == 2 && chance(changer, 2)) {
            stamp(changer, 0);
        }
        settle(changer);
    }
    stamp_anew(changer);
    return changer->slot->now[0].pages;
}

/* The changer's stores copy each page, or readers' do before them. */
static unsigned long change_cow(struct changer *changer) {
    struct view *view = &changer->slot->now[0];
    if (chance(changer, 4)) {
        open_slot(changer);
        view->pages = some_pages(changer);
        map_anonymous(changer, 0, false);
    } else {
        map_file(changer, some_file(changer), false);
    }
    view->writes = chance(changer, 2) ? WRITES_NONE : WRITES_LAND;
    settle(changer);
    open_slot(changer);
    view->writes = WRITES_LAND;
    stamp(changer, 0);
    settle(changer);
    return view->pages;
}

/* All that are zero now stay so: nobody writes stamps but the changer. */
static unsigned long zero_pages(struct changer *changer) {
    unsigned long zero = 0;
    for (unsigned long page = 0; page < changer->slot->now[0].pages; page++) {
        uint64_t found = 1;
        zero += true_load(changer->test, page_at(changer, 0, page), &found) && found == 0;
    }
    return zero;
}

static unsigned long change_free(struct changer *changer) {
    struct slot *slot = changer->slot;
    have_stamped(changer);
    open_slot(changer);
    advise_or_fail(changer, 0, MADV_FREE, "madvise(MADV_FREE)");
    slot->now[0].kind = KIND_FREED;
    slot->now[0].writes = WRITES_NONE;
    if (chance(changer, 2)) {
        settle(changer);
        open_slot(changer);
    }
    if (changer->test->available[OP_PAGEOUT]) {
        (void)advise(changer, 0, MADV_PAGEOUT);
    }
    unsigned long zero = zero_pages(changer);
    if (zero == slot->now[0].pages) {
        slot->now[0].kind = KIND_ZERO;
    }
    if (chance(changer, 2)) {
        settle(changer);
        open_slot(changer);
    }
    slot->now[0].writes = WRITES_LAND;
    stamp(changer, 0);
    settle(changer);
    return zero;
}

/* What follows changes nothing that is seen, so it may be done while all is true. */
static unsigned long change_pageout(struct changer *changer) {
    if (chance(changer, 2) || changer->slot->huge) {
        have_stamped(changer);
    } else {
        enum backing backing = some_file(changer);
        bool shared = chance(changer, 2);
        map_file(changer, backing, shared);
        changer->slot->now[0].writes = chance(changer, 2) ? WRITES_NONE : WRITES_LAND;
        settle(changer);
        /* Only clean pages can go. */
        if (fdatasync(changer->test->files[backing]) != 0) {
            refused("fdatasync");
        }
    }
    advise_or_fail(changer, 0, MADV_PAGEOUT, "madvise(MADV_PAGEOUT)");
    unsigned long out = pages_not_there(changer);
    look_again(changer);
    open_slot(changer);
    changer->slot->now[0].writes = WRITES_LAND;
    stamp(changer, 0);
    settle(changer);
    return out;
}

/* Pages whose accessed bits were taken away while TLBs kept their translations, before and after TLBs were
 * flushed for other reasons. */
static unsigned long change_age(struct changer *changer) {
    struct test *test = changer->test;
    struct slot *slot = changer->slot;
    have_stamped(changer);
    if (test->clear_refs < 0 || chance(changer, 4)) {
        advise_or_fail(changer, 0, MADV_COLD, "madvise(MADV_COLD)");
    } else if (write(test->clear_refs, "1", 1) != 1) {
        refused("writing to /proc/self/clear_refs");
    }
    for (unsigned long flushes = random_between(&changer->random, 0, 4); flushes > 0; flushes--) {
        size_t bytes = bytes_of(changer, FLUSHED_PAGES);
        memset(changer->flushed, 1, bytes);
        if (mprotect(changer->flushed, bytes, PROT_READ) != 0 ||
            mprotect(changer->flushed, bytes, PROT_READ | PROT_WRITE) != 0) {
            refused("mprotect");
        }
    }
    if (chance(changer, 2)) {
        look_again(changer);
    }
    open_slot(changer);
    if (test->available[OP_DONTNEED] && chance(changer, 2)) {
        advise_or_fail(changer, 0, MADV_DONTNEED, "madvise(MADV_DONTNEED)");
    } else {
        unmap(changer, 0);
        map_anonymous(changer, 0, true);
    }
    stamp(changer, 0);
    settle(changer);
    return slot->now[0].pages;
}

/* What readers had written when the records were read must be in the file when nothing of it is in memory. A
 * reader records after it has looked, so a record may come late, but never early; and its marks rise. */
static void check_file(struct changer *changer, unsigned half) {
    const struct test *test = changer->test;
    struct slot *slot = changer->slot;
    const struct view *view = &slot->now[0];
    for (unsigned long page = 0; page < view->pages; page++) {
        read_page(changer, test->files[BACKING_DISK_FILE], file_offset(changer, half, page));
        struct finding finding = {.operation = changer->operation,
                                  .what = "write that is not in the file",
                                  .slot = slot,
                                  .page = page,
                                  .there = true};
        for (unsigned long word = 0; word < test->words + MOST_READERS; word++) {
            bool stamp = word < test->words;
            unsigned long reader = stamp ? 0 : word - test->words;
            size_t offset = stamp ? stamp_offset(test, word) : mark_offset(test, reader);
            uint64_t expected = stamp ? stamp_of(slot->number, page, word, view->generation)
                                      : changer->records[page * MOST_READERS + reader];
            finding.at = page_at(changer, 0, page) + offset;
            finding.found = load_at(changer->buffer + offset);
            bool right =
                stamp ? finding.found == expected
                      : finding.found >= expected && mark_belongs(finding.found, slot->number, page, reader);
            if (!right) {
                expect_number(&finding, expected);
                report(test, &finding);
            }
        }
    }
}

static unsigned long change_msync(struct changer *changer) {
    const struct test *test = changer->test;
    struct slot *slot = changer->slot;
    struct view *view = &slot->now[0];
    int descriptor = test->files[BACKING_DISK_FILE];
    map_file(changer, BACKING_DISK_FILE, true);
    view->durable = true;
    settle(changer);
    size_t bytes = bytes_of(changer, view->pages);
    for (unsigned long turn = random_between(&changer->random, 0, 2); turn > 0; turn--) {
        if (msync(slot->homes[0], bytes, MS_SYNC) != 0) {
            refused("msync");
        }
        look_again(changer);
        stamp_anew(changer);
    }
    /* One more, after which readers write, and nobody syncs. */
    if (msync(slot->homes[0], bytes, MS_SYNC) != 0) {
        refused("msync");
    }
    look_again(changer);
    open_slot(changer);
    for (unsigned long i = 0; i < view->pages * MOST_READERS; i++) {
        const _Atomic uint64_t *record = &slot->landed[view->half * slot->most_pages * MOST_READERS + i];
        changer->records[i] = atomic_load_explicit(record, memory_order_acquire);
    }
    unmap(changer, 0);
    if (fdatasync(descriptor) != 0) {
        refused("fdatasync");
    }
    off_t offset = file_offset(changer, view->half, 0);
    (void)posix_fadvise(descriptor, offset, (off_t)bytes_of(changer, MOST_PAGES), POSIX_FADV_DONTNEED);
    (void)mapped(slot->homes[0], bytes, MAP_SHARED | MAP_FIXED_NOREPLACE, descriptor, offset);
    unsigned long dropped = pages_not_there(changer);
    view->kind = KIND_STAMPED;
    view->writes = WRITES_LAND;
    check_file(changer, view->half);
    settle(changer);
    return dropped;
}

static unsigned long change_punch(struct changer *changer) {
    struct view *view = &changer->slot->now[0];
    map_file(changer, BACKING_MEMORY_FILE, true);
    settle(changer);
    open_slot(changer);
    advise_or_fail(changer, 0, MADV_REMOVE, "madvise(MADV_REMOVE)");
    view->kind = KIND_ZERO;
    settle(changer);
    stamp_anew(changer);
    return view->pages;
}

/* Makes one huge page of small ones, and small ones of that. */
static unsigned long change_huge(struct changer *changer) {
    struct slot *slot = changer->slot;
    size_t bytes = bytes_of(changer, slot->most_pages);
    renew(changer);
    stamp_anew(changer);
    if (madvise(slot->homes[0], bytes, MADV_HUGEPAGE) != 0) {
        refused("madvise(MADV_HUGEPAGE)");
    }
    bool collapsed = madvise(slot->homes[0], bytes, MADV_COLLAPSE) == 0;
    if (!collapsed) {
        /* An old kernel, or no huge page: then the first access brings one, or not. */
        open_slot(changer);
        map_anonymous(changer, 0, false);
        (void)madvise(slot->homes[0], bytes, MADV_HUGEPAGE);
        stamp(changer, 0);
        settle(changer);
    }
    look_again(changer);
    stamp_anew(changer);
    size_t page = changer->test->page;
    char *one = page_at(changer, 0, random_between(&changer->random, 0, slot->most_pages - 1));
    unsigned long way = random_between(&changer->random, 0, 3);
    open_slot(changer);
    if (way == 0 && changer->test->available[OP_PAGEOUT]) {
        (void)madvise(one, page, MADV_PAGEOUT);
    } else if (way == 1 && changer->test->available[OP_DONTNEED]) {
        (void)madvise(one, page, MADV_DONTNEED);
    } else if (way == 2) {
        (void)mapped(one, page, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    } else if (mprotect(one, page, PROT_READ) != 0 || mprotect(one, page, PROT_READ | PROT_WRITE) != 0) {
        refused("mprotect");
    }
    stamp(changer, 0);
    settle(changer);
    return collapsed ? slot->most_pages : 0;
}

/* The frame of a page, where the kernel tells: 0 otherwise. */
static uint64_t frame_of(const struct changer *changer, int pagemap, unsigned long page) {
    uint64_t entry = 0;
    uintptr_t number = (uintptr_t)page_at(changer, 0, page) / changer->test->page;
    ssize_t got = pread(pagemap, &entry, sizeof entry, (off_t)(number * sizeof entry));
    return got == (ssize_t)sizeof entry && entry >> 63 != 0 ? entry & ((UINT64_C(1) << 55) - 1) : 0;
}

static unsigned long merged_pages(const struct changer *changer) {
    int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    uint64_t first = frame_of(changer, pagemap, 0);
    unsigned long merged = 0;
    for (unsigned long page = 0; first != 0 && page < changer->slot->now[0].pages; page++) {
        merged += frame_of(changer, pagemap, page) == first;
    }
    (void)close(pagemap);
    return merged > 1 ? merged : 0;
}

/* Pages alike that the kernel makes one, until somebody writes. */
static unsigned long change_ksm(struct changer *changer) {
    const struct test *test = changer->test;
    struct slot *slot = changer->slot;
    struct view *view = &slot->now[0];
    open_slot(changer);
    view->pages = some_pages(changer) % MOST_MERGED + 2;
    view->pages = view->pages < slot->most_pages ? view->pages : slot->most_pages;
    map_anonymous(changer, 0, false);
    size_t bytes = bytes_of(changer, view->pages);
    for (unsigned long page = 0; test->plant == PLANT_SHARE && page < view->pages; page++) {
        (void)mapped(page_at(changer, 0, page), test->page, MAP_SHARED | MAP_FIXED,
                     test->files[BACKING_DISK_FILE], file_offset(changer, 0, 0));
    }
    if (test->plant != PLANT_SHARE && madvise(slot->homes[0], bytes, MADV_MERGEABLE) != 0) {
        refused("madvise(MADV_MERGEABLE)");
    }
    view->same = true;
    view->writes = WRITES_NONE;
    stamp(changer, 0);
    settle(changer);
    unsigned long merged = 0;
    for (double deadline = now_seconds() + 0.3; merged < view->pages && now_seconds() < deadline;) {
        sleep_seconds(0.005);
        merged = merged_pages(changer);
    }
    look_again(changer);
    open_slot(changer);
    view->writes = WRITES_LAND;
    settle(changer);
    check_marks(changer, 0);
    open_slot(changer);
    if (test->plant != PLANT_SHARE && chance(changer, 2) &&
        madvise(slot->homes[0], bytes, MADV_UNMERGEABLE) != 0) {
        refused("madvise(MADV_UNMERGEABLE)");
    }
    view->same = false;
    stamp(changer, 0);
    settle(changer);
    return merged;
}

static unsigned long change_migrate(struct changer *changer) {
    const struct test *test = changer->test;
    unsigned long moved = 0;
    if (chance(changer, 4)) {
        map_file(changer, some_file(changer), true);
        settle(changer);
    } else {
        have_stamped(changer);
    }
    for (unsigned turn = 0; turn < 2; turn++) {
        unsigned long pages = changer->slot->now[0].pages;
        void *at[MOST_PAGES];
        int nodes[MOST_PAGES];
        int before[MOST_PAGES];
        int after[MOST_PAGES];
        for (unsigned long page = 0; page < pages; page++) {
            at[page] = page_at(changer, 0, page);
            nodes[page] = (int)test->nodes[turn];
        }
        if (syscall(SYS_move_pages, 0, pages, at, NULL, before, 0) < 0 ||
            syscall(SYS_move_pages, 0, pages, at, nodes, after, MPOL_MF_MOVE) < 0) {
            refused("move_pages");
        }
        for (unsigned long page = 0; page < pages; page++) {
            moved += before[page] >= 0 && before[page] != nodes[page] && after[page] == nodes[page];
        }
        look_again(changer);
        stamp_anew(changer);
    }
    return moved;
}

unsigned long (*const change[])(struct changer *changer) = {
    [OP_MUNMAP] = change_munmap, [OP_DONTNEED] = change_dontneed, [OP_MREMAP] = change_mremap,
    [OP_MMAP] = change_mmap,     [OP_MPROTECT] = change_mprotect, [OP_COW] = change_cow,
    [OP_FORK] = change_fork,     [OP_FREE] = change_free,         [OP_PAGEOUT] = change_pageout,
    [OP_AGE] = change_age,       [OP_MSYNC] = change_msync,       [OP_PUNCH] = change_punch,
    [OP_HUGE] = change_huge,     [OP_KSM] = change_ksm,           [OP_MIGRATE] = change_migrate,
};
