#include "governor/fault.h"

#include "os/address_space.h"
#include "os/clock.h"

#define FAULT_PAGES 32

static double measure_fault_ns(void) {
    size_t page = os_page_size();
    char *memory = os_reserve(FAULT_PAGES * page, page);
    if (memory == NULL || !os_commit(memory, FAULT_PAGES * page)) {
        return 1000;
    }
    uint64_t start = clock_thread_ns();
    for (size_t i = 0; i < FAULT_PAGES; i++) {
        *(volatile char *)(memory + i * page) = 1;
    }
    uint64_t end = clock_thread_ns();
    os_release(memory, FAULT_PAGES * page);
    return (double)(end - start) / FAULT_PAGES;
}

double fault_ns(struct governor *governor) {
    double ns = atomic_load_explicit(&governor->fault_ns, memory_order_relaxed);
    if (ns == 0) {
        ns = measure_fault_ns();
        atomic_store_explicit(&governor->fault_ns, ns, memory_order_relaxed);
    }
    return ns;
}
