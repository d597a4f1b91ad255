//! Meetings of processes, held by threads: the sockets don't know the difference.

use std::{
    os::fd::AsFd,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use super::{
    Life, Lifelines, Local, Meeting, Seat,
    message::{Challenge, Hello, MOST_SHARED, PROTOCOL, Terms},
    place::meet_through,
    processes::{Me, soon},
    secret::{self, Secret},
    socket::{Door, Line, Packets, Received},
};
use crate::{Error, Options, Result};

const PATIENCE: Duration = Duration::from_secs(20);

/// A place of this test alone.
fn place() -> impl Fn(usize, usize) -> Meeting + Copy {
    let name: &str = secret::name(&secret::random().unwrap()).leak();
    move |rank, world| Meeting::at_path(std::env::temp_dir().join(name), rank, world).timeout(PATIENCE)
}

/// Runs every rank in a thread of its own.
fn run<R: Send>(world: usize, rank: impl Fn(usize) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..world).map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[track_caller]
fn error<T>(result: &Result<T>) -> &Error {
    result.as_ref().err().expect("an error")
}

/// Whether it is rank `rank`'s timeout for that rank alone.
#[track_caller]
fn is_missing<T>(result: &Result<T>, rank: usize, late: usize) -> bool {
    matches!(error(result), Error::MeetingTimeout { rank: of, missing, .. } if *of == rank && *missing == [late])
}

/// What every rank returns where one comes as somebody else, for this change to what it says of itself.
fn met_by(world: usize, change: impl Fn(&mut Me) + Sync) -> Vec<Result<Seat>> {
    let place = place();
    run(world, |rank| {
        let mut me = Me::here(rank, world);
        change(&mut me);
        place(rank, world).open_as(me, soon(PATIENCE), PATIENCE).map(Seat::from)
    })
}

fn is_refused(results: Vec<Result<Seat>>, is_right: impl Fn(&Error) -> bool) {
    for result in results {
        let error = result.err().expect("no rank is in a group");
        assert!(is_right(&error), "{error}");
    }
}

#[test]
fn everybody_gets_everything_in_rank_order_round_after_round() {
    let place = place();
    run(7, |rank| {
        let mut seat = place(rank, 7).open(PATIENCE).unwrap();
        for round in 0..50u32 {
            let all = seat.all_gather(vec![round, seat.rank() as u32]).unwrap();
            assert_eq!(all, (0..7).map(|rank| vec![round, rank]).collect::<Vec<_>>());
        }
        // Bytes of the most, and of none.
        let large = seat.all_gather(vec![seat.rank() as u8; MOST_SHARED - 4]).unwrap();
        assert!(large.iter().enumerate().all(|(rank, bytes)| *bytes == vec![rank as u8; MOST_SHARED - 4]));
        assert_eq!(seat.all_gather(()).unwrap().len(), 7);
    });
}

#[test]
fn descriptors_reach_every_rank() {
    let seats = Local::group(3, PATIENCE).into_iter().map(Seat::Threads);
    let place = place();
    let seats: Vec<_> = run(3, |rank| place(rank, 3).open(PATIENCE).unwrap()).into_iter().chain(seats).collect();
    thread::scope(|scope| {
        for mut seat in seats {
            scope.spawn(move || {
                use std::io::{Read, Write};
                let (mut own, theirs) = std::io::pipe().unwrap();
                let fds = seat.all_gather_fds(vec![theirs.into(), std::fs::File::open("/dev/null").unwrap().into()]);
                for fds in fds.unwrap() {
                    assert_eq!(fds.len(), 2);
                    let flags = rustix::io::fcntl_getfd(&fds[0]).unwrap();
                    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
                    let pipe = fds.into_iter().next().unwrap();
                    std::fs::File::from(pipe).write_all(&[seat.rank() as u8]).unwrap();
                }
                drop(seat); // threads keep what they lay down until they leave
                let mut from = Vec::new();
                own.read_to_end(&mut from).unwrap();
                from.sort_unstable();
                assert_eq!(from, [0, 1, 2]);
            });
        }
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_by_all() {
    let place = place();
    let started = Instant::now();
    let results = run(4, |rank| {
        // The first to give up, whoever it is, asks rank 0 who is missing.
        let timeout = Duration::from_millis(if rank == 1 { 300 } else { 5000 });
        if rank == 3 { Ok(()) } else { place(rank, 4).timeout(timeout).open(PATIENCE).map(drop) }
    });
    for (rank, result) in results[..3].iter().enumerate() {
        let Error::MeetingTimeout { rank: of, missing, waited } = error(result) else { panic!("{result:?}") };
        assert_eq!((*of, &missing[..]), (rank, &[3][..]));
        assert!(*waited >= Duration::from_millis(300), "{waited:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(4));
    let result = place(2, 4).timeout(Duration::from_millis(50)).open(PATIENCE).map(drop);
    assert!(matches!(error(&result), Error::MeetingTimeout { rank: 2, missing, .. } if *missing == [0]), "{result:?}");
}

#[test]
fn a_rank_that_is_late_for_a_round_is_named_by_all() {
    for late in [0, 2] {
        let place = place();
        let results = run(3, |rank| {
            let mut seat = place(rank, 3).open(Duration::from_millis(200)).unwrap();
            seat.all_gather(()).unwrap();
            if rank == late {
                thread::sleep(Duration::from_millis(1000));
            }
            seat.all_gather(())
        });
        for (rank, result) in results.iter().enumerate().filter(|&(rank, _)| rank != late) {
            assert!(is_missing(result, rank, late), "{result:?}");
        }
        assert!(results[late].is_err());
    }
}

#[test]
fn a_rank_that_fails_or_goes_ends_the_meeting_for_all() {
    for odd in [0, 1] {
        for fails in [false, true] {
            let place = place();
            let started = Instant::now();
            let results = run(3, |rank| {
                let mut seat = place(rank, 3).open(PATIENCE).unwrap();
                seat.all_gather(()).unwrap();
                if rank != odd {
                    return seat.all_gather(());
                }
                if fails {
                    seat.leave(&Error::Overlap);
                }
                Ok(Vec::new())
            });
            for (rank, result) in results.iter().enumerate().filter(|&(rank, _)| rank != odd) {
                match error(result) {
                    Error::PeerFailed { peer, reason } if fails => {
                        assert_eq!((*peer, reason), (odd, &Error::Overlap.to_string()));
                    }
                    Error::PeerGone { rank: of, peer } if !fails => assert_eq!((*of, *peer), (rank, odd)),
                    error => panic!("{error}"),
                }
            }
            assert!(started.elapsed() < PATIENCE / 2);
        }
    }
}

#[test]
fn ranks_that_can_not_be_a_group_are_all_told() {
    is_refused(met_by(3, |me| me.world += me.rank / 2), |error| {
        *error == Error::WorldsDiffer { rank: 0, world: 3, peer: 2, peer_world: 4 }
    });
    is_refused(met_by(3, |me| me.boot += ["", "", "of another machine"][me.rank]), |error| {
        *error == Error::SeveralMachines { reason: "rank 2 is on another than rank 0".into() }
    });
    let other = concat!(env!("CARGO_PKG_VERSION"), "-other");
    is_refused(
        met_by(3, |me| me.version += ["", "", "-other"][me.rank]),
        |error| matches!(error, Error::VersionsDiffer { rank: 0, peer: 2, peer_version, .. } if peer_version == other),
    );
    is_refused(met_by(3, |me| me.rank -= me.rank / 2), |error| *error == Error::RankTaken { rank: 1 });
    is_refused(met_by(2, |me| me.rank = 0), |error| *error == Error::RankTaken { rank: 0 });
}

#[test]
fn options_that_differ_are_told_by_all() {
    let place = place();
    let results = run(3, |rank| {
        let options = Options::default().first_epoch(if rank == 1 { 7 } else { 0 });
        place(rank, 3).open(PATIENCE).unwrap().agree(&options)
    });
    let peers = results.iter().map(|result| match error(result) {
        Error::OptionsDiffer { rank, peer } => (*rank, *peer),
        error => panic!("{error}"),
    });
    assert_eq!(peers.collect::<Vec<_>>(), [(0, 1), (1, 0), (2, 1)]);
}

#[test]
fn ports_serve_names_and_both_kinds_of_address() {
    let mut served = 0;
    for (index, host) in ["127.0.0.1", "[::1]", "localhost"].into_iter().enumerate() {
        if std::net::TcpListener::bind((host.trim_matches(['[', ']']), 0)).is_err() {
            eprintln!("{host} is not to be had here");
            continue;
        }
        let address = format!("{host}:{}", free_port() + index as u16);
        run(3, |rank| {
            let meeting = Meeting::at_address(&address, rank, 3).secret("a secret").timeout(PATIENCE);
            let mut seat = meeting.open(PATIENCE).unwrap();
            assert_eq!(seat.all_gather(rank as u32).unwrap(), [0, 1, 2]);
        });
        served += 1;
    }
    assert!(served > 0);
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn a_port_that_is_in_use_or_elsewhere_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let meet = |address: &str, rank, secret: &str| {
        let meeting = Meeting::at_address(address, rank, 2).timeout(Duration::from_millis(1500));
        let meeting = if secret.is_empty() { meeting } else { meeting.secret(secret) };
        let result = meeting.open(PATIENCE).map(drop);
        error(&result).to_string()
    };
    let address = taken.local_addr().unwrap().to_string();
    assert!(meet(&address, 0, "secret").contains("the port is in use"));
    // Of an address that is kept for documents, and so nobody's.
    assert!(meet("192.0.2.1:2950", 0, "secret").contains("on its own machine"));
    assert!(meet("no-such-host.invalid:2950", 0, "secret").contains("leads nowhere"));
    assert!(meet("no-such-host.invalid:2950", 1, "secret").contains("leads nowhere"));
    assert!(meet(&address, 0, "").contains("secret"));
    assert!(meet("2950", 1, "secret").contains("no host:port"));
    // Something else listens there, and does not speak.
    let free = format!("127.0.0.1:{}", free_port());
    assert!(meet(&free, 1, "secret").contains("for ranks [0]"));
    assert!(meet(&address, 1, "secret").contains("it doesn't speak"));
}

#[test]
fn who_has_another_secret_is_told_so_and_keeps_nobody_from_meeting() {
    let place = place();
    let results = run(4, |index| {
        let (rank, secret) = [(0, "one"), (1, "one"), (1, "other"), (2, "other")][index];
        let timeout = if secret == "one" { PATIENCE } else { Duration::from_millis(400) };
        if index < 2 {
            // So that those with the other secret come first.
            thread::sleep(Duration::from_millis(200));
        }
        place(rank, 2 + index / 3).secret(secret).timeout(timeout).open(PATIENCE).map(drop)
    });
    assert_eq!(results[..2], [Ok(()), Ok(())]);
    for (result, rank) in results[2..].iter().zip([1, 2]) {
        // The one that is not there yet when its time is over has seen no stranger.
        let (Error::ForeignPeer { rank: of, .. } | Error::MeetingTimeout { rank: of, .. }) = error(result) else {
            panic!("{result:?}")
        };
        assert_eq!(*of, rank);
    }
}

#[test]
fn a_stale_file_is_replaced_and_others_are_left_alone() {
    let folder = std::env::temp_dir().join(secret::name(&secret::random().unwrap()));
    std::fs::create_dir(&folder).unwrap();
    let path = folder.join("meeting");
    // A socket that nobody listens on any more: its file stays.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    run(2, |rank| Meeting::at_path(&path, rank, 2).timeout(PATIENCE).open(PATIENCE).map(drop).unwrap());
    assert!(!path.exists());
    std::fs::write(&path, "precious").unwrap();
    let result = Meeting::at_path(&path, 0, 2).open(PATIENCE).map(drop);
    assert!(error(&result).to_string().contains("no socket"), "{result:?}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let result = Meeting::at_path(folder.join("nowhere/meeting"), 0, 2).open(PATIENCE).map(drop);
    assert!(matches!(error(&result), Error::MeetingPlace { rank: 0, .. }), "{result:?}");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn an_all_gather_of_the_caller_brings_ranks_together() {
    let local = Local::group(3, PATIENCE);
    let seats: Vec<_> = local.into_iter().map(std::sync::Mutex::new).collect();
    run(3, |rank| {
        let all_gather = |card: &[u8]| seats[rank].lock().unwrap().all_gather(card.to_vec()).map_err(|e| e.to_string());
        let mut seat = meet_through(rank, 3, all_gather, PATIENCE).unwrap();
        assert_eq!(seat.all_gather(rank as u32).unwrap(), [0, 1, 2]);
    });
    let result = meet_through(1, 2, |_| Err("the engine's".into()), PATIENCE).map(drop);
    assert!(error(&result).to_string().contains("the engine's"), "{result:?}");
    let result = meet_through(1, 2, |card| Ok(vec![card.to_vec(); 2]), PATIENCE).map(drop);
    assert!(error(&result).to_string().contains("rank order"), "{result:?}");
}

#[test]
fn lifelines_tell_who_left_and_who_is_gone() {
    let place = place();
    let lines = run(3, |rank| {
        let mut seat = place(rank, 3).open(PATIENCE).unwrap();
        Lifelines::hand_round(&mut seat).unwrap()
    });
    let [first, second, third] = lines.try_into().unwrap();
    assert_eq!([first.look(0), first.look(1), first.look(2)], [Life::Here; 3]);
    assert_eq!(first.wait(&[], Instant::now() + Duration::from_millis(20)), None);
    drop(second);
    // It is seen by all, and again.
    for _ in 0..2 {
        assert_eq!([first.look(1), third.look(1)], [Life::Left; 2]);
    }
    assert_eq!(first.wait(&[], Instant::now() + PATIENCE), Some((1, Life::Left)));
    // As the system closes it with the process, without a word.
    third.cut();
    assert_eq!(first.look(2), Life::Gone);
    assert_eq!(first.wait(&[1], Instant::now() + PATIENCE), Some((2, Life::Gone)));
}

/// Field case A31 (pytorch/pytorch#179618), A33 and the like: whatever comes to the socket, the ranks still meet.
#[test]
fn ten_thousand_hostile_messages_keep_nobody_from_meeting() {
    const WORLD: usize = 4;
    const HOSTILE: usize = 10_000;
    let others = AtomicUsize::new(0);
    let path = std::env::temp_dir().join(secret::name(&secret::random().unwrap()));
    let port = free_port();
    let address = format!("127.0.0.1:{port}");
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..WORLD)
            .map(|rank| {
                let (path, address, others) = (&path, &address, &others);
                scope.spawn(move || {
                    let open = |meeting: Meeting| {
                        let mut seat = meeting.secret("secret").timeout(PATIENCE).open(PATIENCE).unwrap();
                        assert_eq!(seat.all_gather(rank as u32).unwrap(), [0, 1, 2, 3]);
                    };
                    // The last rank comes when they have done their worst.
                    let wait = |count: usize| {
                        let until = Instant::now() + PATIENCE;
                        while rank + 1 == WORLD && others.load(Ordering::Relaxed) < count && Instant::now() < until {
                            thread::sleep(Duration::from_millis(1));
                        }
                    };
                    wait(HOSTILE);
                    open(Meeting::at_path(path, rank, WORLD));
                    wait(2 * HOSTILE);
                    open(Meeting::at_address(address, rank, WORLD));
                })
            })
            .collect();
        let hostile = scope.spawn(|| {
            let mut recorded = Vec::new();
            let mut silent = Vec::new();
            let mut number = 0u64;
            // Where the ranks have given up there is nobody left to attack.
            let until = Instant::now() + PATIENCE;
            while others.load(Ordering::Relaxed) < HOSTILE && Instant::now() < until {
                if let Ok(Some(packets)) = Packets::connect(&Door::Path(path.clone())) {
                    attack(packets, number, &mut recorded, &mut silent);
                    others.fetch_add(1, Ordering::Relaxed);
                }
                number += 1;
            }
            while others.load(Ordering::Relaxed) < 2 * HOSTILE && Instant::now() < until {
                if let Ok(stream) = super::socket::Stream::connect(&([127, 0, 0, 1], port).into(), Instant::now()) {
                    attack(stream, number, &mut recorded, &mut silent);
                    others.fetch_add(1, Ordering::Relaxed);
                }
                number += 1;
            }
        });
        hostile.join().unwrap();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
    assert_eq!(others.into_inner(), 2 * HOSTILE, "as many at each of the two places");
}

/// One connection of somebody who is no rank: who says nothing, or the wrong thing.
fn attack<L: Line + 'static>(mut line: L, number: u64, recorded: &mut Vec<Vec<u8>>, silent: &mut Vec<Box<dyn AsFd>>) {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let challenge = match (number % 8 < 4).then(|| line.hear_by(Instant::now() + Duration::from_millis(200))) {
        Some(Received::Message(bytes, _)) => Challenge::parse(&bytes),
        _ => None,
    };
    let nonce = challenge.map_or([0; secret::BYTES], |challenge| challenge.nonce);
    let hello = Hello {
        protocol: PROTOCOL,
        rank: (random() % 5) as u32,
        version: env!("CARGO_PKG_VERSION").into(),
        nonce: [1; secret::BYTES],
        terms: Some(Terms { world: 4, boot: Me::here(0, 1).boot }),
    };
    // It does not know the secret, whatever else it knows.
    let greeting = hello.to_bytes(&Secret::given(b"other"), &nonce);
    let message = match number % 8 {
        0 => greeting,
        1 => greeting[..random() as usize % greeting.len()].to_vec(),
        2 => [&greeting[..], &[0; 2000]].concat(),
        3 => {
            let mut changed = greeting;
            let at = random() as usize % changed.len();
            changed[at] ^= 1 << (random() % 8);
            changed
        }
        4 => (0..random() % 900).map(|_| random() as u8).collect(),
        5 => recorded.get(random() as usize % recorded.len().max(1)).cloned().unwrap_or_default(),
        6 => vec![0xff; 20_000],
        _ => Vec::new(),
    };
    if !message.is_empty() {
        line.say(&message);
        recorded.truncate(50);
        recorded.push(message);
    }
    // Some stay, silent.
    if number % 16 == 7 {
        silent.truncate(400);
        silent.push(Box::new(line));
    }
}

/// A greeting that was heard on one connection is worth nothing on another.
#[test]
fn a_replayed_greeting_is_dropped() {
    let secret = Secret::given(b"secret");
    let (mine, theirs) = (secret::random().unwrap(), secret::random().unwrap());
    let terms = Some(Terms { world: 2, boot: "boot".into() });
    let hello = Hello { protocol: PROTOCOL, rank: 1, version: "1".into(), nonce: [1; secret::BYTES], terms };
    let bytes = hello.to_bytes(&secret, &mine);
    assert_eq!(Hello::parse(&bytes, &secret, &mine), Some(hello));
    assert_eq!(Hello::parse(&bytes, &secret, &theirs), None);
}

/// Field case A16 (flashinfer-ai/flashinfer#3408): subgroups that come at different times, and one that never comes.
#[test]
fn groups_of_one_job_do_not_wait_for_each_other() {
    let place = place();
    let results = run(6, |rank| {
        let group = if rank < 3 { [0, 1, 2] } else { [3, 4, 5] };
        let meeting = place(rank, 6).among(&group).unwrap().timeout(Duration::from_millis(400));
        if rank == 4 {
            return Ok(Vec::new());
        }
        meeting.open(PATIENCE).and_then(|mut seat| seat.all_gather(rank as u32))
    });
    assert!(results[..3].iter().all(|result| *result == Ok(vec![0, 1, 2])), "{results:?}");
    for (rank, result) in [(0, &results[3]), (2, &results[5])] {
        assert!(is_missing(result, rank, 1), "{result:?}");
    }
}
