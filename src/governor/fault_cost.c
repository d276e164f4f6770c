#include "governor/fault_cost.h"

#include "os/clock.h"
#include "os/vm.h"

#define FAULT_PAGES 32

static double measure_fault_ns(void) {
    size_t page = vm_page_size();
    char *memory = vm_reserve(FAULT_PAGES * page, page);
    if (memory == NULL || !vm_commit(memory, FAULT_PAGES * page)) {
        return 1000;
    }
    struct stopwatch watch = stopwatch_start();
    for (size_t i = 0; i < FAULT_PAGES; i++) {
        *(volatile char *)(memory + i * page) = 1;
    }
    double ns = (double)stopwatch_ns(&watch);
    vm_release(memory, FAULT_PAGES * page);
    return ns / FAULT_PAGES;
}

double fault_ns(struct governor *governor) {
    double ns = atomic_load_explicit(&governor->fault_ns, memory_order_relaxed);
    if (ns == 0) {
        ns = measure_fault_ns();
        atomic_store_explicit(&governor->fault_ns, ns, memory_order_relaxed);
    }
    return ns;
}
