#include "os/address_range.h"

#include "base/assert.h"
#include "base/size.h"
#include "os/syscall.h"
#include "os/vm.h"

#define MIN_STEP ((size_t)256 << 10)
#define MAX_STEP ((size_t)256 << 20)

bool address_range_reserve(struct address_range *range, size_t bytes) {
    return address_ranges_reserve(range, &bytes, 1);
}

/* Each range gets a guard page on either side. It may therefore be released
 * alone, like a range that was reserved alone. */
bool address_ranges_reserve(struct address_range *ranges, const size_t *bytes, size_t count) {
    size_t guards = 2 * vm_page_size();
    size_t all = 0;
    for (size_t i = 0; i < count; i++) {
        all = size_plus(all, size_plus(vm_round_up(bytes[i]), i == 0 ? 0 : guards));
    }
    char *base = vm_reserve(all);
    for (size_t i = 0; i < count; i++) {
        size_t reserved = base == NULL ? 0 : vm_round_up(bytes[i]);
        ranges[i] = (struct address_range){.base = base, .reserved = reserved};
        base = base == NULL ? NULL : base + reserved + guards;
    }
    calm_assert(count > 0 && all > 0, count, all);
    return base != NULL;
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
    calm_assert(range->base != NULL && range->committed <= range->reserved, range->committed,
                range->reserved);
    char *end = range->base + range->committed;
    size_t needed = vm_round_up(bytes - range->committed);
    size_t step = vm_round_up(size_min(size_max(range->committed / 4, MIN_STEP), MAX_STEP));
    step = size_min(step, range->reserved - range->committed);
    /* If memory is short, a step of only the needed bytes may still succeed. */
    if (step <= needed || !vm_commit_next(end, step)) {
        step = needed;
        if (!vm_commit_next(end, step)) {
            return false;
        }
    }
    range->committed += step;
    calm_assert(range->committed >= bytes && range->committed <= range->reserved, range->committed, bytes);
    return true;
}

void address_range_trim(struct address_range *range, size_t bytes) {
    calm_assert(range->committed <= range->reserved, range->committed, range->reserved);
    size_t keep = size_max(vm_round_up(bytes), range->committed);
    if (keep < range->reserved) {
        /* The page behind the new end becomes the guard page. */
        os_syscall(SYS_munmap, range->base + keep + vm_page_size(), range->reserved - keep);
        range->reserved = keep;
    }
}
