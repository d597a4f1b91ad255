use peersum::crossover::{Entry, Machine, Question, Source, Table, Tuned};

use super::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

fn choice(algorithm: Algorithm, blocks: u32, threads: u32) -> Choice {
    Choice { algorithm, blocks, threads }
}

fn own(algorithm: Algorithm, us: f64) -> Cell {
    Cell { candidate: Candidate::Own(choice(algorithm, 8, 128)), us, wrong: 0 }
}

/// As who measures by forcing it may say it.
fn nccl(us: f64) -> Cell {
    Cell { candidate: Candidate::Own(Choice::NCCL), us, wrong: 0 }
}

fn of(bytes: u64, cells: &[Cell]) -> Size {
    Size { bytes, cells: cells.to_vec() }
}

fn fitted(sizes: &[Size]) -> Fit {
    let fit = fit(Placement::Anywhere, DType::BF16, sizes).unwrap();
    entry(2, vec![fit.curve.clone()]).validate().unwrap();
    fit
}

fn entry(world: u32, curves: Vec<Curve>) -> Entry {
    let machine = Machine {
        gpu: "NVIDIA H200".into(),
        world,
        links: vec!["=".repeat(world as usize); world as usize],
        driver: "580.159.04".into(),
        nccl: Some("2.32.3".into()),
        peersum: "0.1.0".into(),
        kernels: "00c0ffee".into(),
    };
    Entry { machine, measured: "2026-11-30".into(), command: "peersum tune".into(), curves }
}

/// Algorithms of every step and the bytes that each is from, without grids.
fn switches(curve: &Curve) -> Vec<(u64, Algorithm)> {
    let mut switches: Vec<(u64, Algorithm)> = Vec::new();
    for step in &curve.steps {
        if switches.last().is_none_or(|last| last.1 != step.choice.algorithm) {
            switches.push((step.from_bytes, step.choice.algorithm));
        }
    }
    switches
}

/// Powers of two from 1 KiB to 64 MiB.
fn doubling() -> impl Iterator<Item = u64> {
    (10..=26).map(|power| 1 << power)
}

/// A fixed cost and so many bytes a µs.
fn line(fixed: f64, per_us: f64, bytes: u64) -> f64 {
    fixed + bytes as f64 / per_us
}

/// A one-shot and NCCL over all sizes, as `times` has it.
fn against_nccl(times: impl Fn(u64) -> (f64, Option<f64>)) -> Vec<Size> {
    let size = |bytes| {
        let (us, nccl_us) = times(bytes);
        let cells: Vec<Cell> = [own(Algorithm::OneShotLl, us)].into_iter().chain(nccl_us.map(nccl)).collect();
        of(bytes, &cells)
    };
    doubling().map(size).collect()
}

/// Field case A62 (meta-pytorch/torchcomms#3825): the border must be where the curves cross.
#[test]
fn curves_that_cross_once_hand_over_there() {
    // They are equal at 1.2e6 bytes.
    let sizes = against_nccl(|bytes| (line(2.0, 1e5, bytes), Some(line(8.0, 2e5, bytes))));
    let fit = fitted(&sizes);
    let NcclFrom::Bytes(border) = fit.curve.nccl_from else { panic!("{:?}", fit.curve.nccl_from) };
    assert!((1_150_000..1_250_000).contains(&border), "{border}");
    assert_eq!(fit.warnings, []);
    let (own, nccl) = (fit.curve.own_us(Algorithm::OneShotLl, border).unwrap(), fit.curve.nccl_us(border).unwrap());
    assert!((own / nccl - 1.0).abs() < 1e-3, "{own} {nccl}");

    // The same between two of the library's own.
    let cells =
        |bytes| [own_line(Algorithm::OneShotLl, 2.0, 1e5, bytes), own_line(Algorithm::TwoShotPull, 8.0, 2e5, bytes)];
    let fit = fitted(&doubling().map(|bytes| of(bytes, &cells(bytes))).collect::<Vec<_>>());
    assert_eq!(switches(&fit.curve), [(0, Algorithm::OneShotLl), (border, Algorithm::TwoShotPull)]);
    assert_eq!(fit.curve.nccl_from, NcclFrom::NotMeasured);
    assert_eq!(fit.warnings, []);
}

fn own_line(algorithm: Algorithm, fixed: f64, per_us: f64, bytes: u64) -> Cell {
    own(algorithm, line(fixed, per_us, bytes))
}

