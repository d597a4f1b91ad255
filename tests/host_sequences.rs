//! Many calls of the host backend, one after another.
#![cfg(not(any(loom, shuttle)))]

mod common;

use std::{thread, time::Duration};

use common::{Random, assert_bits, group, integer, integer_sum, run_ranks};
use half::f16;
use peersum::{
    Options, ReduceOp,
    host::{self, Communicator},
};

/// One call in place on small integers, checked element by element.
fn call(communicator: &mut Communicator, number: usize, count: usize) {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let mut buffer: Vec<f32> = (0..count).map(|index| integer(number, rank, index)).collect();
    communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
    for (index, sum) in buffer.into_iter().enumerate() {
        assert_eq!(
            sum,
            integer_sum::<f32>(number, world, index),
            "call {number}, rank {rank}, element {index} of {count}"
        );
    }
}

/// Field case A01 (vllm-project/vllm#2760): ranks raced on a flag, so small calls gave garbage.
#[test]
fn small_calls_with_new_data_each_time_are_exact() {
    for world in [2, 4, 8] {
        let calls = if world == 2 { 60_000 } else { 12_000 };
        run_ranks(group(world, &Options::default()), |rank, communicator| {
            let mut buffer = [0.0f32; 1024];
            for number in 0..calls {
                let count = [4, 16, 33, 256, 1024][number % 5];
                let buffer = &mut buffer[..count];
                for (index, value) in buffer.iter_mut().enumerate() {
                    *value = (number % 1000 + rank * 7 + index) as f32;
                }
                communicator.all_reduce_in_place(buffer, ReduceOp::Sum).unwrap();
                let ranks = world * (world - 1) / 2 * 7;
                for (index, &value) in buffer.iter().enumerate() {
                    assert_eq!(value, (world * (number % 1000 + index) + ranks) as f32, "call {number}, {index}");
                }
            }
        });
    }
}

/// Field case A02 (vllm-project/vllm#57059, ROCm/aiter#4812): a call returned the data of the one before.
#[test]
fn back_to_back_calls_never_return_older_data() {
    let default = Options::default();
    let forced = host::ALGORITHMS.map(|algorithm| (default.clone().algorithm(algorithm), None));
    for (options, late) in [(default.clone(), Some(1))].into_iter().chain(forced) {
        run_ranks(group(2, &options), |rank, communicator| {
            if late == Some(rank) {
                thread::sleep(Duration::from_millis(50));
            }
            let mut output = vec![f16::ZERO; 4 << 20];
            for number in 0..64 {
                let input = vec![f16::from_f32((4 * number + rank) as f32); output.len()];
                communicator.all_reduce(&input, &mut output, ReduceOp::Sum).unwrap();
                let expected = f16::from_f32((8 * number + 1) as f32).to_bits();
                let wrong = output.iter().filter(|sum| sum.to_bits() != expected).count();
                assert_eq!(wrong, 0, "call {number} by {:?}, rank {rank}", options.algorithm);
            }
        });
    }
}

/// Field case A03 (ROCm/aiter#4082, ROCm/aiter#3514, lightseekorg/tokenspeed#1017): a peer still read the input that the
/// caller wrote again at once.
#[test]
fn the_input_may_be_written_as_soon_as_the_call_returns() {
    for world in [2, 4, 8] {
        for algorithm in host::ALGORITHMS {
            let options = Options::default().algorithm(algorithm).staging_bytes(world * 2 * 1024);
            run_ranks(group(world, &options), |rank, communicator| {
                let mut random = Random::new(rank as u64);
                let mut output = vec![0.0f32; 500];
                let mut input = output.clone();
                for number in 0..if world == 2 { 1000 } else { 300 } {
                    for (index, value) in input.iter_mut().enumerate() {
                        *value = integer(number, rank, index);
                    }
                    if random.below(20) == 0 {
                        thread::sleep(Duration::from_micros(200));
                    }
                    communicator.all_reduce(&input, &mut output, ReduceOp::Sum).unwrap();
                    input.fill(f32::NAN);
                    let expected: Vec<f32> = (0..500).map(|index| integer_sum(number, world, index)).collect();
                    assert_bits(format!("call {number} by {algorithm}"), &output, &expected);
                }
            });
        }
    }
}

