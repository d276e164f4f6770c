#include "trim_decision.h"

#include "arenas.h"
#include "base/size.h"
#include "glibc_settings.h"
#include "state.h"
#include "trim.h"

/* What may become free between two walks, at least; it adds to what may be retained. */
#define MIN_SLACK_BYTES (1UL << 20)

/*
 * What a merge may leave free above the threshold, for each CPU that the process uses. Memory that becomes
 * free by a merge, all at once as a thread's last blocks are freed, belongs to a thread that ends or turns to
 * something new: that much may stay for the next thread, wherever it is found.
 */
#define MERGED_BYTES_PER_CPU (8UL << 20)

/* Section 6.2.1: all arenas are checked when a free has changed its own by much. */
bool trim_is_due(bool top_grew) {
    size_t margin = MERGED_BYTES_PER_CPU / 100 * LOAD(&state.counters.cpus_hundredths);
    size_t top = state_sum(&state.counters.free_top_bytes);
    size_t threshold = LOAD(&state.counters.threshold_bytes);
    /* The slack was calculated from a threshold that may have fallen since, with the footprint. */
    size_t slack = size_min(LOAD(&state.slack_bytes), size_max(threshold, MIN_SLACK_BYTES));
    return top > threshold + (top_grew ? 0 : margin) &&
           (LOAD(&state.freed_bytes) - LOAD(&state.freed_bytes_then) >= slack ||
            top >= LOAD(&state.free_top_bytes_then) + slack);
}

void trim_if_needed(void) {
    size_t threshold = LOAD(&state.counters.threshold_bytes);
    size_t resident = state_sum(&state.counters.free_top_bytes);
    if (resident > threshold && !LOAD(&glibc_settings.trim_threshold)) {
        size_t keep_bytes = LOAD(&state.counters.pad_each_bytes);
        resident = arenas_resident_bytes(keep_bytes);
        if (resident > threshold) {
            resident -= size_min(trim_arenas(keep_bytes), resident);
        }
    }
    size_t slack = threshold > resident ? threshold - resident : 0;
    STORE(&state.slack_bytes, size_max(size_max(slack, threshold / 16), MIN_SLACK_BYTES));
    STORE(&state.free_top_bytes_then, state_sum(&state.counters.free_top_bytes));
    STORE(&state.freed_bytes_then, LOAD(&state.freed_bytes));
}
