//! Compiles `stub.c` to one shared library for each variant: versions of NCCL, and broken ones.

use std::{env, fmt::Write as _, fs, path::PathBuf};

/// The name of each variant, what is special about it, and the compiler's definitions that make it so.
const VARIANTS: [(&str, &str, &[&str]); 9] = [
    ("V2_32", "2.32.3: windows, which destroying frees too", &["-DVERSION=23203", "-DWINDOWS"]),
    ("V2_30", "2.30.4, as 2.32.3", &["-DVERSION=23004", "-DWINDOWS"]),
    ("V2_27", "2.27.3: windows, which nobody else frees", &["-DVERSION=22703", "-DWINDOWS"]),
    ("V2_18", "2.18.0: no windows", &["-DVERSION=21800"]),
    ("V2_17", "2.17.1: too old", &["-DVERSION=21701"]),
    ("V2_40", "2.40.0: newer than any that was tried", &["-DVERSION=24000", "-DWINDOWS"]),
    ("V3_0", "3.0.0", &["-DVERSION=30000"]),
    ("WITHOUT_ABORT", "2.32.3 without ncclCommAbort", &["-DVERSION=23203", "-DWITHOUT_ABORT"]),
    ("EMPTY", "a library without any function of NCCL", &["-DEMPTY"]),
];

fn main() {
    for path in ["build.rs", "stub.c"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let compiler = cc::Build::new().std("c11").opt_level(1).warnings(true).extra_warnings(true).get_compiler();
    let mut paths = String::new();
    for (name, what, definitions) in VARIANTS {
        let library = out.join(format!("{}.so", name.to_lowercase()));
        let mut command = compiler.to_command();
        command.args(definitions).args(["-Werror", "-fPIC", "-shared", "-pthread", "stub.c", "-o"]).arg(&library);
        let status = command.status().expect("the C compiler runs");
        assert!(status.success(), "{command:?}: {status}");
        writeln!(paths, "/// {what}.\npub const {name}: &str = {:?};", library.to_str().expect("UTF-8"))
            .expect("a String takes all");
    }
    fs::write(out.join("variants.rs"), paths).expect("OUT_DIR can be written");
}
