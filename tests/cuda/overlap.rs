//! Which kernels run together: the blocks of a rank's next call come while those of this one wait, and its peers' must find
//! place beside them; so must all of them beside other work on the device.

use std::{ffi::c_void, ptr, time::Duration};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, sys};
use peersum::{Algorithm, Choice, DType, Overlap, ReduceOp};

use crate::{
    common::Random,
    graphs,
    harness::{self, Bytes, POISON, Rank},
};

const OVERLAPS: [Overlap; 3] = [Overlap::Early, Overlap::Late, Overlap::Off];

/// One call of a batch, the same on every rank. `choice` is `None` for the plan's.
#[derive(Clone, Copy)]
struct Call {
    count: usize,
    choice: Option<Choice>,
}

/// Calls that stand back to back in the stream: what they reduce is filled in before the first, and checked after the last.
struct Batch {
    /// Elements that each tensor has room for.
    most: usize,
    memory: Bytes,
    /// The round of each call, and then the number of wrong elements.
    words: CudaSlice<u64>,
    words_address: u64,
    most_calls: usize,
}

const DTYPE: DType = DType::BF16;
const OP: ReduceOp = ReduceOp::Sum;

impl Batch {
    fn new(rank: &Rank, most_calls: usize, most: usize) -> Batch {
        let rounds = (0..most_calls).map(|call| call as u64 * 1_000_000);
        let words = rank.stream.clone_htod(&rounds.chain([0]).collect::<Vec<_>>()).unwrap();
        let memory = rank.bytes(2 * most_calls * most * DTYPE.size());
        rank.stream.synchronize().unwrap();
        // Asked for once: within a capture the question would be captured.
        let words_address = words.device_ptr(&rank.stream).0;
        Batch { most, memory, words, words_address, most_calls }
    }

    fn tensors(&self, call: usize) -> (u64, u64) {
        assert!(call < self.most_calls);
        let tensor = |index: usize| self.memory.address + (index * self.most * DTYPE.size()) as u64;
        (tensor(2 * call), tensor(2 * call + 1))
    }

    fn round(&self, call: usize) -> u64 {
        self.words_address + 8 * call as u64
    }

    fn fill(&self, rank: &Rank, calls: &[Call]) {
        for (index, call) in calls.iter().enumerate() {
            let ((input, output), round) = (self.tensors(index), self.round(index));
            // SAFETY: the tensors have room for the call, and outlive the work.
            unsafe {
                rank.verifier.fill(output, call.count, DTYPE, POISON, round, rank.raw_stream()).unwrap();
                rank.verifier.fill(input, call.count, DTYPE, rank.rank as u32, round, rank.raw_stream()).unwrap();
            }
        }
    }

    fn reduce(&self, rank: &mut Rank, calls: &[Call]) {
        calls.iter().enumerate().for_each(|(index, &call)| self.reduce_one(rank, index, call));
    }

    fn reduce_one(&self, rank: &mut Rank, index: usize, call: Call) {
        let ((input, output), stream) = (self.tensors(index), rank.raw_stream());
        rank.communicator.force(call.choice).unwrap();
        // SAFETY: as above.
        unsafe { rank.communicator.all_reduce_raw(input, output, call.count, DTYPE, OP, stream).unwrap() };
    }

    /// And goes on to the next rounds.
    fn check(&self, rank: &Rank, calls: &[Call]) {
        for (index, call) in calls.iter().enumerate() {
            let ((_, output), round) = (self.tensors(index), self.round(index));
            let (world, wrong) = (rank.world as u32, self.round(self.most_calls));
            // SAFETY: as above.
            unsafe {
                rank.verifier.check(output, call.count, DTYPE, world, OP, round, wrong, rank.raw_stream()).unwrap();
                rank.verifier.advance(round, rank.raw_stream()).unwrap();
            }
        }
    }

    #[track_caller]
    fn assert_right(&self, rank: &Rank, what: impl std::fmt::Display) {
        rank.meet();
        let words = rank.stream.clone_dtoh(&self.words).unwrap();
        rank.stream.synchronize().unwrap();
        rank.communicator.check().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(words[self.most_calls], 0, "{what}: wrong elements on rank {}", rank.rank);
        rank.meet();
    }
}

