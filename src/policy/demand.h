/*
 * Demand: for how long free memory is worth keeping, decided from how the program used memory so far.
 *
 * This is the ski-rental problem: keeping a free page costs memory for as long as it is kept, and purging it
 * costs the purge and a fault if the program needs the page again. Future gaps are unknown, so the policy
 * assumes that they resemble past ones. Each epoch of 100 ms records the highest number of pages in use. When
 * that level rises again, the pages between the old level and the new one were free for as long as the level
 * was lower, whether or not they were purged meanwhile. The record therefore shows, for each candidate
 * period, how many pages would have been purged in vain, and at what cost. The policy takes the shortest
 * period whose cost is within its share of the CPU time, and doubles it because gaps vary.
 *
 * Levels do not show fragmentation: free pages that do not fit the requested sizes. It is bounded by measured
 * cost: each purged page and each later fault on a non-resident page pair up as one page purged in vain.
 * While the cost of these exceeds the share, purging is over its budget.
 *
 * Pure: no system call, no lock, no global. Called once per epoch by the governor, by retention-replay and by
 * the tests. The zero value is the valid initial state. Source: the break-even rule for ski rental (Karlin et
 * al., "Competitive snoopy caching", 1988), applied to measured gaps.
 */
#ifndef CALM_POLICY_DEMAND_H
#define CALM_POLICY_DEMAND_H

#include <stdbool.h>
#include <stddef.h>

#define DEMAND_EPOCH_NS 100000000ULL
#define DEMAND_PERIODS  8   /* candidates: 1, 2, 4 ... 128 epochs, which is 0.1 to 12.8 s */
#define DEMAND_EPOCHS   256 /* recorded: gaps of up to twice the longest period are seen */

/* All counts are pages, all times nanoseconds. */
struct demand_epoch {
    double ns;            /* length; several times DEMAND_EPOCH_NS if no tick came in between */
    double cpu_ns;        /* CPU time of the process */
    size_t max_used;      /* highest number of pages in use */
    size_t used_last;     /* pages in use at the end */
    size_t max_held;      /* highest number of pages in use or free and perhaps resident */
    size_t min_free;      /* lowest number of free resident pages, plus all pages purged since the start */
    size_t purged_pages;  /* purged in this epoch */
    size_t faulted_pages; /* taken into use while not resident */
    double purge_ns;      /* CPU time spent purging */
};

struct demand_price {
    double fault_ns; /* of one page, as measured */
    double share;    /* of CPU time that purging in vain may cost: 0.01 is one per cent */
};

struct demand_past {
    size_t max_used, max_held, min_free;
};

struct demand {
    struct demand_past past[DEMAND_EPOCHS]; /* epoch number n at n % DEMAND_EPOCHS */
    size_t epochs;
    unsigned period;      /* log2 of the number of epochs */
    unsigned idle_epochs; /* consecutive ones, up to the number that makes the program idle */
    bool over_budget;     /* the measured cost exceeds the share */
    /* Exponentially weighted sums: a term has weight 1/e after DEMAND_EPOCHS epochs. */
    double cpu_ns;
    double vain_pages[DEMAND_PERIODS]; /* that keeping for each period would have purged in vain */
    double wasted_ns;                  /* measured cost of what was purged in vain */
    double purge_ns, purged_pages;
    double pending_pages; /* purged, and not yet paired with a fault */
};

/* Records a finished epoch. Returns the cost of what was found to have been purged in vain, in ns. */
double demand_record(struct demand *demand, const struct demand_epoch *epoch, struct demand_price price);

/* The number of epochs for which free memory is kept. */
size_t demand_period(const struct demand *demand);

/* The number of pages, in use or free, that is worth keeping: the highest number in use within the period. */
size_t demand_peak_pages(const struct demand *demand);

/* While purging is over its budget: the highest number in use or free within the longest period. Otherwise 0.
 */
size_t demand_held_pages(const struct demand *demand);

/*
 * Whether purging in vain has cost more than its share while the program is busy. Then no page is purged for
 * being unused until the weighted cost is within the share again. A program that has been idle for 0.4 s is
 * not busy, and its memory is purged as its period says.
 */
bool demand_is_over_budget(const struct demand *demand);

/* The number of pages to purge: the part of free_now pages that was free throughout the period. purged: all
 * pages purged since the start. 0 while purging is over its budget. */
size_t demand_unused_pages(const struct demand *demand, size_t free_now, size_t purged);

#endif
