//! Maps of peers' memory that lie: what the self-test finds of them, and tells all ranks alike.
//!
//! Ranks are threads with seats among processes: each has mappings of its own, and the sockets don't know the
//! difference.

use std::{
    os::fd::OwnedFd,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::{
    Communicator,
    packets::Region,
    segment::{Lie, Segment},
};
use crate::{Error, Meeting, Options, ReduceOp, Result, protocol::layout::Layout};

const PATIENCE: Duration = Duration::from_secs(20);
/// Of groups that are to run into it.
const SHORT: Duration = Duration::from_secs(1);

/// One rank's map of one peer.
#[derive(Clone, Copy, Debug)]
struct Liar {
    rank: usize,
    peer: usize,
    how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    /// It leads to memory of the rank's own.
    Mirror,
    /// It can't be made.
    Refused,
    Written(Lie),
}

fn place() -> impl Fn(usize, usize) -> Meeting + Copy {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("peersum-lies-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let name: &str = name.leak();
    move |rank, world| Meeting::at_path(std::env::temp_dir().join(name), rank, world).timeout(PATIENCE)
}

/// What each rank makes of `with` a communicator, or why it has none.
fn meet<R: Send>(
    world: usize,
    options: &Options,
    liar: Option<Liar>,
    with: impl Fn(Communicator) -> R + Sync,
) -> Vec<Result<R>> {
    let (place, with) = (place(), &with);
    let rank = move |rank: usize| {
        let seat = place(rank, world).open(options.timeout.max(PATIENCE)).unwrap();
        let open = |layout: &Layout, peer: usize, file: &OwnedFd| match liar
            .filter(|liar| (liar.rank, liar.peer) == (rank, peer))
            .map(|liar| liar.how)
        {
            None => Segment::open(layout, 0, file),
            Some(How::Mirror) => Segment::new(layout, 0, options.first_epoch),
            Some(How::Refused) => {
                Err(Error::System { call: "mmap of a segment", reason: "invalid resource handle".into() })
            }
            Some(How::Written(lie)) => {
                let mut segment = Segment::open(layout, 0, file)?;
                segment.lie = Some(lie);
                Ok(segment)
            }
        };
        Communicator::join_by(seat, options, open).map(with)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..world).map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn options() -> Options {
    Options::default().timeout(PATIENCE).staging_bytes(1 << 20)
}

/// The one error that all ranks return.
#[track_caller]
fn agreed<R>(results: Vec<Result<R>>) -> Error {
    let errors: Vec<_> = results.into_iter().map(|result| result.err().expect("no rank has a group")).collect();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    errors[0].clone()
}

/// That calls are right, whichever algorithm takes them, from the first epoch on.
fn use_it(mut communicator: Communicator) -> Vec<u32> {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    for algorithm in super::ALGORITHMS {
        communicator.force(algorithm);
        for count in [1, 17, 3000] {
            let mut buffer: Vec<_> = (0..count).map(|index| (index % 50 + rank) as f32).collect();
            communicator.all_reduce_in_place(&mut buffer, ReduceOp::Sum).unwrap();
            let sum = |index: usize| (index % 50 * world + world * (world - 1) / 2) as f32;
            assert!(buffer.iter().enumerate().all(|(index, &found)| found == sum(index)), "{algorithm} of {count}");
        }
    }
    communicator.epochs()
}

#[track_caller]
fn a_new_meeting_works(world: usize) {
    for result in meet(world, &options(), None, use_it) {
        result.unwrap();
    }
}

/// Field cases A10 and A11 (NVIDIA/nccl#2335): who writes reads back what it wrote, and the owner sees none of it.
#[test]
fn a_private_mirror_is_told_by_who_gets_nothing() {
    for (world, rank, peer) in [(2, 0, 1), (4, 1, 2), (4, 3, 0), (4, 0, 3), (9, 8, 1)] {
        let started = Instant::now();
        let liar = Liar { rank, peer, how: How::Mirror };
        let error = agreed(meet(world, &options().timeout(SHORT), Some(liar), drop));
        let Error::SelfTestFailed { rank: to, peer: from, reason } = &error else { panic!("{error}") };
        assert_eq!((*to, *from), (peer, rank), "{error}");
        assert!(reason.contains("of 1 x f32: nothing came within 1s"), "{error}");
        assert!(started.elapsed() < SHORT + PATIENCE / 2, "{:?}", started.elapsed());
    }
    a_new_meeting_works(4);
}

/// Field case A10.
#[test]
fn one_stale_line_in_a_thousand_is_told_with_its_element() {
    for (world, rank, peer) in [(2, 1, 0), (4, 2, 1), (4, 0, 3), (11, 9, 2), (11, 2, 9)] {
        let liar = Liar { rank, peer, how: How::Written(Lie::Stale(1000)) };
        // So that more than a thousand lines are of one rank.
        let error = agreed(meet(world, &options().staging_bytes(world << 18), Some(liar), drop));
        let Error::SelfTestFailed { rank: to, peer: from, reason } = &error else { panic!("{error}") };
        assert_eq!((*to, *from), (peer, rank), "{error}");
        assert!(reason.contains(": element ") && reason.contains(", not "), "{error}");
    }
    a_new_meeting_works(4);
}

#[test]
fn what_comes_late_is_right_nevertheless() {
    let late = Duration::from_millis(10);
    let liar = Liar { rank: 1, peer: 2, how: How::Written(Lie::Late(late)) };
    let started = Instant::now();
    for result in meet(4, &options().staging_bytes(1 << 14), Some(liar), use_it) {
        result.unwrap();
    }
    assert!(started.elapsed() > late * 18);
}

/// Field case A34 (NVIDIA/TensorRT-LLM#17034): on one pair alone.
#[test]
fn a_map_that_can_not_be_made_is_told_to_all() {
    for (world, rank, peer) in [(2, 0, 1), (4, 2, 3), (4, 1, 0)] {
        let liar = Liar { rank, peer, how: How::Refused };
        let started = Instant::now();
        let error = agreed(meet(world, &options(), Some(liar), drop));
        let Error::Unmapped { rank: of, peer: to, reason } = &error else { panic!("{error}") };
        assert_eq!((*of, *to), (rank, peer));
        assert!(reason.contains("invalid resource handle"), "{error}");
        assert!(started.elapsed() < PATIENCE / 4, "{:?}", started.elapsed());
    }
    a_new_meeting_works(4);
}

/// Without the test a lie is for the caller to find.
#[test]
fn the_test_can_be_turned_off() {
    let liar = Liar { rank: 1, peer: 0, how: How::Mirror };
    let options = options().timeout(SHORT).self_test(false);
    let results = meet(2, &options, Some(liar), |mut communicator| {
        let begun = communicator.epochs();
        let error = communicator.all_reduce_in_place(&mut [1.0f32], ReduceOp::Sum).err();
        // Kept, since who leaves is told apart.
        (begun, error, communicator)
    });
    let (begun, error, _) = results[0].as_ref().unwrap();
    assert_eq!(*begun, [0, 0]);
    assert!(matches!(error, Some(Error::PeerTimeout { rank: 0, peer: 1, .. })), "{error:?}");
}

/// What could be taken for a round of the first calls: the test's have had the same epochs, and one the same hash.
#[test]
fn a_group_that_was_tested_has_no_flag_and_no_packet_left() {
    let options = options().staging_bytes(3 << 16);
    let results = meet(3, &options, None, |communicator| {
        let own = communicator.group().segment(communicator.rank() as u32);
        let slots = (0..2).flat_map(|half| (0..3).map(move |writer| (half, writer)));
        let words = slots.flat_map(|(half, writer)| {
            let signals = [Region::Flags, Region::Packets].map(|region| own.signal(region, half, 0, writer));
            signals.into_iter().chain(own.packets(half, 0, writer)).map(|word| word.load(Ordering::Relaxed))
        });
        (words.filter(|&word| word != 0).count(), own.call())
    });
    assert_eq!(results, vec![Ok((0, None)); 3]);
}

/// The calls of the test are as if they had not been.
#[test]
fn a_group_that_was_tested_begins_at_its_first_epoch_and_works_from_there() {
    for first in [0, 1, 7, u32::MAX - 40, u32::MAX - 4, u32::MAX - 1, u32::MAX] {
        let options = options().first_epoch(first);
        let tested = meet(3, &options, None, |communicator| (communicator.epochs(), use_it(communicator)));
        let untested = meet(3, &options.self_test(false), None, |rank| (rank.epochs(), use_it(rank)));
        assert_eq!(tested, untested);
        assert!(tested.iter().all(|result| result.as_ref().unwrap().0 == [first, first]), "{tested:?}");
    }
}

#[test]
fn groups_of_all_sizes_pass() {
    for world in [1, 2, 3, 8, 9, 16, 17, 33] {
        for result in meet(world, &options().staging_bytes(world << 12), None, drop) {
            result.unwrap();
        }
    }
}
