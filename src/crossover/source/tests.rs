use std::slice;

use super::{super::samples::*, *};
use crate::{Algorithm, crossover::Machine};

fn source_of(entry: Entry) -> Source {
    Source::Table(Tuned::new(entry.into(), "/tables/table.toml".into(), None).unwrap())
}

fn question(bytes: u64) -> Question {
    Question { bytes, dtype: DType::BF16, world: 2, placement: Placement::Anywhere, deterministic: false }
}

fn entry_of(world: u32) -> Entry {
    let row = "=".repeat(world as usize);
    let mut entry = entry();
    entry.machine = Machine { world, links: vec![row; world as usize], ..machine() };
    entry
}

/// Sizes of one element of 2 and 4 bytes below, at and above every border.
fn around(borders: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let near = |border: u64| [border.saturating_sub(4), border.saturating_sub(2), border, border + 2, border + 4];
    borders.into_iter().flat_map(near).filter(|&bytes| bytes > 0).collect()
}

#[test]
fn a_call_takes_its_step_and_from_the_border_on_nccl() {
    let source = source_of(entry());
    for (bytes, algorithm, blocks, nccl) in [
        (2, Algorithm::OneShotLl, 8, false),
        (8190, Algorithm::OneShotLl, 8, false),
        (8192, Algorithm::OneShotLl, 8, false),
        (8194, Algorithm::OneShotLl, 32, false),
        ((1 << 20) - 2, Algorithm::OneShotLl, 32, false),
        (1 << 20, Algorithm::TwoShotPull, 64, false),
        ((1 << 20) + 2, Algorithm::TwoShotPull, 64, false),
        ((4 << 20) - 2, Algorithm::TwoShotPull, 64, false),
        (4 << 20, Algorithm::TwoShotPull, 64, true),
        ((4 << 20) + 2, Algorithm::TwoShotPull, 64, true),
        (u64::MAX, Algorithm::TwoShotPull, 64, true),
    ] {
        let Decision { own, nccl: taken } = source.choose(&question(bytes), priors);
        assert_eq!((own.algorithm, own.blocks, taken), (algorithm, blocks, nccl), "{bytes} B");
    }
}

/// Field case A61 (lightseekorg/tokenspeed#1234): a rule by tokens, not by bytes.
#[test]
fn equal_bytes_are_done_alike_whatever_the_shape() {
    for world in [2, 4, 8] {
        let source = source_of(entry_of(world));
        for bytes in around([8193, 1 << 20, 4 << 20]).into_iter().filter(|bytes| bytes % 4 == 0) {
            let mut shapes = (0..64).map(|power| 1u64 << power).take_while(|tokens| bytes.is_multiple_of(2 * tokens));
            let of = |tokens: u64| {
                let hidden = bytes / 2 / tokens;
                source.choose(&Question { bytes: tokens * hidden * 2, world, ..question(0) }, priors)
            };
            let first = of(1);
            assert!(shapes.all(|tokens| of(tokens) == first), "{bytes} B of {world} ranks");
            // Elements of another size, as many bytes.
            let f32 = Question { bytes, world, dtype: DType::F32, ..question(0) };
            assert_eq!(source.choose(&f32, priors), first);
        }
    }
}

/// Field case A61: one switch for a border, and never back.
#[test]
fn what_was_left_does_not_come_back() {
    for world in [2, 4, 8] {
        let source = source_of(entry_of(world));
        let mut sizes = around((0..40).map(|power| 1 << power).chain([8193]));
        sizes.sort_unstable();
        let mut seen: Vec<(Algorithm, bool)> = Vec::new();
        for bytes in sizes {
            let Decision { own, nccl } = source.choose(&Question { world, ..question(bytes) }, priors);
            if seen.last() != Some(&(own.algorithm, nccl)) {
                seen.push((own.algorithm, nccl));
            }
        }
        let expected = [(Algorithm::OneShotLl, false), (Algorithm::TwoShotPull, false), (Algorithm::TwoShotPull, true)];
        assert_eq!(seen, expected, "{world} ranks");
    }
}

