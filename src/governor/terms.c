#include "governor/terms.h"

#include "base/assert.h"
#include "base/size.h"
#include "governor/limit.h"
#include "os/cpus.h"

#define GIB ((double)((size_t)1 << 30))
/* GiB of memory for each CPU, as machines are built. */
#define MIN_OFFERED 2.0
#define MAX_OFFERED 16.0

void note_offer(struct governor *governor, size_t memory, double cpu_quota) {
    unsigned set = cpu_set_count(&governor->cpus);
    double cpus = set > 0 ? set : 1;
    calm_assert(cpu_quota >= 0);
    double offered = (double)memory / GIB / (cpu_quota < cpus ? cpu_quota : cpus);
    offered = offered < MAX_OFFERED ? offered : MAX_OFFERED;
    atomic_store_explicit(&governor->machine_gib_per_cpu, offered > MIN_OFFERED ? offered : MIN_OFFERED,
                          memory_order_relaxed);
}

static double gib_per_cpu(const struct governor *governor) {
    int setting = setting_value(&governor->settings.memory_per_cpu);
    return setting == MEMORY_PER_CPU_AUTO
               ? atomic_load_explicit(&governor->machine_gib_per_cpu, memory_order_relaxed)
               : setting - MEMORY_PER_CPU_0;
}

double memory_per_cpu_bytes(const struct governor *governor) {
    double scarcity_factor = atomic_load_explicit(&governor->scarcity_factor, memory_order_relaxed);
    return gib_per_cpu(governor) * GIB * scarcity_factor * governor->family_share;
}

/* The paper's threshold is for a process alone, and for machines as they are built; it follows a price beyond
 * those. */
static double sensitivity(const struct governor *governor) {
    double gib = gib_per_cpu(governor);
    double times = gib < MIN_OFFERED ? gib / MIN_OFFERED : gib > MAX_OFFERED ? gib / MAX_OFFERED : 1;
    return times * governor->family_share;
}

struct retention_terms new_terms(const struct governor *governor) {
    unsigned shift = governor->heap.space.page_shift;
    const struct demand *demand = &governor->demand;
    return (struct retention_terms){
        .adaptive = is_adaptive(governor),
        .factor = hysteresis_factor(governor->cpu_usage.cpus, 1) * sensitivity(governor),
        .peak_bytes = demand_peak_pages(demand) << shift,
        .surplus_bytes = demand_surplus_pages(demand) << shift,
        .available_bytes = atomic_load_explicit(&governor->max_footprint, memory_order_relaxed),
    };
}

void update_terms(struct governor *governor, enum reason reason) {
    calm_assert(lock_is_mine(&governor->purge_lock) && reason < REASONS, reason);
    struct retention_terms terms = new_terms(governor);
    bool over = true;
    for (bool purged = true; over;) {
        heap_lock(governor);
        size_t max_used = governor->max_used << governor->heap.space.page_shift;
        terms.peak_bytes = size_max(terms.peak_bytes, max_used);
        terms.background_purge = governor->background_purge;
        struct limit limit = limit_by(governor, &terms);
        over = purged && is_over(governor, limit.max);
        if (!over) {
            calm_assert(terms.factor >= 0 && limit.keep <= limit.max, limit.keep, limit.max);
            governor->terms = terms;
            publish_limit(governor);
        }
        heap_unlock(governor);
        purged = over && purge_down(governor, limit.keep, limit.max, reason) > 0;
    }
}

void set_background_purge(struct governor *governor, bool background_purge) {
    if (governor->background_purge != background_purge) {
        governor->background_purge = background_purge;
        governor->terms.background_purge = background_purge;
        publish_limit(governor);
    }
}

/* A higher limit needs no purger, which may be at work for long. */
void governor_start_background(struct governor *governor) {
    heap_lock(governor);
    set_background_purge(governor, true);
    heap_unlock(governor);
}

void governor_stop_background(struct governor *governor) {
    if (!purger_enter(governor)) {
        return;
    }
    heap_lock(governor);
    governor->background_purge = false;
    heap_unlock(governor);
    update_terms(governor, REASON_LIMIT);
    purger_leave(governor);
}
