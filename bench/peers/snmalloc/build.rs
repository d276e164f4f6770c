use cargo_metadata::MetadataCommand;

/// Where the crate's sources lie.
fn upstream() -> std::path::PathBuf {
    let metadata = MetadataCommand::new()
        .other_options([
            "--locked".into(),
            "--filter-platform".into(),
            std::env::var("TARGET").unwrap(),
        ])
        .exec()
        .unwrap();
    let package = metadata
        .packages
        .iter()
        .find(|package| package.name.as_str() == "snmalloc-sys")
        .unwrap();
    package.manifest_path.with_file_name("upstream").into()
}

fn main() {
    let sources = upstream().join("src");
    let overrides = sources.join("snmalloc/override");
    println!("cargo:rerun-if-changed={}", overrides.display());
    // As snmalloc's own build of its library to preload, at its defaults.
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .include(&sources)
        .files([overrides.join("malloc.cc"), overrides.join("new.cc")])
        .define("NDEBUG", None)
        .define("SNMALLOC_USE_CXX11_THREAD_ATEXIT_DIRECT", None)
        .define("SNMALLOC_USE_WAIT_ON_ADDRESS", "1")
        .define(
            "SNMALLOC_EXPORT",
            "__attribute__((visibility(\"default\")))",
        )
        .define("SNMALLOC_CHECK_LOADS", "false")
        .define("SNMALLOC_PAGEID", "false")
        .define("SNMALLOC_NO_REALLOCARRAY", None)
        .define("SNMALLOC_NO_REALLOCARR", None)
        .define("SNMALLOC_HAS_LINUX_FUTEX_H", None)
        .define("SNMALLOC_HAS_LINUX_RANDOM_H", None)
        .define("SNMALLOC_PLATFORM_HAS_GETENTROPY", None)
        .flags([
            "-fvisibility=hidden",
            "-fomit-frame-pointer",
            "-ftls-model=initial-exec",
            "-fno-rtti",
        ])
        .flag_if_supported("-mcx16")
        .flag_if_supported("-mprfchw")
        .link_lib_modifier("+whole-archive")
        .cpp_link_stdlib(None)
        .compile("snmallocshim");
    println!("cargo:rustc-cdylib-link-arg=-l:libstdc++.a");
    exports::link(&[]);
}
