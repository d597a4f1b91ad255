//! All-reduce between two threads, beside a copy of the same bytes by each of them.
//!
//! The time is the slowest rank's, over calls back to back on the same buffers, which hold no zeros. Results depend on
//! whether the two cores share a cache, which a virtual machine may change under way: compare runs of one sitting.
#![allow(missing_docs)]

use std::{
    hint::black_box,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use peersum::{
    Element, Options, ReduceOp,
    host::{self, Communicator},
};

const RANKS: usize = 2;
const SHORT: [usize; 11] = [64, 128, 256, 512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];
const SIZES: [usize; 8] = [8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 32 << 20, 64 << 20];

/// Runs `work(rank state, calls)` in a thread per rank, all starting together, and returns the longest time.
fn slowest<S: Send>(ranks: &mut [S], calls: u64, work: impl Fn(&mut S) + Sync) -> Duration {
    let (start, work) = (Barrier::new(ranks.len()), &work);
    thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .iter_mut()
            .map(|rank| {
                let start = &start;
                scope.spawn(move || {
                    work(rank);
                    start.wait();
                    let started = Instant::now();
                    for _ in 0..calls {
                        work(rank);
                    }
                    started.elapsed()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank that doesn't panic")).max().unwrap_or_default()
    })
}

fn all_reduce<T: Element>(criterion: &mut Criterion, options: &Options, name: &str, sizes: &[usize], samples: usize) {
    let mut group = criterion.benchmark_group(format!("all_reduce/{}/{name}", T::DTYPE));
    group.sample_size(samples).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(800));
    for &bytes in sizes {
        let communicators = Communicator::local(RANKS, options).expect("a group of two");
        let mut ranks: Vec<_> = communicators
            .into_iter()
            .map(|communicator| {
                let count = bytes / T::DTYPE.size();
                let value = |index: usize| T::from_f32(1.0 + (index % 100) as f32 / 64.0);
                (communicator, (0..count).map(value).collect::<Vec<T>>(), vec![T::from_f32(0.0); count])
            })
            .collect();
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
            bencher.iter_custom(|calls| {
                slowest(&mut ranks, calls, |(communicator, input, output)| {
                    communicator.all_reduce(input, output, ReduceOp::Sum).expect("both ranks call alike");
                })
            });
        });
    }
}

fn copy(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("memcpy/2 threads");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(800));
    for bytes in SIZES {
        let mut buffers = [(); RANKS].map(|()| (vec![1u8; bytes], vec![2u8; bytes]));
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
            bencher.iter_custom(|calls| {
                slowest(&mut buffers, calls, |(from, to)| black_box(to).copy_from_slice(black_box(from)))
            });
        });
    }
}

fn benches(criterion: &mut Criterion) {
    copy(criterion);
    // Of short messages every algorithm at one size, then at the next, in many samples: they are to be compared, and the
    // machine changes.
    for bytes in SHORT {
        for algorithm in host::ALGORITHMS {
            let name = format!("short/{}", algorithm.name());
            all_reduce::<f32>(criterion, &Options::default().algorithm(algorithm), &name, &[bytes], 100);
        }
    }
    all_reduce::<f32>(criterion, &Options::default(), "default", &SIZES, 10);
    all_reduce::<bf16>(criterion, &Options::default(), "default", &SIZES, 10);
    for algorithm in host::ALGORITHMS {
        all_reduce::<f32>(criterion, &Options::default().algorithm(algorithm), algorithm.name(), &SIZES, 10);
    }
}

criterion_group!(all, benches);
criterion_main!(all);
