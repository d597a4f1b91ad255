use super::{super::samples::*, *};
use crate::{Algorithm, Placement};

fn tuned(without_nccl: Option<&str>) -> Source {
    let tuned = Tuned::new(entry().into(), "/tables/table.toml".into(), without_nccl.map(Into::into));
    Source::Table(tuned.unwrap())
}

fn question(bytes: u64) -> Question {
    Question { bytes, dtype: DType::BF16, world: 2, placement: Placement::Anywhere, deterministic: false }
}

fn own(algorithm: Algorithm, blocks: u32, threads: u32) -> Facts<'static> {
    let plan = Plan { algorithm, blocks, threads, chunk_bytes: 1 << 20 };
    Facts { taken: Taken::Own(plan), forced: false, nccl_missing: None, fallback: None }
}

/// The facts of a call that does what was chosen.
fn as_chosen(source: &Source, question: &Question) -> Facts<'static> {
    let Decision { own: Choice { algorithm, blocks, threads }, nccl } = source.choose(question, priors);
    let own = own(algorithm, blocks, threads);
    if nccl { Facts { taken: Taken::Nccl, ..own } } else { own }
}

fn told(source: &Source, question: Question) -> String {
    source.explain(&question, &as_chosen(source, &question), priors).to_string()
}

const TABLE: &str = "the table /tables/table.toml (measured 2026-11-30 by `peersum tune -g 2`)";

#[test]
fn it_says_which_step_of_which_table_and_why_not_nccl() {
    let source = tuned(None);
    assert_eq!(
        told(&source, question(8192)),
        format!(
            "one-shot-ll, 8 blocks of 128 threads for 8192 B of bf16, tensors anywhere: it has 0 to 8192 B in {TABLE}; \
             1.50 µs expected. Not NCCL: it has all from 4194304 B."
        )
    );
    assert_eq!(
        told(&source, question(2 << 20)),
        format!(
            "two-shot-pull, 64 blocks of 512 threads for 2097152 B of bf16, tensors anywhere: it has all from \
             1048576 B in {TABLE}; 11.54 µs expected. Not NCCL: it has all from 4194304 B."
        )
    );
    assert_eq!(
        told(&source, question(16 << 20)),
        format!(
            "NCCL for 16777216 B of bf16, tensors anywhere: it has all from 4194304 B in {TABLE}; 40.25 µs expected."
        )
    );
    // Outside of what was measured nothing is expected.
    assert_eq!(
        told(&source, Question { dtype: DType::F32, ..question(64) }),
        "one-shot-ll, 8 blocks of 128 threads for 64 B of f32, tensors anywhere: it has 0 to 8192 B in the table \
         /tables/table.toml (measured 2026-11-30 by `peersum tune -g 2`, with bf16). Not NCCL: it has all from 4194304 \
         B."
    );
}

