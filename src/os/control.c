#include "os/control.h"

#include "base/assert.h"

_Alignas(64) struct control os_control = CONTROL_INITIAL;

bool control_claim(struct control *control, struct control_claim *claim) {
    /* `claimed` is read before `pending`. In the other order, a thread that is
     * delayed while other threads carry out this request and the next one could
     * claim this request again. */
    uint32_t claimed = atomic_load_explicit(&control->claimed, memory_order_acquire);
    /* The acquire makes the requester's writes before `pending` visible. */
    uint32_t number = atomic_load_explicit(&control->pending, memory_order_acquire);
    if (number == 0 || number == claimed ||
        atomic_load_explicit(&control->ticket, memory_order_relaxed) != number) {
        return false;
    }
    claim->number = number;
    claim->request = atomic_load_explicit(&control->request, memory_order_relaxed);
    claim->argument = atomic_load_explicit(&control->argument, memory_order_relaxed);
    return atomic_compare_exchange_strong_explicit(&control->claimed, &claimed, number, memory_order_acq_rel,
                                                   memory_order_relaxed);
}

void control_complete(struct control *control, const struct control_claim *claim, int error,
                      uint64_t result) {
    calm_assert(claim->number != 0, claim->number);
    atomic_store_explicit(&control->result, result, memory_order_relaxed);
    atomic_store_explicit(&control->error, error, memory_order_relaxed);
    atomic_store_explicit(&control->completed, claim->number, memory_order_release);
    uint32_t number = claim->number;
    /* If the requester has given up, `pending` may already hold the next
     * request. */
    atomic_compare_exchange_strong_explicit(&control->pending, &number, 0, memory_order_release,
                                            memory_order_relaxed);
}

void control_cancel(struct control *control) {
    if (atomic_load_explicit(&control->pending, memory_order_relaxed) != 0) {
        atomic_store_explicit(&control->pending, 0, memory_order_relaxed);
    }
}
