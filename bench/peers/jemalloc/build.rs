fn main() {
    println!("cargo:rerun-if-changed=new.cpp");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("new.cpp")
        .link_lib_modifier("+whole-archive")
        .compile("new");
    exports::link(&[]);
}
