/* Slots of stale-reads: what their pages hold, who says so, and accesses that may fault. */
#define _GNU_SOURCE /* sched_getcpu, sigsetjmp, pread */
#include "stale.h"
#include "support.h"

#include <inttypes.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

/* A stamp: 01, slot (12 bits), page (10), word (8), generation (32).
 * A mark: 10, slot (12 bits), page (10), reader (6), count (34). */
enum { TYPE_AT = 62, SLOT_AT = 50, PAGE_AT = 40, WORD_AT = 32, READER_AT = 34 };
enum { TYPE_STAMP = 1, TYPE_MARK = 2 };

static uint64_t field(uint64_t number, unsigned at, unsigned end) {
    return number >> at & ((UINT64_C(1) << (end - at)) - 1);
}

uint64_t stamp_of(unsigned slot, unsigned long page, unsigned long word, uint64_t generation) {
    return (uint64_t)TYPE_STAMP << TYPE_AT | (uint64_t)slot << SLOT_AT | (uint64_t)page << PAGE_AT |
           (uint64_t)word << WORD_AT | (generation & UINT32_MAX);
}

uint64_t mark_of(unsigned slot, unsigned long page, unsigned long reader, uint64_t count) {
    return (uint64_t)TYPE_MARK << TYPE_AT | (uint64_t)slot << SLOT_AT | (uint64_t)page << PAGE_AT |
           (uint64_t)reader << READER_AT | field(count, 0, READER_AT);
}

bool mark_belongs(uint64_t found, unsigned slot, unsigned long page, unsigned long reader) {
    return found == 0 || found == mark_of(slot, page, reader, found);
}

/* The page's last words are the readers', one each. */
size_t mark_offset(const struct test *test, unsigned long reader) {
    return test->page - (MOST_READERS - reader) * sizeof(uint64_t);
}

size_t stamp_offset(const struct test *test, unsigned long word) {
    size_t words = test->page / sizeof(uint64_t) - MOST_READERS;
    return word * words / test->words * sizeof(uint64_t);
}

static _Thread_local struct {
    sigjmp_buf back;
    volatile sig_atomic_t armed;
} attempt;

static void on_fault(int number) {
    if (attempt.armed) {
        attempt.armed = 0;
        siglongjmp(attempt.back, 1);
    }
    /* Not one of ours: it happens again, and ends the process. */
    (void)signal(number, SIG_DFL);
}

void faults_catch(void) {
    /* The handler does not return, so nothing would unblock the signal. */
    struct sigaction action = {.sa_handler = on_fault, .sa_flags = SA_NODEFER};
    if (sigaction(SIGSEGV, &action, NULL) != 0 || sigaction(SIGBUS, &action, NULL) != 0) {
        fail(program_name, "cannot catch faults");
    }
}

bool try_load(const char *at, uint64_t *found) {
    if (sigsetjmp(attempt.back, 0) != 0) {
        return false;
    }
    attempt.armed = 1;
    *found = __atomic_load_n((const volatile uint64_t *)at, __ATOMIC_RELAXED);
    attempt.armed = 0;
    return true;
}

bool try_store(char *at, uint64_t number) {
    volatile uint64_t *word = (volatile uint64_t *)at;
    if (sigsetjmp(attempt.back, 0) != 0) {
        return false;
    }
    attempt.armed = 1;
    __atomic_store_n(word, number, __ATOMIC_RELAXED);
    attempt.armed = 0;
    return true;
}

bool true_load(const struct test *test, const char *at, uint64_t *found) {
    return pread(test->self, found, sizeof *found, (off_t)(uintptr_t)at) == (ssize_t)sizeof *found;
}

bool true_store(const struct test *test, char *at, uint64_t number) {
    return pwrite(test->self, &number, sizeof number, (off_t)(uintptr_t)at) == (ssize_t)sizeof number;
}

void slot_open(struct slot *slot) {
    uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_relaxed);
    /* Whoever sees a trace of the change sees that it has begun. */
    atomic_thread_fence(memory_order_seq_cst);
}

