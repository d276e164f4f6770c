#include "os/address_range.h"

#include "base/size.h"
#include "os/syscall.h"
#include "os/vm.h"

#define MIN_STEP ((size_t)256 << 10)
#define MAX_STEP ((size_t)256 << 20)

bool address_range_reserve(struct address_range *range, size_t bytes) {
    *range = (struct address_range){.base = vm_reserve(bytes)};
    range->reserved = range->base == NULL ? 0 : vm_round_up(bytes);
    return range->base != NULL;
}

void address_range_release(struct address_range *range) {
    if (range->base != NULL) {
        vm_release(range->base, range->reserved);
    }
    *range = (struct address_range){0};
}

bool address_range_reach(struct address_range *range, size_t bytes) {
    if (bytes <= range->committed || bytes > range->reserved) {
        return bytes <= range->committed;
    }
    char *end = range->base + range->committed;
    size_t needed = vm_round_up(bytes - range->committed);
    size_t step = vm_round_up(size_min(size_max(range->committed / 4, MIN_STEP), MAX_STEP));
    step = size_min(step, range->reserved - range->committed);
    /* Where memory is short, the bytes that are needed may still be had. */
    if (step <= needed || !vm_commit(end, step)) {
        step = needed;
        if (!vm_commit(end, step)) {
            return false;
        }
    }
    range->committed += step;
    return true;
}

void address_range_trim(struct address_range *range, size_t bytes) {
    size_t keep = size_max(vm_round_up(bytes), range->committed);
    if (keep < range->reserved) {
        /* The page behind the new end becomes the guard. */
        os_syscall(SYS_munmap, range->base + keep + vm_page_size(), range->reserved - keep);
        range->reserved = keep;
    }
}
