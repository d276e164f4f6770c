#include "policy/demand.h"

#include "base/size.h"

/* The weight that a term keeps from one epoch to the next. */
#define FADE (1.0 - 1.0 / DEMAND_EPOCHS)

/* A program counts as using at least this part of a CPU, for at most a second of an epoch that took longer.
 * Otherwise the budget of an idle program would not pay for a single purge. */
#define MIN_CPUS      0.1
#define MAX_CREDIT_NS 1e9
/* The program is idle after this number of epochs in which it used less than this part of a CPU. */
#define BUSY_CPUS   (1.0 / 16)
#define IDLE_EPOCHS 4
/* The assumed cost of purging a page, with the weight of this number of measured pages. A wrong measurement
 * is outweighed by it after a while, also if the measurement prevents all further purges. */
#define PRIOR_PURGE_NS 500.0
#define PRIOR_PAGES    1024.0

static size_t epochs_of(unsigned period) {
    return (size_t)1 << period;
}

static const struct demand_past *ago(const struct demand *demand, size_t epochs) {
    return &demand->past[(demand->epochs - epochs) % DEMAND_EPOCHS];
}

/* The highest number in use within this number of epochs. */
static size_t used_within(const struct demand *demand, size_t epochs) {
    size_t used = 0;
    for (size_t i = 1; i <= size_min(epochs, demand->epochs); i++) {
        used = size_max(used, ago(demand, i)->max_used);
    }
    return used;
}

/* The level has risen to `used`. For each period, adds the pages between what it would have kept and the new
 * level, except those above the highest recorded level: they were never in use before. */
static void record_gaps(struct demand *demand, size_t used) {
    size_t again = size_min(used, used_within(demand, DEMAND_EPOCHS));
    for (unsigned period = 0; period < DEMAND_PERIODS; period++) {
        demand->vain_pages[period] += (double)size_minus(again, used_within(demand, epochs_of(period)));
    }
}

static void fade(struct demand *demand) {
    demand->cpu_ns *= FADE;
    demand->wasted_ns *= FADE;
    demand->purge_ns *= FADE;
    demand->purged_pages *= FADE;
    demand->pending_pages *= FADE;
    for (unsigned period = 0; period < DEMAND_PERIODS; period++) {
        demand->vain_pages[period] *= FADE;
    }
}

/* The shortest period that is within the budget, doubled. */
static unsigned choose_period(const struct demand *demand, double page_ns, double budget_ns) {
    unsigned period = 0;
    while (period + 1 < DEMAND_PERIODS && demand->vain_pages[period] * page_ns > budget_ns) {
        period++;
    }
    return period + 1 < DEMAND_PERIODS ? period + 1 : period;
}

double demand_record(struct demand *demand, const struct demand_epoch *epoch, struct demand_price price) {
    record_gaps(demand, epoch->max_used);
    double length = epoch->ns / DEMAND_EPOCH_NS;
    size_t times = length < 2 ? 1 : length < DEMAND_EPOCHS ? (size_t)length : DEMAND_EPOCHS;
    for (size_t i = 0; i < times; i++) {
        fade(demand);
        demand->past[demand->epochs++ % DEMAND_EPOCHS] = (struct demand_past){
            i == 0 ? epoch->max_used : epoch->used_last, epoch->max_held, epoch->min_free};
    }

    double floor_ns = MIN_CPUS * (epoch->ns < MAX_CREDIT_NS ? epoch->ns : MAX_CREDIT_NS);
    demand->cpu_ns += epoch->cpu_ns > floor_ns ? epoch->cpu_ns : floor_ns;
    demand->purge_ns += epoch->purge_ns;
    demand->purged_pages += (double)epoch->purged_pages;
    demand->pending_pages += (double)epoch->purged_pages;
    double faulted = (double)epoch->faulted_pages;
    double vain = faulted < demand->pending_pages ? faulted : demand->pending_pages;
    demand->pending_pages -= vain;
    double page_ns = price.fault_ns +
                     (demand->purge_ns + PRIOR_PAGES * PRIOR_PURGE_NS) / (demand->purged_pages + PRIOR_PAGES);
    demand->wasted_ns += vain * page_ns;

    bool busy = epoch->cpu_ns >= BUSY_CPUS * epoch->ns;
    demand->idle_epochs = busy ? 0 : demand->idle_epochs + (demand->idle_epochs < IDLE_EPOCHS);
    double budget_ns = price.share * demand->cpu_ns;
    /* A budget of zero cannot be exceeded: the longest period is all that can be done. */
    demand->over_budget = budget_ns > 0 && demand->wasted_ns > budget_ns;
    demand->period = budget_ns > 0 ? choose_period(demand, page_ns, budget_ns) : DEMAND_PERIODS - 1;
    return vain * page_ns;
}

size_t demand_period(const struct demand *demand) {
    return epochs_of(demand->period);
}

bool demand_is_over_budget(const struct demand *demand) {
    return demand->over_budget && demand->idle_epochs < IDLE_EPOCHS;
}

size_t demand_unused_pages(const struct demand *demand, size_t free_now, size_t purged) {
    if (demand_is_over_budget(demand) || demand->epochs < demand_period(demand)) {
        return 0;
    }
    size_t unused = SIZE_MAX;
    for (size_t i = 1; i <= demand_period(demand); i++) {
        unused = size_min(unused, ago(demand, i)->min_free);
    }
    return size_min(size_minus(unused, purged), free_now);
}

size_t demand_peak_pages(const struct demand *demand) {
    return used_within(demand, demand_period(demand));
}

size_t demand_held_pages(const struct demand *demand) {
    size_t held = 0;
    size_t epochs = demand_is_over_budget(demand) ? epochs_of(DEMAND_PERIODS - 1) : 0;
    for (size_t i = 1; i <= size_min(epochs, demand->epochs); i++) {
        held = size_max(held, ago(demand, i)->max_held);
    }
    return held;
}
