//! How build.rs finds nvcc, what it compiles for, and what it writes.

use std::{collections::BTreeSet, ffi::OsString, path::Path};

#[allow(dead_code, reason = "only the pure part is called here")]
#[path = "../build.rs"]
mod build_script;

use build_script::{
    Targets, arguments, check_release, digest_source, find_nvcc, numbers, release, rust_source, targets,
};

/// Looks for nvcc among these variables and files.
fn find(variables: &[(&str, &str)], files: &[&str]) -> Result<Option<String>, String> {
    let variable = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
    let is_file = |path: &Path| files.iter().any(|file| Path::new(file) == path);
    find_nvcc(&variable, &is_file).map(|found| found.map(|path| path.display().to_string()))
}

#[test]
fn nvcc_is_looked_for_from_the_most_to_the_least_explicit_place() {
    let mut variables =
        vec![("PEERSUM_NVCC", "/a/nvcc-13"), ("CUDA_HOME", "/b"), ("CUDA_PATH", "/c"), ("PATH", "/none:/d:/e")];
    let files = ["/a/nvcc-13", "/b/bin/nvcc", "/c/bin/nvcc", "/d/nvcc", "/e/nvcc", "/usr/local/cuda/bin/nvcc"];
    for expected in ["/a/nvcc-13", "/b/bin/nvcc", "/c/bin/nvcc", "/d/nvcc", "/usr/local/cuda/bin/nvcc"] {
        assert_eq!(find(&variables, &files), Ok(Some(expected.into())));
        if !variables.is_empty() {
            variables.remove(0);
        }
    }
    assert_eq!(find(&[("PATH", "/d:/e")], &[]), Ok(None));
}

#[test]
fn a_variable_that_leads_nowhere_is_an_error_that_names_it() {
    let nvcc = ["/usr/local/cuda/bin/nvcc"];
    assert_eq!(
        find(&[("PEERSUM_NVCC", "/gone/nvcc")], &nvcc).unwrap_err(),
        "PEERSUM_NVCC is set to /gone/nvcc, but /gone/nvcc is no file: set it to a CUDA toolkit's nvcc, or unset it"
    );
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        let error = find(&[(name, "/gone")], &nvcc).unwrap_err();
        assert!(error.starts_with(&format!("{name} is set to /gone, but /gone/bin/nvcc is no file")), "{error}");
    }
}

fn all() -> BTreeSet<u32> {
    numbers("sm_75\nsm_80\nsm_86\nsm_90\nsm_100\nsm_103\nsm_120\n")
}

#[test]
fn every_gpu_from_8_0_on_has_machine_code_or_ptx() {
    let chosen = targets(None, &all()).unwrap();
    assert!(chosen.warnings.is_empty());
    // What is there and what may come: 8.0 to 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, 12.1, 13.0.
    for gpu in [80, 86, 87, 89, 90, 100, 103, 110, 120, 121, 130] {
        let code = chosen.machine.iter().any(|number| number / 10 == gpu / 10 && *number <= gpu);
        let ptx = chosen.ptx.is_some_and(|number| number <= gpu);
        assert!(code || ptx, "nothing for sm_{gpu}");
    }
}

#[test]
fn an_old_nvcc_leaves_new_gpus_to_ptx_and_a_too_old_one_is_refused() {
    let chosen = targets(None, &numbers("sm_80\nsm_90\n")).unwrap();
    assert_eq!((chosen.machine, chosen.ptx), (vec![80, 90], Some(90)));
    assert_eq!(chosen.warnings.len(), 2);
    assert!(chosen.warnings[0].contains("sm_100 (CUDA 12.8 or later can)"), "{:?}", chosen.warnings);
    let error = targets(None, &numbers("sm_70\nsm_80\n")).unwrap_err();
    assert!(error.contains("CUDA 12.4 or later"), "{error}");
}

#[test]
fn an_nvcc_older_than_the_kernels_is_refused() {
    let check = |release: &str| check_release(&format!("nvcc: NVIDIA (R) Cuda compiler driver\n{release}\n"));
    for release in ["release 12.4, V12.4.99", "release 12.10, V12.10.0", "release 13.0, V13.0.88", "no such line"] {
        assert_eq!(check(&format!("Cuda compilation tools, {release}")), Ok(()), "{release}");
    }
    for release in ["release 12.3, V12.3.107", "release 11.8, V11.8.89"] {
        let error = check(&format!("Cuda compilation tools, {release}")).unwrap_err();
        assert!(error.contains("CUDA 12.4 or later"), "{error}");
    }
}

