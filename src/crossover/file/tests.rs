use std::path::PathBuf;

use proptest::prelude::*;

use super::{super::samples::*, *};

#[test]
fn the_file_reads_like_this() {
    let expected = r#"
format = 1

[[entry]]
measured = "2026-11-30"
command = "peersum tune -g 2"

[entry.machine]
gpu = "NVIDIA H200"
world = 2
links = ["=N", "N="]
driver = "580.159.04"
nccl = "2.32.3"
peersum = "0.1.0"
kernels = "00c0ffee"

[[entry.curve]]
placement = "anywhere"
dtype = "bf16"
nccl_from_bytes = 4194304
steps = [
    { from_bytes = 0, algorithm = "one-shot-ll", blocks = 8, threads = 128 },
    { from_bytes = 8193, algorithm = "one-shot-ll", blocks = 32, threads = 352 },
    { from_bytes = 1048576, algorithm = "two-shot-pull", blocks = 64, threads = 512 },
]
points = [
    { bytes = 8192, nccl_us = 6.0, own = [
        { us = 1.5, algorithm = "one-shot-ll", blocks = 8, threads = 128 },
        { us = 4.0, algorithm = "two-shot-pull", blocks = 64, threads = 512 },
    ] },
    { bytes = 1048576, nccl_us = 12.0, own = [
        { us = 6.0, algorithm = "one-shot-ll", blocks = 32, threads = 352 },
        { us = 6.5, algorithm = "two-shot-pull", blocks = 64, threads = 512 },
    ] },
    { bytes = 4194304, nccl_us = 20.0, own = [
        { us = 20.5, algorithm = "two-shot-pull", blocks = 64, threads = 512 },
    ] },
    { bytes = 16777216, nccl_us = 40.25, own = [
        { us = 70.0, algorithm = "two-shot-pull", blocks = 64, threads = 512 },
    ] },
]
"#;
    assert_eq!(table().to_text(), format!("{HEADER}{expected}"));
    assert_eq!(Table::parse(&table().to_text()), Ok(table()));
}

#[test]
fn everything_that_can_be_said_is_read_again() {
    let mut table = Table::default();
    assert_eq!(Table::parse(&table.to_text()), Ok(table.clone()));
    let mut odd = entry();
    odd.machine.gpu = r#"A "quoted" \ name + 日本"#.into();
    odd.machine.nccl = None;
    odd.curves.clear();
    for placement in PLACEMENTS {
        for dtype in DType::ALL {
            odd.curves.push(Curve { nccl_from: NcclFrom::Never, ..curve(placement, dtype) });
        }
    }
    odd.curves[0].points.clear();
    odd.curves[1].nccl_from = NcclFrom::NotMeasured;
    odd.curves[2].points[0].own[0].us = 1e-9;
    odd.curves[3].points[0].own[0].us = 1e300;
    let mut everywhere = entry();
    everywhere.curves[0].nccl_from = NcclFrom::Bytes(0);
    table.entries = vec![odd, everywhere];
    assert_eq!(Table::parse(&table.to_text()), Ok(table));
}

