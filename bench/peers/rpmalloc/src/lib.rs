//! The allocator. Its crate wants Rust's library, of which next to nothing is linked.

use rpmalloc_sys as _;
