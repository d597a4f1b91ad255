//! Processes that die, or leave.

use std::time::{Duration, Instant};

use crate::harness::{AT_ONCE, PATIENCE, Rank, algorithms, all, all_do};

/// All of these answer, at once, that rank `gone` is gone, in the same words.
#[track_caller]
fn assert_told(ranks: &mut [Rank], since: Instant, kind: &str, gone: usize) {
    let errors: Vec<_> = ranks.iter_mut().map(Rank::answer).collect();
    let took = since.elapsed();
    eprintln!("{kind} of rank {gone} was told within {took:?}");
    assert!(took < AT_ONCE, "{took:?}: {errors:?}");
    for error in &errors {
        assert!(error.starts_with(kind) && error.contains(&format!("peer: {gone} }}")), "{error}");
    }
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
}

/// A new job of as many works at once, where the old one met too.
fn a_restart_works(mut survivors: Vec<Rank>, replaced: usize, secret_of: &str) {
    all_do(&mut survivors, "leave");
    let mut ranks = survivors;
    let (rank, world) = (replaced.to_string(), (ranks.len() + 1).to_string());
    let variables = [("PEERSUM_RANK", &rank[..]), ("PEERSUM_WORLD_SIZE", &world), ("PEERSUM_SECRET", secret_of)];
    ranks.insert(replaced, Rank::start(&variables));
    let started = Instant::now();
    all_do(&mut ranks, "meet");
    all_do(&mut ranks, "reduce calls=10");
    assert!(started.elapsed() < PATIENCE / 3, "{:?}", started.elapsed());
    assert!(ranks.into_iter().all(Rank::end));
}

fn job(world: usize) -> (Vec<Rank>, String) {
    let secret = crate::harness::secret();
    let world_size = world.to_string();
    let start = |rank: usize| {
        let rank = rank.to_string();
        Rank::start(&[("PEERSUM_RANK", &rank), ("PEERSUM_WORLD_SIZE", &world_size), ("PEERSUM_SECRET", &secret)])
    };
    ((0..world).map(start).collect(), secret)
}

#[test]
fn a_process_that_is_killed_while_ranks_meet_is_named_to_all_who_have_come() {
    for victim in [0, 2] {
        let (mut ranks, _) = job(4);
        let absent = 3;
        ranks[..absent].iter_mut().for_each(|rank| rank.tell("meet"));
        // Nobody says that it sits; all of them do long before this.
        std::thread::sleep(Duration::from_millis(300));
        ranks[victim].kill();
        let since = Instant::now();
        for (rank, answer) in ranks.iter_mut().enumerate().filter(|&(rank, _)| rank != victim && rank != absent) {
            let answer = answer.answer();
            assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
            assert!(answer.starts_with(&format!("PeerGone {{ rank: {rank}, peer: {victim} }}")), "{answer}");
        }
    }
}

