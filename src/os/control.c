#include "os/control.h"

_Alignas(64) struct control os_control = CONTROL_INITIAL;

bool control_take(struct control *control, struct control_claim *claim) {
    /* Before `asked`, in this order: a thread that stays behind while others carry out this request and the
     * next one would claim it again otherwise. */
    uint32_t claimed = atomic_load_explicit(&control->claimed, memory_order_acquire);
    /* Acquire: what the asker wrote before `asked` is there. */
    uint32_t number = atomic_load_explicit(&control->asked, memory_order_acquire);
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

void control_finish(struct control *control, const struct control_claim *claim, int error, uint64_t result) {
    atomic_store_explicit(&control->result, result, memory_order_relaxed);
    atomic_store_explicit(&control->error, error, memory_order_relaxed);
    atomic_store_explicit(&control->done, claim->number, memory_order_release);
    uint32_t number = claim->number;
    /* The next request may be there already: of an asker that gave this one up. */
    atomic_compare_exchange_strong_explicit(&control->asked, &number, 0, memory_order_release,
                                            memory_order_relaxed);
}

void control_clear(struct control *control) {
    if (atomic_load_explicit(&control->asked, memory_order_relaxed) != 0) {
        atomic_store_explicit(&control->asked, 0, memory_order_relaxed);
    }
}
