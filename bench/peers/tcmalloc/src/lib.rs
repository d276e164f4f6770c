//! The allocator. Rust's library is named for the linker's sake; next to nothing of it is linked.

use libtcmalloc_sys as _;
