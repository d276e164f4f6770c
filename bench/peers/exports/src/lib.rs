//! How a member's library is linked: the allocator's functions are exported, and bound within the library.

use std::env;
use std::path::Path;

/// Emits the linker's arguments. Each pair is a symbol to export and the name that it has in the allocator.
pub fn link(renamed: &[(&str, String)]) {
    let map = Path::new(&env::var("CARGO_MANIFEST_DIR").unwrap()).join("../exports.map");
    println!("cargo:rerun-if-changed={}", map.display());
    let mut arguments = vec![
        format!("--version-script={}", map.display()),
        "--undefined-version".into(),
        "--undefined=malloc".into(),
        "-Bsymbolic".into(),
    ];
    for (symbol, name) in renamed {
        arguments.push(format!("--undefined={name}"));
        arguments.push(format!("--defsym={symbol}={name}"));
    }
    for argument in arguments {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
    // Without Rust's library nothing else would name these.
    for argument in ["-lc", "-lgcc_s", "-lgcc", "-Wl,-z,defs"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