/// Field case A62: "never" is an answer.
#[test]
fn curves_that_never_cross_never_hand_over() {
    let fit = fitted(&against_nccl(|bytes| (line(2.0, 2e5, bytes), Some(line(8.0, 1e5, bytes)))));
    assert_eq!((fit.curve.nccl_from, fit.warnings), (NcclFrom::Never, vec![]));
    // Nor do those that are equal, but for noise.
    let fit = fitted(&against_nccl(|bytes| (line(2.0, 2e5, bytes) * 1.02, Some(line(2.0, 2e5, bytes)))));
    assert_eq!((fit.curve.nccl_from, fit.warnings), (NcclFrom::Never, vec![]));
}

/// Field case A62: noise must not make two borders. The one that costs least in total is taken, and what it loses is
/// told.
#[test]
fn curves_that_cross_twice_in_noise_have_one_border() {
    let noisy = |at: u64, factor: f64| {
        against_nccl(move |bytes| {
            let us = line(2.0, 1e5, bytes);
            (if bytes == at { us * factor } else { us }, Some(line(8.0, 2e5, bytes)))
        })
    };
    let border = |fit: &Fit| match fit.curve.nccl_from {
        NcclFrom::Bytes(border) => border,
        other => panic!("{other:?}"),
    };
    // Slow once, far below the border.
    let below = fitted(&noisy(64 * KIB, 4.0));
    assert!((1_150_000..1_250_000).contains(&border(&below)), "{}", border(&below));
    assert!(
        matches!(below.warnings[..], [Warning::NcclFaster { bytes, us, nccl_us }]
            if bytes == 64 * KIB && us > nccl_us),
        "{:?}",
        below.warnings
    );
    // Fast once, far above it.
    let above = fitted(&noisy(16 * MIB, 0.3));
    assert!((1_150_000..1_250_000).contains(&border(&above)), "{}", border(&above));
    assert!(
        matches!(above.warnings[..], [Warning::NcclSlower { bytes, us, nccl_us }]
            if bytes == 16 * MIB && us < nccl_us),
        "{:?}",
        above.warnings
    );
    // At the longest size too fast, by more than NCCL saves at all others: never.
    assert_eq!(fitted(&noisy(64 * MIB, 0.01)).curve.nccl_from, NcclFrom::Never);
}

/// Field case A62: NCCL may not be there, or only for some sizes.
#[test]
fn without_nccl_there_is_no_border() {
    let fit = fitted(&against_nccl(|bytes| (line(2.0, 1e5, bytes), None)));
    assert_eq!((fit.curve.nccl_from, fit.warnings), (NcclFrom::NotMeasured, vec![]));
    // Only up to 4 MiB: whether it stays faster is not known.
    let times = |bytes| (line(2.0, 1e5, bytes), (bytes <= 4 * MIB).then(|| line(8.0, 2e5, bytes)));
    let fit = fitted(&against_nccl(times));
    let unmeasured = vec![Warning::NcclUnmeasured { bytes: 64 * MIB }];
    assert_eq!((fit.curve.nccl_from, fit.warnings), (NcclFrom::NotMeasured, unmeasured));
    // At every fourth size: between them NCCL's time is taken to lie on a line of the logarithms, a little above its
    // own.
    let sparse = |bytes: u64| bytes.trailing_zeros() % 4 == 2;
    let fit = fitted(&against_nccl(|bytes| (line(2.0, 1e5, bytes), sparse(bytes).then(|| line(8.0, 2e5, bytes)))));
    assert!(matches!(fit.curve.nccl_from, NcclFrom::Bytes(1_150_000..2_000_000)), "{:?}", fit.curve.nccl_from);
}

/// Field cases A62 and A63 (vllm-project/vllm#48075): what is slower everywhere is taken nowhere.
#[test]
fn an_nccl_that_is_faster_everywhere_has_everything() {
    let fit = fitted(&against_nccl(|bytes| (line(20.0, 1e5, bytes), Some(line(8.0, 2e5, bytes)))));
    assert_eq!((fit.curve.nccl_from, &fit.warnings[..]), (NcclFrom::Bytes(0), &[][..]));
    let source = source_of(entry(2, vec![fit.curve]));
    for bytes in (0..36).map(|power| 1 << power) {
        let question = question(bytes, 2, Placement::Anywhere);
        assert!(source.choose(&question, priors).nccl, "{bytes} B");
        assert!(!source.choose(&Question { deterministic: true, ..question }, priors).nccl, "{bytes} B");
    }
}