#[test]
fn what_is_no_table_is_told_with_the_line() {
    let text = table().to_text();
    let line_of = |what: &str| text.lines().position(|line| line.contains(what)).unwrap() + 1;
    let changed = |from: &str, to: &str| {
        assert!(text.contains(from));
        Table::parse(&text.replacen(from, to, 1)).unwrap_err()
    };
    let no_table = "it says no `format`, so it is no table of peersum";
    assert_eq!(Table::parse("").unwrap_err(), no_table);
    assert_eq!(Table::parse(include_str!("../../../Cargo.toml")).unwrap_err(), no_table);
    assert!(Table::parse("{\"format\": 1}").unwrap_err().starts_with("line 1: "));
    assert!(Table::parse("format = 1\n\n[[entry").unwrap_err().starts_with("line 3: "));
    assert_eq!(
        Table::parse("format = 1\nlinks = []").unwrap_err(),
        "line 2: unknown field `links`, expected `format` or `entry`"
    );

    let other_format = |shown| format!("format {shown}, where this release reads 1: run `peersum tune`");
    assert_eq!(changed("format = 1", "format = 2"), other_format("2"));
    assert_eq!(changed("format = 1", "format = '1'"), other_format("of type string"));
    // Whatever else a later format may have.
    assert_eq!(
        Table::parse(
            "format = 3
entry = 'none'"
        )
        .unwrap_err(),
        other_format("3")
    );

    assert_eq!(
        changed("dtype = \"bf16\"\n", ""),
        format!("line {}: missing field `dtype`", line_of("[[entry.curve]]"))
    );
    assert_eq!(
        changed("\"bf16\"", "\"int8\""),
        format!("line {}: unknown dtype 'int8'; there are f32, f16, bf16", line_of("dtype"))
    );
    assert!(changed("\"one-shot-ll\"", "\"ring\"").contains("unknown algorithm 'ring'; there are one-shot, two-shot"));
    assert!(changed("\"one-shot-ll\"", "\"nccl\"").contains("step from 0 bytes: nccl is none of the library's own"));
    assert!(
        changed("\"anywhere\"", "\"here\"").contains("unknown placement 'here'; there are anywhere, symmetric-input")
    );
    assert!(changed("4194304", "\"often\"").contains("'often' is no number of bytes, \"never\" or \"not measured\""));
    assert!(changed("4194304", "-1").contains("a number of bytes, \"never\" or \"not measured\" is expected"));
    assert!(changed("4194304", "1.5").contains("a number of bytes, \"never\" or \"not measured\" is expected"));
    assert!(changed("us = 1.5", "us = nan").contains("NaN is no time in µs"));
    assert!(changed("blocks = 8", "blocks = -8").contains("invalid value: integer `-8`"));
    assert!(changed("blocks = 8", "block = 8").contains("unknown field `block`"));
    assert!(changed("threads = 128", "threads = 128, cta = 1").contains("unknown field `cta`"));
    assert!(changed("blocks = 32", "blocks = 320").contains("320 blocks, where there are 1 to 64"));
}

fn reason(path: &Path) -> String {
    Table::read(path).unwrap_err().to_string()
}

#[test]
fn a_file_that_cannot_be_used_is_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.toml");
    let shown = path.display().to_string();
    assert_eq!(reason(&path), format!("{shown}: No such file or directory (os error 2)"));
    let damaged = |cause: &str| format!("{shown} is not a table that can be used: {cause}");

    let mut text = table().to_text().into_bytes();
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    assert!(reason(&path).starts_with(&damaged("line ")), "{}", reason(&path));
    text.push(0xff);
    fs::write(&path, &text).unwrap();
    assert!(reason(&path).starts_with(&damaged("it is no UTF-8 text: ")), "{}", reason(&path));

    text.pop();
    text.resize(MAX_FILE_BYTES as usize, b'\n');
    fs::write(&path, &text).unwrap();
    assert_eq!(Table::read(&path), Ok(table()));
    text.push(b'\n');
    fs::write(&path, &text).unwrap();
    assert_eq!(reason(&path), damaged("it is longer than 4 MiB"));

    assert_eq!(
        reason(folder.path()),
        format!("{} is not a table that can be used: it is no regular file", folder.path().display())
    );
    // One that nobody writes to: opening it would never end.
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    assert!(reason(&pipe).ends_with("it is no regular file"));
    assert!(reason(Path::new("/dev/zero")).ends_with("it is no regular file"));
}