/// Until all have mapped all segments, and a little longer: then all that is left of the meeting is the test.
fn wait_for_the_self_test_of(ranks: &[Rank]) {
    let until = Instant::now() + PATIENCE;
    for rank in ranks {
        let maps = format!("/proc/{}/maps", rank.id());
        while std::fs::read_to_string(&maps).unwrap().matches("memfd:peersum").count() < ranks.len() {
            assert!(Instant::now() < until, "{maps} has too few segments");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    std::thread::sleep(Duration::from_millis(40));
}

/// The test of a group with so much staging takes longer than it takes to kill one of its ranks.
#[test]
fn a_process_that_is_killed_in_the_self_test_is_named_to_all() {
    for victim in [0, 1, 3] {
        let (mut ranks, secret) = job(4);
        ranks.iter_mut().for_each(|rank| rank.tell("meet staging=67108864"));
        wait_for_the_self_test_of(&ranks);
        ranks[victim].kill();
        let since = Instant::now();
        for (rank, survivor) in ranks.iter_mut().enumerate().filter(|&(rank, _)| rank != victim) {
            let answer = survivor.answer();
            assert!(answer.starts_with(&format!("PeerGone {{ rank: {rank}, peer: {victim} }}")), "{answer}");
        }
        assert!(since.elapsed() < PATIENCE / 6, "{:?}", since.elapsed());
        ranks.remove(victim);
        a_restart_works(ranks, victim, &secret);
    }
}

#[test]
fn a_process_that_is_stopped_in_the_self_test_is_a_failure_of_all() {
    let (mut ranks, _) = job(3);
    ranks.iter_mut().for_each(|rank| rank.tell("meet staging=67108864 timeout=1500"));
    wait_for_the_self_test_of(&ranks);
    let stopped = rustix::process::Pid::from_raw(ranks[1].id() as i32).unwrap();
    rustix::process::kill_process(stopped, rustix::process::Signal::STOP).unwrap();
    for rank in [0, 2] {
        let answer = ranks[rank].answer();
        assert!(answer.starts_with("MeetingTimeout") && answer.contains("missing: [1]"), "{answer}");
    }
    rustix::process::kill_process(stopped, rustix::process::Signal::CONT).unwrap();
    assert_ne!(ranks[1].answer(), "done", "it is told when it goes on");
    all_do(&mut ranks, "meet");
    all_do(&mut ranks, "reduce calls=10");
}

#[test]
fn a_process_that_is_killed_between_calls_is_named_by_the_next_call() {
    for victim in [0, 1, 3] {
        let (mut ranks, secret) = job(4);
        all_do(&mut ranks, "meet");
        all_do(&mut ranks, "reduce calls=20");
        ranks[victim].kill();
        let mut survivors: Vec<_> =
            ranks.into_iter().enumerate().filter(|&(rank, _)| rank != victim).map(|(_, rank)| rank).collect();
        let since = Instant::now();
        survivors.iter_mut().for_each(|rank| rank.tell("reduce count=1000"));
        assert_told(&mut survivors, since, "PeerGone", victim);
        let errors = all(&mut survivors, "check");
        assert_eq!(errors, all(&mut survivors, "reduce count=5"));
        a_restart_works(survivors, victim, &secret);
    }
}

#[test]
fn a_process_that_is_killed_in_a_call_is_named_by_that_call() {
    for (number, algorithm) in algorithms().enumerate() {
        let victim = number % 3;
        let (mut ranks, _) = job(3);
        all_do(&mut ranks, &format!("meet algorithm={algorithm}"));
        // So many that none is done before the kill.
        ranks.iter_mut().for_each(|rank| rank.tell("reduce calls=10000000"));
        std::thread::sleep(Duration::from_millis(30 + 7 * number as u64));
        ranks[victim].kill();
        let since = Instant::now();
        ranks.remove(victim);
        assert_told(&mut ranks, since, "PeerGone", victim);
    }
}

#[test]
fn a_process_that_is_stopped_is_a_timeout() {
    let (mut ranks, _) = job(3);
    all_do(&mut ranks, "meet timeout=300");
    let stopped = rustix::process::Pid::from_raw(ranks[1].id() as i32).unwrap();
    rustix::process::kill_process(stopped, rustix::process::Signal::STOP).unwrap();
    for rank in [0, 2] {
        ranks[rank].tell("reduce count=100");
    }
    let errors = [0, 2].map(|rank| ranks[rank].answer());
    assert!(errors[0].starts_with("PeerTimeout") && errors[0].contains("peer: 1,"), "{errors:?}");
    assert_eq!(errors[0], errors[1]);
    rustix::process::kill_process(stopped, rustix::process::Signal::CONT).unwrap();
    ranks[1].tell("reduce count=100");
    assert_eq!(ranks[1].answer(), errors[0], "it is told when it goes on");
}

#[test]
fn who_leaves_in_order_is_not_called_dead() {
    let (mut ranks, _) = job(3);
    all_do(&mut ranks, "meet");
    all_do(&mut ranks, "reduce calls=10");
    let mut leaver = ranks.remove(0);
    leaver.tell("leave");
    assert_eq!(leaver.answer(), "done");
    // That alone is no failure: there may be no more calls.
    all_do(&mut ranks, "check");
    let since = Instant::now();
    ranks.iter_mut().for_each(|rank| rank.tell("reduce count=10"));
    assert_told(&mut ranks, since, "PeerLeft", 0);
}

#[test]
fn a_process_that_ends_without_a_word_is_gone() {
    let (mut ranks, _) = job(2);
    all_do(&mut ranks, "meet");
    ranks[1].tell("forget");
    assert_eq!(ranks[1].answer(), "done");
    assert!(ranks.pop().unwrap().end());
    let since = Instant::now();
    ranks[0].tell("reduce count=10");
    assert_told(&mut ranks, since, "PeerGone", 1);
}

/// A process that was forked, such as a data loader's worker, keeps its parent's sockets open.
#[test]
fn a_process_that_is_killed_is_gone_even_if_a_child_has_its_sockets() {
    let (mut ranks, _) = job(2);
    all_do(&mut ranks, "meet");
    ranks[1].tell("bequeath");
    let heir: i32 = ranks[1].answer().parse().unwrap();
    ranks[1].kill();
    let since = Instant::now();
    ranks[0].tell("reduce count=10");
    ranks.pop();
    assert_told(&mut ranks, since, "PeerGone", 1);
    let heir = rustix::process::Pid::from_raw(heir).unwrap();
    rustix::process::kill_process(heir, rustix::process::Signal::KILL).unwrap();
}

/// What stays of groups that were made, used and killed: nothing. One process lives through all of them.
#[test]
fn two_hundred_cycles_of_create_use_and_kill_leave_nothing_behind() {
    const CYCLES: usize = 200;
    let secret = crate::harness::secret();
    let start =
        |rank: &str| Rank::start(&[("PEERSUM_RANK", rank), ("PEERSUM_WORLD_SIZE", "2"), ("PEERSUM_SECRET", &secret)]);
    let files = || std::fs::read_dir("/dev/shm").map_or(0, Iterator::count);
    let mut survivor = start("0");
    let mut next = start("1");
    let before = (files(), all(std::slice::from_mut(&mut survivor), "open"));
    let mut open = None;
    for cycle in 0..CYCLES {
        let mut victim = std::mem::replace(&mut next, start("1"));
        if cycle % 4 == 3 {
            // At some moment of the meeting, or ahead of it, or behind it.
            survivor.tell("meet wait=100");
            victim.tell("meet wait=100");
            std::thread::sleep(Duration::from_micros(cycle as u64 * 37 % 3000));
            victim.kill();
            let answer = survivor.answer();
            let kinds = ["done", "PeerGone { rank: 0, peer: 1 }", "MeetingTimeout { rank: 0, missing: [1]"];
            assert!(kinds.iter().any(|kind| answer.starts_with(kind)), "cycle {cycle}: {answer}");
            survivor.tell("leave");
            assert_eq!(survivor.answer(), "done");
            continue;
        }
        for rank in [&mut survivor, &mut victim] {
            rank.tell("meet");
        }
        assert_eq!([survivor.answer(), victim.answer()], ["done", "done"], "cycle {cycle}");
        for rank in [&mut survivor, &mut victim] {
            rank.tell("reduce calls=3");
        }
        assert_eq!([survivor.answer(), victim.answer()], ["done", "done"], "cycle {cycle}");
        if cycle % 2 == 0 {
            survivor.tell("reduce count=100");
            victim.kill();
            let error = survivor.answer();
            assert!(error.starts_with("PeerGone { rank: 0, peer: 1 }"), "{error}");
        } else {
            victim.kill();
        }
        survivor.tell("leave");
        assert_eq!(survivor.answer(), "done");
        let now = all(std::slice::from_mut(&mut survivor), "open");
        assert_eq!(*open.get_or_insert(now.clone()), now, "descriptors, cycle {cycle}");
    }
    assert_eq!(all(std::slice::from_mut(&mut survivor), "mapped"), ["0"]);
    assert_eq!((files(), open.unwrap()), before);
    assert!(survivor.end());
}
