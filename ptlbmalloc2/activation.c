#include "activation.h"

#include <gnu/libc-version.h>
#include <malloc.h>

#include "glibc_malloc.h"
#include "glibc_proof.h"
#include "glibc_settings.h"
#include "numbers.h"
#include "os/file.h"
#include "os/filters.h"
#include "state.h"

_Atomic(int) activation;

const char *activation_why_not = "not started";

/* As much of an arena as is read without a lock: its top. */
static union {
    struct arena arena;
    char bytes[256];
} stand_in;

struct arena *const no_arena = &stand_in.arena;

struct governed governed = {.main_arena = &stand_in.arena};

/* Then glibc returns address space, which the system counts, and a trim does not. */
static bool overcommits_strictly(void) {
    return file_read_number("/proc/sys/vm/overcommit_memory") == 2;
}

/* NULL if nothing stands against governing; then glibc_main_arena is set. */
static const char *prepare(void) {
    return !glibc_layout_choose(gnu_get_libc_version()) ? "this version of glibc is not known"
           : glibc_settings.huge_pages                  ? "glibc.malloc.hugetlb changes the layout of heaps"
           : glibc_settings.tagging                     ? "glibc.mem.tagging changes the addresses of blocks"
           : LOAD(&glibc_settings.trim_threshold) && LOAD(&glibc_settings.top_pad)
               ? "trim_threshold and top_pad are set by the user"
           : overcommits_strictly()
               ? "under strict overcommit (vm.overcommit_memory=2) glibc gives address space back itself"
               : glibc_prove_main_arena();
}

bool activation_start(void) {
    filters_detect();
    activation_why_not = prepare();
    if (activation_why_not != NULL) {
        atomic_store(&activation, ACTIVATION_OFF);
        return false;
    }
    if (!LOAD(&glibc_settings.trim_threshold)) {
        __libc_mallopt(M_TRIM_THRESHOLD, -1);
    }
    STORE(&governed.main_arena, glibc_main_arena);
    atomic_store_explicit(&activation, ACTIVATION_ON, memory_order_release);
    return true;
}

void activation_end(const char *why_not) {
    int on = ACTIVATION_ON;
    if (!atomic_compare_exchange_strong(&activation, &on, ACTIVATION_OFF)) {
        return;
    }
    activation_why_not = why_not;
    STORE(&governed.main_arena, no_arena);
    atomic_store(&governed.heaps_proved, false); /* see governor_first_arena_of */
    if (!LOAD(&glibc_settings.trim_threshold)) {
        __libc_mallopt(M_TRIM_THRESHOLD, DEFAULT_TRIM_THRESHOLD);
    }
    if (!LOAD(&glibc_settings.top_pad)) {
        __libc_mallopt(M_TOP_PAD, DEFAULT_TOP_PAD);
    }
}

bool activation_is_on(void) {
    bool on = atomic_load_explicit(&activation, memory_order_acquire) == ACTIVATION_ON;
    if (on && filters_now() == FILTERS_ADDED) {
        activation_end("the program added a seccomp filter");
        return false;
    }
    return on;
}
