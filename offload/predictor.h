/*
 * The predictor: how many magazines of a class, or blocks of a size, to keep
 * ready for the clients of an endpoint ("NextGen-Malloc", sections 3.1.1 and
 * 3.3.2). The target doubles each time a client finds none ready; at an epoch's
 * end it decreases by the number that stayed ready throughout. Pure. All zero:
 * none is predicted.
 */
#ifndef CALM_OFFLOAD_PREDICTOR_H
#define CALM_OFFLOAD_PREDICTOR_H

#include <stdbool.h>
#include <stdint.h>

#define PREDICTOR_FIRST 2

struct predictor {
    uint16_t target; /* to keep ready; 0: quiet */
    uint16_t lowest; /* number ready in this epoch */
    bool wanted;     /* whether there were requests in this epoch */
};

/* A client found none ready: the target doubles, up to max_target. */
static inline void predictor_missed(struct predictor *predictor, uint32_t max_target) {
    uint32_t target = predictor->target == 0 ? PREDICTOR_FIRST : 2U * predictor->target;
    predictor->target = (uint16_t)(target < max_target ? target : max_target);
    predictor->lowest = 0;
    predictor->wanted = true;
}

/* A client took one; `left` stay ready. */
static inline void predictor_took(struct predictor *predictor, uint32_t left) {
    predictor->lowest = left < predictor->lowest ? (uint16_t)left : predictor->lowest;
    predictor->wanted = true;
}

/* Ends the epoch, with `ready` ready. Returns how many of them to give back. */
static inline uint32_t predictor_end_epoch(struct predictor *predictor, uint32_t ready) {
    uint32_t surplus = predictor->lowest < ready ? predictor->lowest : ready;
    if (!predictor->wanted) {
        surplus = ready;
        predictor->target = 0;
    } else if (surplus < predictor->target) {
        predictor->target = (uint16_t)(predictor->target - surplus);
    } else {
        predictor->target = 1;
        surplus = ready > 0 ? ready - 1 : 0;
    }
    predictor->lowest = (uint16_t)(ready - surplus);
    predictor->wanted = false;
    return surplus;
}

#endif
