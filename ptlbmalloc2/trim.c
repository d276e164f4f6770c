#include "trim.h"

#include "arena.h"
#include "arenas.h"
#include "base/assert.h"
#include "base/size.h"
#include "glibc_settings.h"
#include "os/probe.h"
#include "os/purge.h"
#include "state.h"

/* Probes for tracers (docs/usdt.md): a trim is to leave so many bytes at the top of each arena; it gave back
 * so many bytes of address space, of which so many were resident. */
PROBE_DECLARE(probe_trim_begin, uint64_t keep_bytes);
PROBE_DECLARE(probe_trim_end, uint64_t bytes_trimmed, uint64_t bytes_purged);
PROBE_DEFINE_1("ptlbmalloc2", "trim__begin", probe_trim_begin)
PROBE_DEFINE_2("ptlbmalloc2", "trim__end", probe_trim_end)

/* ---- the trim ---- */

/*
 * The most resident memory that is given back while arenas stay locked, since the resident part takes the
 * time: about half a millisecond. Ranges that were never touched cost next to nothing, so a batch may have
 * many of them.
 */
#define MAX_BATCH_RESIDENT_BYTES (16UL << 20)

#define MAX_BATCH_RANGES 64 /* on the stack */

struct trim {
    size_t keep_bytes;
    size_t bytes_trimmed;
    size_t bytes_purged; /* the part of them that was resident */
    bool failed;         /* the kernel refused every range of the last purge */
    bool refused;        /* it refused at least one of them */
    /* The batch: ranges that await one purge. Their arenas stay locked, since a block allocated from such a
     * range meanwhile would be zeroed. */
    size_t count;
    size_t batch_resident_bytes;
    size_t resident_bytes[MAX_BATCH_RANGES];
    struct iovec ranges[MAX_BATCH_RANGES];
    struct arena *arenas[MAX_BATCH_RANGES];
};

static void account(struct trim *trim, struct arena *arena, size_t bytes, size_t resident_bytes) {
    trim->bytes_trimmed += bytes;
    trim->bytes_purged += resident_bytes;
    arenas_record(arena);
}

/*
 * Purges and empties the batch. A range that the kernel refuses (a page of it is locked in memory) is left as
 * it was, and the others go on; if the kernel refuses all of them, the trim ends.
 */
static void purge_batch(struct trim *trim) {
    struct counters *counters = &state.counters;
    size_t refused = 0;
    for (size_t i = 0; i < trim->count; i++) {
        struct purge_result result = purge_ranges(trim->ranges + i, trim->count - i);
        ADD(&counters->process_madvise_calls, result.vectored_calls);
        ADD(&counters->madvise_calls, result.single_calls);
        ADD(&counters->ranges, result.ranges_done);
        for (size_t end = i + result.ranges_done; i < end; i++) {
            arena_cut_purged(trim->arenas[i], trim->ranges[i].iov_len);
            account(trim, trim->arenas[i], trim->ranges[i].iov_len, trim->resident_bytes[i]);
        }
        refused += i < trim->count;
    }
    ADD(&counters->failed_purges, refused);
    calm_assert(trim->count > 0 && refused <= trim->count, refused, trim->count);
    trim->failed = refused == trim->count;
    trim->refused = refused > 0;
    for (size_t i = 0; i < trim->count; i++) {
        arena_unlock(trim->arenas[i]);
    }
    trim->count = 0;
    trim->batch_resident_bytes = 0;
}

/* Cuts a tail off the main arena, which is locked. Returns the bytes cut. */
static size_t cut_main(struct trim *trim, struct residency tail) {
    size_t released = tail.suffix_bytes > 0 ? arena_release_main(tail.suffix_bytes) : 0;
    if (released > 0) {
        ADD(&state.counters.break_calls, 1);
        account(trim, glibc_main_arena, released, tail.resident_bytes);
    } else if (tail.suffix_bytes > 0) {
        ADD(&state.counters.failed_purges, 1);
    }
    return released;
}

/*
 * Cuts a slice off an arena. Returns whether there is more of it to cut: a slice ends once the batch holds
 * the most resident memory that it may, and the arena is unlocked between two slices.
 */
static bool trim_slice(struct trim *trim, struct arena *arena, bool first_slice) {
    if (!arena_trylock(arena)) {
        ADD(&state.counters.busy_arenas, 1);
        return false;
    }
    size_t excess = 0;
    if (arenas_record(arena) && (!first_slice || arena_top_bytes(arena) > 2 * trim->keep_bytes)) {
        excess = arena_excess_bytes(arena, trim->keep_bytes);
    }
    if (excess == 0) {
        arena_unlock(arena);
        return false;
    }
    char *end = arena_top_end(arena);
    struct residency tail = residency_of_tail(
        end - excess, excess, MAX_BATCH_RESIDENT_BYTES - trim->batch_resident_bytes, state.scratch);
    if (arena == glibc_main_arena) {
        size_t cut = cut_main(trim, tail);
        arena_unlock(arena);
        return cut > 0 && cut < excess;
    }
    if (tail.suffix_bytes > 0) {
        calm_assert(trim->count < MAX_BATCH_RANGES && tail.suffix_bytes <= excess, trim->count, excess);
        trim->ranges[trim->count] = (struct iovec){end - tail.suffix_bytes, tail.suffix_bytes};
        trim->arenas[trim->count] = arena;
        trim->resident_bytes[trim->count++] = tail.resident_bytes;
        trim->batch_resident_bytes += tail.resident_bytes;
    } else {
        arena_unlock(arena);
    }
    bool more = tail.suffix_bytes < excess;
    if (more || trim->count == MAX_BATCH_RANGES) {
        purge_batch(trim);
    }
    return more && !trim->refused;
}

size_t trim_arenas(size_t keep_bytes) {
    struct trim trim = {.keep_bytes = keep_bytes};
    if (probe_trim_begin_is_enabled()) {
        probe_trim_begin(keep_bytes);
    }
    struct arena *arena = glibc_main_arena;
    for (; arena != NULL && !trim.failed; arena = arena_after(arena)) {
        for (bool first = true; !trim.failed && trim_slice(&trim, arena, first); first = false) {
        }
    }
    if (trim.count > 0) {
        purge_batch(&trim);
    }
    if (trim.bytes_trimmed > 0) {
        ADD(&state.counters.trims, 1);
        ADD(&state.counters.bytes_trimmed, trim.bytes_trimmed);
        ADD(&state.counters.bytes_purged, trim.bytes_purged);
    }
    if (probe_trim_end_is_enabled()) {
        probe_trim_end(trim.bytes_trimmed, trim.bytes_purged);
    }
    return trim.bytes_purged;
}

/* ---- the decision ---- */

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
            resident = size_minus(resident, trim_arenas(keep_bytes));
        }
    }
    size_t slack = size_minus(threshold, resident);
    STORE(&state.slack_bytes, size_max(size_max(slack, threshold / 16), MIN_SLACK_BYTES));
    STORE(&state.free_top_bytes_then, state_sum(&state.counters.free_top_bytes));
    STORE(&state.freed_bytes_then, LOAD(&state.freed_bytes));
}
