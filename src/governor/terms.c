#include "governor/terms.h"

#include "base/size.h"
#include "governor/limit.h"

struct retention_terms new_terms(const struct governor *governor) {
    unsigned shift = governor->heap.space.page_shift;
    const struct demand *demand = &governor->demand;
    double slack = (double)setting_value(&governor->settings.slack) / 100;
    return (struct retention_terms){
        .adaptive = is_adaptive(governor),
        .factor = hysteresis_factor(governor->cpu_usage.cpus, slack),
        .share = slack < 1 ? slack : 1,
        .peak_bytes = demand_peak_pages(demand) << shift,
        .held_bytes = demand_held_pages(demand) << shift,
        .available_bytes = atomic_load_explicit(&governor->max_footprint, memory_order_relaxed),
    };
}

void update_terms(struct governor *governor, enum reason reason) {
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
