use proptest::prelude::*;

use super::*;
use crate::{
    Options,
    protocol::split::{self, split},
};

const RESIDENT: u32 = 1000;

/// Every algorithm by size, and more blocks than there ever are.
fn greedy(bytes: u64, world: u32) -> Choice {
    let turn = (bytes / 4096 + u64::from(world)) as usize % Algorithm::STAGED.len();
    Choice { algorithm: Algorithm::STAGED[turn], blocks: u32::MAX, threads: 512 }
}

fn layout(world: u32, max_blocks: u32, slot_lines: u64) -> Layout {
    let line = super::super::layout::LINE_BYTES;
    Layout { world, max_blocks, slot_bytes: slot_lines * line }
}

fn forced(algorithm: Algorithm, bytes: u64, layout: &Layout) -> Plan {
    let options = Options::default().algorithm(algorithm);
    plan(bytes, Placement::Symmetric, layout, options.forced(), greedy(bytes, layout.world), &|_, _| RESIDENT).unwrap()
}

fn reason(result: Result<Plan>) -> (Algorithm, String) {
    match result {
        Err(Error::AlgorithmUnavailable { algorithm, reason }) => (algorithm, reason),
        other => panic!("{other:?}"),
    }
}

/// The most units that any rank has of any chunk of the call's: each of which the kernels put in a slot.
fn most_units_of_a_part(plan: &Plan, bytes: u64, world: u32) -> u64 {
    let units = bytes.div_ceil(plan.algorithm.unit_bytes());
    let chunk_units = plan.chunk_bytes / plan.algorithm.unit_bytes();
    // The longer blocks come first, and so do the longer chunks of a block.
    let longest = split(units, plan.blocks.into(), 0);
    let chunk = split::chunks(longest, chunk_units).next().unwrap();
    let chunk = chunk.end - chunk.start;
    match plan.algorithm {
        Algorithm::OneShot | Algorithm::OneShotLl => chunk,
        Algorithm::TwoShot | Algorithm::OneShotPull | Algorithm::TwoShotPull => (0..world)
            .map(|rank| split(chunk, world.into(), rank.into()))
            .map(|part| part.end - part.start)
            .max()
            .unwrap(),
        // Two-shots by packets: all parts alike, the last ones perhaps empty.
        _ => chunk.div_ceil(world.into()),
    }
}

/// Bytes that a unit takes in a slot: as many as it has, or a packet for each payload.
fn bytes_in_a_slot(algorithm: Algorithm) -> u64 {
    match algorithm {
        // Beside the part of the next chunk lies the reduced part of this.
        Algorithm::TwoShot => 2 * PACK_BYTES,
        Algorithm::OneShot | Algorithm::OneShotPull | Algorithm::TwoShotPull => PACK_BYTES,
        by_packets => by_packets.unit_bytes() / u64::from(bindings::PEERSUM_LL_PAYLOAD_BYTES) * PACK_BYTES,
    }
}