/// Field case A04 (sgl-project/sglang#11609): flags that moved with the message's size met those of the call before.
#[test]
fn sizes_may_change_from_call_to_call() {
    for (world, calls) in [(2, 20_000), (4, 3_000)] {
        // The default plan changes with the size; each forced algorithm is a group of its own.
        for algorithm in [None].into_iter().chain(host::ALGORITHMS.map(Some)) {
            let mut options = Options::default().staging_bytes(64 << 10);
            options.algorithm = algorithm;
            run_ranks(group(world, &options), |_, communicator| {
                let mut random = Random::new(4);
                for number in 0..calls / 5 {
                    let bytes = match random.below(40) {
                        0 => 1 << 20,
                        1 => 64 << 10,
                        _ => *random.of(&[16, 48, 4 << 10, 7168 * 2]),
                    };
                    call(communicator, number, bytes / 4);
                }
            });
        }
    }
}

/// Field case A06 (meta-pytorch/torchcomms#2133): calls hung for ever where the epoch wrapped.
#[test]
fn epochs_wrap() {
    for wrap in [0u32, 1 << 31, 1 << 16, 1 << 8] {
        for algorithm in host::ALGORITHMS {
            let first = wrap.wrapping_sub(9);
            let options = Options::default().algorithm(algorithm).first_epoch(first).staging_bytes(4096);
            let epochs = run_ranks(group(3, &options), |_, communicator| {
                assert_eq!(communicator.epochs(), [first, first]);
                for number in 0..64 {
                    // Short ones and long ones, so that packets find others of earlier rounds in their place.
                    call(communicator, number, if number % 5 == 0 { 60 } else { 20 });
                }
                communicator.epochs()
            });
            // A packet's epoch is never 0, which is what fresh memory holds; 2 keeps the halves in turn.
            let next_packet = |epoch: u32| if epoch == u32::MAX { 2 } else { epoch + 1 };
            let by_packets = 64 * algorithm.packet_rounds();
            let flags = first.wrapping_add(64 * algorithm.rounds() - by_packets);
            let packets = (0..by_packets).fold(first, |epoch, _| next_packet(epoch));
            assert_eq!(epochs, vec![vec![flags, packets]; 3], "{algorithm} from {first}");
        }
    }
}

/// Field case A08 (apache/tvm#16797, pytorch/pytorch#196546): a rank cleared its flags after a faster one had set them.
#[test]
fn the_first_call_after_creation_never_hangs() {
    let mut random = Random::new(8);
    let options = Options::default().staging_bytes(64 << 10);
    for number in 0..1000 {
        let sleeper = random.below(8);
        let delay = Duration::from_micros(random.below(2000) as u64);
        run_ranks(group(2, &options), |rank, communicator| {
            if rank == sleeper {
                thread::sleep(delay);
            }
            call(communicator, number, 100);
        });
    }
}

/// A rank that is done may drop its communicator while peers still read what it wrote.
#[test]
fn a_rank_may_leave_as_soon_as_its_last_call_returns() {
    for algorithm in host::ALGORITHMS {
        for number in 0..200 {
            let options = Options::default().algorithm(algorithm).staging_bytes(64 << 10);
            thread::scope(|scope| {
                for mut communicator in group(3, &options) {
                    scope.spawn(move || call(&mut communicator, number, 10_000));
                }
            });
        }
    }
}

/// More ranks than cores: a rank that waits lets the others run.
#[test]
fn eight_ranks_make_progress_on_few_cores() {
    let started = std::time::Instant::now();
    run_ranks(group(8, &Options::default()), |_, communicator| {
        for number in 0..2000 {
            call(communicator, number, 2048);
        }
    });
    // Ranks that only spin take milliseconds a call.
    assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
}
