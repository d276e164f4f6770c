/* Readers of stale-reads: each repeatedly checks the slots on which changers work, and ends the program when
 * a slot differs from what its changer has published.
 *
 * A reader touches only the slots that their changers open to it (the slot's audience): it also matters
 * which CPUs do not have a page's translation. */
#define _GNU_SOURCE /* sched_yield, CPU_SET */
#include "paging.h"
#include "stale.h"
#include "support.h"

#include <sched.h>
#include <time.h>

/* Pages of a slot that one look is at, and looks between two pauses. */
enum { PAGES_AT_ONCE = 8, LOOKS_AT_ONCE = 64, WRITE_ONE_IN = 3, CHECK_ONE_IN = 8 };

struct reader {
    struct test *test;
    unsigned long number;
    uint64_t me; /* in an audience */
    unsigned long long random;
    uint64_t marks;
    struct reader_counts *counts;
    unsigned long *unjudged;
};

/* One slot, as it was when the look began. */
struct look {
    struct reader *reader;
    struct slot *slot;
    uint64_t sequence;
    unsigned home;
    struct view view;
};

/* Whether what was done since the look began was done while all of the view was true. */
static bool holds_still(const struct look *look) {
    /* Not for loads alone: a store must have been made before the number is read. */
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load_explicit(&look->slot->sequence, memory_order_relaxed) == look->sequence;
}

static struct finding finding_at(const struct look *look, unsigned long page, const char *at) {
    return (struct finding){
        .operation = look->view.operation, .slot = look->slot, .page = page, .at = at, .there = true};
}

static bool read_word(const struct look *look, unsigned long page, unsigned long word) {
    const struct test *test = look->reader->test;
    size_t offset = page * test->page + stamp_offset(test, word);
    const char *at = look->slot->homes[look->home] + offset;
    const char *from = at;
    if (test->plant == PLANT_READ && look->view.planted != NULL) {
        from = look->view.planted + offset;
    }
    uint64_t found = 0;
    bool there = try_load(from, &found);
    if (!holds_still(look)) {
        return false;
    }
    struct reader_counts *counts = &look->reader->counts[look->view.operation];
    counts->reads++;
    counts->faults += !there;
    if (!word_right(look->slot, &look->view, page, word, there, found)) {
        struct finding finding = finding_at(look, page, at);
        finding.what = there ? "stale read" : "fault of a read where memory is";
        finding.there = there;
        finding.found = found;
        expect(&finding, &look->view, word);
        report(test, &finding);
    }
    return true;
}

/* A write that faults must be one that has to; one that does not must have got to the page that is there now.
 */
static void write_mark(const struct look *look, unsigned long page) {
    struct reader *reader = look->reader;
    const struct test *test = reader->test;
    size_t offset = page * test->page + mark_offset(test, reader->number);
    char *at = look->slot->homes[look->home] + offset;
    char *to = at;
    if (test->plant > PLANT_READ && look->view.planted != NULL) {
        to = look->view.planted + offset;
    }
    uint64_t mark = mark_of(look->slot->number, page, reader->number, ++reader->marks);
    bool landed = try_store(to, mark);
    if (!holds_still(look) || test->plant == PLANT_STRAY) {
        return;
    }
    struct reader_counts *counts = &reader->counts[look->view.operation];
    counts->writes++;
    counts->faults += !landed;
    struct finding finding = finding_at(look, page, at);
    if (landed != (look->view.writes == WRITES_LAND)) {
        finding.what = landed ? "stale write" : "fault of a write where memory is writable";
        finding.there = landed;
        finding.found = mark;
        expect_text(&finding, landed ? "a fault" : "none");
        report(test, &finding);
    }
    if (landed && test->plant != PLANT_LOSE && test->self >= 0 &&
        random_next(&reader->random) % CHECK_ONE_IN == 0) {
        bool there = true_load(test, at, &finding.found);
        if (!holds_still(look)) {
            return;
        }
        counts->writes_checked++;
        if (!there || finding.found != mark) {
            finding.what = "stale write that went elsewhere";
            finding.there = there;
            expect_number(&finding, mark);
            report(test, &finding);
        }
    }
    if (landed && look->view.durable) {
        _Atomic uint64_t *record = look->slot->landed;
        record += (look->view.half * look->slot->most_pages + page) * MOST_READERS + reader->number;
        atomic_store_explicit(record, mark, memory_order_release);
    }
}

/* What is found while a change is made may be what was there before it, what is after it, or a fault, and a
 * mark may go to either. But it fills TLBs just then, and that must do no harm later. */
static void touch(struct reader *reader, const struct slot *slot) {
    for (unsigned home = 0; home < HOMES && slot->homes[home] != NULL; home++) {
        unsigned long page = random_between(&reader->random, 0, slot->most_pages - 1);
        char *at = slot->homes[home] + page * reader->test->page;
        uint64_t found = 0;
        (void)try_load(at, &found);
        ++*reader->unjudged;
        if (random_next(&reader->random) % WRITE_ONE_IN == 0) {
            uint64_t mark = mark_of(slot->number, page, reader->number, ++reader->marks);
            (void)try_store(at + mark_offset(reader->test, reader->number), mark);
        }
    }
}

