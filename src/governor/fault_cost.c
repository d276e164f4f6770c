#include "governor/fault_cost.h"

#include "base/assert.h"
#include "os/clock.h"
#include "os/vm.h"

#define FAULT_PAGES 64
#define BATCH_PAGES 8
/* A page that a virtual machine's host has yet to back costs several times as much as one that was purged,
 * and so does the first one of a thread that slept: the lowest batch of all measurements counts. */
#define MAX_MEASURES 8

static double measure_fault_ns(void) {
    size_t page = vm_page_size();
    char *memory = vm_map(FAULT_PAGES * page);
    if (memory == NULL) {
        return 1000;
    }
    double lowest = __builtin_inf();
    for (size_t first = 0; first < FAULT_PAGES; first += BATCH_PAGES) {
        struct stopwatch watch = stopwatch_start();
        for (size_t i = first; i < first + BATCH_PAGES; i++) {
            *(volatile char *)(memory + i * page) = 1;
        }
        double ns = (double)stopwatch_ns(&watch);
        lowest = ns < lowest ? ns : lowest;
    }
    vm_release(memory, FAULT_PAGES * page);
    calm_assert(lowest >= 0);
    return lowest / BATCH_PAGES;
}

double fault_ns(struct governor *governor) {
    double ns = atomic_load_explicit(&governor->fault_ns, memory_order_relaxed);
    if (ns == 0) {
        ns = measure_fault_ns();
        atomic_store_explicit(&governor->fault_ns, ns, memory_order_relaxed);
    }
    return ns;
}

void measure_fault_again(struct governor *governor) {
    if (governor->fault_measures < MAX_MEASURES) {
        governor->fault_measures++;
        double before = fault_ns(governor);
        double now = measure_fault_ns();
        atomic_store_explicit(&governor->fault_ns, now < before ? now : before, memory_order_relaxed);
    }
}

void touch_huge_page(struct governor *governor, void *address) {
    struct stopwatch watch = stopwatch_start();
    *(volatile char *)address = 0;
    thp_policy_note_cost(&governor->thp, stopwatch_ns(&watch),
                         (double)governor->heap.runs.region_pages * fault_ns(governor));
}
