/// What the crate calls by names of its own, and C and C++ by these.
const RENAMED: &[(&str, &str)] = &[
    ("malloc", "Malloc"),
    ("free", "Free"),
    ("free_sized", "FreeSized"),
    ("free_aligned_sized", "FreeAlignedSized"),
    ("sdallocx", "Sdallocx"),
    ("realloc", "Realloc"),
    ("reallocarray", "ReallocArray"),
    ("calloc", "Calloc"),
    ("cfree", "Cfree"),
    ("memalign", "Memalign"),
    ("aligned_alloc", "AlignedAlloc"),
    ("valloc", "Valloc"),
    ("pvalloc", "Pvalloc"),
    ("posix_memalign", "PosixMemalign"),
    ("malloc_usable_size", "MallocSize"),
    ("_Znwm", "New"),
    ("_Znam", "NewArray"),
    ("_ZnwmRKSt9nothrow_t", "NewNothrow"),
    ("_ZnamRKSt9nothrow_t", "NewArrayNothrow"),
    ("_ZnwmSt11align_val_t", "NewAligned"),
    ("_ZnamSt11align_val_t", "NewArrayAligned"),
    ("_ZnwmSt11align_val_tRKSt9nothrow_t", "NewAlignedNothrow"),
    (
        "_ZnamSt11align_val_tRKSt9nothrow_t",
        "NewArrayAlignedNothrow",
    ),
    ("_ZdlPv", "Delete"),
    ("_ZdaPv", "DeleteArray"),
    ("_ZdlPvm", "DeleteSized"),
    ("_ZdaPvm", "DeleteArraySized"),
    ("_ZdlPvRKSt9nothrow_t", "DeleteNothrow"),
    ("_ZdaPvRKSt9nothrow_t", "DeleteArrayNothrow"),
    ("_ZdlPvSt11align_val_t", "DeleteAligned"),
    ("_ZdaPvSt11align_val_t", "DeleteArrayAligned"),
    (
        "_ZdlPvSt11align_val_tRKSt9nothrow_t",
        "DeleteAlignedNothrow",
    ),
    (
        "_ZdaPvSt11align_val_tRKSt9nothrow_t",
        "DeleteArrayAlignedNothrow",
    ),
    ("_ZdlPvmSt11align_val_t", "DeleteSizedAligned"),
    ("_ZdaPvmSt11align_val_t", "DeleteArraySizedAligned"),
];

fn main() {
    let renamed: Vec<(&str, String)> = RENAMED
        .iter()
        .map(|(symbol, name)| (*symbol, format!("TCMallocInternal{name}")))
        .collect();
    exports::link(&renamed);
    // The constructor that starts the caches for each CPU is in this function's object; nothing else needs it.
    println!(
        "cargo:rustc-cdylib-link-arg=-Wl,--undefined=TCMalloc_Internal_ForceCpuCacheActivation"
    );
}
