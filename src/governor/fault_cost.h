/* The costs of page faults on this machine, measured. Any thread. */
#ifndef CALM_GOVERNOR_FAULT_COST_H
#define CALM_GOVERNOR_FAULT_COST_H

#include "governor/state.h"

/* For one page. Measured at the first call; more than once if several threads call at once. */
double fault_ns(struct governor *governor);

/* Measures again, up to MAX_MEASURES times, and keeps the lower value. Under the purger's lock. */
void measure_fault_again(struct governor *governor);

/* Faults in a huge page that was only just requested, at the address of a new block, and lets the THP policy
 * know what it cost. */
void touch_huge_page(struct governor *governor, void *address);

#endif
