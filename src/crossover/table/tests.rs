use super::{super::samples::*, *};

/// What validation says after `change`.
fn refusal(change: impl FnOnce(&mut Entry)) -> String {
    let mut table = table();
    change(&mut table.entries[0]);
    table.validate().unwrap_err()
}

#[test]
fn what_cannot_be_is_refused_with_where_and_why() {
    assert_eq!(table().validate(), Ok(()));
    let curve = "entry 1: curve anywhere of bf16";
    for (change, expected) in [
        (
            (|entry| entry.curves[0].steps[1].choice.blocks = 65) as fn(&mut Entry),
            format!("{curve}: step from 8193 bytes: 65 blocks, where there are 1 to 64"),
        ),
        (
            |entry| entry.curves[0].steps[1].choice.blocks = 0,
            format!("{curve}: step from 8193 bytes: 0 blocks, where there are 1 to 64"),
        ),
        (
            |entry| entry.curves[0].steps[0].choice.threads = 100,
            format!("{curve}: step from 0 bytes: 100 threads, which is no multiple of 32 from 32 to 512"),
        ),
        (
            |entry| entry.curves[0].points[0].own[1].choice.threads = 544,
            format!("{curve}: point of 8192 bytes: 544 threads, which is no multiple of 32 from 32 to 512"),
        ),
        (
            |entry| entry.curves[0].steps[2].choice.algorithm = Algorithm::TwoShotDirect,
            format!("{curve}: step from 1048576 bytes: two-shot-direct can't reduce tensors that lie anywhere"),
        ),
        (
            |entry| entry.curves[0].points[1].own[0].choice.algorithm = Algorithm::OneShotDirect,
            format!("{curve}: point of 1048576 bytes: one-shot-direct can't reduce tensors that lie anywhere"),
        ),
        (
            |entry| entry.curves[0].steps[2].choice = Choice::NCCL,
            format!(
                "{curve}: step from 1048576 bytes: nccl is none of the library's own: nccl_from_bytes and nccl_us are \
                 for it"
            ),
        ),
        (
            |entry| entry.curves[0].steps[2].from_bytes = 8193,
            format!("{curve}: step from 8193 bytes: it does not lie above the step before it"),
        ),
        (|entry| entry.curves[0].steps[0].from_bytes = 1, format!("{curve}: its first step is not from 0 bytes")),
        (|entry| entry.curves[0].steps.clear(), format!("{curve}: its first step is not from 0 bytes")),
        (
            |entry| {
                let step = Step { from_bytes: 2 << 20, ..entry.curves[0].steps[0] };
                entry.curves[0].steps.push(step);
            },
            format!("{curve}: step from 2097152 bytes: one-shot-ll was left below it"),
        ),
        (
            |entry| entry.curves[0].points[1].bytes = 8192,
            format!("{curve}: point of 8192 bytes: it does not lie above the point before it, or above 0"),
        ),
        (
            |entry| entry.curves[0].points[0].bytes = 0,
            format!("{curve}: point of 0 bytes: it does not lie above the point before it, or above 0"),
        ),
        (
            |entry| entry.curves[0].points[0].own[1].choice.algorithm = Algorithm::OneShotLl,
            format!("{curve}: point of 8192 bytes: one-shot-ll is there twice"),
        ),
        (
            |entry| entry.curves[0].points[0].own[0].us = -1.0,
            format!("{curve}: point of 8192 bytes: -1 is no time in µs"),
        ),
        (
            |entry| entry.curves[0].points[2].nccl_us = Some(f64::NAN),
            format!("{curve}: point of 4194304 bytes: NaN is no time in µs"),
        ),
        (
            |entry| entry.curves[0].points[2].nccl_us = Some(f64::INFINITY),
            format!("{curve}: point of 4194304 bytes: inf is no time in µs"),
        ),
        (
            |entry| entry.curves[0].nccl_from = NcclFrom::Bytes(1 << 63),
            format!("{curve}: 9223372036854775808 bytes are more than 9223372036854775807"),
        ),
        (|entry| entry.machine.nccl = None, format!("{curve}: it hands over to NCCL, but the machine has none")),
        (|entry| entry.curves.push(entry.curves[0].clone()), format!("{curve}: it is there twice")),
        (|entry| entry.machine.world = 4, "entry 1: machine: 2 rows of links for 4 ranks".into()),
        (
            |entry| entry.machine.links[1] = "N?".into(),
            "entry 1: machine: links 'N?' are not a letter of '=NPx' for each of 2 ranks".into(),
        ),
        (
            |entry| entry.machine.links[0] = "=".into(),
            "entry 1: machine: links '=' are not a letter of '=NPx' for each of 2 ranks".into(),
        ),
        (
            |entry| entry.machine.driver = "580\n".into(),
            r#"entry 1: machine: "580\n" is empty or has control characters"#.into(),
        ),
        (|entry| entry.measured.clear(), r#"entry 1: "" is empty or has control characters"#.into()),
    ] {
        assert_eq!(refusal(change), expected);
    }
    let twice = Table { entries: vec![entry(), entry()] };
    assert_eq!(twice.validate().unwrap_err(), "entry 2: another entry is for the same machine");
}

#[test]
fn an_entry_takes_the_place_of_the_one_for_its_machine() {
    let mut table = table();
    let mut other = entry();
    other.machine.driver = "590.2".into();
    table.upsert(other.clone());
    let again = Entry { measured: "2026-12-01".into(), ..entry() };
    table.upsert(again.clone());
    assert_eq!(table.entries, [again, other]);
}

#[test]
fn a_step_begins_at_its_border() {
    let curve = curve(Placement::Anywhere, DType::BF16);
    for (bytes, from, below) in [
        (0, 0, Some(8193)),
        (8190, 0, Some(8193)),
        (8192, 0, Some(8193)),
        (8194, 8193, Some(1 << 20)),
        ((1 << 20) - 2, 8193, Some(1 << 20)),
        (1 << 20, 1 << 20, None),
        ((1 << 20) + 2, 1 << 20, None),
        (u64::MAX, 1 << 20, None),
    ] {
        let (step, next) = curve.step(bytes).unwrap();
        assert_eq!((step.from_bytes, next), (from, below), "{bytes} B");
    }
    assert_eq!(Curve { steps: Vec::new(), ..curve }.step(5), None);
}

#[test]
fn times_lie_on_a_line_of_the_logarithms_and_nowhere_else() {
    let curve = curve(Placement::Anywhere, DType::BF16);
    assert_eq!(curve.own_us(Algorithm::OneShotLl, 8192), Some(1.5));
    assert_eq!(curve.own_us(Algorithm::OneShotLl, 1 << 20), Some(6.0));
    let middle = curve.own_us(Algorithm::OneShotLl, 92682).unwrap(); // 8192 * sqrt(128)
    assert!((middle - 3.0).abs() < 1e-3, "{middle}");
    let nccl = curve.nccl_us(2 << 20).unwrap();
    assert!((nccl - 240f64.sqrt()).abs() < 1e-9, "{nccl}");
    assert_eq!(curve.own_us(Algorithm::OneShotLl, 8191), None);
    assert_eq!(curve.own_us(Algorithm::OneShotLl, (1 << 20) + 1), None);
    assert_eq!(curve.own_us(Algorithm::OneShot, 8192), None);
    assert_eq!(curve.nccl_us(64 << 20), None);
}

/// Field case A62 (meta-pytorch/torchcomms#3825): a border that stayed where it was when the kernels got faster.
#[test]
fn a_border_where_the_times_do_not_meet_is_found() {
    let crossing = curve(Placement::Anywhere, DType::BF16);
    assert_eq!(crossing.gaps(), []);
    let mut stale = crossing.clone();
    stale.points[1].own[1].us = 7.3; // 6.0 and a fifth is 7.2
    let gap = &stale.gaps()[0];
    assert_eq!((gap.border_bytes, gap.below, gap.above), (1 << 20, ("one-shot-ll", 6.0), ("two-shot-pull", 7.3)));
    stale.points[1].own[1].us = 7.1;
    assert_eq!(stale.gaps(), []);

    let mut stale = crossing.clone();
    stale.nccl_from = NcclFrom::Bytes(16 << 20);
    let told: Vec<_> = stale.gaps().iter().map(ToString::to_string).collect();
    assert_eq!(told, ["two-shot-pull hands over to NCCL at 16777216 B, but they take 70.00 and 40.25 µs"]);
    stale.nccl_from = NcclFrom::Bytes(0);
    assert_eq!(stale.gaps(), []);

    // Where one ends before the border, the nearest size tells.
    let mut apart = crossing;
    apart.steps[2].from_bytes = 2 << 20;
    apart.points[1].own[1].us = 9.0;
    let told: Vec<_> = apart.gaps().iter().map(ToString::to_string).collect();
    assert_eq!(
        told,
        ["one-shot-ll hands over to two-shot-pull at 2097152 B, but at 1048576 B, the nearest size with both, they \
          take 6.00 and 9.00 µs"]
    );
}
