//! Compiles calmalloc's C sources into an archive that is linked into the program.

use std::path::{Path, PathBuf};
use std::{env, fs, process};

/// Differs from the name of an installed library, so that the linker cannot confuse the two.
const ARCHIVE: &str = "calmalloc_bundled";

fn main() {
    let here = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let sources = here.join("csrc/src");
    let include = here.join("csrc/include");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={}", sources.display());
    println!("cargo:rerun-if-changed={}", include.display());
    let target = (variable("CARGO_CFG_TARGET_OS"), variable("CARGO_CFG_TARGET_ARCH"));
    if !matches!((target.0.as_str(), target.1.as_str()), ("linux", "x86_64" | "aarch64")) {
        fail(&format!("{} on {} is not supported: Linux on x86-64 and aarch64 is", target.0, target.1));
    }

    let whole_process = env::var_os("CARGO_FEATURE_OVERRIDE").is_some();
    let mut build = cc::Build::new();
    build
        .files(c_files(&sources))
        .include(&sources)
        .include(&include)
        .define("_GNU_SOURCE", None)
        .define("NDEBUG", None)
        // The optional features.
        .define("CALM_PROFILE", None)
        .define("CALM_FEATURES", "\"profile\"")
        // What is global in the archive, but none of its interface, has symbols that no other crate has.
        .flag("-include")
        .flag("namespace.h")
        .flag("-std=gnu17")
        .flag("-fvisibility=hidden")
        // The compiler must make no assumptions about malloc while it compiles malloc.
        .flag("-fno-builtin")
        // operator new throws through its own frame.
        .flag("-fexceptions")
        // An unoptimized allocator would slow down debug builds without helping to debug the program.
        .opt_level(2)
        .warnings(false)
        .cargo_metadata(false);
    if !whole_process {
        build.define("CALM_WITHOUT_MALLOC", None);
    }
    if let Err(error) = build.try_compile(ARCHIVE) {
        fail(&format!("the C sources do not compile: {error}"));
    }

    // Links the whole archive if it contains malloc: perhaps only libc, which comes later, refers to malloc.
    let kind = if whole_process { "static:+whole-archive,-bundle" } else { "static" };
    println!("cargo:rustc-link-search=native={}", variable("OUT_DIR"));
    println!("cargo:rustc-link-lib={kind}={ARCHIVE}");
    // For build scripts of crates that depend on this one: DEP_CALMALLOC_INCLUDE.
    println!("cargo:include={}", include.display());
}

/// The C files of all layers, in a fixed order.
fn c_files(sources: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for layer in entries(sources).into_iter().filter(|path| path.is_dir()) {
        files.extend(
            entries(&layer).into_iter().filter(|path| path.extension().map_or(false, |end| end == "c")),
        );
    }
    files.sort();
    files
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    match fs::read_dir(folder) {
        Ok(found) => found.flatten().map(|entry| entry.path()).collect(),
        Err(error) => fail(&format!("cannot read the C sources in {}: {error}", folder.display())),
    }
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| fail(&format!("cargo does not set {name}")))
}

fn fail(message: &str) -> ! {
    eprintln!("calmalloc: {message}");
    process::exit(1)
}
