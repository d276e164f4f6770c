#include "policy/demand.h"

/* What is so many windows ago counts 1/e of what is new. */
#define FADE (1.0 - 1.0 / DEMAND_WINDOWS)

/* A program that uses less than this part of a CPU counts as one that uses so much; of a window that took
 * longer, a second counts. Otherwise a share of what it uses would be less than one giving back costs. */
#define CPUS_LEAST     0.1
#define CREDIT_NS_MOST 1e9
/* At work is a program that used this part of a CPU, within so many windows. */
#define CPUS_AT_WORK (1.0 / 16)
#define RESTS        4
/* What purging a page is taken to cost, with the weight of so many measured pages: a measurement that was
 * wrong is outweighed once it has faded, also where it kept anything more from being purged. */
#define PURGE_NS    500.0
#define PRIOR_PAGES 1024.0

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

static size_t most(size_t a, size_t b) {
    return a > b ? a : b;
}

static size_t windows_of(unsigned period) {
    return (size_t)1 << period;
}

static const struct demand_past *ago(const struct demand *demand, size_t windows) {
    return &demand->past[(demand->windows - windows) % DEMAND_WINDOWS];
}

/* The most in use within so many windows. */
static size_t used_within(const struct demand *demand, size_t windows) {
    size_t used = 0;
    for (size_t i = 1; i <= least(windows, demand->windows); i++) {
        used = most(used, ago(demand, i)->max_used);
    }
    return used;
}

/* What each period would have kept when the level rose to used, and what it would have had to fault in again.
 * Above the highest level that is remembered it never was. */
static void note_gaps(struct demand *demand, size_t used) {
    size_t again = least(used, used_within(demand, DEMAND_WINDOWS));
    size_t kept = 0;
    size_t seen = 0;
    for (unsigned period = 0; period < DEMAND_PERIODS; period++) {
        for (; seen < least(windows_of(period), demand->windows); seen++) {
            kept = most(kept, ago(demand, seen + 1)->max_used);
        }
        demand->vain_pages[period] += again > kept ? (double)(again - kept) : 0;
    }
}

static void remember(struct demand *demand, struct demand_past past) {
    demand->past[demand->windows++ % DEMAND_WINDOWS] = past;
}

static double price_of_page(const struct demand *demand, double fault_ns) {
    double purge_ns = demand->purge_ns + PRIOR_PAGES * PURGE_NS;
    return purge_ns / (demand->purged_pages + PRIOR_PAGES) + fault_ns;
}

static unsigned choose_period(const struct demand *demand, double page_ns, double budget_ns) {
    unsigned period = 0;
    while (period + 1 < DEMAND_PERIODS && demand->vain_pages[period] * page_ns > budget_ns) {
        period++;
    }
    return period + 1 < DEMAND_PERIODS ? period + 1 : period;
}

static void fade(struct demand *demand) {
    demand->cpu_ns *= FADE;
    demand->spent_ns *= FADE;
    demand->purge_ns *= FADE;
    demand->purged_pages *= FADE;
    demand->pending_pages *= FADE;
    for (unsigned period = 0; period < DEMAND_PERIODS; period++) {
        demand->vain_pages[period] *= FADE;
    }
}

double demand_note(struct demand *demand, const struct demand_window *window, struct demand_price price) {
    note_gaps(demand, window->max_used);
    double missed = window->ns / DEMAND_WINDOW_NS;
    size_t times = missed < 2 ? 1 : missed < DEMAND_WINDOWS ? (size_t)missed : DEMAND_WINDOWS;
    for (size_t i = 0; i < times; i++) {
        fade(demand);
        struct demand_past past = {window->max_used, window->max_held, window->min_free};
        past.max_used = i == 0 ? past.max_used : window->used_last;
        remember(demand, past);
    }

    double floor_ns = CPUS_LEAST * (window->ns < CREDIT_NS_MOST ? window->ns : CREDIT_NS_MOST);
    demand->cpu_ns += window->cpu_ns > floor_ns ? window->cpu_ns : floor_ns;
    demand->purge_ns += window->purge_ns;
    demand->purged_pages += (double)window->purged_pages;
    demand->pending_pages += (double)window->purged_pages;
    double faulted = (double)window->faulted_pages;
    double vain = faulted < demand->pending_pages ? faulted : demand->pending_pages;
    demand->pending_pages -= vain;
    double page_ns = price_of_page(demand, price.fault_ns);
    demand->spent_ns += vain * page_ns;

    bool works = window->cpu_ns >= CPUS_AT_WORK * window->ns;
    demand->rests = works ? 0 : demand->rests + (demand->rests < RESTS);
    double budget_ns = price.share * demand->cpu_ns;
    /* Without a budget there is none to spend: the longest period is all that can be done. */
    demand->spent = budget_ns > 0 && demand->spent_ns > budget_ns;
    demand->period = budget_ns > 0 ? choose_period(demand, page_ns, budget_ns) : DEMAND_PERIODS - 1;
    return vain * page_ns;
}

size_t demand_period(const struct demand *demand) {
    return windows_of(demand->period);
}

bool demand_is_spent(const struct demand *demand) {
    return demand->spent && demand->rests < RESTS;
}

size_t demand_unused_pages(const struct demand *demand, size_t free_now, size_t given) {
    if (demand_is_spent(demand) || demand->windows < demand_period(demand)) {
        return 0;
    }
    size_t unused = SIZE_MAX;
    for (size_t i = 1; i <= demand_period(demand); i++) {
        unused = least(unused, ago(demand, i)->min_free);
    }
    return unused > given ? least(unused - given, free_now) : 0;
}

size_t demand_peak_pages(const struct demand *demand) {
    return used_within(demand, demand_period(demand));
}

size_t demand_held_pages(const struct demand *demand) {
    size_t held = 0;
    for (size_t i = 1; demand_is_spent(demand) && i <= least(windows_of(DEMAND_PERIODS - 1), demand->windows);
         i++) {
        held = most(held, ago(demand, i)->max_held);
    }
    return held;
}
