#include "arena/terms.h"

#include "arena/limit.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/cpus.h"

#define GIB ((double)((size_t)1 << 30))
/* The range of GiB of memory for each CPU that machines commonly have. */
#define MIN_OFFERED 2.0
#define MAX_OFFERED 16.0

void note_offer(struct arena *arena, size_t memory, double cpu_quota) {
    unsigned set = cpu_set_count(&arena->helper.cpus);
    double cpus = set > 0 ? set : 1;
    calm_assert(cpu_quota >= 0);
    double offered = (double)memory / GIB / (cpu_quota < cpus ? cpu_quota : cpus);
    offered = offered < MAX_OFFERED ? offered : MAX_OFFERED;
    atomic_store_explicit(&arena->machine.gib_per_cpu, offered > MIN_OFFERED ? offered : MIN_OFFERED,
                          memory_order_relaxed);
}

static double gib_per_cpu(const struct arena *arena) {
    int setting = setting_value(&arena->settings.memory_per_cpu);
    return setting == MEMORY_PER_CPU_AUTO
               ? atomic_load_explicit(&arena->machine.gib_per_cpu, memory_order_relaxed)
               : setting - MEMORY_PER_CPU_0;
}

double memory_per_cpu_bytes(const struct arena *arena) {
    double scarcity_factor = atomic_load_explicit(&arena->machine.scarcity_factor, memory_order_relaxed);
    return gib_per_cpu(arena) * GIB * scarcity_factor * arena->epoch.family_share;
}

/* Returns the factor for the paper's threshold. The threshold is meant for a
 * process without relatives, and for common machines. It follows the price only
 * where the price is outside the common range. */
static double sensitivity(const struct arena *arena) {
    double gib = gib_per_cpu(arena);
    double times = gib < MIN_OFFERED ? gib / MIN_OFFERED : gib > MAX_OFFERED ? gib / MAX_OFFERED : 1;
    return times * arena->epoch.family_share;
}

struct retention_terms new_terms(const struct arena *arena) {
    unsigned shift = arena->heap.space.page_shift;
    const struct demand *demand = &arena->epoch.demand;
    return (struct retention_terms){
        .adaptive = is_adaptive(arena),
        .factor = hysteresis_factor(arena->epoch.cpu_usage.cpus, 1) * sensitivity(arena),
        .peak_bytes = demand_peak_pages(demand) << shift,
        .surplus_bytes = demand_surplus_pages(demand) << shift,
        .available_bytes = atomic_load_explicit(&arena->machine.max_footprint, memory_order_relaxed),
    };
}

void update_terms(struct arena *arena, enum reason reason) {
    calm_assert(lock_is_mine(&arena->purger.lock) && reason < REASONS, reason);
    struct retention_terms terms = new_terms(arena);
    bool over = true;
    for (bool purged = true; over;) {
        heap_lock(arena);
        size_t max_used = arena->limit.max_used << arena->heap.space.page_shift;
        terms.peak_bytes = size_max(terms.peak_bytes, max_used);
        terms.background_purge = arena->limit.background_purge;
        struct limit limit = limit_by(arena, &terms);
        over = purged && is_over(arena, limit.max);
        if (!over) {
            calm_assert(terms.factor >= 0 && limit.keep <= limit.max, limit.keep, limit.max);
            arena->limit.terms = terms;
            publish_limit(arena);
        }
        heap_unlock(arena);
        purged = over && purge_down(arena, limit.keep, limit.max, reason) > 0;
    }
}

void set_background_purge(struct arena *arena, bool background_purge) {
    if (arena->limit.background_purge != background_purge) {
        arena->limit.background_purge = background_purge;
        arena->limit.terms.background_purge = background_purge;
        publish_limit(arena);
    }
}

/* Needs no purger's lock, since a higher limit causes no purge. Another thread
 * may hold that lock for long. */
void terms_start_background(struct arena *arena) {
    heap_lock(arena);
    set_background_purge(arena, true);
    heap_unlock(arena);
}

void terms_stop_background(struct arena *arena) {
    purger_enter(arena);
    heap_lock(arena);
    arena->limit.background_purge = false;
    heap_unlock(arena);
    update_terms(arena, REASON_LIMIT);
    purger_leave(arena);
}
