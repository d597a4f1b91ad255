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
        let (mut ranks, secret) = job(4);
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
        ranks.remove(victim);
        a_restart_works(ranks, victim, &secret);
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
        let victim = number % 4;
        let (mut ranks, secret) = job(4);
        all_do(&mut ranks, &format!("meet algorithm={algorithm}"));
        // So many that none is done before the kill.
        ranks.iter_mut().for_each(|rank| rank.tell("reduce calls=10000000"));
        std::thread::sleep(Duration::from_millis(30 + 7 * number as u64));
        ranks[victim].kill();
        let since = Instant::now();
        ranks.remove(victim);
        assert_told(&mut ranks, since, "PeerGone", victim);
        a_restart_works(ranks, victim, &secret);
    }
}

/// Whoever of them is named, all name the same, and no wait is left.
#[test]
fn three_of_four_processes_that_are_killed_in_a_call_leave_one_that_is_told() {
    for survivor in [0, 2] {
        let (mut ranks, _) = job(4);
        all_do(&mut ranks, "meet");
        ranks.iter_mut().for_each(|rank| rank.tell("reduce calls=10000000"));
        std::thread::sleep(Duration::from_millis(20));
        ranks.iter_mut().enumerate().filter(|&(rank, _)| rank != survivor).for_each(|(_, rank)| rank.kill());
        let since = Instant::now();
        let answer = ranks[survivor].answer();
        // One of the killed may have been the first to see that another was gone.
        assert!(answer.starts_with("PeerGone"), "{answer}");
        assert!(since.elapsed() < AT_ONCE, "{:?}", since.elapsed());
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

/// What a process holds, as the system tells.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Held {
    descriptors: usize,
    segments: usize,
    threads: usize,
    children: usize,
}

impl Held {
    fn by(process: &Rank) -> Held {
        let folder = format!("/proc/{}", process.id());
        let entries = |name: &str| std::fs::read_dir(format!("{folder}/{name}")).unwrap().count();
        let maps = std::fs::read_to_string(format!("{folder}/maps")).unwrap();
        let parent = format!(" {} ", process.id());
        let is_child = |stat: String| stat.rsplit_once(')').is_some_and(|(_, rest)| rest[2..].starts_with(&parent));
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        Held {
            descriptors: entries("fd"),
            segments: maps.matches("memfd:peersum").count(),
            threads: entries("task"),
            children: processes
                .filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok())
                .filter(|stat| is_child(stat.clone()))
                .count(),
        }
    }
}

/// Bytes of memory that the process has, its segments included.
fn memory(process: &Rank) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<i64>().unwrap() << 10
}

/// Files where all can leave some, of a name of the library's.
fn files() -> usize {
    let ours = |entry: &std::fs::DirEntry| entry.file_name().to_string_lossy().contains("peersum");
    std::fs::read_dir("/dev/shm").map_or(0, |entries| entries.flatten().filter(ours).count())
}

/// More than what the system's allocator takes now and then, and far less than the segments of all cycles.
const NOT_WORTH_A_WORD: i64 = 4 << 20;

