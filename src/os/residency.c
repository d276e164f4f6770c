#include "os/residency.h"

#include "os/filters.h"
#include "os/syscall.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

struct residency residency_of_tail(const void *start, size_t bytes, size_t page_bytes,
                                   size_t max_resident_bytes, unsigned char *scratch) {
    struct residency tail = {0};
    int saved_errno = errno;
    while (tail.suffix_bytes < bytes) {
        size_t left = bytes - tail.suffix_bytes;
        size_t window = RESIDENCY_WINDOW_PAGES * page_bytes;
        window = left < window ? left : window;
        size_t pages = window / page_bytes;
        char *base = (char *)start + left - window;
        if (filters_now() == FILTERS_ADDED || mincore(base, window, scratch) != 0) {
            memset(scratch, 1, pages);
        }
        while (pages > 0) {
            pages--;
            if ((scratch[pages] & 1) != 0) {
                if (tail.resident_bytes + page_bytes > max_resident_bytes) {
                    errno = saved_errno;
                    return tail;
                }
                tail.resident_bytes += page_bytes;
            }
            tail.suffix_bytes += page_bytes;
        }
    }
    errno = saved_errno;
    return tail;
}

bool residency_is_full(const void *start, size_t bytes, size_t page_bytes) {
    /* One for each page, of the smallest there are: an emulator may count the host's. */
    unsigned char resident[RESIDENCY_SAMPLE_BYTES / 4096] = {0};
    if (!filters_allow_all() ||
        os_syscall(SYS_mincore, (long)start, (long)bytes, (long)resident, 0, 0, 0) != 0) {
        return false;
    }
    for (size_t i = 0; i < bytes / page_bytes; i++) {
        if ((resident[i] & 1) == 0) {
            return false;
        }
    }
    return true;
}
