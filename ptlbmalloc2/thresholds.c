#include "thresholds.h"

#include <limits.h>
#include <malloc.h>

#include "arena.h"
#include "base/size.h"
#include "glibc_malloc.h"
#include "glibc_settings.h"
#include "options.h"
#include "os/vm.h"
#include "policy/hysteresis.h"
#include "state.h"

/*
 * Claimed pages cost nothing until they are touched, but each claim is a system call that takes the address
 * space's lock. So no claim is smaller than glibc's own default pad, and a growing heap at least doubles, up
 * to a limit.
 */
#define MIN_CLAIM_BYTES    DEFAULT_TOP_PAD
#define MAX_DOUBLING_BYTES (8UL << 20)

/* A block of calloc of this size may have pages that the program never touches. glibc's calloc clears, and so
 * makes resident, whatever was usable before; a program that allocates such blocks pads no more than under
 * plain glibc. */
#define MIN_SPARSE_BYTES (32UL << 10)

static size_t always_huge_bytes; /* 0: the kernel uses huge pages only on request */

void thresholds_start(void) {
    always_huge_bytes = huge_pages_always_bytes();
}

static struct hysteresis_thresholds decide(void) {
    return hysteresis_decide((struct hysteresis_input){
        .footprint_bytes = state_sum(&state.counters.footprint_bytes),
        .cpus_used = (double)LOAD(&state.counters.cpus_hundredths) / 100,
        .arenas = LOAD(&state.counters.arenas),
        .sensitivity = options.sensitivity,
    });
}

static bool has_moved(size_t now, _Atomic(size_t) *counter) {
    size_t in_force = LOAD(counter);
    return now > in_force + in_force / 4 || now < in_force - in_force / 4;
}

void thresholds_note_calloc(size_t bytes) {
    if (bytes >= MIN_SPARSE_BYTES && !LOAD(&state.clears)) {
        STORE(&state.clears, true);
    }
}

bool thresholds_have_moved(void) {
    struct hysteresis_thresholds now = decide();
    return has_moved(now.trim_bytes, &state.counters.threshold_bytes) ||
           (!LOAD(&glibc_settings.top_pad) &&
            (LOAD(&state.clears) != LOAD(&state.pads_bounded) ||
             has_moved(now.pad_each_bytes, &state.counters.pad_each_bytes)));
}

void thresholds_update(void) {
    struct hysteresis_thresholds now = decide();
    STORE(&state.counters.threshold_bytes, now.trim_bytes);
    if (LOAD(&glibc_settings.top_pad)) {
        STORE(&state.counters.pad_each_bytes, LOAD(&glibc_settings.top_pad_bytes));
        return;
    }
    bool clears = LOAD(&state.clears);
    if (clears != LOAD(&state.pads_bounded) ||
        has_moved(now.pad_each_bytes, &state.counters.pad_each_bytes)) {
        ADD(&state.counters.threshold_changes, 1);
        STORE(&state.counters.pad_each_bytes, now.pad_each_bytes);
        STORE(&state.pads_bounded, clears);
        size_t max_pad = always_huge_bytes > 0 || clears ? DEFAULT_TOP_PAD : INT_MAX;
        __libc_mallopt(M_TOP_PAD, (int)size_min(now.pad_each_bytes, max_pad));
    }
}

size_t thresholds_claim_padding(const struct arena *arena) {
    if (arena == glibc_main_arena || LOAD(&glibc_settings.top_pad) || LOAD(&state.clears)) {
        return SIZE_MAX;
    }
    size_t pad_each = LOAD(&state.counters.pad_each_bytes);
    size_t low = pad_each / 4;
    size_t usable = arena_usable_bytes(arena);
    if (usable < low) {
        size_t doubling = size_min(heap_of(arena_body(arena)->top)->size, MAX_DOUBLING_BYTES);
        size_t wanted = size_max(pad_each, size_max(doubling, MIN_CLAIM_BYTES));
        size_t claimed = arena_claim(arena, wanted, always_huge_bytes);
        if (claimed > 0) {
            ADD(&state.counters.claims, 1);
            ADD(&state.counters.bytes_claimed, claimed);
            usable += claimed;
        }
    }
    return size_minus(usable, low);
}
