//! calmalloc as the global allocator of a program.

use std::alloc::{alloc, alloc_zeroed, dealloc, realloc, Layout};
use std::collections::{BTreeMap, HashMap};
use std::thread;

#[global_allocator]
static ALLOCATOR: calmalloc::CalMalloc = calmalloc::CalMalloc;

const MIB: usize = 1 << 20;

#[test]
fn what_rust_allocates_is_calmallocs() {
    let boxed = Box::new(7u64);
    let text = "text".repeat(1000);
    let map: HashMap<u32, String> = (0..1000).map(|i| (i, i.to_string())).collect();
    let tree: BTreeMap<u32, String> = (0..1000).map(|i| (i, i.to_string())).collect();
    // SAFETY: all of them live on.
    unsafe {
        assert_eq!(calmalloc::usable_size((&*boxed as *const u64).cast()), 16);
        assert!(calmalloc::usable_size(text.as_ptr()) >= 4000);
        assert!(calmalloc::usable_size(map[&999].as_ptr()) >= 3);
        assert!(calmalloc::usable_size(tree[&999].as_ptr()) >= 3);
        let local = 0u64;
        assert_eq!(calmalloc::usable_size((&local as *const u64).cast()), 0);
        assert_eq!(calmalloc::usable_size(std::ptr::null()), 0);
    }
}

#[test]
fn what_a_thread_allocated_another_frees() {
    let made: Vec<Vec<String>> = (0..8)
        .map(|me| thread::spawn(move || (0..10_000).map(|i| format!("{me} {i}")).collect()))
        .map(|thread| thread.join().unwrap())
        .collect();
    let threads: Vec<_> = made
        .into_iter()
        .enumerate()
        .map(|(me, texts)| {
            thread::spawn(move || texts.iter().enumerate().all(|(i, text)| *text == format!("{me} {i}")))
        })
        .collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
}

/// A byte that tells where it was written.
fn mark(i: usize) -> u8 {
    (i % 251) as u8
}

/// A block of one layout after another, with the contents that realloc must keep.
#[test]
fn every_alignment_holds_through_realloc() {
    let sizes =
        [1, 40, 64, 100, 4096, 5000, 40_000, 33_000, 200_000, MIB - 1, MIB, 3 * MIB, MIB, 70, 4097, 8];
    for align in (0..=21).map(|power| 1usize << power) {
        let mut layout = Layout::from_size_align(24, align).unwrap();
        // SAFETY: each block is used within its layout, and freed once by it.
        unsafe {
            let mut block = alloc(layout);
            (0..layout.size()).for_each(|i| block.add(i).write(mark(i)));
            for size in sizes {
                block = realloc(block, layout, size);
                assert!(!block.is_null());
                assert_eq!(block as usize % align, 0, "{size} bytes aligned to {align}");
                for i in 0..layout.size().min(size) {
                    assert_eq!(*block.add(i), mark(i), "byte {i} of {size}, aligned to {align}");
                }
                layout = Layout::from_size_align(size, align).unwrap();
                (0..size).for_each(|i| block.add(i).write(mark(i)));
                assert!(calmalloc::usable_size(block) >= size);
            }
            dealloc(block, layout);
        }
    }
}

/// The first block of a slab is aligned by chance.
#[test]
fn neighbours_are_aligned_too() {
    for align in (0..=13).map(|power| 1usize << power) {
        for size in [24, 72, 1000, 5000, 9000, 33_000, MIB] {
            let small = Layout::from_size_align(8, align).unwrap();
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: each block is freed once, by the layout that it has then.
            unsafe {
                let blocks: Vec<*mut u8> = (0..6)
                    .flat_map(|_| [alloc(layout), alloc_zeroed(layout), realloc(alloc(small), small, size)])
                    .collect();
                for block in blocks {
                    assert!(!block.is_null());
                    assert_eq!(block as usize % align, 0, "{size} bytes aligned to {align}");
                    dealloc(block, layout);
                }
            }
        }
    }
}

#[test]
fn zeroed_blocks_are_zero() {
    for align in [1, 16, 32, 4096, 8192, 2 * MIB] {
        for size in [1, 24, 4000, 40_000, MIB, 5 * MIB] {
            let layout = Layout::from_size_align(size, align).unwrap();
            // Twice, for the second time is apt to get the block that was dirtied.
            for _ in 0..2 {
                // SAFETY: the block is used within its layout, and freed once by it.
                unsafe {
                    let block = alloc_zeroed(layout);
                    assert_eq!(block as usize % align, 0);
                    assert!((0..size).all(|i| *block.add(i) == 0), "{size} bytes aligned to {align}");
                    block.write_bytes(0xA5, size);
                    dealloc(block, layout);
                }
            }
        }
    }
}

#[test]
fn large_blocks_grow_without_a_copy() {
    let moves = calmalloc::stats().large_moves;
    let mut blocks: Vec<Vec<u64>> = vec![vec![7; MIB / 8]; 4];
    while blocks[0].len() < 64 * MIB / 8 {
        for block in &mut blocks {
            let length = block.len();
            block.resize(2 * length, 7);
        }
    }
    assert!(blocks.iter().all(|block| block.iter().all(|number| *number == 7)));
    assert!(calmalloc::stats().large_moves > moves);
}

/// As many as the C functions promise, and with the old block whole.
#[test]
fn out_of_memory_is_an_answer() {
    let mut numbers: Vec<u8> = vec![1, 2, 3];
    assert!(numbers.try_reserve(isize::MAX as usize - 10).is_err());
    assert_eq!(numbers, [1, 2, 3]);
    for align in [8, 64, 4096, 1 << 40] {
        let huge = Layout::from_size_align(isize::MAX as usize / 2, align).unwrap();
        // SAFETY: the layouts are not empty.
        assert!(unsafe { alloc(huge) }.is_null());
        // SAFETY: as before.
        assert!(unsafe { alloc_zeroed(huge) }.is_null());
    }
    for align in [8, 64, 4096] {
        let layout = Layout::from_size_align(100, align).unwrap();
        // SAFETY: the block is freed by the layout that it still has.
        unsafe {
            let block = alloc(layout);
            block.write_bytes(9, 100);
            assert!(realloc(block, layout, isize::MAX as usize / 2).is_null());
            assert!((0..100).all(|i| *block.add(i) == 9));
            dealloc(block, layout);
        }
    }
}
