//! Chores of this repository: `cargo xtask bindings [--check]`.

use std::{
    env, fs, iter, panic,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

const USAGE: &str = "usage: cargo xtask bindings [--check]

bindings          writes src/protocol/bindings.rs from kernels/layout.h
bindings --check  fails if the file is not what that would write

Needs libclang: LIBCLANG_PATH is the folder of libclang.so; without it, the folder that ci/toolchain.sh fills and then
the system's libraries are searched. So either run ci/toolchain.sh, or install your system's libclang.";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
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
    // Of the checkout that cargo runs this for, which need not be the one that compiled it.
    let package = env::var_os("CARGO_MANIFEST_DIR").ok_or("run this by `cargo xtask`")?;
    let root = Path::new(&package).parent().ok_or("xtask lies in the repository")?;
    let header = root.join("kernels/layout.h");
    let target = root.join("src/protocol/bindings.rs");
    find_libclang()?;
    let fresh = bindgen::Builder::default()
        .clang_args(system_headers())
        .header(header.to_str().ok_or("the path of the repository is not UTF-8")?)
        .allowlist_file(".*/layout\\.h")
        .blocklist_function(".*")
        .blocklist_item("PEERSUM_LAYOUT_H")
        .derive_debug(true)
        .derive_default(false)
        .layout_tests(true)
        .use_core()
        .raw_line("//! Generated from kernels/layout.h by `cargo xtask bindings`; don't edit.")
        .raw_line("#![allow(dead_code, missing_docs, non_camel_case_types, unreachable_pub)]")
        .disable_header_comment()
        .generate()
        .map_err(|error| format!("bindgen: {error}\n\n{USAGE}"))?
        .to_string();
    if !check {
        return fs::write(&target, fresh).map_err(|error| format!("{}: {error}", target.display()));
    }
    let kept = fs::read_to_string(&target).map_err(|error| format!("{}: {error}", target.display()))?;
    if kept == fresh {
        println!("src/protocol/bindings.rs is fresh");
        Ok(())
    } else {
        Err("src/protocol/bindings.rs is not what kernels/layout.h gives: run `cargo xtask bindings`".into())
    }
}

/// Points bindgen to a libclang: the one that LIBCLANG_PATH names, that of ci/toolchain.sh, or the system's.
fn find_libclang() -> Result<(), String> {
    const VARIABLE: &str = "LIBCLANG_PATH";
    if env::var_os(VARIABLE).is_none()
        && let Some(folder) = installed_libclang()
    {
        // SAFETY: this program has one thread.
        unsafe { env::set_var(VARIABLE, folder) };
    }
    // bindgen panics if there is none; the text of its panic tells where it searched.
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let version = panic::catch_unwind(bindgen::clang_version);
    panic::set_hook(hook);
    version.map(drop).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map_or("no libclang", String::as_str);
        format!("{text}\n\n{USAGE}")
    })
}

/// The folder of the libclang that ci/toolchain.sh installs.
fn installed_libclang() -> Option<PathBuf> {
    let tools = match env::var_os("PEERSUM_TOOLS") {
        Some(tools) => PathBuf::from(tools),
        None => PathBuf::from(env::var_os("HOME")?).join(".cache/peersum-tools"),
    };
    let pythons = fs::read_dir(tools.join("lib")).ok()?;
    pythons.flatten().map(|python| python.path().join("site-packages/clang/native")).find(|folder| folder.is_dir())
}

/// Where stdint.h's companions are: a libclang from PyPI comes without clang's own headers, but those of the C compiler
/// serve.
fn system_headers() -> Vec<String> {
    let output = Command::new("cc").arg("-print-file-name=include").output();
    let folder = output.ok().and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_default();
    iter::once(folder.trim())
        .filter(|folder| Path::new(folder).is_dir())
        .map(|folder| format!("-isystem{folder}"))
        .collect()
}
