#include "heap/space.h"
#include "base/size.h"
#include "os/memory.h"

#define MIN_SPACE_BYTES   ((size_t)1 << 30) /* below this, segments do better */
#define MIN_FIRST_BYTES   ((size_t)16 << 30)
#define MAX_FIRST_BYTES   ((size_t)1 << 44)
#define MIN_SEGMENT_BYTES ((size_t)4 << 20)
#define MIN_STEP_BYTES    ((size_t)8 << 20)
#define MAX_STEP_BYTES    ((size_t)1 << 30)
#define GUARD_BYTES       ((size_t)1 << 20)
#define LIMIT_SHARE       16 /* one part in so many of a limit may be reserved for metadata */
#define PAGES_PER_SPAN    2  /* at least, on average: descriptors for half of all pages are enough */
#define MIN_SPANS         1024

static const size_t entry_bytes[] = {
    [CLASS_TABLE] = sizeof(uint8_t), [SPAN_TABLE] = sizeof(uint32_t), [USER_TABLE] = sizeof(uint16_t)};
#define PAGE_METADATA_BYTES (sizeof(uint8_t) + sizeof(uint32_t) + sizeof(uint16_t))

static size_t spans_for(size_t pages) {
    return size_max(pages / PAGES_PER_SPAN, MIN_SPANS);
}

static bool reserve_metadata(struct space *space, size_t bitmap_words) {
    size_t bytes[PAGE_TABLES];
    for (int i = 0; i < PAGE_TABLES; i++) {
        bytes[i] = (space->max_pages + 1) * entry_bytes[i];
    }
    return span_table_init(&space->spans, spans_for(space->max_pages), bitmap_words) &&
           address_ranges_reserve(space->page_tables, bytes, PAGE_TABLES);
}

static void release_metadata(struct space *space) {
    span_table_release(&space->spans);
    for (int i = 0; i < PAGE_TABLES; i++) {
        address_range_release(&space->page_tables[i]);
    }
}

/* Page 0 and those between segments need their metadata too. */
static bool reach_metadata(struct space *space, size_t page_end) {
    bool reached = true;
    for (int i = 0; i < PAGE_TABLES; i++) {
        reached = reached && address_range_reach(&space->page_tables[i], (page_end + 1) * entry_bytes[i]);
    }
    return reached;
}

/* For the owner; other threads acquire. */
static size_t segment_count(const struct space *space) {
    return atomic_load_explicit(&space->segments, memory_order_relaxed);
}

static uintptr_t segment_base(const struct space *space, size_t number) {
    return atomic_load_explicit(&space->segment[number].base, memory_order_acquire);
}

static uint32_t first_page_of(const struct segment *segment) {
    return atomic_load_explicit(&segment->first_page, memory_order_relaxed);
}

/* Where the usable pages of a segment end. */
static uint32_t usable_end(const struct space *space, const struct segment *segment) {
    return first_page_of(segment) + (uint32_t)(segment->region.committed >> space->page_shift);
}

static uint8_t indexed(const struct space *space, size_t at) {
    return atomic_load_explicit(&space->by_address[at], memory_order_relaxed);
}

static void set_indexed(struct space *space, size_t at, size_t number) {
    atomic_store_explicit(&space->by_address[at], (uint8_t)number, memory_order_relaxed);
}

/* Inserts the newest segment into the index by address. */
static void index_segment(struct space *space, size_t number) {
    size_t at = number;
    for (; at > 0 && segment_base(space, indexed(space, at - 1)) >= segment_base(space, number); at--) {
        set_indexed(space, at, indexed(space, at - 1));
    }
    set_indexed(space, at, number);
}

/* The first has wide guards, since metadata is next to it. The others have little room. */
static size_t guard_bytes(size_t bytes) {
    return bytes >= MIN_SPACE_BYTES ? GUARD_BYTES : 0;
}

static bool add_segment(struct space *space, size_t bytes) {
    size_t count = segment_count(space);
    size_t pages = bytes >> space->page_shift;
    if (count == MAX_SEGMENTS || space->page_end + pages + 1 > space->max_pages) {
        return false;
    }
    struct segment *segment = &space->segment[count];
    size_t guard = guard_bytes(bytes);
    if (!address_range_reserve(&segment->region, bytes + 2 * guard)) {
        return false;
    }
    segment->region.base += guard;
    segment->region.reserved -= 2 * guard;
    uint32_t first = (uint32_t)space->page_end + (count == 0 ? 0 : 1);
    space->page_end = first + pages;
    atomic_store_explicit(&segment->first_page, first, memory_order_relaxed);
    atomic_store_explicit(&segment->page_end, first, memory_order_relaxed);
    atomic_store_explicit(&segment->base, (uintptr_t)segment->region.base, memory_order_release);
    atomic_store_explicit(&segment->bytes, bytes, memory_order_release);
    index_segment(space, count);
    /* Release: a thread that finds a block in it was given the block by one that knew it. */
    atomic_store_explicit(&space->segments, count + 1, memory_order_release);
    return true;
}

