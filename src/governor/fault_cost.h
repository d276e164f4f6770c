/*
 * The cost of a page fault on this machine, measured.
 */
#ifndef CALM_GOVERNOR_FAULT_COST_H
#define CALM_GOVERNOR_FAULT_COST_H

#include "governor/state.h"

/* For one page. Measured at the first call; more than once if several threads call at once. */
double fault_ns(struct governor *governor);

#endif
