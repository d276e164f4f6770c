/* Changers of stale-reads: each repeatedly takes a slot, performs an operation on it, and releases it. */
#define _GNU_SOURCE
#include "paging.h"
#include "stale-steps.h"
#include "support.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_COLD
#define MADV_COLD    20
#define MADV_PAGEOUT 21
#endif

static struct changer changers[MOST_CHANGERS];

/* Those that any range of pages will do for, a huge one too. */
static bool for_any_slot(enum operation operation) {
    return operation == OP_MUNMAP || operation == OP_DONTNEED || operation == OP_MPROTECT ||
           operation == OP_FORK || operation == OP_FREE || operation == OP_PAGEOUT || operation == OP_AGE;
}

static void take_slot(struct changer *changer) {
    struct test *test = changer->test;
    unsigned long huge = test->slots + changer->number;
    bool wanted = changer->operation == OP_HUGE || (for_any_slot(changer->operation) && chance(changer, 16));
    do {
        unsigned long number = wanted ? huge : random_between(&changer->random, 0, test->slots - 1);
        changer->slot = &test->all[number];
    } while (atomic_flag_test_and_set_explicit(&changer->slot->taken, memory_order_acquire));
    atomic_store_explicit(&test->focus[changer->number], changer->slot->number, memory_order_relaxed);
}

void change_until_over(struct test *test, unsigned long number) {
    struct changer *changer = &changers[number];
    pin_thread(program_name, test->readers + number);
    while (!atomic_load_explicit(&test->over, memory_order_relaxed)) {
        unsigned long chosen = random_between(&changer->random, 0, test->operation_count - 1);
        changer->operation = test->operations[chosen];
        take_slot(changer);
        choose_readers(changer);
        give_up_taken(changer);
        if (chance(changer, 4) && changer->slot->now[0].kind == KIND_STAMPED) {
            check_marks(changer, 0);
        }
        struct changer_counts *counts = &changer->counts[changer->operation];
        counts->pages += change[changer->operation](changer);
        counts->count++;
        atomic_flag_clear_explicit(&changer->slot->taken, memory_order_release);
    }
}

void changers_prepare(struct test *test) {
    size_t bytes = MOST_PAGES * test->page;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    for (unsigned long i = 0; i < test->changers; i++) {
        struct changer *changer = &changers[i];
        *changer = (struct changer){.test = test,
                                    .number = i,
                                    .random = test->seed + MOST_READERS + i,
                                    .counts = test->changed[i],
                                    .taken = mapped(NULL, bytes, flags, -1, 0),
                                    .flushed = mapped(NULL, FLUSHED_PAGES * test->page, flags, -1, 0)};
        for (unsigned home = 0; home < HOMES; home++) {
            changer->planted[home] = mapped(NULL, bytes, flags, -1, 0);
        }
        changer->family = mapped(NULL, sizeof *changer->family, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        size_t words = (size_t)MOST_PAGES * MOST_READERS;
        size_t child = FLUSHED_PAGES * (test->words + MOST_READERS);
        changer->records = checked(calloc(words > child ? words : child, sizeof(uint64_t)), program_name);
        changer->buffer = checked(calloc(1, test->page), program_name);
    }
}

static bool merging(void) {
    char state = '0';
    int descriptor = open("/sys/kernel/mm/ksm/run", O_RDONLY | O_CLOEXEC);
    bool on = descriptor >= 0 && read(descriptor, &state, 1) == 1 && state == '1';
    if (descriptor >= 0) {
        (void)close(descriptor);
    }
    return on;
}

void find_available(struct test *test) {
    char *page = mapped(NULL, test->page, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (unsigned i = 0; i < OPERATIONS; i++) {
        test->available[i] = true;
    }
    test->available[OP_DONTNEED] = madvise(page, test->page, MADV_DONTNEED) == 0;
    test->available[OP_FREE] = test->self >= 0 && madvise(page, test->page, MADV_FREE) == 0;
    test->available[OP_PAGEOUT] = madvise(page, test->page, MADV_PAGEOUT) == 0;
    test->available[OP_AGE] = test->clear_refs >= 0 || madvise(page, test->page, MADV_COLD) == 0;
    test->available[OP_PUNCH] = test->files[BACKING_MEMORY_FILE] >= 0 && test->available[OP_DONTNEED];
    test->available[OP_HUGE] = madvise(page, test->page, MADV_HUGEPAGE) == 0;
    test->available[OP_KSM] = merging() && madvise(page, test->page, MADV_MERGEABLE) == 0;
    test->available[OP_MIGRATE] = test->node_count > 1;
    (void)munmap(page, test->page);
}
