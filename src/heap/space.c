#include "heap/space.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/memory.h"

#define MIN_SPACE_BYTES   ((size_t)1 << 30) /* if less can be had, only short segments are used */
#define MIN_FIRST_BYTES   ((size_t)16 << 30)
#define MAX_FIRST_BYTES   ((size_t)1 << 44)
#define MAX_PARTS_BYTES   ((size_t)1 << 43) /* of all parts */
#define PARTS_FACTOR      4                 /* all parts are this many times as long as one range would be */
#define MIN_PART_BYTES    ((size_t)1 << 30)
#define MIN_SEGMENT_BYTES ((size_t)4 << 20)
#define MIN_STEP_BYTES    ((size_t)8 << 20)
#define MAX_STEP_BYTES    ((size_t)1 << 30)
#define GUARD_BYTES       ((size_t)1 << 20)
#define MIN_HOLE_BYTES    ((size_t)256 << 10) /* a smaller hole within a segment is not worth a slot */
#define NUMBERS_PER_PAGE  2 /* page numbers for each page of a limit; released segments leave gaps */
#define NUMBERS_IF_RAISED 3 /* page numbers for each page of a limit that may be raised */
#define NO_SEGMENT        MAX_SEGMENTS
#define MAX_SPLIT         (MAX_SEGMENTS / 2) /* the other slots are reserved for new segments */
#define PAGES_PER_SPAN    2 /* at least, on average; so descriptors for half of all pages are enough */
#define MIN_SPANS         1024

static const size_t entry_bytes[] = {
    [CLASS_TABLE] = sizeof(uint8_t), [SPAN_TABLE] = sizeof(uint32_t), [USER_TABLE] = sizeof(uint16_t)};
#define PAGE_METADATA_BYTES (sizeof(uint8_t) + sizeof(uint32_t) + sizeof(uint16_t))

static size_t spans_for(size_t pages) {
    return size_max(pages / PAGES_PER_SPAN, MIN_SPANS);
}

static bool reserve_metadata(struct space *space, size_t pages, size_t bitmap_words) {
    size_t bytes[PAGE_TABLES];
    for (int i = 0; i < PAGE_TABLES; i++) {
        bytes[i] = (space->max_pages + 1) * entry_bytes[i];
    }
    return span_table_init(&space->spans, spans_for(pages), bitmap_words) &&
           address_ranges_reserve(space->page_tables, bytes, PAGE_TABLES);
}

static void release_metadata(struct space *space) {
    span_table_release(&space->spans);
    for (int i = 0; i < PAGE_TABLES; i++) {
        address_range_release(&space->page_tables[i]);
    }
}

/* Numbers that belong to no segment, such as 0, have metadata, too. */
static bool reach_metadata(struct space *space, size_t page_end) {
    bool reached = true;
    for (int i = 0; i < PAGE_TABLES; i++) {
        reached = reached && address_range_reach(&space->page_tables[i], (page_end + 1) * entry_bytes[i]);
    }
    return reached;
}

/* For the owner of the heap. Other threads read the count with acquire. */
static size_t segment_count(const struct space *space) {
    return atomic_load_explicit(&space->segments, memory_order_relaxed);
}

static uintptr_t segment_base(const struct space *space, size_t number) {
    return atomic_load_explicit(&space->segment[number].base, memory_order_acquire);
}

static uint32_t first_page_of(const struct segment *segment) {
    return atomic_load_explicit(&segment->first_page, memory_order_acquire);
}

/* Returns the number after the last usable page of a segment. */
static uint32_t usable_end(const struct space *space, const struct segment *segment) {
    return first_page_of(segment) + (uint32_t)(segment->region.committed >> space->page_shift);
}

static bool is_empty(const struct segment *segment) {
    return segment->region.base == NULL;
}

/* Returns whether the slot is that of the long first segment, which the fast
 * path of free knows. */
static bool is_long(const struct space *space, size_t number) {
    return number == 0 && space->quanta > 0;
}

/* ---- the orders ---- */

