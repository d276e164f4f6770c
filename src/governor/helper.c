#include "governor/helper.h"

#include "os/address_space.h"
#include "os/syscall.h"
#include "os/thread.h"

#include <linux/futex.h>
#include <time.h>

#define STACK_BYTES ((size_t)64 << 10)
/* Windows without work before the helper sleeps until it is rung for. */
#define QUIET_WINDOWS 20

/* The bell is a count of rings. */
static void wait_for_bell(struct governor *governor, uint32_t rung, const struct timespec *most) {
    os_syscall(SYS_futex, (long)&governor->helper_bell, FUTEX_WAIT_PRIVATE, (long)rung, (long)most, 0, 0);
}

static void run(void *argument) {
    struct governor *governor = argument;
    const struct timespec window = {0, (long)WINDOW_NS};
    unsigned quiet = 0;
    for (;;) {
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
                wait_for_bell(governor, rung, NULL);
            }
            atomic_store_explicit(&governor->helper, HELPER_AWAKE, memory_order_relaxed);
            quiet = 0;
        }
        wait_for_bell(governor, atomic_load_explicit(&governor->helper_bell, memory_order_relaxed), &window);
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
        os_syscall(SYS_futex, (long)&governor->helper_bell, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
    }
}
