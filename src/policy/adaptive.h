/*
 * The adaptive policy: global hysteresis (hysteresis.h) with a band that widens while giving back costs too
 * much, and memory that nobody wanted for a whole window given back whatever its amount.
 *
 * What was given back and is then wanted again was given back in vain: the time that took, and the time to
 * fault it in again, as measured, is the cost. A cost above its share of the CPU time doubles the band, up to
 * the most; one below a quarter of the share narrows it by an eighth, down to the paper's own bound.
 *
 * Pure: numbers in, numbers out. Called once a window by the governor, and by the tests.
 */
#ifndef CALM_POLICY_ADAPTIVE_H
#define CALM_POLICY_ADAPTIVE_H

#include <stddef.h>

/*
 * Retention is at most so many times the threshold of table 1 for the current footprint, whatever it costs:
 * at a tenth of the footprint and 400 kB that is two thirds of what is in use, and under 3 MB of nothing.
 * Where somebody tends the memory, so that what lies unused is gone within two windows even if the program
 * never allocates again, it may be more: four times what is in use, and 16 MB of nothing.
 */
#define ADAPTIVE_BAND_MOST        4.0
#define ADAPTIVE_BAND_MOST_TENDED 8.0
#define ADAPTIVE_BAND_LEAST       1.0

struct adaptive_window {
    double ns;           /* how long it was */
    double cpus_used;    /* in it */
    double purge_ns;     /* spent on giving back */
    double fault_ns;     /* for one page, measured */
    size_t purged_pages; /* in it */
    size_t reused_pages; /* given back, in it or before, and wanted again in it */
    size_t unused_pages; /* free and resident through all of it */
    double band_most;
    double cost_share; /* of CPU time that giving back in vain may cost: 0.01 is one hundredth */
};

struct adaptive_decision {
    double band;        /* for the next window */
    size_t purge_pages; /* to give back now */
};

/* band: the current one. Never fails. */
struct adaptive_decision adaptive_decide(double band, struct adaptive_window window);

#endif
