//! The allocator's counters.

use crate::sys;
use std::mem;

/// A snapshot of the allocator's memory and counters. Memory is in bytes.
///
/// `in_use + dirty = footprint`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
#[non_exhaustive]
pub struct Stats {
    /// The version of the C structure, incremented when fields are added.
    pub version: u32,
    size: u32,
    // From src/api/counters.def: begin.
    /// Pages that are, or may be, resident.
    pub footprint: u64,
    /// Pages that contain any part of a block, cached blocks included.
    pub in_use: u64,
    /// Free pages of the heap that may be resident.
    pub dirty: u64,
    /// Free blocks in the CPU caches and the depots.
    pub cached: u64,
    /// Address space.
    pub reserved: u64,
    /// The allocator's own data: an upper bound of what is resident.
    pub metadata: u64,
    /// The limit on dirty memory for the current footprint.
    pub dirty_limit: u64,
    /// The limit on pages kept by cached blocks: a constant per CPU.
    pub cached_limit: u64,
    /// Memory that became free and may be resident.
    pub dirtied: u64,
    /// Memory returned to the kernel.
    pub purged: u64,
    /// Purges because dirty memory exceeded its limit.
    pub purges_limit: u64,
    /// Purges at an epoch's end: memory was unused or is scarce.
    pub purges_epoch: u64,
    /// Purges that `calm_trim`, `malloc_trim` or another process requested.
    pub purges_request: u64,
    /// Address ranges that the kernel refused to purge.
    pub purge_failures: u64,
    /// Calls of `process_madvise` to purge.
    pub purge_vectored_calls: u64,
    /// Calls of `madvise` to purge.
    pub purge_single_calls: u64,
    /// Address ranges purged.
    pub purge_ranges: u64,
    /// CPU time spent in purges.
    pub purge_ns: u64,
    /// Estimated cost of purging memory that was needed again.
    pub purge_wasted_ns: u64,
    /// Estimated CPU time saved by keeping memory that was used again.
    pub dirty_saved_ns: u64,
    /// Dirty memory, multiplied by the time for which it was that much.
    pub dirty_byte_seconds: u64,
    /// Checks of the limit on dirty memory.
    pub limit_checks: u64,
    /// Times that a CPU's cache was flushed.
    pub cache_flushes: u64,
    /// Operations on a size class that left the fast path.
    pub cache_misses: u64,
    /// Acquisitions of a heap's lock.
    pub heap_locks: u64,
    /// Allocations of runs of pages: above 32 KiB.
    pub large_allocations: u64,
    /// Calls of `realloc` that moved pages.
    pub large_moves: u64,
    /// Acquisitions of a heap's lock that had to wait for another thread.
    pub heap_locks_contended: u64,
    /// Why the CPU caches have locks: 0 if they have none.
    pub cache_lock_reason: u64,
    // From src/api/counters.def: end.
}

/// The current counters. Takes the heap's lock briefly, so do not call it for every request of a server.
pub fn stats() -> Stats {
    let mut stats = Stats::default();
    // SAFETY: Stats has the layout of struct calm_stats, and at most the given size is written.
    let status = unsafe { sys::calm_stats(&mut stats, mem::size_of::<Stats>()) };
    debug_assert_eq!(status, 0);
    stats
}

/// The counters and the options as one JSON object.
pub fn stats_json() -> String {
    // SAFETY: writes at most the given size, and never fails.
    sys::text(|buffer, size| unsafe { sys::calm_stats_json(buffer, size) }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields of the C structure, in their order, as (type, name).
    fn fields_in_c() -> Vec<(String, String)> {
        let header = include_str!("../csrc/include/calmalloc.h");
        let body = header.split("struct calm_stats {").nth(1).unwrap().split("};").next().unwrap();
        let code: String = body
            .split("*/")
            .map(|part| part.split("/*").next().unwrap().replace(char::is_whitespace, " "))
            .collect();
        let declarations = code.split(';').map(str::trim).filter(|line| !line.is_empty());
        declarations
            .map(|line| {
                let (kind, name) = line.split_once(' ').unwrap();
                (kind.to_string(), name.trim().to_string())
            })
            .collect()
    }

    /// The same for Stats, from its source.
    fn fields_here() -> Vec<(String, String)> {
        let source = include_str!("stats.rs");
        let body = source.split("pub struct Stats {").nth(1).unwrap().split("\n}").next().unwrap();
        let lines = body.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        lines
            .map(|line| {
                let (name, kind) =
                    line.trim_start_matches("pub ").trim_end_matches(',').split_once(": ").unwrap();
                (format!("uint{}_t", &kind[1..]), name.to_string())
            })
            .collect()
    }

    #[test]
    fn the_structure_is_the_headers() {
        assert!(fields_in_c().len() >= 24);
        assert_eq!(fields_here(), fields_in_c());
        assert_eq!(stats().size as usize, mem::size_of::<Stats>());
        assert_eq!(stats().version, 1);
    }

    #[test]
    fn json_has_every_counter_and_the_options() {
        let json = stats_json();
        assert!(json.starts_with('{') && json.ends_with('}'), "{json}");
        for (_, name) in fields_here().iter().filter(|(_, name)| name != "size") {
            assert!(json.contains(&format!("\"{name}\": ")), "{name} is missing in {json}");
        }
        assert!(json.contains("\"memory_per_cpu\": "), "{json}");
    }
}