void slot_publish(struct slot *slot, uint64_t audience) {
    for (unsigned home = 0; home < HOMES; home++) {
        const struct view *view = &slot->now[home];
        uint64_t packed = (uint64_t)view->kind | (uint64_t)view->writes << 8 |
                          (uint64_t)view->operation << 16 | (uint64_t)view->same << 24 |
                          (uint64_t)view->durable << 25 | (uint64_t)view->half << 26 |
                          (uint64_t)view->left << 27 | (uint64_t)view->pages << 32;
        uint64_t cells[VIEW_CELLS] = {packed, view->generation, (uintptr_t)view->planted};
        for (unsigned i = 0; i < VIEW_CELLS; i++) {
            atomic_store_explicit(&slot->cells[home][i], cells[i], memory_order_relaxed);
        }
    }
    atomic_store_explicit(&slot->audience, audience, memory_order_relaxed);
    atomic_store_explicit(&slot->looked, 0, memory_order_relaxed);
    uint64_t sequence = atomic_load_explicit(&slot->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, sequence + 1, memory_order_release);
}

void slot_view(const struct slot *slot, unsigned home, struct view *view) {
    uint64_t cells[VIEW_CELLS];
    for (unsigned i = 0; i < VIEW_CELLS; i++) {
        cells[i] = atomic_load_explicit(&slot->cells[home][i], memory_order_relaxed);
    }
    *view = (struct view){.kind = (enum kind)field(cells[0], 0, 8),
                          .writes = (enum writes)field(cells[0], 8, 16),
                          .operation = (enum operation)field(cells[0], 16, 24),
                          .same = field(cells[0], 24, 25) != 0,
                          .durable = field(cells[0], 25, 26) != 0,
                          .half = (unsigned)field(cells[0], 26, 27),
                          .left = field(cells[0], 27, 28) != 0,
                          .pages = field(cells[0], 32, 64),
                          .generation = cells[1],
                          .planted = (char *)(uintptr_t)cells[2]};
}

bool word_right(const struct slot *slot, const struct view *view, unsigned long page, unsigned long word,
                bool there, uint64_t found) {
    if (view->kind == KIND_ABSENT || !there) {
        return view->kind == KIND_ABSENT && !there;
    }
    bool stamped = found == stamp_of(slot->number, view->same ? 0 : page, word, view->generation);
    return (view->kind != KIND_ZERO && stamped) || (view->kind != KIND_STAMPED && found == 0);
}

static void describe(char *text, size_t size, uint64_t number) {
    unsigned slot = (unsigned)field(number, SLOT_AT, TYPE_AT);
    unsigned page = (unsigned)field(number, PAGE_AT, SLOT_AT);
    if (field(number, TYPE_AT, 64) == TYPE_STAMP) {
        (void)snprintf(text, size, "%s %u page %u word %u generation %u",
                       slot < MOST_SLOTS ? "slot" : "other memory", slot % MOST_SLOTS, page,
                       (unsigned)field(number, WORD_AT, PAGE_AT), (unsigned)field(number, 0, WORD_AT));
    } else if (field(number, TYPE_AT, 64) == TYPE_MARK) {
        (void)snprintf(text, size, "slot %u page %u mark %" PRIu64 " of reader %u", slot, page,
                       field(number, 0, READER_AT), (unsigned)field(number, READER_AT, PAGE_AT));
    } else {
        (void)snprintf(text, size, "%#" PRIx64, number);
    }
}

void expect_number(struct finding *finding, uint64_t number) {
    describe(finding->expected, sizeof finding->expected, number);
}

void expect_text(struct finding *finding, const char *text) {
    (void)snprintf(finding->expected, sizeof finding->expected, "%s", text);
}

void expect(struct finding *finding, const struct view *view, unsigned long word) {
    if (view->kind == KIND_ABSENT) {
        expect_text(finding, "a fault");
    } else if (view->kind == KIND_ZERO) {
        expect_number(finding, 0);
    } else {
        unsigned long page = view->same ? 0 : finding->page;
        expect_number(finding, stamp_of(finding->slot->number, page, word, view->generation));
    }
}

_Noreturn void report(const struct test *test, const struct finding *finding) {
    int cpu = sched_getcpu();
    char found[64] = "a fault";
    char held[64] = "nothing";
    uint64_t number = 0;
    if (finding->there) {
        describe(found, sizeof found, finding->found);
    }
    if (true_load(test, finding->at, &number)) {
        describe(held, sizeof held, number);
    }
    char line[512];
    (void)snprintf(line, sizeof line,
                   "%s: %s: CPU %d, address %p, slot %u page %lu: expected %s, found %s; memory now holds %s",
                   operation_names[finding->operation], finding->what, cpu, (const void *)finding->at,
                   finding->slot->number, finding->page, finding->expected, found, held);
    fail(program_name, line);
}
