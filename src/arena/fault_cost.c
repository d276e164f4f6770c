#include "arena/fault_cost.h"

#include "base/assert.h"
#include "os/clock.h"
#include "os/vm.h"

#define FAULT_PAGES 64
#define BATCH_PAGES 8
/* The first fault in a page that the host of a virtual machine has not backed
 * yet costs several times as much as a fault in a purged page. So does the
 * first fault of a thread that slept. The lowest batch of all measurements
 * therefore counts. */
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

double fault_ns(struct arenas *arenas) {
    double ns = atomic_load_explicit(&arenas->machine.fault_ns, memory_order_relaxed);
    if (ns == 0) {
        ns = measure_fault_ns();
        atomic_store_explicit(&arenas->machine.fault_ns, ns, memory_order_relaxed);
    }
    return ns;
}

void measure_fault_again(struct arenas *arenas) {
    if (arenas->epoch.fault_measures < MAX_MEASURES) {
        arenas->epoch.fault_measures++;
        double before = fault_ns(arenas);
        double now = measure_fault_ns();
        atomic_store_explicit(&arenas->machine.fault_ns, now < before ? now : before, memory_order_relaxed);
    }
}

void prefault_huge_page(struct arenas *arenas, struct thp_policy *policy, void *address) {
    struct stopwatch watch = stopwatch_start();
    *(volatile char *)address = 0;
    thp_policy_note_cost(policy, stopwatch_ns(&watch),
                         (double)arenas->of[0].heap.runs.region_pages * fault_ns(arenas));
}