uint32_t space_last(const struct space *space, uint32_t *end) {
    size_t count = segment_count(space);
    if (count == 0 || (count == 1 && space->quanta > 0)) { /* which the fast path of free knows */
        return 0;
    }
    *end = usable_end(space, &space->segment[count - 1]);
    return first_page_of(&space->segment[count - 1]);
}

/*
 * Other threads may look up a pointer meanwhile, of a block in another segment. They may still count this
 * segment, and combine the address of one moment with the length of another: see page_in_segment.
 */
void space_drop_last(struct space *space) {
    size_t number = segment_count(space) - 1;
    struct segment *segment = &space->segment[number];
    atomic_store_explicit(&space->segments, number, memory_order_release);
    atomic_store_explicit(&segment->bytes, 0, memory_order_release);
    atomic_store_explicit(&segment->page_end, first_page_of(segment), memory_order_relaxed);
    size_t at = 0;
    while (indexed(space, at) != number) {
        at++;
    }
    for (; at < number; at++) {
        set_indexed(space, at, indexed(space, at + 1));
    }
    space->page_end = first_page_of(segment) - (number == 0 ? 0 : 1);
    size_t guard = guard_bytes(segment->region.reserved);
    segment->region.base -= guard;
    segment->region.reserved += 2 * guard;
    address_range_release(&segment->region);
}

/* Enough for all memory twice, so that nearly every block is in the first segment. */
static size_t first_segment_bytes(void) {
    size_t bytes = MIN_FIRST_BYTES;
    for (size_t memory = memory_total_bytes(); bytes / 2 < memory && bytes < MAX_FIRST_BYTES;) {
        bytes *= 2;
    }
    return bytes;
}

bool space_init(struct space *space, size_t bytes, size_t bitmap_words) {
    space->page_size = vm_page_size();
    space->page_shift = (uint32_t)__builtin_ctzll(space->page_size);
    space->page_end = 1;

    size_t limit = vm_limit_bytes();
    size_t pages = size_min(limit, bytes) >> space->page_shift;
    for (;; pages /= 2) {
        bytes = pages << space->page_shift;
        if (bytes < MIN_SEGMENT_BYTES) {
            return false;
        }
        space->max_pages = pages + 2 + MAX_SEGMENTS;
        bool whole = limit == SIZE_MAX && bytes >= MIN_SPACE_BYTES;
        if (reserve_metadata(space, bitmap_words) &&
            (!whole || add_segment(space, size_min(bytes, first_segment_bytes())))) {
            break;
        }
        release_metadata(space);
    }
    space->class_of = (uint8_t *)space->page_tables[CLASS_TABLE].base;
    space->first_classes = space->class_of + 1;
    space->span_of = (uint32_t *)(void *)space->page_tables[SPAN_TABLE].base;
    space->users_of = (uint16_t *)(void *)space->page_tables[USER_TABLE].base;
    if (segment_count(space) == 1) {
        /* The fast path of free reads the class of any address in the segment. */
        vm_make_readable(space->class_of, space->page_end + 1);
        space->base = (uintptr_t)space->segment[0].region.base;
        space->quanta = space->segment[0].region.reserved >> SPACE_QUANTUM_SHIFT;
    }
    return reach_metadata(space, 1);
}

void space_limit(struct space *space, size_t bytes) {
    struct segment *first = &space->segment[0];
    if (segment_count(space) != 1 || space->quanta == 0 || bytes / 2 > first->region.reserved) {
        return;
    }
    address_range_trim(&first->region, 0);
    size_t reserved = first->region.reserved;
    atomic_store_explicit(&first->bytes, reserved, memory_order_release);
    __atomic_store_n(&space->quanta, reserved >> SPACE_QUANTUM_SHIFT, __ATOMIC_RELAXED);
    space->page_end = first_page_of(first) + (reserved >> space->page_shift);
    size_t each = PAGE_METADATA_BYTES + space->spans.span_bytes / PAGES_PER_SPAN;
    space->max_pages =
        size_min(space->max_pages, space->page_end + bytes / LIMIT_SHARE / each + MAX_SEGMENTS);
    for (int i = 0; i < PAGE_TABLES; i++) {
        address_range_trim(&space->page_tables[i], (space->max_pages + 1) * entry_bytes[i]);
    }
    span_table_trim(&space->spans, spans_for(space->max_pages));
}