/// Field case A63: at no size is a path taken that was measured slower than NCCL, by more than noise and unless it is
/// told.
#[test]
fn nothing_slower_than_nccl_is_taken_untold() {
    // Pseudo-random times, of which many cross often; the generator is Knuth's for MMIX.
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as f64 / (1u64 << 31) as f64
    };
    for _ in 0..300 {
        let spread = random() * 2.0;
        let mut noisy = |bytes: u64| line(5.0, 1e5, bytes) * (spread * (random() - 0.5)).exp();
        let sizes: Vec<Size> = doubling()
            .map(|bytes| {
                let algorithms = [Algorithm::OneShotLl, Algorithm::TwoShotLl, Algorithm::TwoShotPull];
                let mut cells: Vec<Cell> = algorithms.map(|algorithm| own(algorithm, noisy(bytes))).to_vec();
                cells.push(nccl(noisy(bytes)));
                of(bytes, &cells)
            })
            .collect();
        let fit = fitted(&sizes);
        let told: Vec<u64> = fit
            .warnings
            .iter()
            .filter_map(|warning| match warning {
                Warning::NcclFaster { bytes, .. } => Some(*bytes),
                _ => None,
            })
            .collect();
        let source = source_of(entry(2, vec![fit.curve.clone()]));
        let mut slower = Vec::new();
        for point in &fit.curve.points {
            let decision = source.choose(&question(point.bytes, 2, Placement::Anywhere), priors);
            let us = fit.curve.own_us(decision.own.algorithm, point.bytes).unwrap();
            if !decision.nccl && us > point.nccl_us.unwrap() * HYSTERESIS {
                slower.push(point.bytes);
            }
        }
        assert_eq!(slower, told);
    }
}

#[test]
fn one_wrong_element_refuses_a_candidate_at_every_size() {
    let fast = Algorithm::OneShotLl;
    let cells = |bytes: u64| vec![own_line(fast, 1.0, 4e5, bytes), own_line(Algorithm::TwoShot, 4.0, 2e5, bytes)];
    let mut sizes: Vec<Size> = doubling().map(|bytes| of(bytes, &cells(bytes))).collect();
    assert_eq!(switches(&fitted(&sizes).curve), [(0, fast)]);
    // On another grid, at one size.
    sizes[3].cells.push(Cell { candidate: Candidate::Own(choice(fast, 64, 512)), us: 9.0, wrong: 1 });
    let fit = fitted(&sizes);
    assert_eq!(switches(&fit.curve), [(0, Algorithm::TwoShot)]);
    assert!(fit.curve.points.iter().flat_map(|point| &point.own).all(|timing| timing.choice.algorithm != fast));
    assert_eq!(fit.warnings, [Warning::Wrong { name: "one-shot-ll", cells: 1, bytes: 8 * KIB, wrong: 1 }]);

    // NCCL too, which is not as if it had not been measured.
    let mut sizes = against_nccl(|bytes| (line(20.0, 1e5, bytes), Some(line(8.0, 2e5, bytes))));
    sizes[16].cells[1].wrong = 7;
    let fit = fitted(&sizes);
    assert_eq!(fit.curve.nccl_from, NcclFrom::Never);
    assert!(fit.curve.points.iter().all(|point| point.nccl_us.is_none()));
    assert_eq!(fit.warnings, [Warning::Wrong { name: "NCCL", cells: 1, bytes: 64 * MIB, wrong: 7 }]);

    // And if nothing is left there is no curve.
    let wrong = Cell { wrong: 2, ..own(fast, 1.0) };
    let none = super::fit(Placement::Anywhere, DType::BF16, &[of(KIB, &[wrong, nccl(3.0)])]).unwrap_err();
    assert_eq!(
        none.to_string(),
        "nothing that can be chosen was measured; one-shot-ll gave wrong results in 1 of its cells (at 1024 B 2 \
         elements): it is refused at every size; 1024 B: no algorithm but NCCL has a time: left out"
    );
    assert_eq!(super::fit(Placement::Anywhere, DType::BF16, &[]).unwrap_err().warnings, []);
}

