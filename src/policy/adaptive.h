/*
 * The adaptive policy: global hysteresis (hysteresis.h) with a band that widens while giving back costs too
 * much, and memory that nobody wanted for a whole window given back whatever its amount.
 *
 * What was given back and then wanted again within the window was given back in vain: the time that took, and
 * the time to fault it in again, as measured, is the cost. A cost above its share of the CPU time doubles the
 * band, up to ADAPTIVE_BAND_MOST; one below a quarter of the share narrows it by an eighth, down to the
 * paper's own bound.
 *
 * Pure: numbers in, numbers out. Called once a window by the governor, and by the tests.
 */
#ifndef CALM_POLICY_ADAPTIVE_H
#define CALM_POLICY_ADAPTIVE_H

#include <stddef.h>

/* Retention is at most this many times the threshold of table 1 for the current footprint, whatever it costs.
 */
#define ADAPTIVE_BAND_MOST  4.0
#define ADAPTIVE_BAND_LEAST 1.0

struct adaptive_window {
    double ns;           /* how long it was */
    double cpus_used;    /* in it */
    double purge_ns;     /* spent on giving back */
    double fault_ns;     /* for one page, measured */
    size_t purged_pages; /* in it */
    size_t reused_pages; /* given back, in it or before, and wanted again in it */
    size_t unused_pages; /* free and resident through all of it */
    double cost_share;   /* of CPU time that giving back in vain may cost: 0.01 is one hundredth */
};

struct adaptive_decision {
    double band;        /* for the next window */
    size_t purge_pages; /* to give back now */
};

/* band: the current one. Never fails. */
struct adaptive_decision adaptive_decide(double band, struct adaptive_window window);

#endif
