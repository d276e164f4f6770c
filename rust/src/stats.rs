//! The allocator's counters.

use crate::sys;
use std::mem;

/// What the allocator holds and has done, one moment's view. Memory is in bytes.
///
/// `in_use + retained = footprint`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
#[non_exhaustive]
pub struct Stats {
    /// Of the C structure; it counts up when fields are added.
    pub version: u32,
    size: u32,
    /// Pages that hold, or held, something, and were not given back.
    pub footprint: u64,
    /// Pages with at least one byte that is not free. Blocks in caches count as not free here.
    pub in_use: u64,
    /// Free pages that may be resident.
    pub retained: u64,
    /// Free blocks in the caches of CPUs and in the depot.
    pub cached: u64,
    /// Address space.
    pub reserved: u64,
    /// Of the allocator's own, resident at most.
    pub metadata: u64,
    /// What `retained` is at most, for the current footprint, once a thread has left the allocator.
    pub retained_limit: u64,
    /// What pages kept alive by cached blocks alone are at most.
    pub cached_limit: u64,
    /// Since the start: bytes that became free, and may be resident.
    pub dirtied: u64,
    /// Since the start: bytes given back.
    pub purged: u64,
    /// Purges because `retained` exceeded its limit.
    pub purges: u64,
    /// Purges because time passed, or memory is short.
    pub purges_timed: u64,
    /// Purges by [`trim`](crate::trim).
    pub purges_asked: u64,
    /// Ranges that the kernel refused to take back.
    pub purge_failures: u64,
    /// Calls of process_madvise(2).
    pub purge_vectored_calls: u64,
    /// Calls of madvise(2).
    pub purge_single_calls: u64,
    /// Ranges given back.
    pub purge_ranges: u64,
    /// Times that one CPU's cache was emptied by another CPU's thread.
    pub cache_drains: u64,
    /// Operations that left the fast path for a size class.
    pub cache_misses: u64,
    /// Acquisitions of a heap's lock.
    pub heap_locks: u64,
    /// Allocations of runs of pages.
    pub large_allocations: u64,
    /// Blocks that grew by moving their pages.
    pub large_moves: u64,
    /// Offload mode: what was ready when a thread wanted it.
    pub offload_hits: u64,
    /// What was not.
    pub offload_misses: u64,
    /// Answers of the server that a thread waited for.
    pub offload_calls: u64,
    /// Messages to the server.
    pub offload_records: u64,
    /// Magazines and large blocks made ready ahead.
    pub offload_stocked: u64,
    /// Of those, the ones that nobody wanted.
    pub offload_unused: u64,
    /// Times that a thread woke the server.
    pub offload_wakes: u64,
    /// Times that the server slept.
    pub offload_naps: u64,
    /// Times that a thread found the server not to answer.
    pub offload_lost: u64,
    /// Times that the server had no CPU to itself, and lent the heap to the threads.
    pub offload_lent: u64,
    /// Nanoseconds that giving back cost where memory was wanted again.
    pub purge_vain_ns: u64,
}

/// The counters, now. Takes the heap's lock for a moment: not for every request of a server.
pub fn stats() -> Stats {
    let mut stats = Stats::default();
    // SAFETY: Stats is laid out as struct calm_stats, of which no more than the given size is written.
    let status = unsafe { sys::calm_stats(&mut stats, mem::size_of::<Stats>()) };
    debug_assert_eq!(status, 0);
    stats
}

/// The counters and the options as one JSON object.
pub fn stats_json() -> String {
    // SAFETY: writes no more than the size it is given. It never fails.
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

    /// The same of Stats, by what its source says.
    fn fields_here() -> Vec<(String, String)> {
        let source = include_str!("stats.rs");
        let body = source.split("pub struct Stats {").nth(1).unwrap().split("\n}").next().unwrap();
        let lines = body.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("///"));
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
        assert_eq!(stats().version, 2);
    }

    #[test]
    fn json_has_every_counter_and_the_options() {
        let json = stats_json();
        assert!(json.starts_with('{') && json.ends_with('}'), "{json}");
        for (_, name) in fields_here().iter().filter(|(_, name)| name != "size") {
            assert!(json.contains(&format!("\"{name}\": ")), "{name} is missing in {json}");
        }
        assert!(json.contains("\"policy\": "), "{json}");
    }
}