/// Dozens of small calls back to back while a rank is late: if each let the next come before its own wait, a rank's waiting
/// calls would fill the device, and the late rank would find no place. No more than two of a rank may be there.
#[test]
fn small_calls_behind_a_late_rank() {
    const CALLS: usize = 64;
    let Some(devices) = harness::devices() else { return };
    for overlap in OVERLAPS {
        for world in [2, 4, 8] {
            devices.run(world, &harness::options().overlap(overlap), |rank| {
                let batch = Batch::new(rank, CALLS, 4096);
                let mut random = Random::new(world as u64);
                for round in 0..4 {
                    let calls: Vec<_> = (0..CALLS)
                        .map(|_| Call { count: 1 + random.below(1 << (3 * round + 3)), choice: None })
                        .collect();
                    batch.fill(rank, &calls);
                    rank.stream.synchronize().unwrap();
                    rank.meet();
                    if rank.rank == round % world {
                        std::thread::sleep(Duration::from_millis(50));
                        // What is ahead of its calls needs place as well: the poison once more.
                        let (_, output) = batch.tensors(0);
                        let (round, stream) = (batch.round(0), rank.raw_stream());
                        // SAFETY: as in `Batch::fill`.
                        unsafe { rank.verifier.fill(output, calls[0].count, DTYPE, POISON, round, stream).unwrap() };
                    }
                    batch.reduce(rank, &calls);
                    batch.check(rank, &calls);
                    batch.assert_right(rank, format_args!("{overlap:?}, {world} ranks, round {round}"));
                }
            });
        }
    }
}

/// The largest grid that the plan lets these threads have.
fn largest(rank: &mut Rank, algorithm: Algorithm, threads: u32) -> Option<Choice> {
    (1..=64).rev().map(|blocks| Choice { algorithm, blocks, threads }).find(|&choice| {
        rank.communicator.force(Some(choice)).unwrap();
        rank.communicator.plan(1 << 20, DTYPE).is_ok()
    })
}

/// Calls by the largest grids, by half of them and by small ones, with other threads and another algorithm each time.
fn mixed(rank: &mut Rank, calls: usize, most: usize, random: &mut Random) -> Vec<Call> {
    (0..calls)
        .map(|_| {
            let (algorithm, threads) = (*random.of(&Algorithm::STAGED), *random.of(&[32, 64, 128, 256, 384, 512]));
            let largest = largest(rank, algorithm, threads).expect("one block fits");
            let (blocks, least) = match random.below(5) {
                0 | 1 => (largest.blocks, most / 2),
                2 => (largest.blocks.div_ceil(2), most / 2),
                _ => (1 + random.below(2) as u32, 1),
            };
            let count = least + random.below(if least == 1 { 4096 } else { most - least });
            Call { count, choice: Some(Choice { blocks: blocks.min(largest.blocks), ..largest }) }
        })
        .collect()
}

