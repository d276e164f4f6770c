//! calmalloc as a Rust program's allocator: a memory allocator for Linux that returns memory with few TLB
//! shootdowns. It is compiled from its C sources and linked statically.
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: calmalloc::CalMalloc = calmalloc::CalMalloc;
//!
//! let numbers: Vec<u64> = (0..1_000_000).collect();
//! assert!(calmalloc::stats().in_use >= 8_000_000);
//! # assert_eq!(numbers.len(), 1_000_000);
//! ```
//!
//! C code in the same process keeps its malloc, unless the feature `override` is enabled: then malloc(3) and
//! its relatives, and C++'s `new` and `delete`, use calmalloc in the whole process. That feature is for
//! programs, not for shared libraries.
//!
//! The environment variable `CALM_OPTIONS=name=value,...` sets options at the start, [`set`] later.
//!
//! Every function here is thread-safe. None may be called from a signal handler.

#![warn(missing_docs)]

mod options;
mod stats;
mod sys;

pub use options::{get, set, Error};
pub use stats::{stats, stats_json, Stats};

use std::alloc::{GlobalAlloc, Layout};
use std::ptr;

/// The allocator, for `#[global_allocator]`, or for direct use as a [`GlobalAlloc`].
///
/// It holds no data: all values denote the same allocator, so one value may free the blocks of another.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CalMalloc;

/// The alignment, in bytes, of every block.
const ALIGNED_ALWAYS: usize = 16;
/// The alignment, in bytes, of blocks that are runs of pages.
const RUN_ALIGNED: usize = 64;
/// Blocks of at least this many bytes are runs of pages, whatever the page size.
const RUN_LEAST: usize = 1 << 20;

/// Whether any block of `size` bytes is aligned to `align`.
#[inline]
fn is_aligned_anyway(align: usize, size: usize) -> bool {
    align <= ALIGNED_ALWAYS || (align <= RUN_ALIGNED && size >= RUN_LEAST)
}

// SAFETY: calmalloc's blocks are disjoint and live until they are freed, and nothing here unwinds. Blocks are
// aligned according to `is_aligned_anyway`, or on request.
unsafe impl GlobalAlloc for CalMalloc {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_aligned_anyway(layout.align(), layout.size()) {
            sys::calm_malloc(layout.size()).cast()
        } else {
            sys::calm_aligned_alloc(layout.align(), layout.size()).cast()
        }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, _layout: Layout) {
        sys::calm_free(block.cast());
    }

    /// Fresh pages are zero already, and are not written to.
    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_aligned_anyway(layout.align(), layout.size()) {
            return sys::calm_calloc(1, layout.size()).cast();
        }
        let block = self.alloc(layout);
        if !block.is_null() {
            ptr::write_bytes(block, 0, layout.size());
        }
        block
    }

    /// In place, or by moving pages, where that is possible.
    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if is_aligned_anyway(layout.align(), new_size) {
            return sys::calm_realloc(block.cast(), new_size).cast();
        }
        realloc_aligned(block, layout, new_size)
    }
}

/// For alignments that realloc(3) does not keep.
#[cold]
unsafe fn realloc_aligned(block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
    let held = sys::calm_malloc_usable_size(block.cast());
    if new_size <= held && new_size > held / 2 {
        return block;
    }
    let moved: *mut u8 = sys::calm_aligned_alloc(layout.align(), new_size).cast();
    if moved.is_null() {
        // To shrink cannot fail.
        return if new_size <= held { block } else { moved };
    }
    ptr::copy_nonoverlapping(block, moved, layout.size().min(new_size));
    sys::calm_free(block.cast());
    moved
}

/// Flushes the caches and purges: returns all but `keep_bytes` of the free memory to the kernel. The result
/// is the number of bytes purged: 0 if there was nothing to purge, or the kernel refused.
///
/// Programs need not call this: free memory is always limited. It is useful when the program knows that it
/// will allocate little for a long time.
pub fn trim(keep_bytes: usize) -> usize {
    // SAFETY: takes any number.
    unsafe { sys::calm_trim(keep_bytes) }
}

/// The usable size of a block, at least the size requested. 0 if `block` is null, or not a block of this
/// allocator.
///
/// # Safety
///
/// If `block` belongs to this allocator, no other thread may free it meanwhile.
pub unsafe fn usable_size(block: *const u8) -> usize {
    sys::calm_malloc_usable_size(block.cast())
}
