/*
 * The predictor: how many magazines of a class, or blocks of a size, to have ready for a client.
 *
 * Recent demand says it ("NextGen-Malloc", sections 3.1.1 and 3.3.2). Each time that a client found nothing
 * ready the target doubles; at the end of each window it falls by what lay ready throughout, which goes back
 * to the heap: that was not wanted. Pure: numbers in, numbers out, for one client and class each.
 */
#ifndef CALM_OFFLOAD_PREDICTOR_H
#define CALM_OFFLOAD_PREDICTOR_H

#include <stdbool.h>
#include <stdint.h>

#define PREDICTOR_FIRST  2
#define PREDICTOR_BEHIND 8

/* All zero: nothing is expected. */
struct predictor {
    uint16_t target; /* to have ready */
    uint16_t lowest; /* that were ready in this window */
    uint16_t wanted; /* how often anything was taken or missed in this window, as far as it counts */
    uint16_t missed; /* of that, how often there was none */
};

/* A client wanted one and there was none: the target grows, up to most. */
static inline void predictor_missed(struct predictor *predictor, uint32_t most) {
    uint32_t target = predictor->target == 0 ? PREDICTOR_FIRST : 2U * predictor->target;
    predictor->target = (uint16_t)(target < most ? target : most);
    predictor->lowest = 0;
    predictor->wanted += predictor->wanted < UINT16_MAX;
    predictor->missed += predictor->missed < UINT16_MAX;
}

/* A client took one, which leaves so many. */
static inline void predictor_took(struct predictor *predictor, uint32_t left) {
    predictor->lowest = left < predictor->lowest ? (uint16_t)left : predictor->lowest;
    predictor->wanted += predictor->wanted < UINT16_MAX;
}

/* The window is over and so many are ready: how many of them were not wanted. */
static inline uint32_t predictor_end_window(struct predictor *predictor, uint32_t ready) {
    uint32_t surplus = predictor->lowest < ready ? predictor->lowest : ready;
    if (predictor->wanted == 0) {
        surplus = ready;
        predictor->target = 0;
    } else if (surplus < predictor->target) {
        predictor->target = (uint16_t)(predictor->target - surplus);
    } else {
        predictor->target = 1;
        surplus = ready > 0 ? ready - 1 : 0;
    }
    predictor->lowest = (uint16_t)(ready - surplus);
    predictor->wanted = 0;
    predictor->missed = 0;
    return surplus;
}

/* Whether it falls behind: a client wants more than can be made ready, and waits again and again. */
static inline bool predictor_falls_behind(const struct predictor *predictor) {
    return predictor->missed >= PREDICTOR_BEHIND && predictor->missed > predictor->wanted / 4;
}

static inline bool predictor_is_quiet(const struct predictor *predictor) {
    return predictor->target == 0;
}

#endif
