fn main() {
    exports::link(&[]);
}
