//! The allocator, and nothing else.
#![no_std]

use libmimalloc_sys as _;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}
