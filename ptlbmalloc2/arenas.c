#include "arenas.h"

#include <stdint.h>

#include "arena.h"
#include "base/assert.h"
#include "glibc_proof.h"
#include "state.h"

/*
 * The record of a locked arena, which is proved when it is recorded first. NULL if the proof failed, or if
 * there are too many arenas.
 */
static struct arena_record *arenas_find(struct arena *arena, bool *proved) {
    *proved = true;
    for (size_t i = 0; *proved && i < MAX_ARENAS; i++) {
        struct arena_record *record = &state.records[i];
        struct arena *known = atomic_load_explicit(&record->arena, memory_order_acquire);
        if (known == arena) {
            return record;
        }
        if (known == NULL) {
            *proved = arena == glibc_main_arena || glibc_prove_arena(arena);
            /* The arena's lock lets one thread at a time make its record. Different arenas compete for one.
             */
            if (*proved && atomic_compare_exchange_strong(&record->arena, &known, arena)) {
                ADD(&state.counters.arenas, 1);
                return record;
            }
        }
    }
    return NULL;
}

/*
 * Sums by exchange: in whatever order two threads update a record, each difference is added exactly once, so
 * that the totals are the sums of the records.
 */
static void update(struct arena_record *record, size_t top, size_t system) {
    size_t old_top = atomic_exchange_explicit(&record->top_bytes, top, memory_order_relaxed);
    size_t old_system = atomic_exchange_explicit(&record->system_bytes, system, memory_order_relaxed);
    calm_assert(top <= system, top, system);
    ADD(&state.counters.free_top_bytes, top - old_top);
    ADD(&state.counters.footprint_bytes, system - old_system);
}

static size_t distance(size_t a, size_t b) {
    return a > b ? a - b : b - a;
}

bool arenas_record_change(struct arena *arena, size_t min_change, bool *top_grew) {
    bool proved;
    struct arena_record *record = arenas_find(arena, &proved);
    *top_grew = false;
    if (record != NULL) {
        size_t top = arena_trimmable_bytes(arena);
        size_t system = arena_body(arena)->system_mem;
        size_t old_top = LOAD(&record->top_bytes);
        *top_grew = top >= old_top + min_change;
        if (distance(top, old_top) >= min_change ||
            distance(system, LOAD(&record->system_bytes)) >= min_change) {
            update(record, top, system);
        }
    }
    return proved;
}

bool arenas_record(struct arena *arena) {
    bool top_grew;
    return arenas_record_change(arena, 0, &top_grew);
}

/* Records an arena unless it is busy. */
static bool record_if_free(struct arena *arena) {
    bool proved = true;
    if (arena_trylock(arena)) {
        proved = arenas_record(arena);
        arena_unlock(arena);
    }
    return proved;
}

void arenas_update_next(void) {
    size_t turn = atomic_fetch_add_explicit(&state.turn, 1, memory_order_relaxed);
    calm_assert(LOAD(&state.counters.arenas) > 0 && LOAD(&state.counters.arenas) <= MAX_ARENAS);
    struct arena_record *record = &state.records[turn % LOAD(&state.counters.arenas)];
    struct arena *arena = atomic_load_explicit(&record->arena, memory_order_acquire);
    if (arena != NULL) {
        record_if_free(arena);
    }
}

bool arenas_walk(void) {
    for (struct arena *arena = glibc_main_arena; arena != NULL; arena = arena_after(arena)) {
        if (!record_if_free(arena)) {
            return false;
        }
    }
    ADD(&state.counters.walks, 1);
    return true;
}

static size_t resident_bytes_of(const struct arena *arena, size_t keep_bytes) {
    size_t top = arena_trimmable_bytes(arena);
    if (top <= 2 * keep_bytes) {
        return top;
    }
    size_t pages = arena_excess_bytes(arena, 0);
    struct residency residency =
        residency_of_tail(arena_top_end(arena) - pages, pages, SIZE_MAX, state.scratch);
    return top - pages + residency.resident_bytes;
}

size_t arenas_resident_bytes(size_t keep_bytes) {
    size_t resident = 0;
    for (size_t i = 0; i < MAX_ARENAS; i++) {
        struct arena_record *record = &state.records[i];
        struct arena *arena = atomic_load_explicit(&record->arena, memory_order_acquire);
        if (arena == NULL) {
            break;
        }
        if (arena_trylock(arena)) {
            resident += resident_bytes_of(arena, keep_bytes);
            arena_unlock(arena);
        } else {
            resident += LOAD(&record->top_bytes);
        }
    }
    return resident;
}