/* Commits from the end of the last segment; *extended pages, or none. */
static uint32_t extend_last(struct space *space, size_t pages, size_t *extended) {
    size_t count = segment_count(space);
    if (count == 0) {
        return 0;
    }
    struct segment *segment = &space->segment[count - 1];
    struct address_range *region = &segment->region;
    size_t left = (region->reserved - region->committed) >> space->page_shift;
    if (left < pages) {
        return 0;
    }
    uint32_t first = usable_end(space, segment);
    size_t step =
        size_min(size_max(region->committed / 4, MIN_STEP_BYTES), MAX_STEP_BYTES) >> space->page_shift;
    size_t tries[] = {size_min(size_max(pages, step), left), pages};
    for (int i = 0; i < 2; i++) {
        size_t bytes = tries[i] << space->page_shift;
        if (reach_metadata(space, first + tries[i]) && vm_commit(region->base + region->committed, bytes)) {
            region->committed += bytes;
            atomic_store_explicit(&segment->page_end, first + (uint32_t)tries[i], memory_order_release);
            *extended = tries[i];
            return first;
        }
    }
    return 0;
}

uint32_t space_extend(struct space *space, size_t pages, size_t *extended) {
    if (pages > space->max_pages) {
        return 0;
    }
    uint32_t first = extend_last(space, pages, extended);
    if (first != 0) {
        return first;
    }
    /* Segments grow with the space, so that few are needed; where that is too much, as little as will do. */
    size_t all = space->page_end << space->page_shift;
    size_t needed = size_max(pages << space->page_shift, MIN_SEGMENT_BYTES);
    if (add_segment(space, size_max(needed, all / 4 / space->page_size * space->page_size)) ||
        add_segment(space, needed) || add_segment(space, pages << space->page_shift)) {
        return extend_last(space, pages, extended);
    }
    return 0;
}

/* The last of count segments that begins at or below a page; NULL if all begin above it. */
static const struct segment *segment_of_page(const struct space *space, size_t count, uint32_t page) {
    size_t low = 0;
    for (size_t high = count; low < high;) {
        size_t middle = (low + high) / 2;
        if (first_page_of(&space->segment[middle]) <= page) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low > 0 ? &space->segment[low - 1] : NULL;
}

bool space_is_usable(const struct space *space, uint32_t page) {
    size_t count = atomic_load_explicit(&space->segments, memory_order_acquire);
    const struct segment *segment = segment_of_page(space, count, page);
    return segment != NULL && page < atomic_load_explicit(&segment->page_end, memory_order_acquire);
}

bool space_ends_at(const struct space *space, uint32_t page) {
    size_t count = segment_count(space);
    return count > 0 && page == usable_end(space, &space->segment[count - 1]);
}

char *space_address(const struct space *space, uint32_t page) {
    const struct segment *segment = segment_of_page(space, segment_count(space), page);
    return segment->region.base + ((size_t)(page - first_page_of(segment)) << space->page_shift);
}

/*
 * The page of an address within a segment; 0 if it is outside. A segment that is released loses its length
 * first, and one that takes its place has its address before its length: a length that was read between two
 * reads of the same address belongs to that address.
 */
static uint32_t page_in_segment(const struct space *space, size_t number, uintptr_t address) {
    const struct segment *segment = &space->segment[number];
    uintptr_t base = segment_base(space, number);
    size_t bytes = atomic_load_explicit(&segment->bytes, memory_order_acquire);
    if (address - base >= bytes || segment_base(space, number) != base) {
        return 0;
    }
    return first_page_of(segment) + (uint32_t)((address - base) >> space->page_shift);
}

/*
 * A binary search in the index. While another thread changes the index, the search may end at a segment that
 * does not hold the address. It cannot return a wrong page, since that of a block in use does not change. So
 * only a miss needs the linear search.
 */
uint32_t space_page_elsewhere(const struct space *space, uintptr_t address) {
    size_t count = atomic_load_explicit(&space->segments, memory_order_acquire);
    size_t low = 0;
    for (size_t high = count; low < high;) {
        size_t middle = (low + high) / 2;
        uint8_t number = indexed(space, middle);
        if (number < count && segment_base(space, number) <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    uint8_t found = low > 0 ? indexed(space, low - 1) : 0;
    uint32_t page = found < count ? page_in_segment(space, found, address) : 0;
    for (size_t number = 0; page == 0 && number < count; number++) {
        page = page_in_segment(space, number, address);
    }
    return page;
}

size_t space_metadata_bytes(const struct space *space) {
    size_t pages = 0;
    for (size_t i = 0; i < segment_count(space); i++) {
        pages += space->segment[i].region.committed >> space->page_shift;
    }
    return pages * PAGE_METADATA_BYTES + space->spans.end * space->spans.span_bytes;
}

size_t space_reserved_bytes(const struct space *space) {
    size_t bytes = 0;
    for (size_t i = 0; i < segment_count(space); i++) {
        bytes += space->segment[i].region.reserved;
    }
    return bytes;
}
