//! calmalloc as a Rust program's allocator: a memory allocator for Linux that gives memory back without
//! shooting down the TLB. It is compiled from its C sources and linked statically.
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
//! C code in the same process keeps its own malloc, unless the feature `override` is on: then malloc(3) and
//! its kin, and C++'s `new` and `delete`, are calmalloc's for the whole process. That feature is for
//! programs, not for shared libraries.
//!
//! Options are set by the environment variable `CALM_OPTIONS=name=value,...` at the start, and by [`set`]
//! later.
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

/// The allocator, for `#[global_allocator]`, or to be called as any [`GlobalAlloc`].
///
/// It holds no data: all values of it are one allocator, so what one allocated another may free.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CalMalloc;

/// The alignment, in bytes, of every block.
const ALIGNED_ALWAYS: usize = 16;
/// The alignment, in bytes, of blocks that are runs of pages.
const RUN_ALIGNED: usize = 64;
/// Blocks from so many bytes on are runs of pages, whatever the page size.
const RUN_LEAST: usize = 1 << 20;

/// Whether a block of `size` bytes is aligned to `align` without being asked for it.
#[inline]
fn is_aligned_anyway(align: usize, size: usize) -> bool {
    align <= ALIGNED_ALWAYS || (align <= RUN_ALIGNED && size >= RUN_LEAST)
}

// SAFETY: calmalloc's blocks are disjoint, live until they are freed, and nothing here unwinds. The
// alignments are those of `is_aligned_anyway`, or asked for.
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

/// For alignments that realloc(3) knows nothing of.
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

/// Gives back to the system all but `keep_bytes` of the free memory, cached blocks included, now. Returns the
/// bytes given back: 0 if there was nothing, or the kernel refused.
///
/// A program need not call this: free memory is bounded at all times. It is for moments of which the program
/// knows that little will be allocated for long.
pub fn trim(keep_bytes: usize) -> usize {
    // SAFETY: takes any number.
    unsafe { sys::calm_trim(keep_bytes) }
}

/// Bytes that may be used at `block`, at least what was asked for. 0 if `block` is null, or no block of this
/// allocator's.
///
/// # Safety
///
/// If `block` is one of this allocator's, no other thread may be freeing it.
pub unsafe fn usable_size(block: *const u8) -> usize {
    sys::calm_malloc_usable_size(block.cast())
}
