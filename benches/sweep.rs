//! Times every algorithm on every grid, for the table of priors: `cargo bench --bench sweep -- [RANKS ...]`.
//!
//! All ranks run on device 0 unless `PEERSUM_SWEEP_DEVICES` lists others. Every rank's calls are captured in one CUDA
//! graph, 100 or 10 by size, on a stream of its own, and all graphs are launched together; in rounds over the candidates, so that
//! drift hits all alike. Prints CSV: kernel,blocks,threads,ranks,bytes,median_us,min_us,wrong, and
//! first what an empty kernel costs.
//!
//! What it can't tell where ranks share a device: a peer's memory is the same L2, so a pull looks as cheap as a push, and
//! there is no wire. The hops and bytes of each protocol decide between them (docs/measurements.md); this decides grids.

use std::{sync::Arc, time::Duration};

use cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream, DevicePtr, sys};
use peersum::{
    Algorithm, Choice, DType, Options, Placement, ReduceOp,
    cuda::{self, Communicator, SymmetricMemory, Verifier},
};

/// Calls of a graph.
fn calls(bytes: usize) -> usize {
    if bytes >= 4 << 20 { 10 } else { 100 }
}

const ROUNDS: usize = 7;
const WARMUPS: usize = 2;
const SIZES: [usize; 11] =
    [8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
const DTYPE: DType = DType::BF16;

struct Rank {
    communicator: Communicator,
    stream: Arc<CudaStream>,
    verifier: Verifier,
    /// In symmetric memory, so that every algorithm can have them.
    input: SymmetricMemory,
    output: SymmetricMemory,
    state: CudaSlice<u64>,
}

struct Candidate {
    choice: Choice,
    graphs: Vec<CudaGraph>,
    microseconds: Vec<f32>,
    wrong: u64,
}

fn main() {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    if let Err(error) = cuda::available() {
        println!("skipped: {error}");
        return;
    }
    let worlds: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let worlds = if worlds.is_empty() { vec![2, 4, 8] } else { worlds };
    println!("kernel,blocks,threads,ranks,bytes,median_us,min_us,wrong");
    for world in worlds {
        sweep(world);
    }
}

fn devices(world: usize) -> Vec<usize> {
    let listed = std::env::var("PEERSUM_SWEEP_DEVICES").unwrap_or_else(|_| "0".into());
    let listed: Vec<usize> = listed.split(',').map(|device| device.parse().expect("a device")).collect();
    (0..world).map(|rank| listed[rank * listed.len() / world]).collect()
}

fn sweep(world: usize) {
    let most = *SIZES.last().unwrap();
    let options = Options::default().timeout(Duration::from_secs(3)).symmetric_bytes(2 * most);
    let communicators = Communicator::local(&devices(world), &options).unwrap();
    let mut ranks: Vec<Rank> = communicators
        .into_iter()
        .map(|communicator| {
            let stream = CudaContext::new(communicator.device()).unwrap().new_stream().unwrap();
            Rank {
                verifier: Verifier::new(communicator.device()).unwrap(),
                input: communicator.symmetric_memory(most).unwrap(),
                output: communicator.symmetric_memory(most).unwrap(),
                state: stream.clone_htod(&[1u64, 0]).unwrap(),
                communicator,
                stream,
            }
        })
        .collect();
    for threads in [128, 512] {
        let graphs: Vec<_> = ranks.iter().map(|rank| capture_empty(rank, threads)).collect();
        synchronize(&ranks);
        let times: Vec<_> =
            (0..ROUNDS + WARMUPS).map(|_| replay(&ranks, &graphs) / calls(0) as f32).skip(WARMUPS).collect();
        let least = times.iter().copied().fold(f32::INFINITY, f32::min);
        println!("empty,16,{threads},{world},0,{:.2},{least:.2},0", median(&times));
    }
    for bytes in SIZES {
        let mut candidates: Vec<Candidate> = choices(bytes, world)
            .into_iter()
            .filter_map(|choice| {
                let graphs = ranks.iter_mut().map(|rank| capture(rank, choice, bytes)).collect::<Option<Vec<_>>>()?;
                Some(Candidate { choice, graphs, microseconds: Vec::new(), wrong: 0 })
            })
            .collect();
        synchronize(&ranks);
        for round in 0..ROUNDS + WARMUPS {
            for candidate in &mut candidates {
                if round == 0 {
                    prepare(&ranks, bytes);
                }
                let microseconds = replay(&ranks, &candidate.graphs) / calls(bytes) as f32;
                if round == 0 {
                    candidate.wrong = wrong(&mut ranks, bytes);
                }
                if round >= WARMUPS {
                    candidate.microseconds.push(microseconds);
                }
            }
        }
        candidates.sort_by(|left, right| median(&left.microseconds).total_cmp(&median(&right.microseconds)));
        for Candidate { choice, microseconds, wrong, .. } in &candidates {
            let least = microseconds.iter().copied().fold(f32::INFINITY, f32::min);
            let Choice { algorithm, blocks, threads } = choice;
            println!("{algorithm},{blocks},{threads},{world},{bytes},{:.2},{least:.2},{wrong}", median(microseconds));
        }
    }
}

/// Grids as far as they can be resident: with one packet or two a thread, or with one to sixteen packs.
fn choices(bytes: usize, world: usize) -> Vec<Choice> {
    // Of a GPU that all ranks share; more are tried where each has its own.
    let most_blocks = (128 / world).min(64);
    let long = bytes >= 4 << 20;
    let mut choices = Vec::new();
    for algorithm in Algorithm::ALL {
        let units = bytes.div_ceil(algorithm.unit_bytes() as usize);
        let by_packets = [Algorithm::OneShotLl, Algorithm::TwoShotLl].contains(&algorithm);
        if by_packets && long {
            continue; // which takes long, and a third more bytes
        }
        let mut grids = Vec::new();
        if by_packets {
            for blocks in [2, 3, 4, 6, 8, 11, 16, 22, 32, 43, 64].into_iter().filter(|&blocks| blocks <= most_blocks) {
                for a_thread in [1, 2] {
                    grids.push((blocks, units.div_ceil(blocks * a_thread).next_multiple_of(32)));
                }
            }
        }
        for threads in [64, 128, 256, 384, 512].into_iter().filter(|&threads| !long || threads > 256) {
            for a_thread in [1, 2, 4, 8, 16] {
                grids.push((units.div_ceil(threads * a_thread).clamp(1, most_blocks), threads));
            }
        }
        grids.retain(|&(_, threads)| (64..=512).contains(&threads));
        grids.sort_unstable();
        grids.dedup();
        choices.extend(grids.into_iter().map(|(blocks, threads)| Choice {
            algorithm,
            blocks: blocks as u32,
            threads: threads as u32,
        }));
    }
    choices
}

fn capture(rank: &mut Rank, choice: Choice, bytes: usize) -> Option<CudaGraph> {
    rank.communicator.force(Some(choice)).unwrap();
    let count = bytes / DTYPE.size();
    rank.communicator.plan_at(Placement::Symmetric, count, DTYPE).ok()?;
    let (input, output) = (rank.input.address(), rank.output.address());
    rank.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    for _ in 0..calls(bytes) {
        let stream = rank.stream.cu_stream().cast();
        // SAFETY: both tensors have room for the largest size and outlive the graph.
        unsafe { rank.communicator.all_reduce_raw(input, output, count, DTYPE, ReduceOp::Sum, stream).unwrap() };
    }
    let graph = rank.stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    graph.upload().unwrap();
    Some(graph)
}

/// What the graph of calls costs without them: T0.
fn capture_empty(rank: &Rank, threads: u32) -> CudaGraph {
    rank.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
    for _ in 0..calls(0) {
        // SAFETY: the stream is of the rank's device.
        unsafe { rank.verifier.empty(16, threads, rank.stream.cu_stream().cast()).unwrap() };
    }
    let graph = rank.stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
    graph.upload().unwrap();
    graph
}

/// New inputs, and outputs that are wrong everywhere.
fn prepare(ranks: &[Rank], bytes: usize) {
    for rank in ranks {
        let (input, output) = (rank.input.address(), rank.output.address());
        let (number, round) = (rank.communicator.rank() as u32, rank.state.device_ptr(&rank.stream).0);
        let stream = rank.stream.cu_stream();
        // SAFETY: the tensors have room for the largest size, `state` holds the round.
        unsafe {
            cudarc::driver::result::memset_d8_async(output, 0xff, bytes, stream).unwrap();
            rank.verifier.fill(input, bytes / DTYPE.size(), DTYPE, number, round, stream.cast()).unwrap();
        }
    }
    synchronize(ranks);
}

fn wrong(ranks: &mut [Rank], bytes: usize) -> u64 {
    let world = ranks.len() as u32;
    for rank in &*ranks {
        let (output, state) = (rank.output.address(), rank.state.device_ptr(&rank.stream).0);
        let (count, stream) = (bytes / DTYPE.size(), rank.stream.cu_stream().cast());
        // SAFETY: as in `prepare`.
        unsafe {
            rank.verifier.check(output, count, DTYPE, world, ReduceOp::Sum, state, state + 8, stream).unwrap();
            rank.verifier.advance(state, stream).unwrap();
        }
    }
    synchronize(ranks);
    let mut wrong = 0;
    for rank in ranks {
        rank.communicator.check().unwrap();
        let state = rank.stream.clone_dtoh(&rank.state).unwrap();
        wrong += state[1];
        rank.stream.memcpy_htod(&[state[0], 0], &mut rank.state).unwrap();
    }
    wrong
}

/// Microseconds of the rank that took longest.
fn replay(ranks: &[Rank], graphs: &[CudaGraph]) -> f32 {
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let mut events = Vec::new();
    for (rank, graph) in ranks.iter().zip(graphs) {
        let start = rank.stream.record_event(flags).unwrap();
        graph.launch().unwrap();
        events.push((start, rank.stream.record_event(flags).unwrap()));
    }
    synchronize(ranks);
    let milliseconds = events.iter().map(|(start, stop)| start.elapsed_ms(stop).unwrap()).fold(0.0, f32::max);
    milliseconds * 1000.0
}

fn synchronize(ranks: &[Rank]) {
    for rank in ranks {
        rank.stream.synchronize().unwrap();
    }
}

fn median(samples: &[f32]) -> f32 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f32::total_cmp);
    sorted[sorted.len() / 2]
}