/* False if the view had not been true for long enough. */
static bool look_at_page(const struct look *look, unsigned long page) {
    struct reader *reader = look->reader;
    if (!read_word(look, page, random_between(&reader->random, 0, reader->test->words - 1))) {
        ++*reader->unjudged;
        return false;
    }
    if (look->view.writes != WRITES_NONE && random_next(&reader->random) % WRITE_ONE_IN == 0) {
        write_mark(look, page);
    }
    return true;
}

/* How many pages of a home to look at. A fault takes long: where nothing has been for a while, few see to
 * that. */
static unsigned long worth_a_look(struct reader *reader, const struct view *view, bool seen) {
    if (view->kind != KIND_ABSENT) {
        return view->pages < PAGES_AT_ONCE ? view->pages : PAGES_AT_ONCE;
    }
    return (view->left && !seen) || random_next(&reader->random) % 16 == 0 ? 1 : 0;
}

/* Mostly one that readers have looked at before the change, and may have the translation of. */
static unsigned long first_page(struct reader *reader, const struct slot *slot, unsigned long pages) {
    uint64_t anywhere = random_next(&reader->random);
    uint64_t window = atomic_load_explicit(&slot->window, memory_order_relaxed);
    return (unsigned long)((anywhere % 4 == 0 ? anywhere / 4 : window) % pages);
}

/* False if there was nothing for this reader. */
static bool look_at(struct reader *reader, struct slot *slot) {
    struct look look = {.reader = reader,
                        .slot = slot,
                        .sequence = atomic_load_explicit(&slot->sequence, memory_order_acquire)};
    if ((atomic_load_explicit(&slot->audience, memory_order_relaxed) & reader->me) == 0) {
        return false;
    }
    if (look.sequence % 2 != 0) {
        touch(reader, slot);
        return true;
    }
    bool seen = (atomic_load_explicit(&slot->looked, memory_order_relaxed) & reader->me) != 0;
    for (; look.home < HOMES && slot->homes[look.home] != NULL; look.home++) {
        slot_view(slot, look.home, &look.view);
        unsigned long count = worth_a_look(reader, &look.view, seen);
        unsigned long page = count == 0 ? 0 : first_page(reader, slot, look.view.pages);
        for (; count > 0; count--) {
            if (!look_at_page(&look, page)) {
                return true;
            }
            page = (page + 1) % look.view.pages;
        }
    }
    if (!seen) {
        (void)atomic_fetch_or_explicit(&slot->looked, reader->me, memory_order_relaxed);
    }
    return true;
}

/* A slot that is new to this reader, if a changer has one for it. */
static struct slot *news(struct reader *reader) {
    struct test *test = reader->test;
    unsigned long first = random_between(&reader->random, 0, test->changers - 1);
    for (unsigned long i = 0; i < test->changers; i++) {
        unsigned long changer = (first + i) % test->changers;
        struct slot *slot = &test->all[atomic_load_explicit(&test->focus[changer], memory_order_relaxed)];
        uint64_t audience = atomic_load_explicit(&slot->audience, memory_order_relaxed);
        if ((audience & ~atomic_load_explicit(&slot->looked, memory_order_relaxed) & reader->me) != 0) {
            return slot;
        }
    }
    return NULL;
}

/* One that a changer works on, or any. */
static struct slot *some_slot(struct reader *reader) {
    struct test *test = reader->test;
    unsigned long slot = random_between(&reader->random, 0, test->slots + test->changers - 1);
    if (random_next(&reader->random) % 4 != 0) {
        unsigned long changer = random_between(&reader->random, 0, test->changers - 1);
        slot = atomic_load_explicit(&test->focus[changer], memory_order_relaxed);
    }
    return &test->all[slot];
}

/* Lets others have the CPU, or none: what an idle CPU has in its TLB is flushed late. */
static void rest(struct reader *reader) {
    struct test *test = reader->test;
    unsigned long chance = random_between(&reader->random, 0, 7);
    if (test->moving && chance == 0) {
        pin_thread(program_name, random_between(&reader->random, 0, test->cpus - 1));
    } else if (chance < 5) {
        struct timespec time = {.tv_nsec = (long)random_between(&reader->random, 20000, 1000000)};
        (void)nanosleep(&time, NULL);
    } else if (chance < 7) {
        (void)sched_yield();
    }
}

void read_until_over(struct test *test, unsigned long number) {
    struct reader reader = {.test = test,
                            .number = number,
                            .me = UINT64_C(1) << number,
                            .random = test->seed + number,
                            .counts = test->read[number],
                            .unjudged = &test->unjudged[number]};
    pin_thread(program_name, number);
    for (unsigned long looks = 1; !atomic_load_explicit(&test->over, memory_order_relaxed); looks++) {
        struct slot *slot = news(&reader);
        bool looked = look_at(&reader, slot != NULL ? slot : some_slot(&reader));
        if (slot == NULL || !looked || looks % LOOKS_AT_ONCE == 0) {
            rest(&reader);
        }
        busy_wait();
    }
}
