
struct Linked;
unsafe impl std::alloc::GlobalAlloc for Linked {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        tikv_jemalloc_sys::mallocx(layout.size(), layout.align().trailing_zeros() as i32).cast()
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        tikv_jemalloc_sys::sdallocx(block.cast(), layout.size(), layout.align().trailing_zeros() as i32)
    }
}
#[global_allocator]
static LINKED: Linked = Linked;
