#include "os/residency.h"

#include "base/size.h"
#include "os/filters.h"
#include "os/syscall.h"
#include "os/vm.h"

#include <stdatomic.h>
#include <string.h>

/* A page of the largest size may count as pages of the smallest, since an
 * emulator may count the host's. */
#define MAX_PAGE_BYTES ((size_t)64 << 10)
#define MIN_PAGE_BYTES ((size_t)4 << 10)

static bool ask(const char *start, size_t bytes, unsigned char *resident) {
    return os_syscall(SYS_mincore, start, bytes, resident) == 0;
}

/* Returns whether the kernel tells a page that was never touched from others.
 * gVisor says of all pages that they are resident. So does Linux, with reason,
 * of all that is mapped while the program locks its mappings. */
static bool is_told(void) {
    enum { NOT_ASKED, TOLD, UNTOLD };
    static _Atomic(int) known;
    int answer = atomic_load_explicit(&known, memory_order_relaxed);
    if (answer != NOT_ASKED) {
        return answer == TOLD;
    }
    unsigned char resident[MAX_PAGE_BYTES / MIN_PAGE_BYTES] = {0};
    size_t bytes = vm_page_size();
    char *page = vm_map(bytes);
    if (page == NULL) {
        return true;
    }
    bool asked = ask(page, bytes, resident);
    bool told = asked && (resident[0] & 1) == 0;
    vm_release(page, bytes);
    if (asked && (told || !vm_locks_mappings())) {
        atomic_store_explicit(&known, told ? TOLD : UNTOLD, memory_order_relaxed);
    }
    return told;
}

static bool examine(const char *start, size_t bytes, unsigned char *resident) {
    return is_told() && ask(start, bytes, resident);
}

struct residency residency_of_tail(const void *start, size_t bytes, size_t max_resident_bytes,
                                   unsigned char *scratch) {
    size_t page_bytes = vm_page_size();
    struct residency tail = {0};
    while (tail.suffix_bytes < bytes) {
        size_t left = bytes - tail.suffix_bytes;
        size_t chunk = size_min(left, RESIDENCY_CHUNK_PAGES * page_bytes);
        size_t pages = chunk / page_bytes;
        if (filters_now() == FILTERS_ADDED || !examine((const char *)start + left - chunk, chunk, scratch)) {
            memset(scratch, 1, pages);
        }
        while (pages > 0) {
            size_t resident_bytes = (scratch[--pages] & 1) != 0 ? page_bytes : 0;
            if (tail.resident_bytes + resident_bytes > max_resident_bytes) {
                return tail;
            }
            tail.resident_bytes += resident_bytes;
            tail.suffix_bytes += page_bytes;
        }
    }
    return tail;
}

size_t residency_first(const void *start, size_t bytes, unsigned char *scratch, size_t *offset) {
    size_t page_bytes = vm_page_size();
    size_t pages = bytes / page_bytes;
    if (!filters_allow_all() || !examine(start, bytes, scratch)) {
        return 0;
    }
    size_t first = 0;
    while (first < pages && (scratch[first] & 1) == 0) {
        first++;
    }
    size_t end = first;
    while (end < pages && (scratch[end] & 1) != 0) {
        end++;
    }
    *offset = first * page_bytes;
    return (end - first) * page_bytes;
}

bool residency_is_full(const void *start, size_t bytes) {
    unsigned char resident[RESIDENCY_SAMPLE_BYTES / MIN_PAGE_BYTES] = {0};
    if (!filters_allow_all() || !examine(start, bytes, resident)) {
        return false;
    }
    for (size_t i = 0; i < bytes / vm_page_size(); i++) {
        if ((resident[i] & 1) == 0) {
            return false;
        }
    }
    return true;
}
