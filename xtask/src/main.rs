//! Chores of this repository: `cargo xtask bindings [--check]`.

use std::{path::Path, process::ExitCode};

const USAGE: &str = "usage: cargo xtask bindings [--check]

bindings          writes src/protocol/bindings.rs from kernels/layout.h
bindings --check  fails if the file is not what that would write

Needs libclang: `pip install libclang==18.1.1`, then LIBCLANG_PATH set to its folder `clang/native`; and, where clang's
own headers are missing, BINDGEN_EXTRA_CLANG_ARGS=-isystem/usr/lib/gcc/x86_64-linux-gnu/12/include";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["bindings"] => bindings(false),
        ["bindings", "--check"] => bindings(true),
        ["--help" | "-h"] => {
            println!("{USAGE}");
            Ok(())
        }
        _ => Err(USAGE.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn bindings(check: bool) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the repository");
    let header = root.join("kernels/layout.h");
    let target = root.join("src/protocol/bindings.rs");
    let fresh = bindgen::Builder::default()
        .header(header.to_str().ok_or("the path of the repository is not UTF-8")?)
        .allowlist_file(".*/layout\\.h")
        .blocklist_function(".*")
        .blocklist_item("PEERSUM_LAYOUT_H")
        .derive_debug(true)
        .derive_default(false)
        .layout_tests(true)
        .use_core()
        .raw_line("//! Generated from kernels/layout.h by `cargo xtask bindings`; don't edit.")
        .raw_line("#![allow(missing_docs, non_camel_case_types)]")
        .disable_header_comment()
        .generate()
        .map_err(|error| format!("bindgen: {error}\n\n{USAGE}"))?
        .to_string();
    if !check {
        return std::fs::write(&target, fresh).map_err(|error| format!("{}: {error}", target.display()));
    }
    let kept = std::fs::read_to_string(&target).map_err(|error| format!("{}: {error}", target.display()))?;
    if kept == fresh {
        println!("src/protocol/bindings.rs is fresh");
        Ok(())
    } else {
        Err("src/protocol/bindings.rs is not what kernels/layout.h gives: run `cargo xtask bindings`".into())
    }
}
