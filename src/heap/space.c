#include "heap/space.h"

#include <string.h>

#define SPACE_BYTES_LEAST   ((size_t)1 << 30) /* below this, segments do better */
#define FIRST_BYTES_LEAST   ((size_t)16 << 30)
#define FIRST_BYTES_MOST    ((size_t)1 << 44)
#define SEGMENT_BYTES_LEAST ((size_t)4 << 20)
#define STEP_BYTES_LEAST    ((size_t)8 << 20)
#define GUARD_BYTES         ((size_t)1 << 20)
#define LIMIT_SHARE         16 /* one part in so many of a limit may be reserved for metadata */
#define STEP_BYTES_MOST     ((size_t)1 << 30)
#define IDLE_BYTES_LEAST    ((size_t)256 << 10) /* of descriptors, before they are worth a purge */
#define SPAN_LEAST_PAGES    2                   /* on average: descriptors for half of all pages are enough */

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t most(size_t a, size_t b) {
    return a > b ? a : b;
}

static bool reserve(struct os_region *region, size_t bytes, size_t page_size) {
    region->reserved = (bytes + page_size - 1) & ~(page_size - 1);
    region->committed = 0;
    region->base = os_reserve(region->reserved, page_size);
    return region->base != NULL;
}

/* Room for what is known of so many pages. */
static bool reserve_metadata(struct space *space) {
    size_t pages = space->pages_most + 1;
    size_t words = space->spans_most / 64 + 1;
    return reserve(&space->classes_region, pages, space->page_size) &&
           reserve(&space->spans_of_region, pages * sizeof *space->span_of, space->page_size) &&
           reserve(&space->users_region, pages * sizeof *space->users_of, space->page_size) &&
           reserve(&space->spans_region, space->spans_most * space->span_bytes, space->page_size) &&
           reserve(&space->free_spans_region, words * sizeof(uint64_t), space->page_size) &&
           reserve(&space->free_words_region, (words / 64 + 1) * sizeof(uint64_t), space->page_size);
}

/* Page 0, which is nobody's, and those at the borders of segments need their metadata too. */
static bool reach_metadata(struct space *space, size_t page_end) {
    return os_region_reach(&space->classes_region, page_end + 1) &&
           os_region_reach(&space->spans_of_region, (page_end + 1) * sizeof *space->span_of) &&
           os_region_reach(&space->users_region, (page_end + 1) * sizeof *space->users_of);
}

static uintptr_t segment_base(const struct space *space, size_t number) {
    return atomic_load_explicit(&space->segment[number].base, memory_order_acquire);
}

static uint32_t first_page_of(const struct segment *segment) {
    return atomic_load_explicit(&segment->first_page, memory_order_relaxed);
}

/* Inserts the newest segment into the index by address. */
static void index_segment(struct space *space, size_t number) {
    size_t at = number;
    for (; at > 0; at--) {
        uint8_t below = atomic_load_explicit(&space->by_address[at - 1], memory_order_relaxed);
        if (segment_base(space, below) < segment_base(space, number)) {
            break;
        }
        atomic_store_explicit(&space->by_address[at], below, memory_order_relaxed);
    }
    atomic_store_explicit(&space->by_address[at], (uint8_t)number, memory_order_relaxed);
}

/* The first has wide guards: what lies next to it is metadata. The others have little room. */
static size_t guard_bytes(size_t bytes) {
    return bytes >= SPACE_BYTES_LEAST ? GUARD_BYTES : 0;
}