/// Field case A18 (NVIDIA/nccl#103, #418): grids as large as ranks that share a device can have, back to back, large and
/// small in turn and with other threads each time, eagerly and in graphs: a rank's next blocks must not take the registers
/// that a peer's present ones need.
#[test]
fn large_and_small_grids_in_turn() {
    const CALLS: usize = 24;
    const MOST: usize = 1 << 17;
    let Some(devices) = harness::devices() else { return };
    for overlap in OVERLAPS {
        for world in [3, 4, 8] {
            devices.run(world, &harness::options().overlap(overlap), |rank| {
                let what = format!("{overlap:?}, {world} ranks");
                let batch = Batch::new(rank, CALLS, MOST);
                let mut random = Random::new(world as u64);
                for round in 0..harness::calls().div_ceil(5) {
                    let calls = mixed(rank, CALLS, MOST, &mut random);
                    batch.fill(rank, &calls);
                    rank.meet();
                    if round % 4 == 0 && rank.rank == round / 4 % world {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    batch.reduce(rank, &calls);
                    batch.check(rank, &calls);
                    batch.assert_right(rank, format_args!("{what}, round {round}"));
                }
                // Each graph's calls end where the eager ones begin, and the other way round. A capture that is thrown
                // away between is no call: the one behind it follows the one before it.
                for round in 0..harness::calls().div_ceil(20) {
                    let calls = mixed(rank, CALLS, MOST, &mut random);
                    let whole = graphs::capture(rank, |rank| {
                        batch.fill(rank, &calls);
                        batch.reduce(rank, &calls);
                        batch.check(rank, &calls);
                    });
                    let bare = graphs::capture(rank, |rank| batch.reduce(rank, &calls));
                    rank.meet();
                    for _ in 0..3 {
                        whole.launch().unwrap();
                    }
                    rank.stream.synchronize().unwrap();
                    batch.fill(rank, &calls);
                    for replay in 0..4 {
                        bare.launch().unwrap();
                        let some = &calls[..random.below(CALLS)];
                        batch.reduce(rank, some);
                        if replay % 2 == 0 {
                            graphs::capture_in_vain(rank, |rank| batch.reduce(rank, &calls[..=replay]));
                        }
                        batch.reduce(rank, some);
                    }
                    batch.check(rank, &calls);
                    batch.assert_right(rank, format_args!("{what}, graph {round}"));
                    drop((whole, bare));
                    rank.meet();
                }
            });
        }
    }
}

/// A kernel of the test's own that keeps its place for so many nanoseconds.
const OCCUPY: &str = "
.version 7.0
.target sm_80
.address_size 64

.visible .entry occupy(.param .u64 nanoseconds)
{
    .reg .u64 %limit, %start, %now;
    .reg .pred %goes_on;
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %start, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %goes_on, %now, %limit;
    @%goes_on bra again;
    ret;
}
\0";

struct Tenant {
    function: sys::CUfunction,
    blocks: u32,
}

impl Tenant {
    /// `None` where the driver has no compiler for it. Waits for the device, so before any call.
    fn new(rank: &Rank) -> Option<Tenant> {
        rank.context.bind_to_thread().unwrap();
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a whole text that ends in a zero byte, and valid places for the answers. The module stays loaded.
        unsafe {
            let loaded = sys::cuModuleLoadData(&mut module, OCCUPY.as_ptr().cast());
            if loaded == sys::CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND {
                return None;
            }
            loaded.result().unwrap();
            sys::cuModuleGetFunction(&mut function, module, c"occupy".as_ptr()).result().unwrap();
        }
        let processors = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // Two blocks of 1024 threads take all threads of a multiprocessor.
        let tenant = Tenant { function, blocks: 2 * rank.context.attribute(processors).unwrap() as u32 };
        // Functions are loaded at their first launch, which waits for the device.
        tenant.occupy(&rank.stream, Duration::ZERO);
        rank.stream.synchronize().unwrap();
        Some(tenant)
    }

    /// Takes the whole device for so long, once the blocks have come.
    fn occupy(&self, stream: &CudaStream, time: Duration) {
        let mut nanoseconds = time.as_nanos() as u64;
        let mut arguments = [ptr::from_mut(&mut nanoseconds).cast::<c_void>()];
        // SAFETY: the kernel takes one u64, which the driver copies now, and touches no memory. The context is bound.
        unsafe {
            let (arguments, extra) = (arguments.as_mut_ptr(), ptr::null_mut());
            sys::cuLaunchKernel(self.function, self.blocks, 1, 1, 1024, 1, 1, 0, stream.cu_stream(), arguments, extra)
                .result()
                .unwrap();
        }
    }
}

/// Field cases A18 and A19 (NVIDIA/TensorRT-LLM#1601): other streams' kernels fill the device again and again, so that some
/// ranks' blocks come milliseconds after the others': calls are slower, and right, with the largest grids too.
#[test]
fn long_kernels_of_other_streams_make_calls_slower_and_not_wrong() {
    const CALLS: usize = 16;
    const MOST: usize = 1 << 17;
    let Some(devices) = harness::devices() else { return };
    for world in [2, 4, 8] {
        devices.run(world, &harness::options(), |rank| {
            let tenant = Tenant::new(rank);
            if tenant.is_none() {
                eprintln!("skipped: the driver can't compile the kernel that would fill the device");
            }
            let other = rank.second_stream();
            let batch = Batch::new(rank, CALLS, MOST);
            let mut random = Random::new(19);
            for round in 0..12 {
                let calls = if round % 2 == 0 {
                    mixed(rank, CALLS, MOST, &mut random)
                } else {
                    (0..CALLS).map(|_| Call { count: 1 + random.below(MOST), choice: None }).collect()
                };
                batch.fill(rank, &calls);
                rank.meet();
                for (index, &call) in calls.iter().enumerate() {
                    // One rank at a time, on its second stream, so that no call waits for it in a stream.
                    if let Some(tenant) = tenant.as_ref().filter(|_| (index + round) % world == rank.rank) {
                        tenant.occupy(&other, Duration::from_micros(500 * (1 + index as u64 % 8)));
                    }
                    batch.reduce_one(rank, index, call);
                }
                batch.check(rank, &calls);
                batch.assert_right(rank, format_args!("{world} ranks, round {round}"));
                other.synchronize().unwrap();
                rank.meet();
            }
        });
    }
}