#[test]
fn what_cannot_run_or_is_no_time_is_left_out() {
    let direct = Algorithm::OneShotDirect;
    let sizes = [of(KIB, &[own(direct, 1.0), own(Algorithm::OneShot, 2.0), own(Algorithm::TwoShot, f64::NAN)])];
    let fit = fitted(&sizes);
    assert_eq!(switches(&fit.curve), [(0, Algorithm::OneShot)]);
    assert!(
        matches!(&fit.warnings[..], [Warning::NoTime { name: "two-shot", us, .. }, Warning::Unserved { algorithm }]
            if us.is_nan() && *algorithm == direct),
        "{:?}",
        fit.warnings
    );
    let symmetric = super::fit(Placement::Symmetric, DType::BF16, &sizes).unwrap();
    assert_eq!(switches(&symmetric.curve), [(0, direct)]);
}

#[test]
fn a_grid_is_kept_where_it_costs_little() {
    let cell = |blocks, us| Cell { candidate: Candidate::Own(choice(Algorithm::OneShotLl, blocks, 128)), us, wrong: 0 };
    let sizes = [
        of(KIB, &[cell(2, 1.0), cell(4, 1.1), cell(8, 1.2)]),
        of(2 * KIB, &[cell(2, 1.215), cell(4, 1.2), cell(8, 1.3)]), // 1.25 % behind
        of(4 * KIB, &[cell(2, 1.6), cell(4, 1.5), cell(8, 1.4)]),
        of(8 * KIB, &[cell(4, 2.0), cell(8, 2.04)]), // 2 %
    ];
    let fit = fitted(&sizes);
    let steps: Vec<_> = fit.curve.steps.iter().map(|step| (step.from_bytes, step.choice.blocks)).collect();
    // A grid is for its size and what lies between it and the size before.
    assert_eq!(steps, [(0, 2), (2 * KIB + 1, 8), (4 * KIB + 1, 4)]);
    let taken: Vec<_> = fit.curve.points.iter().map(|point| (point.own[0].choice.blocks, point.own[0].us)).collect();
    assert_eq!(taken, [(2, 1.0), (2, 1.215), (8, 1.4), (4, 2.0)]);
}

#[test]
fn noise_does_not_make_a_switch_and_no_algorithm_comes_back() {
    let (one, two) = (Algorithm::OneShotLl, Algorithm::TwoShotLl);
    let table = |times: &[(f64, f64)]| -> Vec<Size> {
        let size =
            |(index, &(first, second)): (usize, &(f64, f64))| of(KIB << index, &[own(one, first), own(two, second)]);
        times.iter().enumerate().map(size).collect()
    };
    // 2 % at the end are less than a switch has to save.
    let fit = fitted(&table(&[(1.0, 2.0), (1.0, 1.5), (1.02, 1.0)]));
    assert_eq!(switches(&fit.curve), [(0, one)]);
    // Twice 2 % are more.
    let fit = fitted(&table(&[(1.0, 2.0), (1.0, 1.5), (1.02, 1.0), (1.02, 1.0)]));
    assert_eq!(switches(&fit.curve).len(), 2);
    // Back and forth: the second of three switches would save 10 %, but no switch that comes back is one.
    let fit = fitted(&table(&[(1.0, 2.0), (1.1, 1.0), (1.0, 1.5), (2.0, 1.0)]));
    assert_eq!(switches(&fit.curve).iter().map(|switch| switch.1).collect::<Vec<_>>(), [one, two]);
    assert_eq!(fit.warnings, [Warning::Loses { algorithm: one, bytes: 2 * KIB, us: 1.1, best_us: 1.0 }]);
    // One cell that loses 5 % is avoided, though the sum would be less with it: 0.049 against 0.064.
    let fit = fitted(&table(&[(1.0, 2.0), (1.0, 2.0), (1.05, 1.0), (1.0, 1.035)]));
    assert_eq!(switches(&fit.curve).iter().map(|switch| switch.1).collect::<Vec<_>>(), [one, two]);
    // And 3.9 % are not.
    let fit = fitted(&table(&[(1.0, 2.0), (1.0, 2.0), (1.039, 1.0), (1.0, 1.035)]));
    assert_eq!(switches(&fit.curve), [(0, one)]);
}

