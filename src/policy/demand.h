/*
 * Demand: for how long free memory is worth keeping, by what the program did with it so far.
 *
 * Ski rental: pages that the program wants again after a gap had better be kept for as long as the gap; but
 * nobody knows the gaps to come, so they are taken to be those of the past. In each window the most pages
 * that were in use are noted. A page is in use again after a gap where that level rises above what it was
 * since, whether or not the page was given back meanwhile: so for each of a few periods it is known which
 * pages keeping for so long would have given back in vain, and what that would have cost. The shortest period
 * with which it is at most its share of the CPU time is taken, and doubled, since gaps differ.
 *
 * What levels do not see, as pages of a mixture of sizes that fit nothing, is seen by its cost: a page that
 * was given back and one that is faulted in later are one giving back in vain. While those cost more than
 * their share the budget is spent.
 *
 * Pure: numbers in, numbers out; no system call, no lock, no global. Called once a window by the governor, by
 * bench/retention-replay, and by the tests. All zero is the valid initial state.
 */
#ifndef CALM_POLICY_DEMAND_H
#define CALM_POLICY_DEMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DEMAND_WINDOW_NS 100000000ULL
#define DEMAND_PERIODS   8   /* of 1, 2, 4 ... 128 windows: 0.1 to 12.8 s */
#define DEMAND_WINDOWS   256 /* remembered: gaps of twice the longest period are seen */

struct demand_window {
    double ns;            /* how long it was: several windows, if nobody looked in between */
    double cpu_ns;        /* that the process used in it */
    size_t used_most;     /* pages in use, at most */
    size_t used_last;     /* at its end */
    size_t held_most;     /* pages in use, and free ones that may be resident, at most */
    size_t free_least;    /* pages free and resident through all of it, given back since or not */
    size_t purged_pages;  /* given back in it */
    size_t faulted_pages; /* that were not resident, and are in use now */
    double purge_ns;      /* spent on giving back */
};

struct demand_price {
    double fault_ns; /* of one page, as measured */
    double share;    /* of CPU time that giving back in vain may cost: 0.01 is one hundredth */
};

struct demand_past {
    size_t used_most, held_most, free_least;
};

struct demand {
    struct demand_past past[DEMAND_WINDOWS]; /* window number n at n % DEMAND_WINDOWS */
    size_t windows;
    unsigned period; /* 2 to its power is the number of windows */
    unsigned rests;  /* windows since the program was at work */
    bool spent;      /* more than its share */
    /* Sums in which what is long ago counts less. */
    double cpu_ns;
    double vain_pages[DEMAND_PERIODS]; /* that each period would have given back in vain */
    double spent_ns;                   /* on what was given back in vain */
    double purge_ns, purged_pages;
    double pending_pages; /* given back, and not faulted in since */
};

/* The window is over. Returns what giving back in vain cost that came to light in it, in ns. */
double demand_note(struct demand *demand, const struct demand_window *window, struct demand_price price);

/* For how many windows free memory is kept. */
size_t demand_period(const struct demand *demand);

/*
 * The most pages that were in use within the period: so many, in use or not, are worth keeping. While the
 * budget is spent, the most that were in use or free within the longest period.
 */
size_t demand_peak_pages(const struct demand *demand);

/*
 * Whether giving back in vain has cost its share, and the program is at work: then nothing is given back for
 * lying unused, until what was spent is little beside the CPU time again. A program that rests is given no
 * such respite, and its memory goes back as its gaps allow.
 */
bool demand_is_spent(const struct demand *demand);

/* Of so many pages that are free now, those that were so through all of the period: to be given back. given:
 * all that were given back before. */
size_t demand_unused_pages(const struct demand *demand, size_t free_now, size_t given);

#endif
