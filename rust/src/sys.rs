//! The functions of calmalloc.h that the crate uses.

use std::os::raw::{c_char, c_int, c_void};

extern "C" {
    pub fn calm_malloc(size: usize) -> *mut c_void;
    pub fn calm_free(block: *mut c_void);
    pub fn calm_calloc(count: usize, size: usize) -> *mut c_void;
    pub fn calm_realloc(block: *mut c_void, size: usize) -> *mut c_void;
    pub fn calm_aligned_alloc(alignment: usize, size: usize) -> *mut c_void;
    pub fn calm_malloc_usable_size(block: *const c_void) -> usize;
    pub fn calm_trim(keep_bytes: usize) -> usize;
    pub fn calm_stats(stats: *mut crate::Stats, size: usize) -> c_int;
    pub fn calm_stats_json(buffer: *mut c_char, size: usize) -> c_int;
    pub fn calm_set(name: *const c_char, value: *const c_char) -> c_int;
    pub fn calm_get(name: *const c_char, buffer: *mut c_char, size: usize) -> c_int;
}

/// The text that a function writes as snprintf does: it returns the length that all of it has, or less than
/// 0.
pub fn text(mut write: impl FnMut(*mut c_char, usize) -> c_int) -> Option<String> {
    let mut bytes: Vec<u8> = Vec::new();
    loop {
        let length = usize::try_from(write(bytes.as_mut_ptr().cast(), bytes.len())).ok()?;
        if length < bytes.len() {
            bytes.truncate(length);
            return Some(String::from_utf8_lossy(&bytes).into_owned());
        }
        // It may have grown by the next time.
        bytes.resize(length + 16, 0);
    }
}