/// Packets are not measured for long messages, so where they end can't be seen from both sides.
#[test]
fn what_ends_between_two_sizes_hands_over_in_the_middle() {
    let (packets, pull) = (Algorithm::TwoShotLl, Algorithm::TwoShotPull);
    let sizes = [of(MIB, &[own(packets, 8.0), own(pull, 9.0)]), of(4 * MIB, &[own(pull, 27.0)])];
    let fit = fitted(&sizes);
    assert_eq!(switches(&fit.curve), [(0, packets), (2 * MIB, pull)]);
    assert_eq!(fit.warnings, []);
    // Unless the two are far apart where both were seen: then there is no telling.
    let sizes = [of(MIB, &[own(packets, 8.0), own(pull, 10.0)]), of(4 * MIB, &[own(pull, 27.0)])];
    let fit = fitted(&sizes);
    let told: Vec<_> = fit.warnings.iter().map(ToString::to_string).collect();
    assert_eq!(
        told,
        ["two-shot-ll hands over to two-shot-pull at 2097152 B, but at 1048576 B, the nearest size with both, they \
          take 8.00 and 10.00 µs: measure sizes between"]
    );
    // Two that share no size: told that one is taken where it was not measured, or that nothing can be said.
    let sizes = [of(KIB, &[own(packets, 1.0)]), of(2 * KIB, &[own(pull, 1.0)]), of(4 * KIB, &[own(packets, 1.0)])];
    let fit = fitted(&sizes);
    assert!(matches!(fit.warnings[..], [Warning::Unmeasured { .. }]), "{:?}", fit.warnings);
}

#[test]
fn the_order_of_what_was_measured_decides_nothing() {
    let mut sizes = against_nccl(|bytes| (line(2.0, 1e5, bytes), Some(line(8.0, 2e5, bytes))));
    let ordered = fitted(&sizes).curve;
    sizes.reverse();
    sizes.push(of(0, &[own(Algorithm::OneShotLl, 1.0)]));
    for size in &mut sizes {
        size.cells.reverse();
    }
    // A size in two parts.
    let half = Size { bytes: sizes[4].bytes, cells: vec![sizes[4].cells.pop().unwrap()] };
    sizes.push(half);
    assert_eq!(fitted(&sizes).curve, ordered);
}

// What one H200 that all ranks shared gave.

const SWEEP: &str = include_str!("../../../../docs/data/sweep-one-h200-2026-11-30.csv");
const PEERS: &str = include_str!("../../../../docs/data/peers-one-h200-2026-11-30.csv");

/// The sweep of so many ranks, of what serves `placement`, and NCCL's kernels for plain buffers beside it.
fn swept(world: u32, placement: Placement, with_nccl: bool) -> Vec<Size> {
    let mut sizes: BTreeMap<u64, Vec<Cell>> = BTreeMap::new();
    for row in SWEEP.lines().skip(1) {
        let [kernel, blocks, threads, ranks, bytes, us, _, wrong] = row.split(',').collect::<Vec<_>>()[..] else {
            panic!("{row}")
        };
        let Ok(algorithm) = kernel.parse::<Algorithm>() else { continue };
        if ranks.parse() != Ok(world) || !algorithm.serves(placement) {
            continue;
        }
        let candidate = Candidate::Own(choice(algorithm, blocks.parse().unwrap(), threads.parse().unwrap()));
        let cell = Cell { candidate, us: us.parse().unwrap(), wrong: wrong.parse().unwrap() };
        sizes.entry(bytes.parse().unwrap()).or_default().push(cell);
    }
    for row in PEERS.lines().skip(1).filter(|_| with_nccl) {
        let [system, kernel, ranks, bytes, us, _, _] = row.split(',').collect::<Vec<_>>()[..] else { panic!("{row}") };
        if (system, kernel) == ("nccl", "plain_graph") && ranks.parse() == Ok(world) {
            sizes.get_mut(&bytes.parse().unwrap()).unwrap().push(nccl(us.parse().unwrap()));
        }
    }
    assert_eq!(sizes.len(), 11);
    sizes.into_iter().map(|(bytes, cells)| Size { bytes, cells }).collect()
}

const WORLDS: [u32; 3] = [2, 4, 8];
const PLACEMENTS: [Placement; 4] =
    [Placement::Anywhere, Placement::SymmetricInput, Placement::Symmetric, Placement::SymmetricInPlace];

fn fit_of_sweep(world: u32, placement: Placement) -> Fit {
    super::fit(placement, DType::BF16, &swept(world, placement, false)).unwrap()
}