/// The checks of the test below see what a group that is lost takes with it.
#[test]
fn what_a_lost_group_holds_is_seen() {
    let mut ranks = Rank::job(2);
    // The first takes what the process keeps for the next.
    all_do(&mut ranks, "meet");
    all_do(&mut ranks, "leave");
    let (before, resident) = (Held::by(&ranks[0]), memory(&ranks[0]));
    all_do(&mut ranks, "meet staging=8388608");
    all_do(&mut ranks, "forget");
    let after = Held::by(&ranks[0]);
    assert!(after.descriptors > before.descriptors && after.segments == before.segments + 2, "{before:?}, {after:?}");
    assert!(memory(&ranks[0]) > resident + NOT_WORTH_A_WORD);
    ranks[0].tell("bequeath");
    let heir: i32 = ranks[0].answer().parse().unwrap();
    assert_eq!(Held::by(&ranks[0]), Held { children: before.children + 1, ..after });
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
    let mut survivor = start("0");
    let mut next = start("1");
    all(std::slice::from_mut(&mut survivor), "open");
    let (before, files_before) = (Held::by(&survivor), files());
    let mut resident = None;
    for cycle in 0..CYCLES {
        let mut victim = std::mem::replace(&mut next, start("1"));
        if cycle % 4 == 3 {
            // At some moment of the meeting, or of the self-test, or ahead of both, or behind them.
            survivor.tell("meet wait=100");
            victim.tell("meet wait=100");
            std::thread::sleep(Duration::from_micros(cycle as u64 * 37 % 3000));
            victim.kill();
            let answer = survivor.answer();
            let kinds = ["done", "PeerGone { rank: 0, peer: 1 }", "MeetingTimeout { rank: 0, missing: [1]"];
            assert!(kinds.iter().any(|kind| answer.starts_with(kind)), "cycle {cycle}: {answer}");
        } else {
            for rank in [&mut survivor, &mut victim] {
                rank.tell("meet");
            }
            assert_eq!([survivor.answer(), victim.answer()], ["done", "done"], "cycle {cycle}");
            for rank in [&mut survivor, &mut victim] {
                rank.tell("reduce calls=3");
            }
            assert_eq!([survivor.answer(), victim.answer()], ["done", "done"], "cycle {cycle}");
            match cycle % 4 {
                // In a call, that it has not come to, or has begun.
                0 => {
                    survivor.tell("reduce calls=10000000");
                    if cycle % 8 == 0 {
                        victim.tell("reduce calls=10000000");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    victim.kill();
                    let error = survivor.answer();
                    assert!(error.starts_with("PeerGone { rank: 0, peer: 1 }"), "{error}");
                }
                // Between calls, which one may notice and the other not.
                1 => victim.kill(),
                _ => {
                    victim.kill();
                    survivor.tell("reduce count=100");
                    let error = survivor.answer();
                    assert!(error.starts_with("PeerGone { rank: 0, peer: 1 }"), "{error}");
                }
            }
        }
        survivor.tell("leave");
        assert_eq!(survivor.answer(), "done");
        assert_eq!(Held::by(&survivor), before, "cycle {cycle}");
        // Once there has been one of each.
        if cycle == 7 {
            resident = Some(memory(&survivor));
        }
    }
    let grown = memory(&survivor) - resident.unwrap();
    eprintln!("the process that lived through {CYCLES} groups has grown by {grown} bytes");
    assert!(grown < NOT_WORTH_A_WORD, "{grown}");
    assert_eq!(files(), files_before);
    assert!(survivor.end());
}

/// Field case A71 (sgl-project/sglang#40723, llm-d/llm-d#352): crashes left files behind, until none could be made any more.
/// All are killed, at moments before the meeting, in it, and behind it, where each job meets at the same path.
#[test]
fn a_hundred_jobs_that_are_killed_leave_nothing_that_keeps_the_next_from_meeting() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("meeting");
    let meet = |ranks: &mut [Rank]| {
        for (rank, process) in ranks.iter_mut().enumerate() {
            process.tell(&format!("meet at={} rank={rank} world=3 secret=one", place.display()));
        }
    };
    let files_before = files();
    let mut next: Vec<_> = (0..3).map(|_| Rank::start(&[])).collect();
    for job in 0..100u64 {
        let mut ranks = std::mem::replace(&mut next, (0..3).map(|_| Rank::start(&[])).collect());
        meet(&mut ranks);
        ranks.iter_mut().for_each(|rank| rank.tell("reduce calls=10000000"));
        std::thread::sleep(Duration::from_micros(job * 1373 % 15_000));
        ranks.iter_mut().for_each(Rank::kill);
        // The one thing that a killed rank 0 may leave, which the next job replaces.
        let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path()).collect();
        assert!(left.iter().all(|path| *path == place), "{left:?}");
    }
    meet(&mut next);
    assert!(next.iter_mut().all(|rank| rank.answer() == "done"));
    all_do(&mut next, "reduce calls=10");
    assert!(next.into_iter().all(Rank::end));
    assert_eq!((files(), std::fs::read_dir(folder.path()).unwrap().count()), (files_before, 0));
}

/// Field case A71: segments are in no file system, so how much room one has does not matter.
#[test]
fn a_full_shared_memory_folder_does_not_matter() {
    let full = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs -o size=64k none /dev/shm && exec \"$0\" \"$@\""];
    let can = std::process::Command::new(full[0]).args(&full[1..]).arg("true").output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: only root can mount another /dev/shm");
        return;
    }
    let mut ranks = Rank::job_under(&full, 2);
    all_do(&mut ranks, "meet staging=16777216");
    all_do(&mut ranks, "reduce count=3000000");
    assert!(ranks.into_iter().all(Rank::end));
}
