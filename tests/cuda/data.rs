//! Every element right, at every size, by every algorithm, with new data each call, eager and in graphs.

use peersum::{Algorithm, DType, ReduceOp};

use crate::{
    common::Random,
    harness::{self, Rank},
};

const MOST_BYTES: usize = 64 << 20;
const WORLDS: [usize; 5] = [2, 3, 4, 5, 8];

/// One call of a run, the same on every rank.
#[derive(Clone, Copy)]
struct Shape {
    count: usize,
    op: ReduceOp,
    in_place: bool,
}

/// Mostly small ones, some up to 64 MiB, with tails of every length; the borders always.
fn shapes(calls: usize, dtype: DType, seed: u64) -> Vec<Shape> {
    let mut random = Random::new(seed);
    let most = MOST_BYTES / dtype.size();
    (0..calls)
        .map(|call| {
            let magnitude = if random.below(50) == 0 { 26 } else { random.below(21) };
            let count = match call {
                0 => 0,
                1 => most,
                2 => most - 1,
                _ => random.below(1 << magnitude).min(most),
            };
            Shape { count, op: *random.of(&ReduceOp::ALL), in_place: random.below(2) == 0 }
        })
        .collect()
}

/// Where this rank's tensors start: often aligned, often not, and other than on the peers.
fn offsets(random: &mut Random, dtype: DType) -> [u64; 2] {
    [(); 2].map(|()| if random.below(2) == 0 { 0 } else { (random.below(16) * dtype.size()) as u64 })
}

struct Buffers {
    input: harness::Bytes,
    output: harness::Bytes,
}

fn buffers(rank: &Rank) -> Buffers {
    Buffers { input: rank.bytes(MOST_BYTES + 256), output: rank.bytes(MOST_BYTES + 256) }
}

/// # Safety
/// The shape fits the buffers.
unsafe fn call(
    rank: &mut Rank,
    buffers: &Buffers,
    shape: Shape,
    offsets: [u64; 2],
    dtype: DType,
    state: &harness::State,
) {
    let input = buffers.input.address + offsets[0];
    let output = if shape.in_place { input } else { buffers.output.address + offsets[1] };
    // SAFETY: both buffers have room for the most bytes behind the largest offset.
    unsafe { rank.verified_call(input, output, shape.count, dtype, shape.op, state).unwrap() };
}

fn eager(world: usize) {
    let Some(devices) = harness::devices() else { return };
    for algorithm in Algorithm::STAGED {
        devices.run(world, &harness::options().algorithm(algorithm), |rank| {
            let buffers = buffers(rank);
            for dtype in DType::ALL {
                let mut mine = Random::new(rank.rank as u64);
                let state = rank.state(1000);
                rank.meet();
                let shapes = shapes(harness::calls(), dtype, world as u64);
                for &shape in &shapes {
                    // SAFETY: the shapes are within the buffers.
                    unsafe { call(rank, &buffers, shape, offsets(&mut mine, dtype), dtype, &state) };
                }
                let rounds = state.assert_right(rank, format_args!("{algorithm} {dtype} {world} ranks"));
                assert_eq!(rounds, 1000 + shapes.len() as u64);
                rank.meet();
            }
        });
    }
}

fn in_graphs(world: usize) {
    const CALLS_A_GRAPH: usize = 5;
    let Some(devices) = harness::devices() else { return };
    for algorithm in Algorithm::STAGED {
        devices.run(world, &harness::options().algorithm(algorithm), |rank| {
            let buffers = buffers(rank);
            for dtype in DType::ALL {
                let mut mine = Random::new(rank.rank as u64);
                let state = rank.state(0);
                let graphs: Vec<_> = shapes(harness::calls().min(50), dtype, world as u64)
                    .chunks(CALLS_A_GRAPH)
                    .map(|shapes| {
                        crate::graphs::capture(rank, |rank| {
                            for &shape in shapes {
                                // SAFETY: the shapes are within the buffers, which outlive the graphs.
                                unsafe { call(rank, &buffers, shape, offsets(&mut mine, dtype), dtype, &state) };
                            }
                        })
                    })
                    .collect();
                rank.meet();
                let mut order = Random::new(7);
                let replays = harness::calls().div_ceil(CALLS_A_GRAPH);
                for replay in 0..replays {
                    graphs[order.below(graphs.len())].launch().unwrap();
                    if replay % 3 == 0 {
                        let shape = Shape { count: 777, op: ReduceOp::Sum, in_place: false };
                        // SAFETY: as above.
                        unsafe { call(rank, &buffers, shape, [0, 0], dtype, &state) };
                    }
                }
                let rounds = state.assert_right(rank, format_args!("{algorithm} {dtype} {world} ranks, graphs"));
                assert!(rounds >= (replays * CALLS_A_GRAPH) as u64 / 2);
                rank.meet();
                drop(graphs);
            }
        });
    }
}

macro_rules! worlds {
    ($($world:literal $eager:ident $graphs:ident),*) => {
        $(
            #[test]
            fn $eager() {
                eager($world);
            }

            #[test]
            fn $graphs() {
                in_graphs($world);
            }
        )*
    };
}

worlds!(
    2 eager_2_ranks graphs_2_ranks,
    3 eager_3_ranks graphs_3_ranks,
    4 eager_4_ranks graphs_4_ranks,
    5 eager_5_ranks graphs_5_ranks,
    8 eager_8_ranks graphs_8_ranks
);

/// The same input gives the same bits by every algorithm, on every rank, and whatever else is in the tensor.
#[test]
fn the_same_bits_by_every_algorithm_on_every_rank() {
    use half::{bf16, f16};

    use crate::common::{Value, wild};

    fn check<T: Value + cudarc::driver::DeviceRepr>(devices: &harness::Devices, world: usize, count: usize) {
        let mut seen: Option<Vec<u32>> = None;
        for algorithm in Algorithm::STAGED {
            let options = harness::options().algorithm(algorithm);
            let results = devices
                .run(world, &options, |rank| rank.all_reduce_values(&wild::<T>(3, rank.rank, count), ReduceOp::Sum));
            for result in results {
                let bits: Vec<u32> = result.into_iter().map(Value::bits).collect();
                match &seen {
                    None => seen = Some(bits),
                    Some(first) => assert!(*first == bits, "{algorithm}, {world} ranks, {count} x {}", T::DTYPE),
                }
            }
        }
    }

    let Some(devices) = harness::devices() else { return };
    for world in WORLDS {
        for count in [1, 4096, 300_001] {
            check::<f32>(&devices, world, count);
            check::<f16>(&devices, world, count);
            check::<bf16>(&devices, world, count);
        }
    }
}