static uint8_t ordered(const struct space *space, enum segment_order order, size_t at) {
    return atomic_load_explicit(&space->order[order][at], memory_order_relaxed);
}

static void set_ordered(struct space *space, enum segment_order order, size_t at, size_t number) {
    atomic_store_explicit(&space->order[order][at], (uint8_t)number, memory_order_relaxed);
}

static uintptr_t key_of(const struct space *space, enum segment_order order, size_t number) {
    return order == BY_ADDRESS ? segment_base(space, number) : first_page_of(&space->segment[number]);
}

/* Moves a slot to the place of its current keys. */
static void reorder(struct space *space, size_t number) {
    size_t count = segment_count(space);
    for (enum segment_order order = BY_ADDRESS; order < SEGMENT_ORDERS; order++) {
        uintptr_t key = key_of(space, order, number);
        size_t at = 0;
        while (ordered(space, order, at) != number) {
            calm_assert(at + 1 < count, number, count);
            at++;
        }
        for (; at > 0 && key_of(space, order, ordered(space, order, at - 1)) > key; at--) {
            set_ordered(space, order, at, ordered(space, order, at - 1));
        }
        for (; at + 1 < count && key_of(space, order, ordered(space, order, at + 1)) < key; at++) {
            set_ordered(space, order, at, ordered(space, order, at + 1));
        }
        set_ordered(space, order, at, number);
    }
}

/* Returns the last slot whose key is not above `key`, or NO_SEGMENT if there is
 * none. May return a wrong slot to another thread while the owner changes the
 * order. */
