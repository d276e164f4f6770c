#include "trim.h"

#include "arena.h"
#include "governor_state.h"
#include "os/purge.h"
#include "probes.h"

/*
 * What one hold of arena locks gives back at most, in resident memory, since that is what takes the time:
 * about half a millisecond. An untouched range costs next to nothing, so that one call can take many of them.
 */
#define HOLD_MAX_RESIDENT_BYTES (16UL << 20)

/* Ranges in one hold: they stand on the stack. */
#define TRIM_MAX_RANGES 64

/* Ranges that await one purge. Their arenas stay locked: a top handed out meanwhile would be zeroed. */
struct batch {
    struct iovec ranges[TRIM_MAX_RANGES];
    struct arena *arenas[TRIM_MAX_RANGES];
    size_t count;
    size_t resident_bytes[TRIM_MAX_RANGES];
    size_t total_resident_bytes;
};

struct trim {
    struct governor *governor;
    struct arena *main_arena;
    size_t keep_bytes;
    size_t page_bytes;
    size_t bytes_trimmed;
    size_t bytes_purged; /* of them, resident before */
    bool failed;         /* the kernel refused every range of a purge */
    bool refused;        /* it refused one of the last purge */
    struct batch batch;
};

/* Accounts for the ranges [from, to) of the batch, which are purged. */
static void account(struct trim *trim, size_t from, size_t to) {
    struct batch *batch = &trim->batch;
    for (size_t i = from; i < to; i++) {
        arena_cut_purged(batch->arenas[i], batch->ranges[i].iov_len);
        trim->bytes_trimmed += batch->ranges[i].iov_len;
        trim->bytes_purged += batch->resident_bytes[i];
        governor_record(trim->governor, batch->arenas[i]);
    }
    governor_count(&trim->governor->stats.ranges, to - from);
}

/*
 * Purges the batch, accounts for what was purged, and unlocks its arenas in any case. A range that the kernel
 * refuses (a page of it is locked in memory) is left as it was, and the others go on; if it refuses all, so
 * does it the rest.
 */
static void flush(struct trim *trim) {
    struct batch *batch = &trim->batch;
    struct governor_counters *counters = &trim->governor->stats;
    size_t refused = 0;
    for (size_t from = 0; from < batch->count; from++) {
        struct purge_result result = purge_ranges(batch->ranges + from, batch->count - from);
        account(trim, from, from + result.ranges_done);
        governor_count(&counters->vectored_calls, result.vectored_calls);
        governor_count(&counters->single_calls, result.single_calls);
        from += result.ranges_done;
        if (from < batch->count) {
            refused++;
        }
    }
    governor_count(&counters->failed_purges, refused);
    trim->failed = refused == batch->count;
    trim->refused = refused > 0;
    for (size_t i = 0; i < batch->count; i++) {
        arena_unlock(batch->arenas[i]);
    }
    batch->count = 0;
    batch->total_resident_bytes = 0;
}

/* Cuts up to `excess` off the main arena's end, all of it in resident bytes at most `room`. Returns the cut.
 */
static size_t cut_main(struct trim *trim, size_t excess, size_t room) {
    char *end = arena_top_end(trim->main_arena);
    struct residency tail =
        residency_of_tail(end - excess, excess, trim->page_bytes, room, trim->governor->scratch);
    size_t released = tail.suffix_bytes > 0 ? arena_release_main(trim->main_arena, tail.suffix_bytes) : 0;
    if (released > 0) {
        trim->bytes_trimmed += released;
        governor_count(&trim->governor->stats.break_calls, 1);
        trim->bytes_purged += tail.resident_bytes;
        governor_record(trim->governor, trim->main_arena);
    } else if (tail.suffix_bytes > 0) {
        governor_count(&trim->governor->stats.failed_purges, 1);
    }
    return released;
}

/* Adds up to `excess` of a locked arena's end to the batch, which keeps the lock. Returns what it added. */
static size_t add_range(struct trim *trim, struct arena *arena, size_t excess, size_t room) {
    struct batch *batch = &trim->batch;
    char *end = arena_top_end(arena);
    struct residency tail =
        residency_of_tail(end - excess, excess, trim->page_bytes, room, trim->governor->scratch);
    if (tail.suffix_bytes > 0) {
        batch->ranges[batch->count].iov_base = end - tail.suffix_bytes;
        batch->ranges[batch->count].iov_len = tail.suffix_bytes;
        batch->arenas[batch->count] = arena;
        batch->resident_bytes[batch->count] = tail.resident_bytes;
        batch->total_resident_bytes += tail.resident_bytes;
        batch->count++;
    }
    return tail.suffix_bytes;
}

/*
 * One slice off an arena. Returns whether there is more of it to cut: a slice ends where the hold has given
 * back its most, and the arena is let go between two of them.
 */
static bool trim_slice(struct trim *trim, struct arena *arena, bool first_slice) {
    bool is_main = arena == trim->main_arena;
    if (!arena_trylock(arena)) {
        governor_count(&trim->governor->stats.busy_arenas, 1);
        return false;
    }
    size_t excess = 0;
    if (governor_record(trim->governor, arena) &&
        (!first_slice || arena_top_bytes(arena) > 2 * trim->keep_bytes)) {
        excess = arena_excess_bytes(arena, is_main, trim->keep_bytes, trim->page_bytes);
    }
    if (excess == 0) {
        arena_unlock(arena);
        return false;
    }
    size_t room = HOLD_MAX_RESIDENT_BYTES - trim->batch.total_resident_bytes;
    if (is_main) {
        size_t cut = cut_main(trim, excess, room);
        arena_unlock(arena);
        return cut > 0 && cut < excess;
    }
    size_t added = add_range(trim, arena, excess, room);
    if (added == 0) {
        arena_unlock(arena);
    }
    if (added < excess || trim->batch.count == TRIM_MAX_RANGES) {
        flush(trim);
        return added < excess && !trim->refused;
    }
    return false;
}

size_t trim_arenas(struct governor *governor, struct arena *main_arena, size_t keep_bytes,
                   size_t page_bytes) {
    struct trim trim = {
        .governor = governor,
        .main_arena = main_arena,
        .keep_bytes = keep_bytes,
        .page_bytes = page_bytes,
    };
    if (probe_trim_begin_is_heard()) {
        probe_trim_begin(keep_bytes);
    }
    struct arena *arena = main_arena;
    do {
        bool first_slice = true;
        while (!trim.failed && trim_slice(&trim, arena, first_slice)) {
            first_slice = false;
        }
        arena = arena_next(arena);
    } while (arena != main_arena && !trim.failed);
    if (trim.batch.count > 0) {
        flush(&trim);
    }
    if (trim.bytes_trimmed > 0) {
        governor_count(&governor->stats.trims, 1);
        governor_count(&governor->stats.bytes_trimmed, trim.bytes_trimmed);
        governor_count(&governor->stats.bytes_purged, trim.bytes_purged);
    }
    if (probe_trim_end_is_heard()) {
        probe_trim_end(trim.bytes_trimmed, trim.bytes_purged);
    }
    return trim.bytes_purged;
}
