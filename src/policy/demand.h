/*
 * Demand: for how long free memory is worth keeping, decided from how the program used memory so far.
 *
 * This is the ski-rental problem: keeping a free page costs memory for as long as it is kept, and giving it
 * back costs a purge and a fault if the program needs it again. Future gaps are unknown, so the policy
 * assumes that they resemble past ones. Each window (an epoch of 100 ms) records the highest number of pages
 * in use. When that level rises again, the pages between the old level and the new one were free for as long
 * as the level was lower, whether or not they were given back meanwhile. The record therefore shows, for each
 * candidate period, how many pages would have been given back in vain, and at what cost. The policy takes the
 * shortest period whose cost is within its share of the CPU time, and doubles it because gaps vary.
 *
 * Levels do not show fragmentation: free pages that do not fit the requested sizes. It is bounded by measured
 * cost: each page given back and each later fault on a non-resident page pair up as one page given back in
 * vain. While the cost of these exceeds the share, the budget is spent.
 *
 * Pure: no system call, no lock, no global. Called once per window by the governor, by retention-replay and
 * by the tests. The zero value is the valid initial state. Source: the break-even rule for ski rental (Karlin
 * et al., "Competitive snoopy caching", 1988), applied to measured gaps.
 */
#ifndef CALM_POLICY_DEMAND_H
#define CALM_POLICY_DEMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DEMAND_WINDOW_NS 100000000ULL
#define DEMAND_PERIODS   8   /* candidates: 1, 2, 4 ... 128 windows, which is 0.1 to 12.8 s */
#define DEMAND_WINDOWS   256 /* recorded: gaps of up to twice the longest period are seen */

/* All counts are pages, all times nanoseconds. */
struct demand_window {
    double ns;           /* length; several times DEMAND_WINDOW_NS if no tick came in between */
    double cpu_ns;       /* CPU time of the process */
    size_t max_used;     /* highest number of pages in use */
    size_t used_last;    /* pages in use at the end */
    size_t max_held;     /* highest number of pages in use or free and perhaps resident */
    size_t min_free;     /* lowest number of free resident pages, plus all pages given back since the start */
    size_t purged_pages; /* given back */
    size_t faulted_pages; /* taken into use while not resident */
    double purge_ns;      /* CPU time spent giving back */
};

struct demand_price {
    double fault_ns; /* of one page, as measured */
    double share;    /* of CPU time that giving back in vain may cost: 0.01 is one per cent */
};

struct demand_past {
    size_t max_used, max_held, min_free;
};

struct demand {
    struct demand_past past[DEMAND_WINDOWS]; /* window number n at n % DEMAND_WINDOWS */
    size_t windows;
    unsigned period; /* log2 of the number of windows */
    unsigned rests;  /* consecutive windows in which the program was not at work */
    bool spent;      /* the measured cost exceeds the share */
    /* Exponentially weighted sums: a term has weight 1/e after DEMAND_WINDOWS windows. */
    double cpu_ns;
    double vain_pages[DEMAND_PERIODS]; /* that keeping for each period would have given back in vain */
    double spent_ns;                   /* measured cost of what was given back in vain */
    double purge_ns, purged_pages;
    double pending_pages; /* given back, and not yet paired with a fault */
};

/* Records a finished window. Returns the cost of what was found to have been given back in vain, in ns. */
double demand_note(struct demand *demand, const struct demand_window *window, struct demand_price price);

/* The number of windows for which free memory is kept. */
size_t demand_period(const struct demand *demand);

/* The number of pages, in use or free, that is worth keeping: the highest number in use within the period. */
size_t demand_peak_pages(const struct demand *demand);

/* While the budget is spent: the highest number in use or free within the longest period. Otherwise 0. */
size_t demand_held_pages(const struct demand *demand);

/*
 * Whether giving back in vain has cost more than its share while the program is at work. Then no page is
 * given back for being unused until the weighted cost is within the share again. A program that rests for 0.4
 * s is not at work, and its memory is given back as its period says.
 */
bool demand_is_spent(const struct demand *demand);

/* The part of free_now pages that was free throughout the period, and is to be given back. given: all pages
 * given back since the start. 0 while the budget is spent. */
size_t demand_unused_pages(const struct demand *demand, size_t free_now, size_t given);

#endif
