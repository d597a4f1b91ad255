//! Compiles `probe.c`, which includes the shared header, with the machine's C compiler. What it is to measure, constants,
//! structures and fields, is listed from the bindings, so that nobody has to keep a list.

use std::{env, fmt::Write as _, fs, path::PathBuf};

#[path = "src/bindings.rs"]
#[allow(unreachable_pub, reason = "the crate exports what is private here")]
mod bindings;

fn main() {
    let from = "../../src/protocol/bindings.rs";
    for path in ["build.rs", "probe.c", "src/bindings.rs", "../../kernels/layout.h", from] {
        println!("cargo::rerun-if-changed={path}");
    }
    let text = fs::read_to_string(from).expect("the bindings are checked in");
    let mut table = String::new();
    for name in bindings::numbers(&text).keys() {
        let value = if let Some(structure) = name.strip_prefix("size of ") {
            format!("sizeof(struct {structure})")
        } else if let Some(structure) = name.strip_prefix("alignment of ") {
            format!("_Alignof(struct {structure})")
        } else if let Some((structure, field)) = name.split_once("::") {
            format!("offsetof(struct {structure}, {field})")
        } else {
            name.clone()
        };
        writeln!(table, "{{\"{name}\", {value}}},").expect("a String takes all");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("numbers.inc"), table).expect("OUT_DIR can be written");
    let compiled = cc::Build::new()
        .file("probe.c")
        .include(out)
        .std("c11")
        .warnings_into_errors(true)
        .extra_warnings(true)
        .try_compile("layout_probe");
    if let Err(error) = compiled {
        panic!("{error}\n\nIf it says 'no member named', the bindings are old: run `cargo xtask bindings`.");
    }
}
