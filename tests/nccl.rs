//! What the loader of NCCL makes of libraries that serve, and of such that don't.
#![cfg(feature = "cuda")]

use std::{path::Path, sync::Arc};

use nccl_stub::{Stub, variants};
use peersum::{Error, nccl::Library};

fn reason(path: &Path) -> String {
    let error = Library::open(Some(path)).unwrap_err();
    assert!(error.is_recoverable());
    let text = error.to_string();
    assert!(text.starts_with("NCCL is not available: "), "{text}");
    assert!(matches!(error, Error::NcclUnavailable { .. }), "{text}");
    assert!(text.contains(path.to_str().unwrap()), "it says what was tried: {text}");
    text
}

#[test]
fn versions_from_2_18_on_serve_and_newer_ones_too() {
    for (variant, version) in [
        (variants::V2_18, "2.18.0"),
        (variants::V2_27, "2.27.3"),
        (variants::V2_30, "2.30.4"),
        (variants::V2_32, "2.32.3"),
        (variants::V2_40, "2.40.0"),
    ] {
        let stub = Stub::new(variant);
        let library = Library::open(Some(stub.path())).unwrap();
        assert_eq!((library.version().to_string().as_str(), library.name()), (version, stub.path()));
    }
}

#[test]
fn each_reason_not_to_serve_is_told() {
    let reason_of = |variant| reason(Stub::new(variant).path());
    assert!(reason_of(variants::V2_17).contains("it is NCCL 2.17.1, and versions from 2.18.0 to 2.x serve"));
    assert!(reason_of(variants::V3_0).contains("it is NCCL 3.0.0, and versions from 2.18.0 to 2.x serve"));
    assert!(reason_of(variants::WITHOUT_ABORT).contains("it has no ncclCommAbort"));
    assert!(reason_of(variants::EMPTY).contains("it has no ncclGetVersion"));
}

#[test]
fn a_file_that_is_not_there_or_no_library_is_told_in_the_loaders_words() {
    let stub = Stub::new(variants::V2_32);
    let folder = stub.path().parent().unwrap();
    assert!(reason(&folder.join("absent.so")).contains("No such file"));
    let text = folder.join("text.so");
    std::fs::write(&text, "GROUP ( libnccl.so.2 )").unwrap();
    let reason = reason(&text);
    assert!(["invalid ELF header", "file too short"].iter().any(|words| reason.contains(words)), "{reason}");
}

#[test]
fn a_folder_is_looked_into() {
    let stub = Stub::new(variants::V2_32);
    let folder = stub.path().parent().unwrap();
    assert_eq!(Library::open(Some(folder)).unwrap().name(), stub.path());

    let empty = folder.join("empty");
    std::fs::create_dir(&empty).unwrap();
    let reason = reason(&empty);
    assert!(reason.contains("empty/libnccl.so.2: ") && reason.contains("empty/libnccl.so: "), "{reason}");
    // Nothing is remembered of a failure.
    std::fs::copy(stub.path(), empty.join("libnccl.so")).unwrap();
    assert_eq!(Library::open(Some(&empty)).unwrap().name(), empty.join("libnccl.so"));
}

#[test]
fn a_path_is_not_searched_for() {
    let error = Library::open(Some(Path::new("libnccl.so.2"))).unwrap_err().to_string();
    assert!(error.contains("./libnccl.so.2"), "{error}");
}

#[test]
fn opening_again_gives_the_same() {
    let stub = Stub::new(variants::V2_18);
    let first = Library::open(Some(stub.path())).unwrap();
    // Not even the file is looked at.
    std::fs::remove_file(stub.path()).unwrap();
    assert!(Arc::ptr_eq(&first, &Library::open(Some(stub.path())).unwrap()));
    assert!(!Arc::ptr_eq(&first, &Library::open(Some(Stub::new(variants::V2_18).path())).unwrap()));
}

/// What a search finds depends on the machine; that it says what it has tried doesn't.
#[test]
fn the_search_finds_one_or_says_what_it_tried() {
    match Library::open(None) {
        Ok(library) => println!("found {library:?}"),
        Err(error) => {
            let error = error.to_string();
            for words in ["libnccl.so.2: ", "libnccl.so: ", "folders of Python packages", "pip install"] {
                assert!(error.contains(words), "{words} is not in: {error}");
            }
        }
    }
}
