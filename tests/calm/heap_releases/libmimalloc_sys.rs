
struct Linked;
unsafe impl std::alloc::GlobalAlloc for Linked {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        libmimalloc_sys::mi_malloc_aligned(layout.size(), layout.align()).cast()
    }
    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        libmimalloc_sys::mi_free(block.cast())
    }
}
#[global_allocator]
static LINKED: Linked = Linked;

// The linker drops the function if nothing refers to it.
#[cfg(feature = "named")]
#[used]
static NAMED: unsafe extern "C" fn() -> i32 = {
    extern "C" {
        fn mi_version() -> i32;
    }
    mi_version
};
