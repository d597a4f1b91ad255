//! Reads `src/protocol/bindings.rs`; shared by the build script and the crate.

use std::collections::BTreeMap;

/// The constants of the bindings by name; their structures' sizes and alignments as "size of NAME" and "alignment of
/// NAME"; their fields' offsets as "NAME::FIELD".
///
/// The numbers of structures come from bindgen's assertions, which rustc evaluates: so they are Rust's own.
///
/// # Panics
///
/// If the text hasn't the form that bindgen gives it.
pub fn numbers(text: &str) -> BTreeMap<String, u64> {
    let number = |text: &str| text.trim_end_matches("usize").parse().expect("a number");
    let mut numbers = BTreeMap::new();
    for line in text.lines() {
        let line = line.trim();
        if let Some(constant) = line.strip_prefix("pub const ") {
            let (name, rest) = constant.split_once(": ").expect("a constant has a type");
            let (_, value) = rest.trim_end_matches(';').split_once(" = ").expect("a constant has a value");
            numbers.insert(name.to_owned(), number(value));
        } else if let Some((name, assertion)) = line.strip_prefix("[\"").and_then(|line| line.split_once("\"][")) {
            let (_, value) = assertion.trim_end_matches("];").rsplit_once(" - ").expect("a difference");
            let name = name
                .replace("Size of ", "size of ")
                .replace("Alignment of ", "alignment of ")
                .replace("Offset of field: ", "");
            numbers.insert(name, number(value));
        }
    }
    assert!(numbers.len() > 50, "only {} numbers: have the bindings another form than before?", numbers.len());
    numbers
}