static size_t space_search(const struct space *space, enum segment_order order, size_t count, uintptr_t key) {
    size_t low = 0;
    for (size_t high = count; low < high;) {
        size_t middle = (low + high) / 2;
        uint8_t number = ordered(space, order, middle);
        if (number < count && key_of(space, order, number) <= key) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    uint8_t found = low > 0 ? ordered(space, order, low - 1) : 0;
    return low > 0 && found < count ? found : NO_SEGMENT;
}

/* ---- slots ---- */

/* Returns an empty slot, or NO_SEGMENT if there is none. */
static size_t empty_slot(struct space *space) {
    size_t count = segment_count(space);
    for (size_t number = 0; number < count; number++) {
        if (is_empty(&space->segment[number])) {
            return number;
        }
    }
    if (count < MAX_SEGMENTS) {
        struct segment *segment = &space->segment[count];
        atomic_store_explicit(&segment->base, UINTPTR_MAX, memory_order_relaxed);
        atomic_store_explicit(&segment->first_page, UINT32_MAX, memory_order_relaxed);
        set_ordered(space, BY_ADDRESS, count, count);
        set_ordered(space, BY_PAGE, count, count);
        /* A release store is enough: a thread that looks up a block of the new
         * segment received the block from a thread that knew the new count. */
        atomic_store_explicit(&space->segments, count + 1, memory_order_release);
    }
    return count;
}

static void drop_empty_slots(struct space *space) {
    size_t count = segment_count(space);
    for (; count > 0 && is_empty(&space->segment[count - 1]); count--) {
        for (enum segment_order order = BY_ADDRESS; order < SEGMENT_ORDERS; order++) {
            size_t at = 0;
            while (ordered(space, order, at) != count - 1) {
                calm_assert(at + 1 < count, at, count);
                at++;
            }
            for (; at + 1 < count; at++) {
                set_ordered(space, order, at, ordered(space, order, at + 1));
            }
        }
        atomic_store_explicit(&space->segments, count - 1, memory_order_release);
    }
}

/* Fills a slot. Meanwhile another thread's lookup finds a page of the new
 * segment, or of the slot's old one, or none. The order of the stores ensures
 * this: see page_in_segment. */
static void fill_slot(struct space *space, size_t number, struct address_range region, uint32_t first) {
    calm_assert(number < segment_count(space) && region.base != NULL && first > 0, number);
    calm_assert(region.committed <= region.reserved, region.committed, region.reserved);
    struct segment *segment = &space->segment[number];
    segment->region = region;
    atomic_store_explicit(&segment->first_page, first, memory_order_release);
    atomic_store_explicit(&segment->page_end, usable_end(space, segment), memory_order_release);
    atomic_store_explicit(&segment->base, (uintptr_t)region.base, memory_order_release);
    atomic_store_explicit(&segment->bytes, region.reserved, memory_order_release);
    reorder(space, number);
}

/* Clears a slot. Meanwhile other threads may look up blocks of other segments:
 * see page_in_segment. */
static void clear_slot(struct space *space, size_t number) {
    calm_assert(!is_empty(&space->segment[number]), number);
    struct segment *segment = &space->segment[number];
    atomic_store_explicit(&segment->bytes, 0, memory_order_release);
    atomic_store_explicit(&segment->base, UINTPTR_MAX, memory_order_release);
    atomic_store_explicit(&segment->page_end, 0, memory_order_release);
    atomic_store_explicit(&segment->first_page, UINT32_MAX, memory_order_release);
    segment->region = (struct address_range){0};
    reorder(space, number);
    drop_empty_slots(space);
    if (space->growing == number) {
        space->growing = space->quanta > 0 ? 0 : NO_SEGMENT;
    }
}

static void set_reserved(struct space *space, size_t number, size_t bytes) {
    calm_assert(bytes >= space->segment[number].region.committed, number, bytes);
    atomic_store_explicit(&space->segment[number].bytes, bytes, memory_order_release);
    if (is_long(space, number)) {
        __atomic_store_n(&space->quanta, bytes >> SPACE_QUANTUM_SHIFT, __ATOMIC_RELAXED);
    }
}

/* ---- adding and releasing segments ---- */

/* Returns the start of the first gap in the page numbers that has room, or 0 if
 * there is none. The numbers behind the last segment are a gap, too. */
static uint32_t find_numbers(const struct space *space, size_t pages) {
    size_t next = 1;
    for (size_t at = 0; at < segment_count(space); at++) {
        const struct segment *segment = &space->segment[ordered(space, BY_PAGE, at)];
        if (next + pages < first_page_of(segment)) {
            break;
        }
        next = first_page_of(segment) + (segment->region.reserved >> space->page_shift) + 1;
    }
    return next + pages < space->max_pages ? (uint32_t)next : 0;
}

/* Releases the reserved end of the growing segment, before another segment is
 * added. The new reservation can take its place. */
static void stop_growing(struct space *space) {
    size_t number = space->growing;
    if (number == NO_SEGMENT || is_long(space, number)) {
        return;
    }
    struct address_range region = space->segment[number].region;
    if (region.committed == 0) {
        clear_slot(space, number);
        address_range_release(&region);
        return;
    }
    set_reserved(space, number, region.committed);
    address_range_trim(&space->segment[number].region, 0);
    space->growing = NO_SEGMENT;
}

/* Adds a segment, which grows from now on. The long segment gets wide guards,
 * since metadata is next to it. Address space is too scarce for wide guards
 * around short segments. */
static bool add_segment(struct space *space, size_t bytes, size_t guard) {
    stop_growing(space);
    uint32_t first = find_numbers(space, bytes >> space->page_shift);
    struct address_range region;
    if (first == 0 || !address_range_reserve(&region, bytes + 2 * guard)) {
        return false;
    }
    size_t number = empty_slot(space);
    if (number == NO_SEGMENT) {
        address_range_release(&region);
        return false;
    }
    region.base += guard;
    region.reserved -= 2 * guard;
    fill_slot(space, number, region, first);
    space->growing = number;
    return true;
}

bool space_release(struct space *space, uint32_t page, size_t pages) {
    size_t number = space_search(space, BY_PAGE, segment_count(space), page);
    calm_assert(number != NO_SEGMENT && pages > 0, page, pages);
    struct segment *segment = &space->segment[number];
    calm_assert(page >= first_page_of(segment) && page + pages <= usable_end(space, segment), page, pages);
    bool before = page > first_page_of(segment);
    bool after = page + pages < usable_end(space, segment);
    size_t bytes = pages << space->page_shift;
    if ((before && after && bytes < MIN_HOLE_BYTES) ||
        (is_long(space, number) && (!before || after || !space->limited))) {
        return false;
    }
    if (!after && number == space->growing) {
        stop_growing(space);
    }
    struct address_range region = segment->region;
    size_t offset = (size_t)(page - first_page_of(segment)) << space->page_shift;
    size_t rest = !after ? number : segment_count(space) < MAX_SPLIT ? empty_slot(space) : NO_SEGMENT;
    if (rest == NO_SEGMENT || ((before || after) && !vm_decommit(region.base + offset, bytes))) {
        drop_empty_slots(space);
        return false;
    }
    /* The order of these changes lets other threads find each remaining page at
     * every moment. */
    if (after) {
        size_t end = offset + bytes;
        fill_slot(space, rest,
                  (struct address_range){region.base + end, region.reserved - end, region.committed - end},
                  page + (uint32_t)pages);
        space->growing = space->growing == number ? rest : space->growing;
        atomic_fetch_add_explicit(&space->splits, 1, memory_order_release);
    }
    if (before) {
        segment->region.reserved = segment->region.committed = offset;
        atomic_store_explicit(&segment->page_end, page, memory_order_release);
        set_reserved(space, number, offset);
    } else {
        clear_slot(space, number);
    }
    /* The pages next to those that stay become their guards. */
    size_t guard = 2 * space->page_size;
    vm_release(region.base + offset + (before ? guard : 0),
               bytes - (before ? guard : 0) - (after ? guard : 0));
    return true;
}

/* Returns at least twice the machine's memory, so that nearly every block is in
 * the first segment. */
static size_t first_segment_bytes(void) {
    size_t bytes = MIN_FIRST_BYTES;
    for (size_t memory = memory_total_bytes(); bytes / 2 < memory && bytes < MAX_FIRST_BYTES;) {
        bytes *= 2;
    }
    return bytes;
}

/* Stores what lookups read. */
static void set_tables(struct space *space) {
    space->class_of = (uint8_t *)space->page_tables[CLASS_TABLE].base;
    space->first_classes = space->class_of + 1;
    space->span_of = (uint32_t *)(void *)space->page_tables[SPAN_TABLE].base;
    space->users_of = (uint16_t *)(void *)space->page_tables[USER_TABLE].base;
    if (segment_count(space) == 1) {
        space->base = (uintptr_t)space->segment[0].region.base;
        space->quanta = space->segment[0].region.reserved >> SPACE_QUANTUM_SHIFT;
    }
}

static size_t map_page(const struct page_map *map) {
    return (size_t)1 << map->page_shift;
}

bool space_init(struct space *space, size_t bytes, size_t bitmap_words) {
    space->page_size = vm_page_size();
    space->page_shift = (uint32_t)__builtin_ctzll(space->page_size);
    calm_assert(space->page_size == (size_t)1 << space->page_shift, space->page_size);
    space->growing = NO_SEGMENT;

    size_t limit = vm_limit_bytes();
    size_t pages = size_min(limit, bytes) >> space->page_shift;
    for (;; pages /= 2) {
        bytes = pages << space->page_shift;
        if (bytes < MIN_SEGMENT_BYTES) {
            return false;
        }
        bool whole = limit == SIZE_MAX && bytes >= MIN_SPACE_BYTES;
        space->limited = !whole;
        space->max_pages = pages * (whole ? 1 : NUMBERS_PER_PAGE) + 2 + MAX_SEGMENTS;
        if (reserve_metadata(space, pages, bitmap_words) &&
            (!whole || add_segment(space, size_min(bytes, first_segment_bytes()), GUARD_BYTES))) {
            break;
        }
        release_metadata(space);
    }
    set_tables(space);
    if (segment_count(space) == 1) {
        /* The fast path of free reads the class of any address in the
         * segment. */
        size_t page_end =
            first_page_of(&space->segment[0]) + (space->segment[0].region.reserved >> space->page_shift);
        vm_make_readable(space->class_of, page_end + 1);
    }
    bool ready = reach_metadata(space, 1);
    if (!ready) {
        release_metadata(space);
        if (segment_count(space) == 1) {
            const struct address_range *region = &space->segment[0].region;
            vm_release(region->base - GUARD_BYTES, region->reserved + 2 * GUARD_BYTES);
        }
    }
    return ready;
}

/* The class of the last page of a part is never used, so the tables of two
 * parts do not overlap. */
bool space_reserve_parts(struct page_map *map, unsigned parts, size_t bytes) {
    calm_assert(parts > 1 && parts <= SPACE_MAX_PARTS, parts);
    size_t all = size_min(size_min(bytes, first_segment_bytes()) * PARTS_FACTOR, MAX_PARTS_BYTES);
    size_t part = all / parts;
    uint32_t shift = 63 - (uint32_t)__builtin_clzll(part);
    part = (size_t)1 << shift;
    struct address_range range;
    struct address_range classes;
    if (vm_limit_bytes() != SIZE_MAX || part < MIN_PART_BYTES ||
        !address_range_reserve(&range, parts * part + 2 * GUARD_BYTES)) {
        return false;
    }
    uint32_t page_shift = (uint32_t)__builtin_ctzll(vm_page_size());
    if (!address_range_reserve(&classes, (parts * part >> page_shift) + 1)) {
        address_range_release(&range);
        return false;
    }
    vm_make_readable(classes.base, classes.reserved);
    *map = (struct page_map){
        .base = (uintptr_t)range.base + GUARD_BYTES,
        .quanta = parts * part >> SPACE_QUANTUM_SHIFT,
        .first_classes = (uint8_t *)classes.base + 1,
        .page_shift = page_shift,
        .part_shift = shift,
        .parts = parts,
    };
    return true;
}

void space_unreserve_parts(struct page_map *map) {
    size_t bytes = map->quanta << SPACE_QUANTUM_SHIFT;
    vm_release((char *)map->base - GUARD_BYTES, bytes + 2 * GUARD_BYTES); // NOLINT(performance-no-int-to-ptr)
    vm_release((char *)map->first_classes - 1, (bytes >> map->page_shift) + 1);
    *map = (struct page_map){0};
}

bool space_init_part(struct space *space, const struct page_map *map, unsigned part, size_t bitmap_words) {
    size_t bytes = (size_t)1 << map->part_shift;
    size_t pages = bytes >> map->page_shift;
    calm_assert(part < map->parts && (map->quanta << SPACE_QUANTUM_SHIFT) >> map->part_shift > part, part);
    space->page_size = (size_t)1 << map->page_shift;
    space->page_shift = map->page_shift;
    space->growing = NO_SEGMENT;
    space->is_part = true;
    space->max_pages = pages;
    size_t tables[] = {pages * entry_bytes[SPAN_TABLE], pages * entry_bytes[USER_TABLE]};
    if (!span_table_init(&space->spans, spans_for(pages), bitmap_words) ||
        !address_ranges_reserve(&space->page_tables[SPAN_TABLE], tables, PAGE_TABLES - SPAN_TABLE)) {
        release_metadata(space);
        return false;
    }
    space->page_tables[CLASS_TABLE] =
        (struct address_range){.base = (char *)map->first_classes - 1 + part * pages, .reserved = pages};
    char *base = (char *)map->base + ((size_t)part << map->part_shift); // NOLINT(performance-no-int-to-ptr)
    space->growing = empty_slot(space);
    fill_slot(space, space->growing, (struct address_range){.base = base, .reserved = bytes - GUARD_BYTES},
              1);
    set_tables(space);
    bool ready = reach_metadata(space, 1);
    if (!ready) {
        space->page_tables[CLASS_TABLE] = (struct address_range){0}; /* the map's */
        release_metadata(space);
    }
    return ready;
}

void space_release_parts(struct page_map *map, unsigned from) {
    size_t keep = (size_t)from << map->part_shift;
    size_t bytes = map->quanta << SPACE_QUANTUM_SHIFT;
    if (from < 1 || keep >= bytes) {
        return;
    }
    __atomic_store_n(&map->quanta, keep >> SPACE_QUANTUM_SHIFT, __ATOMIC_RELAXED);
    /* The guards of the long range and of the table stay behind the parts that
     * are kept. */
    char *base = (char *)map->base + keep; // NOLINT(performance-no-int-to-ptr)
    vm_release(base + map_page(map), bytes - keep + GUARD_BYTES - map_page(map));
    size_t table = (keep >> map->page_shift) + 2 * map_page(map);
    vm_release((char *)map->first_classes - 1 + table, (bytes >> map->page_shift) - table + map_page(map));
}

void space_release_part(const struct page_map *map, unsigned part) {
    char *base = (char *)map->base + ((size_t)part << map->part_shift); // NOLINT(performance-no-int-to-ptr)
    size_t page = map_page(map);
    calm_assert(part > 0 && part < map->parts, part);
    vm_release(base + page, ((size_t)1 << map->part_shift) - 3 * page); /* one page stays as a guard */
}

void space_limit(struct space *space, size_t bytes) {
    struct segment *first = &space->segment[0];
    if (space->quanta == 0 || bytes / 2 > first->region.reserved) {
        return;
    }
    set_reserved(space, 0, first->region.committed);
    if (!space->limited && !space->is_part) {
        /* Address space is scarce now, so each guard keeps only one page. */
        vm_release(first->region.base - GUARD_BYTES, GUARD_BYTES - 2 * space->page_size);
        first->region.reserved += GUARD_BYTES;
    }
    space->limited = true;
    address_range_trim(&first->region, 0);
    size_t used = 0;
    for (size_t i = 0; i < segment_count(space); i++) {
        used = size_max(used, usable_end(space, &space->segment[i]));
    }
    size_t pages = used + (bytes >> space->page_shift);
    space->max_pages = size_min(space->max_pages, pages * NUMBERS_IF_RAISED + MAX_SEGMENTS);
    /* The table of classes of a part continues in the next part's. */
    for (int i = space->is_part ? SPAN_TABLE : CLASS_TABLE; i < PAGE_TABLES; i++) {
        address_range_trim(&space->page_tables[i], (space->max_pages + 1) * entry_bytes[i]);
    }
    span_table_trim(&space->spans, spans_for(pages));
}

/* Commits reserved pages of the growing segment. Returns the number of the
 * first and stores their count in *extended. Returns 0 if that is
 * impossible. */
static uint32_t extend_growing(struct space *space, size_t pages, size_t *extended) {
    if (space->growing == NO_SEGMENT) {
        return 0;
    }
    struct segment *segment = &space->segment[space->growing];
    struct address_range *region = &segment->region;
    calm_assert(region->committed <= region->reserved, region->committed, region->reserved);
    size_t left = (region->reserved - region->committed) >> space->page_shift;
    if (left < pages) {
        return 0;
    }
    uint32_t first = usable_end(space, segment);
    calm_assert(first == atomic_load_explicit(&segment->page_end, memory_order_relaxed), first);
    size_t step =
        size_min(size_max(region->committed / 4, MIN_STEP_BYTES), MAX_STEP_BYTES) >> space->page_shift;
    size_t tries[] = {size_min(size_max(pages, step), left), pages};
    for (int i = 0; i < 2; i++) {
        size_t bytes = tries[i] << space->page_shift;
        if (reach_metadata(space, first + tries[i]) &&
            vm_commit_next(region->base + region->committed, bytes)) {
            region->committed += bytes;
            atomic_store_explicit(&segment->page_end, first + (uint32_t)tries[i], memory_order_release);
            *extended = tries[i];
            return first;
        }
    }
    return 0;
}

/* Adds a segment that has room for a run of this length. New segments get
 * longer as the space grows, so that few are needed. They have room for several
 * such runs. If address space is short, the segment is as long as the kernel
 * permits. */
static bool add_for(struct space *space, size_t bytes) {
    size_t wanted = size_max(space_reserved_bytes(space) / 4, MIN_SEGMENT_BYTES);
    for (; wanted / 2 >= bytes; wanted /= 2) {
        if (add_segment(space, wanted / bytes * bytes, 0)) {
            return true;
        }
    }
    return add_segment(space, bytes, 0);
}

uint32_t space_extend(struct space *space, size_t pages, size_t *extended) {
    calm_assert(pages > 0);
    if (pages > space->max_pages) {
        return 0;
    }
    uint32_t first = extend_growing(space, pages, extended);
    if (first == 0 && !space->is_part && add_for(space, pages << space->page_shift)) {
        first = extend_growing(space, pages, extended);
    }
    return first;
}

static bool holds_page(const struct segment *segment, uint32_t page) {
    return page >= first_page_of(segment) &&
           page < atomic_load_explicit(&segment->page_end, memory_order_acquire);
}

uint32_t space_segment(const struct space *space, size_t number, uint32_t *end) {
    if (number >= segment_count(space) || space->segment[number].region.committed == 0) {
        return 0;
    }
    *end = usable_end(space, &space->segment[number]);
    return first_page_of(&space->segment[number]);
}

static size_t splits_of(const struct space *space) {
    return atomic_load_explicit(&space->splits, memory_order_acquire);
}

/*
 * While another thread changes the order, a search by page or address may end
 * in the wrong segment or in none. After a miss, a lookup therefore tries each
 * segment. A split may move used pages to another slot, and another segment may
 * then fill their old slot. If a segment was split meanwhile, a lookup
 * therefore starts again, whatever its result was.
 */
bool space_is_usable(const struct space *space, uint32_t page) {
    bool usable;
    size_t splits;
    do {
        splits = splits_of(space);
        size_t count = atomic_load_explicit(&space->segments, memory_order_acquire);
        size_t found = space_search(space, BY_PAGE, count, page);
        usable = found != NO_SEGMENT && holds_page(&space->segment[found], page);
        for (size_t number = 0; !usable && number < count; number++) {
            usable = holds_page(&space->segment[number], page);
        }
    } while (splits_of(space) != splits);
    return usable;
}

uint32_t space_end(const struct space *space) {
    const struct segment *segment = space->growing == NO_SEGMENT ? NULL : &space->segment[space->growing];
    return segment == NULL || segment->region.committed == 0 ? 0 : usable_end(space, segment);
}

bool space_ends_at(const struct space *space, uint32_t page) {
    return page != 0 && page == space_end(space);
}

bool space_retract(struct space *space, uint32_t page) {
    calm_assert(space->growing != NO_SEGMENT && page > 0 && page < space_end(space), page);
    struct segment *segment = &space->segment[space->growing];
    size_t offset = (size_t)(page - first_page_of(segment)) << space->page_shift;
    if (!vm_decommit(segment->region.base + offset, segment->region.committed - offset)) {
        return false;
    }
    segment->region.committed = offset;
    atomic_store_explicit(&segment->page_end, page, memory_order_release);
    return true;
}

char *space_address(const struct space *space, uint32_t page) {
    calm_assert(space_search(space, BY_PAGE, segment_count(space), page) != NO_SEGMENT, page);
    const struct segment *segment = &space->segment[space_search(space, BY_PAGE, segment_count(space), page)];
    return segment->region.base + ((size_t)(page - first_page_of(segment)) << space->page_shift);
}

/*
 * Returns the page of an address within a segment, or 0 if the address is
 * outside. clear_slot changes the length before the base, and fill_slot stores
 * the base before the length. So if two reads of the base are equal, a length
 * read between them belongs to this base.
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

uint32_t space_page_elsewhere(const struct space *space, uintptr_t address) {
    uint32_t page;
    size_t splits;
    do {
        splits = splits_of(space);
        size_t count = atomic_load_explicit(&space->segments, memory_order_acquire);
        size_t found = space_search(space, BY_ADDRESS, count, address);
        page = found != NO_SEGMENT ? page_in_segment(space, found, address) : 0;
        for (size_t number = 0; page == 0 && number < count; number++) {
            page = page_in_segment(space, number, address);
        }
    } while (splits_of(space) != splits);
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
