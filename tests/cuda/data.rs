//! Every element right, at every size, by every algorithm, with new data each call, eager and in graphs.

use half::{bf16, f16};
use peersum::{Algorithm, DType, ReduceOp};

use crate::{
    common::{Random, Value, among_others, assert_bits, places, references, wild},
    harness::{self, Rank},
};

pub const MOST_BYTES: usize = 64 << 20;
pub const WORLDS: [usize; 5] = [2, 3, 4, 5, 8];

/// One call of a run, the same on every rank.
#[derive(Clone, Copy)]
pub struct Shape {
    pub count: usize,
    pub op: ReduceOp,
    pub in_place: bool,
}

/// Mostly small ones, some up to 64 MiB, with tails of every length; the borders always.
pub fn shapes(calls: usize, dtype: DType, seed: u64) -> Vec<Shape> {
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

/// Where two tensors start: often aligned, often not.
pub fn offsets(random: &mut Random, dtype: DType) -> [u64; 2] {
    [(); 2].map(|()| if random.below(2) == 0 { 0 } else { (random.below(16) * dtype.size()) as u64 })
}

/// A rank's tensors for calls of one type, and what they came to.
struct Run<'a> {
    dtype: DType,
    input: &'a harness::Bytes,
    output: &'a harness::Bytes,
    offsets: Random,
    state: harness::State,
    what: String,
}

const FIRST_ROUND: u64 = 1000;

impl Run<'_> {
    fn call(&mut self, rank: &mut Rank, shape: Shape) {
        let offsets = offsets(&mut self.offsets, self.dtype);
        let input = self.input.address + offsets[0];
        let output = if shape.in_place { input } else { self.output.address + offsets[1] };
        // SAFETY: shapes have the most bytes at most, for which both have room behind the largest offset.
        unsafe { rank.verified_call(input, output, shape.count, self.dtype, shape.op, &self.state).unwrap() };
    }

    /// Fails if any element was wrong; returns how many calls were made.
    fn assert_right(&self, rank: &Rank) -> usize {
        (self.state.assert_right(rank, &self.what) - FIRST_ROUND) as usize
    }
}

/// Runs `work` on every rank by every algorithm with every type.
fn by_every_algorithm(world: usize, what: &str, work: impl Fn(&mut Rank, &mut Run<'_>) + Sync) {
    let Some(devices) = harness::devices() else { return };
    for algorithm in Algorithm::STAGED {
        devices.run(world, &harness::options().algorithm(algorithm), |rank| {
            let (input, output) = (rank.bytes(MOST_BYTES + 256), rank.bytes(MOST_BYTES + 256));
            for dtype in DType::ALL {
                let mut run = Run {
                    dtype,
                    input: &input,
                    output: &output,
                    offsets: Random::new(rank.rank as u64),
                    state: rank.state(FIRST_ROUND),
                    what: format!("{what} by {algorithm} of {dtype}, {world} ranks"),
                };
                work(rank, &mut run);
                rank.meet();
            }
        });
    }
}

fn eager(world: usize) {
    by_every_algorithm(world, "eager", |rank, run| {
        let shapes = shapes(harness::calls(), run.dtype, world as u64);
        rank.meet();
        for &shape in &shapes {
            run.call(rank, shape);
        }
        assert_eq!(run.assert_right(rank), shapes.len());
    });
}

fn in_graphs(world: usize) {
    const CALLS_A_GRAPH: usize = 5;
    by_every_algorithm(world, "in graphs", |rank, run| {
        let graphs: Vec<_> = shapes(harness::calls().min(50), run.dtype, world as u64)
            .chunks(CALLS_A_GRAPH)
            .map(|shapes| crate::graphs::capture(rank, |rank| shapes.iter().for_each(|&shape| run.call(rank, shape))))
            .collect();
        rank.meet();
        let mut order = Random::new(7);
        let replays = harness::calls().div_ceil(CALLS_A_GRAPH);
        for replay in 0..replays {
            graphs[order.below(graphs.len())].launch().unwrap();
            if replay % 3 == 0 {
                run.call(rank, Shape { count: 777, op: ReduceOp::Sum, in_place: false });
            }
        }
        assert!(run.assert_right(rank) >= replays * CALLS_A_GRAPH / 2);
        rank.meet();
        drop(graphs);
    });
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

/// The same input gives the same bits by every algorithm, on every rank.
#[test]
fn the_same_bits_by_every_algorithm_on_every_rank() {
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

/// A row has the same bits whatever tensor it is part of, and wherever it is there: another length takes another algorithm,
/// other chunks, and another split over blocks and ranks.
#[test]
fn a_row_has_the_same_bits_in_any_tensor() {
    const ROW: usize = 7168;
    let Some(devices) = harness::devices() else { return };
    for world in [2, 3, 4, 8] {
        let of_ranks = |seed, count| -> Vec<Vec<bf16>> { (0..world).map(|rank| wild(seed, rank, count)).collect() };
        let (row, others) = (of_ranks(7, ROW), of_ranks(8, 3 * ROW + 5));
        let expected = references(ReduceOp::Sum, &row);
        for algorithm in [None].into_iter().chain(Algorithm::STAGED.map(Some)) {
            let mut options = harness::options();
            options.algorithm = algorithm;
            devices.run(world, &options, |rank| {
                for rows in [1, 2, 3, 4, 5, 8, 16, 33, 64] {
                    let tensor = among_others(&row[rank.rank], &others[rank.rank], rows);
                    let sums = rank.all_reduce_values(&tensor, ReduceOp::Sum);
                    for place in places(rows) {
                        let what = format!("{world} ranks by {algorithm:?}, row {place} of {rows}");
                        assert_bits(what, &sums[place * ROW..][..ROW], &expected);
                    }
                }
            });
        }
    }
}
