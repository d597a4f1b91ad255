//! What the library chooses beside each of its algorithms and NCCL: `cargo bench --bench all_reduce`.
//!
//! A group for each place that tensors can lie in, with a line for each candidate over the sizes, so that criterion's
//! report shows where they cross. Every rank's calls are captured in a CUDA graph, whose replays are timed by device
//! events, the slowest rank's; the first replay is not timed, and the others are launched while it runs.
//!
//! Ranks run on `PEERSUM_BENCH_DEVICES`, as `0,1`: if unset, on all devices, or two on the one that there is. What
//! decides for a machine is `peersum tune`, which tries all grids; here an algorithm has one.
#![allow(missing_docs)]

use std::{sync::Arc, thread, time::Duration};

use criterion::{AxisScale, BenchmarkId, Criterion, PlotConfiguration, Throughput};
use cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream, DevicePtr, sys};
use peersum::{
    Algorithm, Choice, DType, Nccl, Options, Placement, ReduceOp, TableFrom,
    cuda::{self, Communicator, SymmetricMemory},
};

/// Calls of a graph.
const CALLS: u64 = 20;
const SIZES: [usize; 6] = [8 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 32 << 20];
const DTYPE: DType = DType::BF16;

/// A rank, with tensors in both places.
struct Rank {
    communicator: Communicator,
    stream: Arc<CudaStream>,
    /// Where input and output are, in plain memory and in symmetric memory.
    plain: [u64; 2],
    symmetric: [u64; 2],
    _memory: ([CudaSlice<u8>; 2], [SymmetricMemory; 2]),
}

impl Rank {
    fn enqueue(&mut self, placement: Placement, bytes: usize) {
        let [input, output] = if placement == Placement::Anywhere { self.plain } else { self.symmetric };
        let stream = self.stream.cu_stream().cast();
        // SAFETY: both tensors have room for the largest size, are used on this stream alone, and outlive all graphs.
        unsafe { self.communicator.all_reduce_raw(input, output, bytes / DTYPE.size(), DTYPE, ReduceOp::Sum, stream) }
            .expect("a call that was planned");
    }

    fn capture(&mut self, placement: Placement, bytes: usize) -> Graph {
        // NCCL's first call of a size makes connections.
        self.enqueue(placement, bytes);
        self.stream.synchronize().expect("a call");
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).expect("a capture");
        for _ in 0..CALLS {
            self.enqueue(placement, bytes);
        }
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0)).expect("a graph").expect("a graph");
        graph.upload().expect("a graph on the device");
        Graph(graph)
    }
}

struct Graph(CudaGraph);

// SAFETY: a graph may be used from any thread, one at a time: made by one, it is launched by another.
unsafe impl Send for Graph {}

fn devices() -> Vec<usize> {
    match std::env::var("PEERSUM_BENCH_DEVICES") {
        Ok(listed) => listed.split(',').map(|device| device.trim().parse().expect("a list of devices")).collect(),
        Err(_) => match cuda::device_count().expect("devices") {
            1 => vec![0, 0],
            count => (0..count.min(8)).collect(),
        },
    }
}

fn ranks(devices: &[usize], most: usize) -> Vec<Rank> {
    let options = Options::default()
        .timeout(Duration::from_secs(10))
        .symmetric_bytes(2 * most)
        .nccl(Nccl::IfThere)
        .table(TableFrom::Usual);
    let communicators = Communicator::local(devices, &options).expect("a group");
    communicators
        .into_iter()
        .map(|communicator| {
            let stream = CudaContext::new(communicator.device()).and_then(|gpu| gpu.new_stream()).expect("a stream");
            let plain = [(); 2].map(|()| stream.alloc_zeros::<u8>(most).expect("memory"));
            let symmetric = [(); 2].map(|()| communicator.symmetric_memory(most).expect("symmetric memory"));
            Rank {
                // Asked for once: cudarc would record an event each time, also in a capture.
                plain: [0, 1].map(|which: usize| plain[which].device_ptr(&stream).0),
                symmetric: [0, 1].map(|which: usize| symmetric[which].address()),
                _memory: (plain, symmetric),
                stream,
                communicator,
            }
        })
        .collect()
}

/// Blocks of a few packs a thread, as many as are resident beside those of the other ranks of the device.
fn choice(algorithm: Algorithm, bytes: usize, sharing: usize) -> Choice {
    if algorithm == Algorithm::Nccl {
        return Choice::NCCL;
    }
    let blocks = bytes.div_ceil(256 * 16).clamp(1, (64 / sharing).max(1));
    Choice { algorithm, blocks: blocks as u32, threads: 256 }
}

