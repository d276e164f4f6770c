#include "governor/helper.h"

#include "os/futex.h"
#include "os/thread.h"

#define STACK_BYTES ((size_t)64 << 10)
/* Windows without work before the helper sleeps until it is rung for. */
#define QUIET_WINDOWS 20

static void run(void *argument) {
    struct governor *governor = argument;
    unsigned quiet = 0;
    for (;;) {
        /* The bell is a count of rings. */
        uint32_t rung = atomic_load_explicit(&governor->helper_bell, memory_order_relaxed);
        bool idle = governor_tick(governor);
        quiet = idle ? quiet + 1 : 0;
        if (!governor_wants_helper(governor)) {
            atomic_store_explicit(&governor->helper, HELPER_NONE, memory_order_seq_cst);
            return;
        }
        if (quiet >= QUIET_WINDOWS) {
            /* Whoever comes through the heap's door from here on rings, and the count then is not rung any
             * more. */
            atomic_store_explicit(&governor->helper, HELPER_ASLEEP, memory_order_seq_cst);
            if (governor_is_untouched(governor)) {
                futex_wait(&governor->helper_bell, rung, 0);
            }
            atomic_store_explicit(&governor->helper, HELPER_AWAKE, memory_order_relaxed);
            quiet = 0;
        }
        rung = atomic_load_explicit(&governor->helper_bell, memory_order_relaxed);
        futex_wait(&governor->helper_bell, rung, WINDOW_NS);
    }
}

bool helper_start(struct governor *governor) {
    int none = HELPER_NONE;
    if (!atomic_compare_exchange_strong_explicit(&governor->helper, &none, HELPER_AWAKE, memory_order_acq_rel,
                                                 memory_order_relaxed)) {
        return false;
    }
    if (!thread_start(run, governor, STACK_BYTES)) {
        atomic_store_explicit(&governor->helper, HELPER_REFUSED, memory_order_relaxed);
        return false;
    }
    return true;
}

void helper_wake(struct governor *governor) {
    int asleep = HELPER_ASLEEP;
    if (atomic_compare_exchange_strong_explicit(&governor->helper, &asleep, HELPER_AWAKE,
                                                memory_order_seq_cst, memory_order_relaxed)) {
        atomic_fetch_add_explicit(&governor->helper_bell, 1, memory_order_seq_cst);
        futex_wake_all(&governor->helper_bell);
    }
}