/// Field case A63 (vllm-project/vllm#48075): a faster path that is lost must not be lost silently.
#[test]
fn why_a_faster_path_is_not_taken_is_kept() {
    let not_nccl = |source: &Source, question: Question, facts: Facts<'_>| {
        source.explain(&question, &facts, priors).not_nccl.unwrap()
    };
    let long = question(16 << 20);
    let two_shot = own(Algorithm::TwoShotPull, 64, 512);
    let source = tuned(None);
    let missing = Facts { nccl_missing: Some("libnccl.so.2 is not there"), ..two_shot };
    assert_eq!(not_nccl(&source, long, missing), NotNccl::Missing("libnccl.so.2 is not there".into()));
    let deterministic = Question { deterministic: true, ..long };
    assert_eq!(not_nccl(&source, deterministic, two_shot), NotNccl::Deterministic);
    assert_eq!(not_nccl(&source, long, Facts { forced: true, ..two_shot }), NotNccl::Forced);
    assert_eq!(not_nccl(&source, question(2 << 20), two_shot), NotNccl::Below(4 << 20));
    let other = "measured with NCCL 2.32.3, this is 2.33.0";
    assert_eq!(not_nccl(&tuned(Some(other)), long, two_shot), NotNccl::Differs(other.into()));
    let both = not_nccl(&tuned(Some("there is none here")), long, missing);
    assert_eq!(both, NotNccl::Differs("there is none here (libnccl.so.2 is not there)".into()));
    for (nccl_from, expected) in
        [(NcclFrom::Never, NotNccl::NeverFaster), (NcclFrom::NotMeasured, NotNccl::NotMeasured)]
    {
        let mut entry = entry();
        entry.curves[0].nccl_from = nccl_from;
        let source = Source::Table(Tuned::new(entry.into(), "table.toml".into(), None).unwrap());
        assert_eq!(not_nccl(&source, long, two_shot), expected);
    }
    let untuned = Source::Priors(Reason::Untuned { path: None });
    assert_eq!(not_nccl(&untuned, long, two_shot), NotNccl::Priors);

    let text = source.explain(&long, &missing, priors).to_string();
    assert!(text.ends_with(" Not NCCL: it would be faster, but libnccl.so.2 is not there."), "{text}");
    let text = tuned(Some(other)).explain(&long, &two_shot, priors).to_string();
    assert!(text.ends_with(" Not NCCL: measured with NCCL 2.32.3, this is 2.33.0."), "{text}");
}

#[test]
fn priors_say_why_there_is_no_table() {
    let source = Source::Priors(Reason::Untuned { path: Some("/cache/table.toml".into()) });
    assert_eq!(
        told(&source, question(8192)),
        "two-shot-ll, 2 blocks of 64 threads for 8192 B of bf16, tensors anywhere: chosen by priors, since there is no \
         table: no table was measured (/cache/table.toml): run `peersum tune`. Not NCCL: priors never hand over to it."
    );
    let told = told(&tuned(None), Question { placement: Placement::Symmetric, ..question(8192) });
    assert!(
        told.contains("priors, since there is no table: /tables/table.toml has no curve of placement symmetric: run"),
        "{told}"
    );
}

#[test]
fn another_grid_than_wanted_and_what_was_forced_are_told() {
    let source = tuned(None);
    let fewer = source.explain(&question(8192), &own(Algorithm::OneShotLl, 4, 128), priors);
    assert_eq!(fewer.expected_us, None);
    assert_eq!(fewer.wanted, Some(choice(Algorithm::OneShotLl, 8, 128)));
    assert!(fewer.to_string().contains(". Wanted were 8 blocks of 128 threads. Not"), "{fewer}");

    let forced = Facts { forced: true, ..own(Algorithm::OneShot, 1, 64) };
    let forced = source.explain(&question(8192), &forced, priors);
    assert_eq!((forced.why, forced.wanted, forced.expected_us), (Why::Forced, None, None));
    assert!(
        forced.to_string().starts_with("one-shot, 1 block of 64 threads for 8192 B of bf16, tensors anywhere: forced")
    );
    let forced = Facts { taken: Taken::Nccl, forced: true, nccl_missing: None, fallback: None };
    let forced = source.explain(&question(8192), &forced, priors);
    assert_eq!((forced.why, forced.expected_us, forced.not_nccl), (Why::Forced, Some(6.0), None));
}

#[test]
fn ranks_that_can_not_reach_each_other_are_why_nccl_has_all() {
    let error = Error::Unmapped { rank: 2, peer: 1, reason: "device 2 has no peer access to device 1".into() };
    let facts = Facts { taken: Taken::Nccl, forced: false, nccl_missing: None, fallback: Some(&error) };
    let source = Source::Priors(Reason::Untuned { path: None });
    let question = question(4096);
    let explanation = source.explain(&question, &facts, |_, _, _| Choice::NCCL);
    assert_eq!((explanation.why, explanation.fallback.as_ref()), (Why::Fallback, Some(&error)));
    let text = explanation.to_string();
    assert!(
        text.starts_with("NCCL for 4096 B of bf16") && text.contains("it has all calls. rank 2 can't map"),
        "{text}"
    );
}
