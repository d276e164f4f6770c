#include "arena/terms.h"

#include "arena/limit.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/cpus.h"

#define GIB ((double)((size_t)1 << 30))
/* The range of GiB of memory for each CPU that machines commonly have. */
#define MIN_OFFERED 2.0
#define MAX_OFFERED 16.0

void note_offer(struct arenas *arenas, size_t memory, double cpu_quota) {
    unsigned set = cpu_set_count(&arenas->helper.cpus);
    double cpus = set > 0 ? set : 1;
    calm_assert(cpu_quota >= 0);
    double offered = (double)memory / GIB / (cpu_quota < cpus ? cpu_quota : cpus);
    offered = offered < MAX_OFFERED ? offered : MAX_OFFERED;
    atomic_store_explicit(&arenas->machine.gib_per_cpu, offered > MIN_OFFERED ? offered : MIN_OFFERED,
                          memory_order_relaxed);
}

static double gib_per_cpu(const struct arenas *arenas) {
    int setting = setting_value(&arenas->settings.memory_per_cpu);
    return setting == MEMORY_PER_CPU_AUTO
               ? atomic_load_explicit(&arenas->machine.gib_per_cpu, memory_order_relaxed)
               : setting - MEMORY_PER_CPU_0;
}

double memory_per_cpu_bytes(const struct arenas *arenas) {
    double scarcity_factor = atomic_load_explicit(&arenas->machine.scarcity_factor, memory_order_relaxed);
    return gib_per_cpu(arenas) * GIB * scarcity_factor * arenas->epoch.family_share;
}

/* Returns the factor for the paper's threshold. The threshold is meant for a
 * process without relatives, and for common machines. It follows the price only
 * where the price is outside the common range. */
static double sensitivity(const struct arenas *arenas) {
    double gib = gib_per_cpu(arenas);
    double times = gib < MIN_OFFERED ? gib / MIN_OFFERED : gib > MAX_OFFERED ? gib / MAX_OFFERED : 1;
    return times * arenas->epoch.family_share;
}

struct retention_terms new_terms(const struct arenas *arenas) {
    unsigned shift = page_shift(arenas);
    const struct demand *demand = &arenas->work->demand;
    return (struct retention_terms){
        .adaptive = is_adaptive(arenas),
        .factor = hysteresis_factor(arenas->epoch.cpu_usage.cpus, 1) * sensitivity(arenas),
        .peak_bytes = demand_peak_pages(demand) << shift,
        .surplus_bytes = demand_surplus_pages(demand) << shift,
        .available_bytes = atomic_load_explicit(&arenas->machine.max_footprint, memory_order_relaxed),
    };
}

static void store_terms(struct limit_terms *terms, const struct retention_terms *from) {
    atomic_store_explicit(&terms->adaptive, from->adaptive, memory_order_relaxed);
    atomic_store_explicit(&terms->background_purge, from->background_purge, memory_order_relaxed);
    atomic_store_explicit(&terms->factor, from->factor, memory_order_relaxed);
    atomic_store_explicit(&terms->peak_bytes, from->peak_bytes, memory_order_relaxed);
    atomic_store_explicit(&terms->surplus_bytes, from->surplus_bytes, memory_order_relaxed);
    atomic_store_explicit(&terms->available_bytes, from->available_bytes, memory_order_relaxed);
}

void set_terms(struct arenas *arenas, const struct retention_terms *terms) {
    store_terms(&arenas->limit.terms, terms);
    note_levels(arenas, totals_now(arenas)); /* a thread may have raised the old terms' peak meanwhile */
    publish_limit(arenas);
}

void update_terms(struct arenas *arenas, enum reason reason) {
    calm_assert(lock_is_mine(&arenas->purger.lock) && reason < REASONS, reason);
    struct retention_terms terms = new_terms(arenas);
    bool over = true;
    for (bool purged = true; over;) {
        struct levels totals = report_all(arenas);
        size_t max_used = get_total(&arenas->limit.max_used) << page_shift(arenas);
        terms.peak_bytes = size_max(terms.peak_bytes, max_used);
        terms.background_purge = atomic_load_explicit(&arenas->limit.background_purge, memory_order_relaxed);
        struct limit limit = limit_by(arenas, &terms, totals);
        over = purged && is_over(arenas, totals.dirty, limit.max);
        if (!over) {
            calm_assert(terms.factor >= 0 && limit.keep <= limit.max, limit.keep, limit.max);
            set_terms(arenas, &terms);
        }
        purged = over && purge_down(arenas, limit.keep, limit.max, reason) > 0;
    }
}

void set_background_purge(struct arenas *arenas, bool background_purge) {
    struct limit_state *limit = &arenas->limit;
    if (atomic_load_explicit(&limit->background_purge, memory_order_relaxed) != background_purge) {
        atomic_store_explicit(&limit->background_purge, background_purge, memory_order_relaxed);
        atomic_store_explicit(&limit->terms.background_purge, background_purge, memory_order_relaxed);
        publish_limit(arenas);
    }
}

/* Needs no purger's lock, since a higher limit causes no purge. Another thread
 * may hold that lock for long. */
void terms_start_background(struct arenas *arenas) {
    set_background_purge(arenas, true);
}

void terms_stop_background(struct arenas *arenas) {
    purger_enter(arenas);
    atomic_store_explicit(&arenas->limit.background_purge, false, memory_order_relaxed);
    update_terms(arenas, REASON_LIMIT);
    purge_to_limit(arenas); /* from here on each change is reported, but not yet those before */
    purger_leave(arenas);
}