/// Who is timed where tensors lie so: what the library chooses, and who is forced.
fn candidates(placement: Placement, bytes: usize, sharing: usize) -> Vec<(&'static str, Option<Choice>)> {
    let by_packets = |algorithm| matches!(algorithm, Algorithm::OneShotLl | Algorithm::TwoShotLl);
    let forced = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| algorithm.is_direct() == (placement != Placement::Anywhere))
        .filter(|&algorithm| !by_packets(algorithm) || bytes <= 1 << 20)
        .chain([Algorithm::Nccl])
        .map(|algorithm| (algorithm.name(), Some(choice(algorithm, bytes, sharing))));
    [("peersum", None)].into_iter().chain(forced).collect()
}

/// Every rank's graph, or why there is none. Each is made by a thread of its own, since NCCL's calls may wait for each
/// other.
fn graphs(
    ranks: &mut [Rank],
    choice: Option<Choice>,
    placement: Placement,
    bytes: usize,
) -> Result<Vec<Graph>, peersum::Error> {
    for rank in &mut *ranks {
        rank.communicator.force(choice)?;
        rank.communicator.plan_at(placement, bytes / DTYPE.size(), DTYPE)?;
    }
    Ok(thread::scope(|scope| {
        let threads: Vec<_> =
            ranks.iter_mut().map(|rank| scope.spawn(move || rank.capture(placement, bytes))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a graph")).collect()
    }))
}

/// What `calls` calls take the slowest rank.
fn replay(ranks: &[Rank], graphs: &[Graph], calls: u64) -> Duration {
    let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
    let replays = calls.div_ceil(CALLS);
    // In turns, so that no rank's queue is full before another's has what it waits for.
    let launch = || graphs.iter().for_each(|graph| graph.0.launch().expect("a launch"));
    let record = || ranks.iter().map(|rank| rank.stream.record_event(flags).expect("an event")).collect::<Vec<_>>();
    launch();
    let starts = record();
    (0..replays).for_each(|_| launch());
    let stops = record();
    for rank in ranks {
        rank.stream.synchronize().expect("the calls come to their end");
        rank.communicator.check().expect("no rank gave up");
    }
    let times = starts.iter().zip(&stops).map(|(start, stop)| start.elapsed_ms(stop).expect("a time"));
    let milliseconds = f64::from(times.fold(0.0, f32::max));
    Duration::from_secs_f64(milliseconds / 1e3 * calls as f64 / (replays * CALLS) as f64)
}

fn benches(criterion: &mut Criterion) {
    if let Err(error) = cuda::available() {
        println!("skipped: {error}");
        return;
    }
    let (devices, most) = (devices(), SIZES[SIZES.len() - 1]);
    let on = |device: &usize| devices.iter().filter(|&other| other == device).count();
    let sharing = devices.iter().map(on).max().unwrap_or(1);
    let mut ranks = ranks(&devices, most);
    match ranks[0].communicator.nccl() {
        Ok(version) => println!("NCCL {version}"),
        Err(reason) => println!("without NCCL: {reason}"),
    }
    for (placement, name) in [(Placement::Anywhere, "anywhere"), (Placement::Symmetric, "symmetric")] {
        let mut group = criterion.benchmark_group(format!("all_reduce/{} ranks/{name}", devices.len()));
        group
            .sample_size(10)
            .nresamples(2000)
            .warm_up_time(Duration::from_millis(50))
            .measurement_time(Duration::from_millis(200));
        group.plot_config(PlotConfiguration::default().summary_scale(AxisScale::Logarithmic));
        for bytes in SIZES {
            group.throughput(Throughput::Bytes(bytes as u64));
            for (name, choice) in candidates(placement, bytes, sharing) {
                let Ok(graphs) = graphs(&mut ranks, choice, placement, bytes) else { continue };
                group.bench_function(BenchmarkId::new(name, bytes), |bencher| {
                    bencher.iter_custom(|calls| replay(&ranks, &graphs, calls));
                });
            }
        }
        group.finish();
    }
}

fn main() {
    for (name, value) in [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("NCCL_MULTI_RANK_GPU_ENABLE", "1")] {
        if std::env::var_os(name).is_none() {
            // SAFETY: no other thread runs yet.
            unsafe { std::env::set_var(name, value) };
        }
    }
    let mut criterion = Criterion::default().configure_from_args();
    benches(&mut criterion);
    criterion.final_summary();
}
