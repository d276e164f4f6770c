#include "offload/call.h"

#include "base/assert.h"
#include "os/futex.h"
#include "os/lock.h"

struct call *call_claim(struct call *calls, unsigned from) {
    for (unsigned i = 0; i < CALLS; i++) {
        struct call *call = &calls[(from + i) % CALLS];
        uint32_t free = CALL_FREE;
        if (atomic_load_explicit(&call->state, memory_order_relaxed) == CALL_FREE &&
            atomic_compare_exchange_strong_explicit(&call->state, &free, CALL_CLAIMED, memory_order_acquire,
                                                    memory_order_relaxed)) {
            atomic_store_explicit(&call->claimer, lock_self(), memory_order_relaxed);
            return call;
        }
    }
    return NULL;
}

bool call_retract(struct call *call) {
    uint32_t pending = CALL_PENDING;
    return atomic_compare_exchange_strong_explicit(&call->state, &pending, CALL_FREE, memory_order_acq_rel,
                                                   memory_order_relaxed);
}

bool call_abandon(struct call *call) {
    uint32_t state = atomic_load_explicit(&call->state, memory_order_relaxed);
    while ((state & CALL_STATE) == CALL_PENDING || (state & CALL_STATE) == CALL_TAKEN) {
        if (atomic_compare_exchange_weak_explicit(&call->state, &state, CALL_ABANDONED, memory_order_acq_rel,
                                                  memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

bool call_begin(struct call *call) {
    /* Acquire also for an abandoned call: its client's writes come before those
     * of the slot's next client. */
    uint32_t state = atomic_load_explicit(&call->state, memory_order_acquire);
    while ((state & CALL_STATE) == CALL_PENDING) {
        if (atomic_compare_exchange_weak_explicit(&call->state, &state, (state & CALL_SLEEPING) | CALL_TAKEN,
                                                  memory_order_acquire, memory_order_acquire)) {
            return true;
        }
    }
    if ((state & CALL_STATE) == CALL_ABANDONED) {
        call_free(call);
    }
    return false;
}

bool call_answer(struct call *call) {
    uint32_t before = atomic_exchange_explicit(&call->state, CALL_DONE, memory_order_acq_rel);
    calm_assert((before & CALL_STATE) == CALL_TAKEN || (before & CALL_STATE) == CALL_ABANDONED, before);
    if ((before & CALL_SLEEPING) != 0) {
        futex_wake_all(&call->state);
    }
    return (before & CALL_STATE) != CALL_ABANDONED;
}

void calls_start_child(struct call *calls) {
    for (struct call *call = calls; call < calls + CALLS; call++) {
        uint32_t state = atomic_load_explicit(&call->state, memory_order_relaxed);
        if (state == CALL_FREE) {
            continue; /* and the page stays shared with the parent */
        }
        bool mine = (state & CALL_STATE) != CALL_ABANDONED &&
                    atomic_load_explicit(&call->claimer, memory_order_relaxed) == lock_self();
        bool waits = (state & CALL_STATE) == CALL_PENDING || (state & CALL_STATE) == CALL_TAKEN;
        if (!mine || waits) {
            atomic_store_explicit(&call->state, mine ? CALL_CLAIMED : CALL_FREE, memory_order_relaxed);
        }
    }
}
