//! calmalloc in a program that does not make it the global allocator: which allocator serves which calls, and
//! the safe functions.

use calmalloc::{get, set, CalMalloc, Error};
use std::alloc::{GlobalAlloc, Layout};
use std::sync::Mutex;

const MIB: usize = 1 << 20;

/// Held by tests that must run alone, because options and counters belong to the process.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn the_processs_malloc_is_calmallocs_only_if_asked_for() {
    let overridden = cfg!(feature = "override");
    let boxed = Box::new(1u64);
    // SAFETY: blocks live until they are freed, once.
    unsafe {
        let usable = |block: *const u8| calmalloc::usable_size(block) > 0;
        assert_eq!(usable((&*boxed as *const u64).cast()), overridden);
        let block = libc::malloc(100);
        assert_eq!(usable(block.cast()), overridden);
        libc::free(block);
        // From within libc.
        let copy = libc::strdup(b"text\0".as_ptr().cast());
        assert_eq!(usable(copy.cast()), overridden);
        libc::free(copy.cast());

        let layout = Layout::new::<[u64; 100]>();
        let block = CalMalloc.alloc(layout);
        assert!(calmalloc::usable_size(block) >= 800);
        CalMalloc.dealloc(block, layout);
    }
}

#[test]
fn options_are_set_and_read() {
    let _alone = ALONE.lock().unwrap();
    assert_eq!(get("misuse").as_deref(), Ok("abort"));
    assert_eq!(set("misuse", "warn"), Ok(()));
    assert_eq!(get("misuse").as_deref(), Ok("warn"));
    assert_eq!(set("misuse", "abort"), Ok(()));
    assert_eq!(set("memory_per_cpu", "9999"), Ok(()));
    assert_eq!(get("memory_per_cpu").as_deref(), Ok("9999"));
    assert_eq!(set("memory_per_cpu", "auto"), Ok(()));
}

#[test]
fn what_cannot_be_set_is_told_apart() {
    let _alone = ALONE.lock().unwrap();
    assert_eq!(set("misus", "warn"), Err(Error::UnknownOption));
    assert_eq!(set("", ""), Err(Error::UnknownOption));
    assert_eq!(set("misuse\0", "warn"), Err(Error::UnknownOption));
    assert_eq!(set("unknown", "wa\0rn"), Err(Error::UnknownOption));
    assert_eq!(set("misuse", "wa\0rn"), Err(Error::InvalidValue));
    assert_eq!(set("misuse", "Warn"), Err(Error::InvalidValue));
    assert_eq!(set("memory_per_cpu", "-1"), Err(Error::InvalidValue));
    assert_eq!(set("memory_per_cpu", "1 "), Err(Error::InvalidValue));
    assert_eq!(set("test_cache", "off"), Err(Error::FixedAtStart));
    assert_eq!(set("test_cache", "on"), Err(Error::InvalidValue));
    assert_eq!(get("misus"), Err(Error::UnknownOption));
    assert_eq!(get("misuse\0"), Err(Error::UnknownOption));
    assert_eq!(get("misuse").as_deref(), Ok("abort"));
    let shown: Vec<String> = [Error::UnknownOption, Error::InvalidValue, Error::FixedAtStart]
        .iter()
        .map(|error| error.to_string())
        .collect();
    assert!(shown.iter().all(|text| !text.is_empty()));
    assert!(shown[0] != shown[1] && shown[1] != shown[2] && shown[0] != shown[2]);
}

#[test]
fn trim_gives_back_what_it_says() {
    let _alone = ALONE.lock().unwrap();
    set("memory_per_cpu", "160").unwrap();
    let layout = Layout::from_size_align(8 * MIB, 64).unwrap();
    // SAFETY: the block is used within its layout, and freed once by it.
    unsafe {
        let block = CalMalloc.alloc(layout);
        block.write_bytes(1, layout.size());
        CalMalloc.dealloc(block, layout);
    }
    let before = calmalloc::stats();
    let given_back = calmalloc::trim(0);
    let after = calmalloc::stats();
    set("memory_per_cpu", "auto").unwrap();
    assert!(after.purged - before.purged >= given_back as u64);
    assert!(after.purged >= 8 * MIB as u64);
    assert!(after.dirty < MIB as u64);
    assert!(after.purges_request > 0 && calmalloc::trim(0) < MIB);
}

#[test]
fn the_counters_add_up() {
    let _alone = ALONE.lock().unwrap();
    let layout = Layout::from_size_align(16 * MIB, 16).unwrap();
    // SAFETY: the block is freed once, by its layout.
    unsafe {
        let before = calmalloc::stats();
        let block = CalMalloc.alloc(layout);
        let with = calmalloc::stats();
        CalMalloc.dealloc(block, layout);
        assert!(with.large_allocations > before.large_allocations);
        assert!(with.in_use >= 16 * MIB as u64);
        assert_eq!(with.in_use + with.dirty, with.footprint);
        assert!(calmalloc::stats().in_use < with.in_use);
    }
}