fn source_of(entry: Entry) -> Source {
    Source::Table(Tuned::new(entry.into(), "table.toml".into(), None).unwrap())
}

/// What no table here chooses.
fn priors(_: u64, _: u32, _: Placement) -> Choice {
    choice(Algorithm::OneShot, 1, 32)
}

fn question(bytes: u64, world: u32, placement: Placement) -> Question {
    Question { bytes, dtype: DType::BF16, world, placement, deterministic: false }
}

#[test]
fn of_what_was_swept_nothing_chosen_is_a_twentieth_slower_than_the_best() {
    for world in WORLDS {
        let curves: Vec<Curve> = PLACEMENTS.map(|placement| fit_of_sweep(world, placement).curve).to_vec();
        let entry = entry(world, curves);
        // Through the file, as the library gets it.
        let table = Table { entries: vec![entry] };
        let table = Table::parse(&table.to_text()).unwrap();
        let source = source_of(table.entries[0].clone());
        for placement in PLACEMENTS {
            for Size { bytes, cells } in swept(world, placement, false) {
                let chosen = source.choose(&question(bytes, world, placement), priors).own;
                let us = cells.iter().find(|cell| cell.candidate == Candidate::Own(chosen)).unwrap().us;
                let best = cells.iter().map(|cell| cell.us).fold(f64::INFINITY, f64::min);
                assert!(us <= best * 1.05, "{world} ranks, {placement:?}, {bytes} B: {chosen:?} {us} {best}");
            }
        }
    }
}

/// Field case A61 (lightseekorg/tokenspeed#1234): a one-shot costs the more the more ranks there are.
#[test]
fn of_what_was_swept_more_ranks_get_no_longer_one_shots() {
    for placement in PLACEMENTS {
        let longest = |world| {
            let source = source_of(entry(world, vec![fit_of_sweep(world, placement).curve]));
            let one_shot = |&bytes: &u64| {
                let algorithm = source.choose(&question(bytes, world, placement), priors).own.algorithm;
                matches!(
                    algorithm,
                    Algorithm::OneShot | Algorithm::OneShotLl | Algorithm::OneShotPull | Algorithm::OneShotDirect
                )
            };
            (0..1 << 12).map(|step| 16u64 << 10 | step << 14).filter(one_shot).max()
        };
        let longest = WORLDS.map(longest);
        assert!(longest.is_sorted_by(|fewer, more| fewer >= more), "{placement:?}: {longest:?}");
        // Where only the input is in symmetric memory, one-shot-direct alone has no copy: on one GPU it has all that is
        // long.
        if placement != Placement::SymmetricInput {
            assert!(longest[2] < longest[0], "{placement:?}: {longest:?}");
        }
    }
}

/// Field case A61: equal bytes, equal choice; one switch for a border; one element below, at and above each.
#[test]
fn of_what_was_swept_each_border_is_one_switch() {
    for world in WORLDS {
        for placement in PLACEMENTS {
            let curve = fit_of_sweep(world, placement).curve;
            let switches = switches(&curve);
            let source = source_of(entry(world, vec![curve]));
            let at = |bytes| source.choose(&question(bytes, world, placement), priors).own.algorithm;
            for pair in switches.windows(2) {
                let ((_, below), (border, above)) = (pair[0], pair[1]);
                for element in [2, 4] {
                    let whole = border.next_multiple_of(element);
                    let seen = [whole - element, whole, whole + element].map(at);
                    assert_eq!(seen, [below, above, above], "{world} ranks, {placement:?}, {border} B");
                }
            }
            let mut algorithms: Vec<_> = switches.iter().map(|switch| switch.1).collect();
            algorithms.sort_unstable();
            algorithms.dedup();
            assert_eq!(algorithms.len(), switches.len(), "{world} ranks, {placement:?}: {switches:?}");
        }
    }
}

#[test]
fn of_what_was_swept_nothing_goes_to_the_nccl_that_was_slower_everywhere() {
    for world in WORLDS {
        let sizes = swept(world, Placement::Symmetric, true);
        let fit = super::fit(Placement::Symmetric, DType::BF16, &sizes).unwrap();
        assert_eq!(fit.curve.nccl_from, NcclFrom::Never, "{world} ranks");
        assert!(fit.curve.points.iter().all(|point| point.nccl_us.is_some()));
    }
}