static bool add_segment(struct space *space, size_t bytes) {
    size_t count = atomic_load_explicit(&space->segments, memory_order_relaxed);
    size_t pages = bytes >> space->page_shift;
    if (count == SEGMENTS_MOST || space->page_end + pages + 1 > space->pages_most) {
        return false;
    }
    struct segment *segment = &space->segment[count];
    size_t guard = guard_bytes(bytes);
    if (!reserve(&segment->region, bytes + 2 * guard, space->page_size)) {
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
    size_t count = atomic_load_explicit(&space->segments, memory_order_relaxed);
    if (count == 0 || (count == 1 && space->quanta > 0)) { /* which the fast path of free knows */
        return 0;
    }
    const struct segment *last = &space->segment[count - 1];
    *end = atomic_load_explicit(&last->page_end, memory_order_relaxed);
    return first_page_of(last);
}

/*
 * Other threads may look up a pointer meanwhile, of a block in another segment. They may still count this
 * one, and find the address of one time with the length of another: see page_in_segment.
 */
void space_drop_last(struct space *space) {
    size_t number = atomic_load_explicit(&space->segments, memory_order_relaxed) - 1;
    struct segment *segment = &space->segment[number];
    atomic_store_explicit(&space->segments, number, memory_order_release);
    atomic_store_explicit(&segment->bytes, 0, memory_order_release);
    atomic_store_explicit(&segment->page_end, first_page_of(segment), memory_order_relaxed);
    size_t at = 0;
    while (atomic_load_explicit(&space->by_address[at], memory_order_relaxed) != number) {
        at++;
    }
    for (; at < number; at++) {
        uint8_t above = atomic_load_explicit(&space->by_address[at + 1], memory_order_relaxed);
        atomic_store_explicit(&space->by_address[at], above, memory_order_relaxed);
    }
    space->page_end = first_page_of(segment) - (number == 0 ? 0 : 1);
    size_t guard = guard_bytes(segment->region.reserved);
    os_release(segment->region.base - guard, segment->region.reserved + 2 * guard);
    segment->region = (struct os_region){0};
}

/* Enough for all memory twice, so that nearly every block lies in the first segment. */
static size_t first_segment_bytes(void) {
    size_t bytes = FIRST_BYTES_LEAST;
    for (size_t memory = os_memory_bytes(); bytes / 2 < memory && bytes < FIRST_BYTES_MOST;) {
        bytes *= 2;
    }
    return bytes;
}

bool space_init(struct space *space, size_t bytes, size_t bitmap_words) {
    space->page_size = os_page_size();
    space->page_shift = (uint32_t)__builtin_ctzll(space->page_size);
    space->span_bytes = sizeof(struct span) + bitmap_words * sizeof(uint64_t);
    space->page_end = 1;

    size_t limit = os_address_space_limit();
    bool segmented = limit != SIZE_MAX;
    size_t pages = least(segmented ? limit : bytes, bytes) >> space->page_shift;
    size_t first = first_segment_bytes();
    for (;;) {
        space->pages_most = pages + 2 + SEGMENTS_MOST;
        space->spans_most = most(space->pages_most / SPAN_LEAST_PAGES, 1024);
        bool whole = !segmented && (pages << space->page_shift) >= SPACE_BYTES_LEAST;
        struct space blank = *space;
        if (reserve_metadata(space) &&
            (!whole || add_segment(space, least(pages << space->page_shift, first)))) {
            break;
        }
        struct os_region *regions[] = {&space->classes_region,    &space->spans_of_region,
                                       &space->users_region,      &space->spans_region,
                                       &space->free_spans_region, &space->free_words_region};
        for (size_t i = 0; i < sizeof regions / sizeof regions[0]; i++) {
            if (regions[i]->base != NULL) {
                os_release(regions[i]->base, regions[i]->reserved);
            }
        }
        *space = blank;
        pages /= 2;
        if (pages << space->page_shift < SEGMENT_BYTES_LEAST) {
            return false;
        }
    }
    /* The fast path of free asks for the class of whatever it is given. */
    if (atomic_load_explicit(&space->segments, memory_order_relaxed) == 1) {
        os_make_readable(space->classes_region.base, space->page_end + 1);
    }
    if (!reach_metadata(space, 1) || !os_region_reach(&space->spans_region, space->span_bytes)) {
        return false;
    }
    space->class_of = (uint8_t *)space->classes_region.base;
    space->span_of = (uint32_t *)(void *)space->spans_of_region.base;
    space->users_of = (uint16_t *)(void *)space->users_region.base;
    space->spans_end = 1; /* number 0 is that of no span: unused for ever */
    if (atomic_load_explicit(&space->segments, memory_order_relaxed) == 1) {
        space->base = (uintptr_t)space->segment[0].region.base;
        space->quanta = space->segment[0].region.reserved >> SPACE_QUANTUM_SHIFT;
    }
    space->first_classes = space->class_of + 1;
    return true;
}

void space_limit(struct space *space, size_t bytes) {
    struct segment *first = &space->segment[0];
    if (atomic_load_explicit(&space->segments, memory_order_relaxed) != 1 || space->quanta == 0 ||
        bytes / 2 > first->region.reserved) {
        return;
    }
    os_region_trim(&first->region, 0);
    atomic_store_explicit(&first->bytes, first->region.reserved, memory_order_release);
    __atomic_store_n(&space->quanta, first->region.reserved >> SPACE_QUANTUM_SHIFT, __ATOMIC_RELAXED);
    space->page_end = first_page_of(first) + (first->region.reserved >> space->page_shift);
    size_t each = sizeof *space->class_of + sizeof *space->span_of + sizeof *space->users_of +
                  space->span_bytes / SPAN_LEAST_PAGES;
    space->pages_most =
        least(space->pages_most, space->page_end + bytes / LIMIT_SHARE / each + SEGMENTS_MOST);
    space->spans_most = least(space->spans_most, most(space->pages_most / SPAN_LEAST_PAGES, 1024));
    size_t pages = space->pages_most + 1;
    size_t words = space->spans_most / 64 + 1;
    os_region_trim(&space->classes_region, pages);
    os_region_trim(&space->spans_of_region, pages * sizeof *space->span_of);
    os_region_trim(&space->users_region, pages * sizeof *space->users_of);
    os_region_trim(&space->spans_region, space->spans_most * space->span_bytes);
    os_region_trim(&space->free_spans_region, words * sizeof(uint64_t));
    os_region_trim(&space->free_words_region, (words / 64 + 1) * sizeof(uint64_t));
}

/* Commits from the end of the last segment; *got pages, or none. */
static uint32_t extend_last(struct space *space, size_t pages, size_t *got) {
    size_t count = atomic_load_explicit(&space->segments, memory_order_relaxed);
    if (count == 0) {
        return 0;
    }
    struct segment *segment = &space->segment[count - 1];
    struct os_region *region = &segment->region;
    size_t left = (region->reserved - region->committed) >> space->page_shift;
    if (left < pages) {
        return 0;
    }
    size_t step = least(most(region->committed / 4, STEP_BYTES_LEAST), STEP_BYTES_MOST) >> space->page_shift;
    size_t tries[] = {least(most(pages, step), left), pages};
    for (int i = 0; i < 2; i++) {
        uint32_t first = first_page_of(segment) + (uint32_t)(region->committed >> space->page_shift);
        size_t bytes = tries[i] << space->page_shift;
        if (reach_metadata(space, first + tries[i]) && os_commit(region->base + region->committed, bytes)) {
            region->committed += bytes;
            atomic_store_explicit(&segment->page_end, first + (uint32_t)tries[i], memory_order_release);
            *got = tries[i];
            return first;
        }
    }
    return 0;
}

uint32_t space_extend(struct space *space, size_t pages, size_t *got) {
    if (pages > space->pages_most) {
        return 0;
    }
    uint32_t first = extend_last(space, pages, got);
    if (first != 0) {
        return first;
    }
    /* Segments grow with what there is, so that few are needed; where that is too much, as little as will do.
     */
    size_t all = space->page_end << space->page_shift;
    size_t needed = most(pages << space->page_shift, SEGMENT_BYTES_LEAST);
    if (add_segment(space, most(needed, all / 4 / space->page_size * space->page_size)) ||
        add_segment(space, needed) || add_segment(space, pages << space->page_shift)) {
        return extend_last(space, pages, got);
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
    size_t count = atomic_load_explicit(&space->segments, memory_order_relaxed);
    if (count == 0) {
        return false;
    }
    const struct segment *last = &space->segment[count - 1];
    return page == first_page_of(last) + (last->region.committed >> space->page_shift);
}

char *space_address(const struct space *space, uint32_t page) {
    size_t count = atomic_load_explicit(&space->segments, memory_order_relaxed);
    const struct segment *segment = segment_of_page(space, count, page);
    return segment->region.base + ((size_t)(page - first_page_of(segment)) << space->page_shift);
}

/*
 * The page of an address within a segment; 0 if it is outside. A segment that goes loses its length first,
 * and one that comes in its place has its address before its length: who reads a length between two reads of
 * the same address has read what was, or is, together.
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
        uint8_t number = atomic_load_explicit(&space->by_address[middle], memory_order_relaxed);
        if (number < count && segment_base(space, number) <= address) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low > 0) {
        uint8_t number = atomic_load_explicit(&space->by_address[low - 1], memory_order_relaxed);
        uint32_t page = number < count ? page_in_segment(space, number, address) : 0;
        if (page != 0) {
            return page;
        }
    }
    for (size_t number = 0; number < count; number++) {
        uint32_t page = page_in_segment(space, number, address);
        if (page != 0) {
            return page;
        }
    }
    return 0;
}

/*
 * Free descriptors are bits, not a list: their memory may be given back. A set bit of free_words says that a
 * word of free_spans has a set bit.
 */
struct span *space_take_span(struct space *space) {
    uint64_t *words = (uint64_t *)(void *)space->free_words_region.base;
    uint64_t *bits = (uint64_t *)(void *)space->free_spans_region.base;
    size_t committed = space->free_words_region.committed / sizeof *words;
    size_t word = space->lowest_free_word;
    while (word < committed && words[word] == 0) {
        word++;
    }
    space->lowest_free_word = word;
    size_t number;
    if (word < committed) {
        size_t row = word * 64 + (size_t)__builtin_ctzll(words[word]);
        number = row * 64 + (size_t)__builtin_ctzll(bits[row]);
        bits[row] &= bits[row] - 1;
        if (bits[row] == 0) {
            words[word] &= words[word] - 1;
        }
        space->spans_unused--;
    } else {
        number = space->spans_end;
        if (number >= space->spans_most ||
            !os_region_reach(&space->spans_region, (number + 1) * space->span_bytes) ||
            !os_region_reach(&space->free_spans_region, (number / 64 + 1) * sizeof(uint64_t)) ||
            !os_region_reach(&space->free_words_region, (number / 4096 + 1) * sizeof(uint64_t))) {
            return NULL;
        }
        space->spans_end++;
        /* The words just reached are all zero: they stay below nothing. */
    }
    struct span *span = space_span(space, (uint32_t)number);
    memset(span, 0, space->span_bytes);
    return span;
}

void space_drop_span(struct space *space, struct span *span) {
    uint64_t *words = (uint64_t *)(void *)space->free_words_region.base;
    uint64_t *bits = (uint64_t *)(void *)space->free_spans_region.base;
    size_t number = space_span_number(space, span);
    span->state = SPAN_UNUSED;
    space->spans_unused++;
    space->spans_dropped++;
    bits[number / 64] |= (uint64_t)1 << (number % 64);
    words[number / 4096] |= (uint64_t)1 << (number / 64 % 64);
    space->lowest_free_word = least(space->lowest_free_word, number / 4096);
}

/* Marks descriptors [first, end) as unused or as in use, without touching them. */
static void mark_unused(struct space *space, size_t first, size_t end, bool unused) {
    uint64_t *words = (uint64_t *)(void *)space->free_words_region.base;
    uint64_t *bits = (uint64_t *)(void *)space->free_spans_region.base;
    for (size_t number = first; number < end; number++) {
        uint64_t bit = (uint64_t)1 << (number % 64);
        uint64_t row = (uint64_t)1 << (number / 64 % 64);
        if (unused) {
            bits[number / 64] |= bit;
            words[number / 4096] |= row;
        } else {
            bits[number / 64] &= ~bit;
            words[number / 4096] &= bits[number / 64] == 0 ? ~row : ~(uint64_t)0;
        }
    }
    if (unused) {
        space->lowest_free_word = least(space->lowest_free_word, first / 4096);
    }
}

static bool is_unused(const struct space *space, size_t number) {
    const uint64_t *bits = (const uint64_t *)(const void *)space->free_spans_region.base;
    return (bits[number / 64] >> (number % 64) & 1) != 0;
}

/* Descriptors that lie on a range, in part or whole. */
static void spans_on(const struct space *space, const struct iovec *range, size_t *first, size_t *end) {
    size_t offset = (size_t)((const char *)range->iov_base - space->spans_region.base);
    *first = offset / space->span_bytes;
    *end = (offset + range->iov_len + space->span_bytes - 1) / space->span_bytes;
}

size_t space_take_idle(struct space *space, struct iovec *ranges, size_t most_ranges) {
    if (least(space->spans_dropped, space->spans_unused) * space->span_bytes < IDLE_BYTES_LEAST ||
        space->spans_unused < space->spans_end / 2) {
        return 0;
    }
    space->spans_dropped = 0;
    size_t count = 0;
    size_t pages = space->spans_end * space->span_bytes / space->page_size;
    for (size_t page = 0; page < pages; page++) {
        struct iovec one = {space->spans_region.base + page * space->page_size, space->page_size};
        size_t first;
        size_t end;
        spans_on(space, &one, &first, &end);
        size_t number = first;
        while (number < end && is_unused(space, number)) {
            number++;
        }
        if (number < end) {
            continue;
        }
        struct iovec *last = count == 0 ? NULL : &ranges[count - 1];
        if (last != NULL && (char *)last->iov_base + last->iov_len == one.iov_base) {
            last->iov_len += one.iov_len;
        } else if (count < most_ranges) {
            ranges[count++] = one;
        }
    }
    for (size_t i = 0; i < count; i++) {
        size_t first;
        size_t end;
        spans_on(space, &ranges[i], &first, &end);
        mark_unused(space, first, end, false);
        space->spans_unused -= end - first;
    }
    return count;
}

void space_put_idle(struct space *space, const struct iovec *ranges, size_t count) {
    for (size_t i = 0; i < count; i++) {
        size_t first;
        size_t end;
        spans_on(space, &ranges[i], &first, &end);
        mark_unused(space, first, end, true);
        space->spans_unused += end - first;
    }
}

size_t space_metadata_bytes(const struct space *space) {
    size_t pages = 0;
    size_t count = atomic_load_explicit(&space->segments, memory_order_relaxed);
    for (size_t i = 0; i < count; i++) {
        pages += space->segment[i].region.committed >> space->page_shift;
    }
    return pages * (sizeof *space->class_of + sizeof *space->span_of + sizeof *space->users_of) +
           space->spans_end * space->span_bytes;
}

size_t space_reserved_bytes(const struct space *space) {
    size_t bytes = 0;
    size_t count = atomic_load_explicit(&space->segments, memory_order_relaxed);
    for (size_t i = 0; i < count; i++) {
        bytes += space->segment[i].region.reserved;
    }
    return bytes;
}
