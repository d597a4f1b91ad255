//! What the types forbid does not compile, and the compiler says why.
//!
//! The messages in `compile_fail/` are the compiler's own, so they hold for one release of it. After a change of the API,
//! or of the release, `TRYBUILD=overwrite cargo test --test compile_fail` writes them anew: read them before they are
//! committed.

use std::{env, process::Command};

/// The release whose messages are in `compile_fail/`.
const RUSTC: &str = "rustc 1.95.";

/// Tells the library's build script to leave out the kernels: what compiles doesn't depend on them.
const WITHOUT_KERNELS: &str = "DOCS_RS";

#[test]
fn what_the_types_forbid_does_not_compile() {
    if !cfg!(feature = "cuda") {
        // The compiler leaves out the paths of names that occur once, and without the CUDA backend these are others.
        eprintln!("skipped: the expected messages are those of a library with both backends");
        return;
    }
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().expect("rustc runs").stdout;
    let version = String::from_utf8_lossy(&version);
    if !version.starts_with(RUSTC) {
        eprintln!("skipped: the expected messages are those of {RUSTC}x, and this is {}", version.trim());
        return;
    }
    if env::var_os(WITHOUT_KERNELS).is_none() {
        // The variable has to be there before threads are, so in another process.
        let status = Command::new(env::current_exe().expect("the test has a path"))
            .args(["--exact", "what_the_types_forbid_does_not_compile", "--nocapture"])
            .env(WITHOUT_KERNELS, "1")
            .env_remove("PEERSUM_REQUIRE_NVCC")
            .status()
            .expect("the test starts again");
        assert!(status.success(), "see above");
        return;
    }
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/host/*.rs");
    cases.compile_fail("tests/compile_fail/cuda/*.rs");
}
