//! Makes a feature of this package the `cfg` that the library's sources ask for. A flag for rustc would do too, but would
//! have all dependencies built anew for each model.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let shuttle = std::env::var_os("CARGO_FEATURE_SHUTTLE").is_some();
    println!("cargo::rustc-cfg={}", if shuttle { "shuttle" } else { "loom" });
}
