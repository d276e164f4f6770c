#include "api/placing.h"

#include "api/allocator.h"
#include "api/door.h"
#include "os/caches.h"
#include "os/seed.h"
#include "placement/lines.h"

#include <stdatomic.h>
#include <stdbool.h>

/* One page of so many may be spent. */
#define PAID_PART 16

/*
 * So many blocks in use at once are no more than most caches have ways, wherever they begin: until then the
 * machine is not asked for its caches, which costs more than a short program's blocks do.
 */
#define TURNS_BEFORE_ASKING 8

static _Atomic(uint64_t) turns;
static _Atomic(uint64_t) seed; /* 0: not drawn yet */
/* Of the nearest cache; 0: not asked yet. */
static _Atomic(size_t) line_bytes;
static _Atomic(size_t) way_bytes;

static int placement(void) {
    return atomic_load_explicit(&calm_governor.settings.placement, memory_order_relaxed);
}

static size_t page_bytes(void) {
    return calm_governor.heap.space.page_size;
}

/* Threads that come at once find the same. */
static void ask_machine(void) {
    struct os_cache caches[CACHES_MOST];
    size_t count = os_caches("", caches, CACHES_MOST);
    bool known = count > 0 && caches[0].level == 1;
    atomic_store_explicit(&way_bytes, known ? os_cache_way_bytes(&caches[0]) : 0, memory_order_relaxed);
    atomic_store_explicit(&line_bytes, known ? caches[0].line_bytes : 64, memory_order_relaxed);
}

static uint64_t process_seed(void) {
    uint64_t known = atomic_load_explicit(&seed, memory_order_relaxed);
    if (known == 0) {
        known = os_process_seed() | 1;
        atomic_store_explicit(&seed, known, memory_order_relaxed);
    }
    return known;
}

static size_t room_of(size_t size) {
    return -size & (page_bytes() - 1);
}

static struct line_spread current_spread(void) {
    return line_spread_for(page_bytes(), atomic_load_explicit(&line_bytes, memory_order_relaxed),
                           atomic_load_explicit(&way_bytes, memory_order_relaxed));
}

size_t placing_pages(size_t size, size_t alignment) {
    size_t line = current_spread().line_bytes;
    bool has_room = room_of(size) >= line;
    bool is_little = size / PAID_PART >= page_bytes();
    return placement() != PLACEMENT_OFF && !has_room && is_little && alignment <= line;
}

void *placing_place(void *base, size_t size, size_t alignment) {
    if (placement() == PLACEMENT_OFF || alignment >= page_bytes()) {
        return base;
    }
    struct span *span = heap_large_span(door_heap_of(base), base);
    size_t room = span->pages * page_bytes() - size;
    uint64_t turn = atomic_fetch_add_explicit(&turns, 1, memory_order_relaxed);
    if (turn == TURNS_BEFORE_ASKING) {
        ask_machine();
    }
    struct line_spread spread = current_spread();
    return heap_place_large(
        span, line_offset(&spread, placement() != PLACEMENT_RANDOM, turn, process_seed(), room, alignment));
}

void placing_after_fork(void) {
    if (atomic_load_explicit(&seed, memory_order_relaxed) != 0) {
        atomic_store_explicit(&seed, 0, memory_order_relaxed);
    }
}