proptest! {
    /// Field case A41 (vllm-project/vllm#50932): a message passed the gate of the whole workspace, and then did not fit
    /// the part of it that serves one call. Here the plan says how long chunks are, and the kernels take its word.
    #[test]
    fn what_a_plan_admits_fits_the_slots(
        world in 1u32..=8,
        max_blocks in 1u32..=128,
        slot_lines in 1u64..=70,
        algorithm in 0..Algorithm::STAGED.len(),
        around in 0u64..=3,
        difference in -40i64..=40,
    ) {
        let (layout, algorithm) = (layout(world, max_blocks, slot_lines), Algorithm::STAGED[algorithm]);
        // Around what one chunk, and one chunk of every block, holds.
        let capacity = algorithm.chunk_capacity(&layout).unwrap();
        let near = [1, capacity, capacity * u64::from(max_blocks), 3 * capacity * u64::from(max_blocks)];
        let bytes = near[around as usize].saturating_add_signed(difference).max(1);
        let plan = forced(algorithm, bytes, &layout);
        prop_assert_eq!(plan.chunk_bytes, capacity);
        let part = most_units_of_a_part(&plan, bytes, world);
        prop_assert!(part * bytes_in_a_slot(algorithm) <= layout.slot_bytes, "{:?}: {} units", plan, part);
        // A chunk of packets that isn't the last fills the slots, so that the kernels need sweep behind the last alone.
        if algorithm.packet_rounds() > 0 {
            let parts = if algorithm == Algorithm::TwoShotLl { u64::from(world) } else { 1 };
            prop_assert_eq!(plan.chunk_bytes / algorithm.unit_bytes(), parts * (layout.slot_bytes / PACK_BYTES));
        }
        // The pulls lay a rank's parts side by side over its slots of a half.
        if matches!(algorithm, Algorithm::OneShotPull | Algorithm::TwoShotPull) {
            let beside = u64::from(algorithm == Algorithm::TwoShotPull && world > 1);
            prop_assert!(plan.chunk_bytes <= (u64::from(world) - beside) * layout.slot_bytes);
        }
    }

    #[test]
    fn blocks_have_work_and_are_resident_together(
        bytes in 1u64..1 << 24,
        world in 2u32..=8,
        max_blocks in 1u32..=128,
        resident in 1u32..=300,
        blocks in proptest::option::of(1u32..=300),
        algorithm in proptest::option::of(0..Algorithm::ALL.len()),
    ) {
        let layout = layout(world, max_blocks, 4);
        let algorithm = algorithm.map(|index| Algorithm::ALL[index]);
        let options = Options { algorithm, blocks, ..Options::default() };
        match plan(bytes, Placement::Symmetric, &layout, options.forced(), greedy(bytes, world), &|_, _| resident) {
            Ok(plan) => {
                let units = bytes.div_ceil(plan.algorithm.unit_bytes());
                prop_assert!(plan.blocks >= 1 && u64::from(plan.blocks) <= units);
                prop_assert!(plan.blocks <= resident && plan.blocks <= max_blocks);
                prop_assert!(options.algorithm.is_none_or(|forced| forced == plan.algorithm));
                prop_assert!(blocks.is_none_or(|forced| u64::from(plan.blocks) == units.min(forced.into())));
            }
            Err(Error::AlgorithmUnavailable { reason, .. }) => {
                let forced = blocks.expect("only what is forced can fail");
                prop_assert!(forced > resident.min(max_blocks));
                let limit = format!("only {} can be resident", resident.min(max_blocks));
                prop_assert!(reason.contains(&format!("{forced} blocks")) && reason.contains(&limit), "{}", reason);
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    /// Ranks don't talk about the plan: each computes it, from what all know.
    #[test]
    fn a_plan_depends_on_nothing_but_its_arguments(bytes in 1u64..=u64::MAX, world in 1u32..=8) {
        let of_rank = || {
            let layout = Layout::new(world, 64, 8 << 20).unwrap();
            let resident = |algorithm: Algorithm, threads| algorithm.code() + threads;
            plan(bytes, Placement::Anywhere, &layout, Forced::default(), greedy(bytes, layout.world), &resident)
        };
        prop_assert_eq!(of_rank(), of_rank());
    }
}

#[test]
fn what_is_forced_is_done_or_refused_with_the_reason() {
    let layout = layout(4, 64, 16);
    // 512 threads leave room for one block, and more threads for none.
    let resident = |_, threads: u32| 512 / threads;
    let forced = |options: Options| {
        plan(1 << 20, Placement::Anywhere, &layout, options.forced(), greedy(1 << 20, layout.world), &resident)
    };
    let options = || Options::default().algorithm(Algorithm::TwoShot);

    let done = forced(options().threads(64).blocks(8)).unwrap();
    assert_eq!((done.algorithm, done.threads, done.blocks), (Algorithm::TwoShot, 64, 8));
    assert_eq!(
        reason(forced(options().threads(64).blocks(9))),
        (Algorithm::TwoShot, "9 blocks of 64 threads were forced, but only 8 can be resident together".into())
    );
    assert_eq!(
        reason(forced(options().threads(1024))),
        (Algorithm::TwoShot, "not one block of 1024 threads can be resident beside those of all ranks".into())
    );
    // Also more than there are flags for, though they would be resident.
    let many = plan(
        1 << 20,
        Placement::Anywhere,
        &layout,
        Forced { blocks: Some(65), ..options().forced() },
        greedy(1 << 20, layout.world),
        &|_, _| RESIDENT,
    );
    assert!(reason(many).1.contains("only 64 can be resident together"));
}

/// Field case A42 (flashinfer-ai/flashinfer#1223): sizes in 32 bits wrapped.
#[test]
fn sizes_beyond_32_bits_do_not_wrap() {
    for world in 2..=8 {
        let layout = Layout::new(world, 128, 32 << 20).unwrap();
        for algorithm in Algorithm::STAGED {
            let gibibyte = forced(algorithm, 1 << 30, &layout);
            assert_eq!(gibibyte.blocks, 128);
            for border in [1u64 << 31, 1 << 32, 1 << 35, 1 << 36, 1 << 63] {
                for bytes in border - 17..=border + 17 {
                    assert_eq!(forced(algorithm, bytes, &layout), gibibyte, "{algorithm} {bytes}");
                    let part = most_units_of_a_part(&gibibyte, bytes, world);
                    assert!(part * bytes_in_a_slot(algorithm) <= layout.slot_bytes, "{algorithm} {bytes}");
                }
            }
            assert_eq!(forced(algorithm, u64::MAX, &layout), gibibyte);
        }
    }
    // And so do slots beyond them.
    for algorithm in Algorithm::STAGED {
        let vast = Layout::new(8, 1, 200 << 30).unwrap();
        let plan = forced(algorithm, 1 << 40, &vast);
        assert!(plan.chunk_bytes > 6 << 30, "{algorithm}: {}", plan.chunk_bytes);
        assert!(most_units_of_a_part(&plan, 1 << 40, 8) * bytes_in_a_slot(algorithm) <= vast.slot_bytes, "{algorithm}");
    }
}

#[test]
fn names_and_codes_come_back_as_they_were() {
    for (code, algorithm) in Algorithm::ALL.into_iter().chain([Algorithm::Nccl]).enumerate() {
        assert_eq!(algorithm.code() as usize, code);
        assert_eq!(Algorithm::from_code(code as u32), Some(algorithm));
        assert_eq!(algorithm.name().parse(), Ok(algorithm));
    }
    assert_eq!(Algorithm::from_code(Algorithm::ALL.len() as u32 + 1), None);
    let unknown = "ring".parse::<Algorithm>().unwrap_err();
    assert!(Algorithm::ALL.iter().all(|algorithm| unknown.contains(algorithm.name())), "{unknown}");
}

/// Direct kernels count a block's packs in 32 bits.
#[test]
fn blocks_of_direct_kernels_are_counted_in_32_bits() {
    let layout = layout(4, 64, 16);
    let of = |bytes, blocks| {
        let options = Options::default().algorithm(Algorithm::TwoShotDirect).blocks(blocks);
        plan(bytes, Placement::Symmetric, &layout, options.forced(), greedy(bytes, layout.world), &|_, _| RESIDENT)
    };
    let most = u64::from(u32::MAX) * PACK_BYTES;
    assert_eq!(of(most, 1).unwrap().chunk_bytes, most);
    assert!(reason(of(most + 1, 1)).1.contains("64 GiB"));
    assert_eq!(of(most + 1, 2).unwrap().blocks, 2);
}