#[test]
fn deterministic_calls_never_go_to_nccl() {
    let mut everywhere = entry();
    everywhere.curves[0].nccl_from = NcclFrom::Bytes(0);
    let source = source_of(everywhere);
    for bytes in around([8192, 1 << 20, 4 << 20, 1 << 40]) {
        let asked = question(bytes);
        assert!(source.choose(&asked, priors).nccl);
        let deterministic = source.choose(&Question { deterministic: true, ..asked }, priors);
        assert_eq!(deterministic, Decision { nccl: false, ..source.choose(&asked, priors) });
    }
}

#[test]
fn a_border_that_does_not_hold_leaves_the_steps() {
    let whole = source_of(entry());
    let without =
        Tuned::new(entry().into(), "table.toml".into(), Some("measured with NCCL 2.32.3, there is none".into()));
    let without = Source::Table(without.unwrap());
    for bytes in around([8193, 1 << 20, 4 << 20]) {
        let expected = Decision { nccl: false, ..whole.choose(&question(bytes), priors) };
        assert_eq!(without.choose(&question(bytes), priors), expected);
    }
}

#[test]
fn never_and_not_measured_are_never() {
    for nccl_from in [NcclFrom::Never, NcclFrom::NotMeasured] {
        let mut entry = entry();
        entry.curves[0].nccl_from = nccl_from;
        assert!(!source_of(entry).choose(&question(u64::MAX), priors).nccl);
    }
}

#[test]
fn a_type_without_a_curve_takes_that_of_its_size_or_of_any() {
    let marked = |dtype, blocks| {
        let mut curve = curve(Placement::Anywhere, dtype);
        curve.steps[0].choice.blocks = blocks;
        curve
    };
    let blocks = |curves: &[Curve], dtype| {
        let source = source_of(Entry { curves: curves.to_vec(), ..entry() });
        source.choose(&Question { dtype, ..question(64) }, priors).own.blocks
    };
    let (f32, f16, bf16) = (marked(DType::F32, 1), marked(DType::F16, 2), marked(DType::BF16, 3));
    let all = [bf16.clone(), f16.clone(), f32.clone()];
    assert_eq!(DType::ALL.map(|dtype| blocks(&all, dtype)), [1, 2, 3]);
    assert_eq!(DType::ALL.map(|dtype| blocks(&[f32.clone(), bf16.clone()], dtype)), [1, 3, 3]);
    assert_eq!(DType::ALL.map(|dtype| blocks(&[f16.clone(), f32.clone()], dtype)), [1, 2, 2]);
    assert_eq!(DType::ALL.map(|dtype| blocks(slice::from_ref(&f32), dtype)), [1, 1, 1]);
    assert_eq!(DType::ALL.map(|dtype| blocks(slice::from_ref(&bf16), dtype)), [3, 3, 3]);
}

#[test]
fn what_was_not_measured_is_done_as_without_a_table() {
    let source = source_of(entry());
    let unmeasured = Decision { own: priors(1 << 30, 2, Placement::Symmetric), nccl: false };
    for placement in [Placement::SymmetricInput, Placement::Symmetric, Placement::SymmetricInPlace] {
        assert_eq!(source.choose(&Question { placement, ..question(1 << 30) }, priors), unmeasured);
    }
    // Other ranks than the table's.
    let other = source.choose(&Question { world: 4, ..question(1 << 30) }, priors);
    assert_eq!(other, Decision { own: priors(1 << 30, 4, Placement::Anywhere), nccl: false });
    // No table at all.
    let source = Source::Priors(Reason::Untuned { path: None });
    assert_eq!(source.choose(&question(1 << 30), priors), unmeasured);
}

#[test]
fn only_what_is_valid_is_taken() {
    let mut damaged = entry();
    damaged.curves[0].steps.clear();
    let error = Tuned::new(damaged.into(), "table.toml".into(), None).unwrap_err();
    assert_eq!(error, "curve anywhere of bf16: its first step is not from 0 bytes");
}
