#include "os/residency.h"

#include "base/size.h"
#include "os/filters.h"
#include "os/syscall.h"
#include "os/vm.h"

#include <string.h>

static bool examine(const char *start, size_t bytes, unsigned char *resident) {
    return os_syscall(SYS_mincore, start, bytes, resident) == 0;
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
    /* The array has one byte for each page of the smallest size, since an
     * emulator may count the host's pages. */
    unsigned char resident[RESIDENCY_SAMPLE_BYTES / 4096] = {0};
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
