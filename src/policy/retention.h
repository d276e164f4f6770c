/*
 * Retention: the limit on free memory at this moment, and the amount to which a purge reduces it.
 *
 * Under the paper's policy the limit is table 1 (hysteresis.h). Under the adaptive policy it is that
 * threshold plus the free memory that the program had in use within the period worth keeping (demand.h).
 * Resident memory therefore exceeds the program's own recent peak by the threshold at most; while giving back
 * in vain has cost more than its share, by up to four times the threshold. At most a third
 * of the memory that the process may still take (os/memory_room.h) is kept free.
 *
 * Pure: no system call, no lock, no global. Inline, since each thread calls it when it leaves the heap. Also
 * called by retention-replay and by the tests.
 */
#ifndef CALM_POLICY_RETENTION_H
#define CALM_POLICY_RETENTION_H

#include "policy/hysteresis.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The limit where neither a helper nor a server gives memory back later: so many times the threshold, or so
 * many bytes if that is more. */
#define RETENTION_UNTENDED_FACTOR 4
#define RETENTION_UNTENDED_BYTES  ((size_t)4 << 20)

/* What holds for a while. */
struct retention_terms {
    bool adaptive;
    bool tended;       /* a helper or server gives memory back later, even if the program stays idle */
    double factor;     /* of the threshold: hysteresis_factor */
    double share;      /* of what else is worth keeping, in [0, 1] */
    size_t peak_bytes; /* what is worth keeping, with what is in use */
    size_t held_bytes; /* the same while the budget is spent, or 0: what was in use or free */
    size_t room_bytes; /* which what is resident may come to; SIZE_MAX: not known */
};

struct retention {
    size_t limit_bytes; /* free memory beyond it is given back at once */
    size_t keep_bytes;  /* until so much stays */
};

static inline size_t retention_least(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline size_t retention_most(size_t a, size_t b) {
    return a > b ? a : b;
}

static inline size_t retention_less(size_t a, size_t b) {
    return a > b ? a - b : 0;
}

static inline size_t retention_sum(size_t a, size_t b) {
    return a > SIZE_MAX - b ? SIZE_MAX : a + b;
}

static inline size_t retention_part(size_t bytes, double share) {
    return share < 1 ? (size_t)((double)bytes * share) : bytes;
}

/* The threshold of table 1 for so much in use and so much free; it saturates at PTRDIFF_MAX. */
static inline size_t retention_threshold(const struct retention_terms *terms, size_t used_bytes,
                                         size_t free_bytes) {
    double bytes = (double)hysteresis_base_bytes(retention_sum(used_bytes, free_bytes)) * terms->factor;
    return bytes < (double)PTRDIFF_MAX ? (size_t)bytes : (size_t)PTRDIFF_MAX;
}

/* The bound on free memory and what is made resident ahead of use together: as if nothing were known of what
 * the program used before. */
static inline size_t retention_ahead_bytes(const struct retention_terms *terms, size_t used_bytes,
                                           size_t free_bytes) {
    size_t threshold = retention_threshold(terms, used_bytes, free_bytes);
    return threshold > SIZE_MAX / RETENTION_UNTENDED_FACTOR ? SIZE_MAX
                                                            : threshold * RETENTION_UNTENDED_FACTOR;
}

/* For so much in use, and so much free that may be resident. Never fails. */
static inline struct retention retention_decide(const struct retention_terms *terms, size_t used_bytes,
                                                size_t free_bytes) {
    size_t threshold = retention_threshold(terms, used_bytes, free_bytes);
    if (!terms->adaptive) {
        return (struct retention){threshold, threshold / 4}; /* the padding of section 6.2.1 */
    }
    size_t before = retention_part(retention_less(terms->peak_bytes, used_bytes), terms->share);
    size_t wanted = retention_sum(threshold, before);
    size_t several = retention_ahead_bytes(terms, used_bytes, free_bytes);
    if (terms->held_bytes > 0) {
        /* What was held shows what fragmentation needs, but also what this limit allowed: so there is an end.
         */
        size_t held = retention_part(retention_less(terms->held_bytes, used_bytes), terms->share);
        wanted = retention_least(retention_sum(threshold, retention_most(held, before)),
                                 retention_sum(several, before));
    }
    size_t limit = wanted;
    if (!terms->tended) {
        size_t little = retention_part(RETENTION_UNTENDED_BYTES, terms->share);
        limit = retention_least(limit, retention_most(several, little));
    }
    if (terms->room_bytes != SIZE_MAX) {
        limit = retention_least(limit, retention_less(terms->room_bytes, used_bytes) / 3);
    }
    /* Enough that the next purge is not soon; but of what is wanted again, nothing. */
    size_t purge = (limit < wanted ? limit : retention_least(limit, threshold)) / 4;
    return (struct retention){limit, limit - purge};
}

#endif
