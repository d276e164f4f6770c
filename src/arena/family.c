#include "arena/family.h"

#include "base/assert.h"
#include "base/size.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/vm.h"

#define PAGE_BYTES     4096
#define MEMBERS        (PAGE_BYTES / sizeof(uint64_t) - 1)
#define FAMILY_TICK_NS 100000000ULL
#define OLD_TICKS      10
/* A note holds the time in ticks in its upper half, and the kept memory in
 * units of 64 KiB in its lower half: up to 256 TiB. */
#define UNIT_SHIFT 16

/* If there are more members than notes, several members share a note, and count
 * as one. */
struct family_page {
    _Atomic(uint64_t) members;
    _Atomic(uint64_t) notes[MEMBERS]; /* see UNIT_SHIFT */
};
_Static_assert(sizeof(struct family_page) == PAGE_BYTES, "one page");

void family_before_fork(struct family *family) {
    if (family->page == NULL && filters_now() != FILTERS_ADDED) {
        family->page = vm_map_shared(sizeof(struct family_page));
    }
}

void family_start_child(struct family *family) {
    family->member = 0;
}

double family_share(struct family *family, size_t kept_bytes) {
    struct family_page *page = family->page;
    if (page == NULL) {
        return 1;
    }
    if (family->member == 0) {
        family->member = 1 + atomic_fetch_add_explicit(&page->members, 1, memory_order_relaxed);
    }
    uint32_t now = (uint32_t)(clock_coarse_ns() / FAMILY_TICK_NS);
    uint64_t own = (uint64_t)now << 32 | (uint32_t)(kept_bytes >> UNIT_SHIFT);
    atomic_store_explicit(&page->notes[family->member % MEMBERS], own, memory_order_relaxed);
    uint64_t most = 0;
    uint64_t all = 0;
    for (size_t i = 0; i < MEMBERS; i++) {
        uint64_t note = atomic_load_explicit(&page->notes[i], memory_order_relaxed);
        /* The clock of another member may be ahead by a tick. */
        int32_t age = (int32_t)(now - (uint32_t)(note >> 32));
        if (age >= -1 && age <= OLD_TICKS) {
            most = size_max(most, (uint32_t)note);
            all += (uint32_t)note;
        }
    }
    calm_assert(most <= all, most, all);
    return all > 0 ? (double)most / (double)all : 1;
}
