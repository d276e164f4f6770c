//! Heaps whose contents are known, in a program that an allocator is linked into. It prints what it holds,
//! as JSON, and waits for input. It does what `mixed` of foreign_heaps.c does.
use std::alloc::{alloc, dealloc, Layout};
use std::io::{stdin, stdout, Write};
use std::sync::{Arc, Barrier};

const MIB: usize = 1 << 20;
const MOST: usize = 20000;
const THREADS: usize = 4;

fn filled(size: usize) -> *mut u8 {
    unsafe {
        let block = alloc(Layout::from_size_align_unchecked(size, 8));
        block.write_bytes(0x5a, size);
        block
    }
}

fn release(block: *mut u8, size: usize) {
    unsafe { dealloc(block, Layout::from_size_align_unchecked(size, 8)) }
}

fn size_of(index: usize) -> usize {
    if index % 7 != 0 { 64 } else { 512 }
}

fn main() {
    let mut blocks = Vec::with_capacity(MOST);
    blocks.extend((0..MOST).map(|i| filled(size_of(i))));
    let mut counts = [0, 0];
    for (i, &block) in blocks.iter().enumerate() {
        if i % 10 != 0 {
            release(block, size_of(i));
        } else {
            counts[(size_of(i) == 512) as usize] += 1;
        }
    }
    let _large = filled(10 * MIB);
    release(filled(30 * MIB), 30 * MIB);
    let barrier = Arc::new(Barrier::new(THREADS + 1));
    for _ in 0..THREADS {
        let barrier = barrier.clone();
        std::thread::spawn(move || {
            let mine: Vec<_> = (0..100).map(|_| filled(112)).collect();
            mine.into_iter().for_each(|block| release(block, 112));
            barrier.wait();
            barrier.wait();
        });
    }
    barrier.wait();
    let live = counts[0] * 64 + counts[1] * 512 + 10 * MIB;
    println!("{{\"blocks_64\": {}, \"blocks_512\": {}, \"live\": {}}}", counts[0], counts[1], live);
    stdout().flush().unwrap();
    let _ = stdin().read_line(&mut String::new());
}
