#include "api/placing.h"

#include "arena/select.h"
#include "base/assert.h"
#include "os/hardware_caches.h"
#include "os/random.h"
#include "os/rseq.h"
#include "placement/lines.h"

#include <stdatomic.h>
#include <stdbool.h>

/* A block gets one page more only if it has at least this many. */
#define MIN_PAGES_PER_EXTRA 16

/* A thread's first blocks need no placement, because they are no more than most
 * caches have ways, even if all of them are in use. The machine's caches are
 * read after these blocks, because a short program would spend more time on
 * reading than on its blocks. */
#define TURNS_BEFORE_READING 8

/* The counters of the blocks that were placed. Each counter has a cache line of
 * its own, and few threads use it, so that CPUs share no line. Threads that
 * share a counter may lose a count. Two blocks then start at the same line. */
#define TURN_COUNTERS 32
static struct { _Alignas(64) _Atomic(uint32_t) turns; } counters[TURN_COUNTERS];

static _Atomic(uint64_t) seed; /* 0: not drawn yet */
/* Of the nearest cache; 0: not read yet. */
static _Atomic(size_t) line_bytes;
static _Atomic(size_t) way_bytes;

static int placing_mode(void) {
    return setting_value(&calm_arenas.settings.placement);
}

/* Several threads may read the caches at the same time, and find the same
 * values. */
static void read_caches(void) {
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    bool known = hardware_caches_read("", caches, MAX_HARDWARE_CACHES) > 0 && caches[0].level == 1;
    atomic_store_explicit(&way_bytes, known ? hardware_cache_way_bytes(&caches[0]) : 0, memory_order_relaxed);
    atomic_store_explicit(&line_bytes, known ? caches[0].line_bytes : 64, memory_order_relaxed);
}

static uint64_t process_seed(void) {
    uint64_t known = atomic_load_explicit(&seed, memory_order_relaxed);
    if (known == 0) {
        known = random_process_seed() | 1;
        atomic_store_explicit(&seed, known, memory_order_relaxed);
    }
    return known;
}

/* Returns the number of the next turn. The counters begin at different
 * turns. */
static uint64_t next_turn(void) {
    unsigned number = arena_slot(&calm_arenas, TURN_COUNTERS);
    uint32_t turn = atomic_load_explicit(&counters[number].turns, memory_order_relaxed);
    atomic_store_explicit(&counters[number].turns, turn + 1, memory_order_relaxed);
    if (turn >= TURNS_BEFORE_READING && atomic_load_explicit(&line_bytes, memory_order_relaxed) == 0) {
        read_caches();
    }
    return turn + random_mix(number);
}

static struct line_spread current_spread(size_t page_bytes) {
    return line_spread_for(page_bytes, atomic_load_explicit(&line_bytes, memory_order_relaxed),
                           atomic_load_explicit(&way_bytes, memory_order_relaxed));
}

size_t placing_pages(size_t size, size_t alignment) {
    size_t page = page_bytes(&calm_arenas);
    size_t line = current_spread(page).line_bytes;
    bool has_room = (-size & (page - 1)) >= line;
    bool is_large = size / MIN_PAGES_PER_EXTRA >= page;
    return placing_mode() != PLACEMENT_OFF && !has_room && is_large && alignment <= line;
}

void *placing_place(void *base, size_t size, size_t alignment) {
    size_t page = page_bytes(&calm_arenas);
    if (placing_mode() == PLACEMENT_OFF || alignment >= page) {
        return base;
    }
    struct span *span = heap_large_span(heap_of(&calm_arenas, base), base);
    calm_assert(span != NULL && span->pages * page >= size, base, size);
    size_t room = span->pages * page - size;
    uint64_t turn = next_turn();
    struct line_spread spread = current_spread(page);
    bool spreads = placing_mode() != PLACEMENT_RANDOM;
    span->offset = line_offset(&spread, spreads, turn, process_seed(), room, alignment);
    calm_assert(span->offset <= room && span->offset % alignment == 0, span->offset, room, alignment);
    return span->base + span->offset;
}

void placing_after_fork(void) {
    if (atomic_load_explicit(&seed, memory_order_relaxed) != 0) {
        atomic_store_explicit(&seed, 0, memory_order_relaxed);
    }
}