#[test]
fn the_architectures_can_be_restricted() {
    let only = |list: &str| targets(Some(list.as_ref()), &all());
    assert_eq!(only("90").unwrap(), Targets { machine: vec![90], ptx: None, warnings: vec![] });
    assert_eq!(only("100, 86").unwrap().machine, [86, 100]);
    for (list, reason) in
        [("sm_90", "'sm_90' is no number"), ("90,", "'' is no number"), ("75", "need 80 or later"), ("95", "sm_95")]
    {
        let error = only(list).unwrap_err();
        assert!(error.contains(reason) && error.contains("PEERSUM_CUDA_ARCHS"), "{error}");
    }
}

#[test]
fn nvcc_gets_each_architecture_and_threads_only_where_there_are_some() {
    let chosen = Targets { machine: vec![80, 90], ptx: Some(90), warnings: vec![] };
    let line = |threads| {
        let arguments = arguments(&chosen, threads, Path::new("kernels/a.cu"), Path::new("/out/a.fatbin"));
        arguments.iter().map(|argument| argument.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    };
    assert!(line(1).contains(
        "--generate-code=arch=compute_80,code=sm_80 --generate-code=arch=compute_90,code=sm_90 \
         --generate-code=arch=compute_90,code=compute_90"
    ));
    assert!(line(1).ends_with("-o /out/a.fatbin kernels/a.cu"));
    assert!(!line(1).contains("--threads") && line(4).contains("--threads=4"));
}

#[test]
fn what_nvcc_prints_is_read() {
    assert_eq!(numbers("sm_80\nsm_90a\nwarning: sm_1\n sm_120\r\n"), BTreeSet::from([80, 120]));
    assert_eq!(release("Cuda compilation tools, release 13.0, V13.0.88\nBuild"), Some("release 13.0"));
    assert_eq!(release("something else"), None);
}

#[test]
fn the_generated_source_embeds_the_images_or_says_why_there_are_none() {
    let source = rust_source(&["a.fatbin".into(), "b.fatbin".into()], "");
    assert!(source.contains("IMAGES: &[&[u8]] = &[&IMAGE_0.0, &IMAGE_1.0];"), "{source}");
    assert!(source.contains("align(16)") && source.contains("\"/b.fatbin\"") && source.contains("REASON: &str = \"\""));
    let source = rust_source(&["a.fatbin".into(), "probe.fatbin".into(), "verify.fatbin".into()], "");
    assert!(source.contains("IMAGES: &[&[u8]] = &[&IMAGE_0.0, &IMAGE_2.0];"), "{source}");
    assert!(source.contains("PROBE: Option<&[u8]> = Some(&IMAGE_1.0);"), "{source}");
    let source = rust_source(&[], "no \"nvcc\"");
    assert!(source.contains("PROBE: Option<&[u8]> = None;"), "{source}");
    assert!(source.contains("IMAGES: &[&[u8]] = &[];") && source.contains(r#"REASON: &str = "no \"nvcc\"""#));
}

#[test]
fn the_digest_is_of_every_byte_and_name() {
    let digest = |sources: &[(&str, &str)]| {
        let owned: Vec<_> = sources.iter().map(|&(name, text)| (name.to_owned(), text.as_bytes().to_owned())).collect();
        digest_source(&owned)
    };
    let base = digest(&[("a.cu", "one"), ("b.cuh", "two")]);
    assert_eq!(base, digest(&[("a.cu", "one"), ("b.cuh", "two")]));
    for other in [
        &[("a.cu", "one"), ("b.cuh", "twO")][..],
        &[("a.cu", "one"), ("c.cuh", "two")],
        &[("a.cu", "onet"), ("b.cuh", "wo")],
        &[("a.cu", "one")],
        &[],
    ] {
        assert_ne!(base, digest(other), "{other:?}");
    }
    assert!(base.contains("DIGEST: &str = \"") && base.trim_end().ends_with("\";"), "{base}");
}
