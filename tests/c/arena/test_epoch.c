/* Epochs: what is kept from one to the next, and what an idle arena gives back. */
#include "arena/epoch.h"

#include "os/clock.h"
#include "os/filters.h"
#include "os/residency.h"
#include "whole_allocator.h"

#include <limits.h>
#include <string.h>

/* The test's clock knows nothing of it. A byte costs as much with any page. */
static void fix_fault_cost(void) {
    atomic_store(&calm_arenas.machine.fault_ns, 1000.0 * (double)page_size / 4096);
    calm_arenas.epoch.fault_measures = UINT_MAX;
}

/* What comes in waves stays between them, once it is known how far apart they are; and goes when no more
 * come. */
static void test_waves(void) {
    set("huge_pages", "never"); /* once they are earned, what lies elsewhere goes */
    fix_fault_cost();
    for (size_t gap = 1; gap <= 32; gap *= 4) {
        uint64_t known = 0;
        for (int wave = 0; wave < 12; wave++) {
            build();
            pass_epochs(1, DEMAND_EPOCH_NS / 10);
            free_all();
            clock_await_sleep(&calm_arenas.helper.wakeup);
            pass_epochs(gap, DEMAND_EPOCH_NS / 10);
            known = wave == 2 ? stats_now().purged : known;
        }
        CHECK_EQUAL(stats_now().purged, known);
        CHECK(stats_now().dirty > (WAVE - 1) * wave_bytes());
        size_t epochs = 0;
        for (; stats_now().dirty > 0; epochs++) {
            pass_epochs(1, 0);
            CHECK(epochs < 128);
        }
        printf("waves %zu epochs apart: gone after %zu\n", gap, epochs);
        CHECK(epochs > gap);
        memset(&calm_arenas.work->demand, 0, sizeof calm_arenas.work->demand);
    }
}

/* Small blocks of which some stay, and large ones, in turn: neither fits where the other was, so that what is
 * in use does not show what is wanted again. What giving back costs does. */
static void test_waves_of_two_kinds(void) {
    enum { SMALL = 480, SMALLS = 100000 };
    fix_fault_cost();
    static void *small[SMALLS];
    uint64_t purged = 0;
    for (int wave = 0; wave < 30; wave++) {
        for (size_t i = 0; i < SMALLS; i++) {
            small[i] = small[i] == NULL ? obtain(SMALL) : small[i];
        }
        for (size_t i = 0; i < SMALLS; i++) {
            if (i % 64 != 0) {
                calm_free(small[i]);
                small[i] = NULL;
            }
        }
        build();
        free_all();
        clock_await_sleep(&calm_arenas.helper.wakeup);
        pass_epochs(1, DEMAND_EPOCH_NS);
        purged = wave == 9 ? stats_now().purged : purged;
    }
    /* In 20 waves less than 2 would have been given back and taken again. */
    CHECK(stats_now().purged - purged < (uint64_t)4 * SMALLS * SMALL);
    for (size_t i = 0; i < SMALLS; i++) {
        calm_free(small[i]);
    }
}

/* A thread that read the clock, and was preempted until another had ended the epoch, ends none of -1 ns. */
static void test_epoch_of_the_future(void) {
    obtain(3 * MIB);
    size_t epochs = calm_arenas.work->demand.epochs;
    uint64_t start = clock_coarse_ns() + DEMAND_EPOCH_NS;
    atomic_store(&calm_arenas.epoch.start_ns, start);
    CHECK(!epoch_advance(&calm_arenas, false));
    CHECK_EQUAL(calm_arenas.work->demand.epochs, epochs);
    CHECK_EQUAL(calm_arenas.epoch.start_ns, start);
}

/* Free memory that the program does not touch is purged, though it is within the limit. */
static void test_unused_goes(void) {
    void *kept = obtain(8 * MIB);
    for (size_t i = 0; i < 8; i++) {
        blocks[i] = obtain(10 * page_size);
    }
    free_all();
    CHECK(stats_now().dirty >= 75 * page_size);
    for (unsigned epoch = 0; epoch < 2 + break_even_epochs(); epoch++) {
        clock_advance(120 * CLOCK_MS);
        for (size_t i = 0; i < 40; i++) {
            calm_free(obtain(8 * page_size + KIB));
        }
    }
    struct calm_stats stats = stats_now();
    CHECK(stats.purges_epoch > 0);
    CHECK(stats.dirty <= 26 * page_size);
    calm_free(kept);
}

/* What is usable at the end of the heap, and was used by no block for a while, is reserved again: trimmed,
 * and by a arena that has nothing to do. */
static void test_usable_memory_is_reserved_again(void) {
    const struct segment *segment = &calm_arenas.of[0].heap.space.segment[0];
    size_t before = segment->region.committed;
    for (int trims = 0; trims < 2; trims++) {
        calm_free(obtain(256 * MIB));
        CHECK(segment->region.committed >= before + 200 * MIB);
        if (trims) {
            calm_trim(0);
        }
        for (int epoch = 0; epoch < 1000; epoch++) {
            clock_advance(DEMAND_EPOCH_NS);
            epoch_advance(&calm_arenas, false);
        }
        CHECK(segment->region.committed < before + 32 * MIB);
    }
    memset(obtain(256 * MIB), 1, 256 * MIB);
}

static unsigned char scratch[RESIDENCY_CHUNK_PAGES];

/* Memory that something else made resident is found in time, counted, and purged again. */
static void test_clean_memory_is_examined(void) {
    enum { BYTES = 64 * MIB };
    char *block = obtain(BYTES);
    char *middle = (char *)((uintptr_t)(block + BYTES / 2) & -page_size);
    char *behind = obtain(MIB); /* or the memory would be reserved again */
    CHECK(behind > block);
    calm_free(block);
    calm_trim(0);
    CHECK(stats_now().dirty < 4 * MIB);
    for (size_t at = 0; at < 8 * MIB; at += page_size) {
        middle[at] = 1; /* as khugepaged might; no block is there */
    }
    size_t resident = SIZE_MAX;
    for (int epoch = 0; epoch < 4096 && resident > 0; epoch++) {
        clock_advance(DEMAND_EPOCH_NS);
        epoch_advance(&calm_arenas, false);
        resident = residency_of_tail(middle, 8 * MIB, SIZE_MAX, scratch).resident_bytes;
    }
    CHECK(filters_now() != FILTERS_NONE || !residency_is_told() || resident == 0);
    calm_free(behind);
}

int main(void) {
    prepare_governor();
    in_child(test_waves);
    in_child(test_waves_of_two_kinds);
    in_child(test_epoch_of_the_future);
    set("background", "off"); /* the rest would be done by a helper, too, in its own time */
    in_child(test_unused_goes);
    in_child(test_usable_memory_is_reserved_again);
    in_child(test_clean_memory_is_examined);
    return 0;
}