/// Field case A23 (vllm-project/vllm#6893), jobs that write and read at once.
#[test]
fn a_file_is_replaced_at_once_and_nothing_else_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new").join("folders").join("table.toml");
    table().write(&path).unwrap();
    assert_eq!(Table::read(&path), Ok(table()));

    // A reader that has the old one open reads it to its end.
    let mut old = File::open(&path).unwrap();
    let link = folder.path().join("link.toml");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let mut longer = Table::read(&link).unwrap();
    let mut other = entry();
    other.machine.gpu = "NVIDIA B200".into();
    longer.upsert(other);
    longer.write(&link).unwrap();
    let mut text = String::new();
    old.read_to_string(&mut text).unwrap();
    assert_eq!(text, table().to_text());
    assert_eq!(Table::read(&path), Ok(longer.clone()));
    assert!(link.is_symlink());

    longer.entries[1].curves[0].steps.clear();
    let refused = longer.write(&path).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    assert_eq!(refused.to_string(), "entry 2: curve anywhere of bf16: its first step is not from 0 bytes");
    assert_eq!(Table::read(&path).unwrap().entries.len(), 2);

    longer.entries[1] = Entry { command: "x".repeat(MAX_FILE_BYTES as usize), ..longer.entries[0].clone() };
    longer.entries[1].machine.gpu = "other".into();
    let refused = longer.write(&path).unwrap_err().to_string();
    assert!(refused.ends_with("would be longer than 4 MiB: remove entries"), "{refused}");

    let no_folder = path.join("below-a-file.toml");
    let refused = table().write(&no_folder).unwrap_err().to_string();
    assert!(refused.starts_with(&no_folder.display().to_string()), "{refused}");
    // A folder can't be replaced by a file, which is found out last.
    let folder_there = path.with_file_name("folder");
    fs::create_dir(&folder_there).unwrap();
    table().write(&folder_there).unwrap_err();
    fs::remove_dir(&folder_there).unwrap();
    let names: Vec<PathBuf> =
        fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(names, [path]);
}

/// Field case A23 (vllm-project/vllm#6893): a table that was cut is refused, or lacks its last curves and entries and has
/// all others as they were.
#[test]
fn a_cut_file_never_decides_otherwise() {
    let mut whole = table();
    whole.entries[0].curves.push(curve(Placement::Symmetric, DType::F32));
    let mut other = entry();
    other.machine.gpu = "NVIDIA B200".into();
    whole.upsert(other);
    let text = whole.to_text();
    let mut shorter = 0;
    for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
        let Ok(cut) = Table::parse(&text[..end]) else { continue };
        shorter += 1;
        assert!(cut.entries.len() <= 2);
        for (cut, whole) in cut.entries.iter().zip(&whole.entries) {
            assert_eq!((&cut.machine, &cut.measured), (&whole.machine, &whole.measured));
            assert!(whole.curves.starts_with(&cut.curves), "cut at {end}");
        }
    }
    assert!(shorter > 0);
}

/// Whatever passes can be used and written.
fn passes_or_is_refused(text: &str) {
    if let Ok(table) = Table::parse(text) {
        assert_eq!(Table::parse(&table.to_text()), Ok(table.clone()));
        for entry in table.entries {
            let curves = entry.curves.clone();
            super::super::Tuned::new(entry.into(), "table.toml".into(), None).unwrap();
            for curve in curves {
                curve.gaps();
                assert!([0, 1, 1 << 20, u64::MAX].into_iter().all(|bytes| curve.step(bytes).is_some()));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        passes_or_is_refused(&String::from_utf8_lossy(&bytes));
        passes_or_is_refused(&format!("format = 1\n{}", String::from_utf8_lossy(&bytes)));
    }

    #[test]
    fn no_change_of_a_table_panics(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), 0usize..30, "[ -~\n]{0,6}"), 1..4),
    ) {
        let mut text = table().to_text();
        for (at, removed, put) in changes {
            let at = (0..=at.index(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap();
            let least = (at + removed).min(text.len());
            let end = (least..=text.len()).find(|&end| text.is_char_boundary(end)).unwrap();
            text.replace_range(at..end, &put);
        }
        passes_or_is_refused(&text);
    }

    /// Changes that mostly leave it TOML: of the numbers.
    #[test]
    fn no_number_panics(
        at in any::<proptest::sample::Index>(),
        number in "-?[0-9]{1,22}|[0-9]\\.[0-9]{1,3}e[0-9]{1,4}|nan|inf|-inf|0x[0-9]{2}",
    ) {
        let text = table().to_text();
        let numbers: Vec<usize> = text
            .match_indices(" = ")
            .map(|(at, _)| at + 3)
            .filter(|&at| text[at..].starts_with(|first: char| first.is_ascii_digit()))
            .collect();
        let start = numbers[at.index(numbers.len())];
        let length = text[start..].find([' ', ',', '\n']).unwrap();
        let mut changed = text.clone();
        changed.replace_range(start..start + length, &number);
        passes_or_is_refused(&changed);
    }
}
