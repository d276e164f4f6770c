/*
 * Retention: the limit on free memory at this moment, and the amount to which a purge reduces it.
 *
 * Under the paper's policy the limit is table 1 (hysteresis.h). Under the adaptive policy it is that
 * threshold plus the free memory that is worth keeping (demand.h). Resident memory therefore exceeds the
 * program's own recent peak by the threshold at most; while the heap is so fragmented that purging does not
 * pay, by up to four times the threshold. At most a third of the memory that the process may still take
 * (os/memory.h) is kept free.
 *
 * Pure: no system call, no lock, no global. Inline, since each thread calls it when it leaves the heap. Also
 * called by retention-replay and by the tests.
 */
#ifndef CALM_POLICY_RETENTION_H
#define CALM_POLICY_RETENTION_H

#include "base/size.h"
#include "policy/hysteresis.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The limit where no other thread purges later: this multiple of the threshold, or this number of bytes,
 * whichever is larger. */
#define RETENTION_FOREGROUND_FACTOR 4
#define RETENTION_FOREGROUND_BYTES  ((size_t)4 << 20)

/* What the arena sets once per epoch. */
struct retention_terms {
    bool adaptive;
    bool background_purge;  /* a helper thread purges later, even if the program stays idle */
    double factor;          /* of the threshold: hysteresis_factor; 0: no free memory is kept */
    size_t peak_bytes;      /* worth keeping, in use or free: demand_peak_pages */
    size_t surplus_bytes;   /* as the heap is fragmented: demand_surplus_pages */
    size_t available_bytes; /* upper bound of resident memory; SIZE_MAX: unknown */
};

struct retention {
    size_t limit_bytes; /* a purge starts as soon as more is free */
    size_t keep_bytes;  /* and leaves this much */
};

/* The threshold of table 1; saturates at PTRDIFF_MAX. */
static inline size_t retention_threshold(const struct retention_terms *terms, size_t used_bytes,
                                         size_t free_bytes) {
    return hysteresis_threshold_bytes(size_plus(used_bytes, free_bytes), terms->factor);
}

/* The bound on free and prefaulted memory together: the limit for a program whose past is unknown. */
static inline size_t retention_prefault_bytes(const struct retention_terms *terms, size_t used_bytes,
                                              size_t free_bytes) {
    size_t threshold = retention_threshold(terms, used_bytes, free_bytes);
    return threshold > SIZE_MAX / RETENTION_FOREGROUND_FACTOR ? SIZE_MAX
                                                              : threshold * RETENTION_FOREGROUND_FACTOR;
}

/* What may stay free whatever the threshold is. */
static inline size_t retention_little_bytes(const struct retention_terms *terms) {
    return terms->factor < 1 ? (size_t)(RETENTION_FOREGROUND_BYTES * terms->factor)
                             : RETENTION_FOREGROUND_BYTES;
}

/* used_bytes: in use; free_bytes: free and perhaps resident. Never fails. */
static inline struct retention retention_decide(const struct retention_terms *terms, size_t used_bytes,
                                                size_t free_bytes) {
    size_t threshold = retention_threshold(terms, used_bytes, free_bytes);
    if (!terms->adaptive) {
        return (struct retention){threshold, threshold / 4}; /* the padding of section 6.2.1 */
    }
    size_t peak = terms->factor > 0 ? size_minus(terms->peak_bytes, used_bytes) : 0;
    size_t several = retention_prefault_bytes(terms, used_bytes, free_bytes);
    /* surplus_bytes shows what fragmentation needs, but also what this limit allowed before. The bound keeps
     * it from growing without end. */
    size_t wanted = size_plus(size_min(size_plus(threshold, terms->surplus_bytes), several), peak);
    size_t limit = wanted;
    if (!terms->background_purge) {
        limit = size_min(limit, size_max(several, retention_little_bytes(terms)));
    }
    if (terms->available_bytes != SIZE_MAX) {
        limit = size_min(limit, size_minus(terms->available_bytes, used_bytes) / 3);
    }
    /* Enough that the next purge is not soon, but nothing of what is worth keeping beyond the threshold. */
    size_t purge = (limit < wanted ? limit : size_min(limit, threshold)) / 4;
    return (struct retention){limit, limit - purge};
}

/* Returns whether the limit and the memory in use add up to the same number of bytes, whatever part of the
 * memory held is in use, up to the peak. That number alone then decides whether a purge starts. */
static inline bool retention_limits_held(const struct retention_terms *terms, size_t held_bytes) {
    return terms->adaptive && terms->background_purge && terms->factor > 0 &&
           retention_decide(terms, 0, held_bytes).limit_bytes < terms->available_bytes / 3;
}

#endif
