/* Measures what page faults cost on this machine. Any thread may call these
 * functions unless their comment names a lock. */
#ifndef CALM_ARENA_FAULT_COST_H
#define CALM_ARENA_FAULT_COST_H

#include "arena/state.h"

/* Returns the cost for one page. The first call measures it. Several threads
 * may measure concurrently. */
double fault_ns(struct arenas *arenas);

/* Measures again, up to MAX_MEASURES times, and keeps the lower value. The
 * caller holds the purger's lock. */
void measure_fault_again(struct arenas *arenas);

/* Touches a new block in a huge-page region that was requested just now.
 * Reports the time that this fault took to the THP policy. */
void prefault_huge_page(struct arenas *arenas, struct thp_policy *policy, void *address);

#endif
