//! Meetings that can't be, each with its error.

use std::time::{Duration, Instant};

use crate::harness::{AT_ONCE, Rank, all, all_do, secret};

/// Two ranks of one job, told these.
fn two(commands: [&str; 2]) -> [String; 2] {
    let mut ranks = Rank::job(2);
    ranks.iter_mut().zip(commands).for_each(|(rank, command)| rank.tell(command));
    [ranks[0].answer(), ranks[1].answer()]
}

#[track_caller]
fn assert_all(answers: impl IntoIterator<Item = String>, kind: &str) {
    for answer in answers {
        assert!(answer.starts_with(kind), "{answer}");
    }
}

fn path() -> String {
    let name = format!("peersum-test-{}", secret().replace(' ', "-"));
    std::env::temp_dir().join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_missing_rank_is_named_by_all() {
    let mut ranks = Rank::job(3);
    let started = Instant::now();
    for rank in [0, 2] {
        ranks[rank].tell("meet wait=300");
    }
    for rank in [0, 2] {
        let answer = ranks[rank].answer();
        assert!(answer.starts_with(&format!("MeetingTimeout {{ rank: {rank}, missing: [1]")), "{answer}");
    }
    assert!(started.elapsed() < Duration::from_millis(300) + 2 * AT_ONCE);
    // They are all there now.
    all_do(&mut ranks, "meet");
}

#[test]
fn worlds_that_differ_are_told() {
    let path = path();
    let answers = two([&format!("meet at={path} rank=0 world=2"), &format!("meet at={path} rank=1 world=3")]);
    assert_all(answers, "WorldsDiffer { rank: 0, world: 2, peer: 1, peer_world: 3 }");
}

#[test]
fn a_rank_that_comes_twice_is_told() {
    let path = path();
    let answers = two([&format!("meet at={path} rank=0 world=3"), &format!("meet at={path} rank=0 world=3")]);
    assert_all(answers, "RankTaken { rank: 0 }");
    let mut ranks = Rank::job(3);
    for (rank, process) in [0, 1, 1].into_iter().zip(&mut ranks) {
        process.tell(&format!("meet at={path} rank={rank} world=3"));
    }
    assert_all(ranks.iter_mut().map(Rank::answer), "RankTaken { rank: 1 }");
}

#[test]
fn options_that_differ_are_told_by_each() {
    let answers = two(["meet timeout=20000", "meet timeout=19999"]);
    assert_all([answers[0].clone()], "OptionsDiffer { rank: 0, peer: 1 }");
    assert_all([answers[1].clone()], "OptionsDiffer { rank: 1, peer: 0 }");
    assert_all(two(["meet", "meet untested=1"]), "OptionsDiffer");
}

#[test]
fn options_that_can_not_be_fail_on_every_rank() {
    assert_all(two(["meet staging=1", "meet staging=1"]), "InvalidOption { option: \"staging_bytes\"");
}

#[test]
fn a_port_in_use_is_named() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let mut ranks = Rank::job(1);
    let answers = all(&mut ranks, &format!("meet at={at} rank=0 world=2 secret=x"));
    assert_all(answers, &format!("MeetingPlace {{ rank: 0, at: \"{at}\", reason: \"the port is in use"));
}

#[test]
fn a_foreign_peer_is_named() {
    let path = path();
    let mut ranks = Rank::job(2);
    ranks[0].tell(&format!("meet at={path} rank=0 world=2 secret=one wait=1500"));
    ranks[1].tell(&format!("meet at={path} rank=1 world=2 secret=two wait=700"));
    let answer = ranks[1].answer();
    assert!(answer.starts_with("ForeignPeer { rank: 1") && answer.contains(&path), "{answer}");
    assert_all([ranks[0].answer()], "MeetingTimeout { rank: 0, missing: [1]");
    assert!(!std::path::Path::new(&path).exists());
}

/// Whatever the secret: the system tells whose a socket is.
#[test]
fn a_process_of_another_user_joins_nothing() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can start processes of another user");
        return;
    }
    const NOBODY: u32 = 65534;
    let secret = secret();
    let variables = |rank| [("PEERSUM_RANK", rank), ("PEERSUM_WORLD_SIZE", "2"), ("PEERSUM_SECRET", &secret[..])];
    for stranger in ["0", "1"] {
        let mut ranks = ["0", "1"].map(|rank| {
            let user = (rank == stranger).then_some(NOBODY);
            Rank::start_as(user, &variables(rank)).expect("a place where all users can start this executable")
        });
        ranks.iter_mut().for_each(|rank| rank.tell("meet wait=500"));
        let answers = ranks.each_mut().map(Rank::answer);
        assert!(answers[0].starts_with("MeetingTimeout { rank: 0, missing: [1]"), "{answers:?}");
        let whose = if stranger == "0" { "user id 65534" } else { "user id 0" };
        assert!(answers[1].starts_with("ForeignPeer") && answers[1].contains(whose), "{answers:?}");
    }
}

#[test]
fn an_environment_that_makes_no_sense_is_named() {
    for (variables, expected) in [
        (&[][..], "PEERSUM_RANK"),
        (&[("RANK", "0")], "WORLD_SIZE"),
        (&[("RANK", "zero"), ("WORLD_SIZE", "2")], "RANK"),
        (&[("PMI_RANK", "2"), ("PMI_SIZE", "2")], "PMI_RANK"),
    ] {
        let mut rank = Rank::start(variables);
        rank.tell("meet");
        assert_all([rank.answer()], &format!("Environment {{ variable: \"{expected}\""));
    }
    // Two machines of two ranks each.
    let mut rank = Rank::start(&[("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_PORT", "1")]);
    rank.tell("meet");
    assert_all([rank.answer()], "SeveralMachines");
}

/// Field case A33 (vllm-project/vllm#51986): attempts that fail cost nothing.
#[test]
fn attempts_that_fail_leave_no_descriptor_and_no_memory() {
    let mut ranks = Rank::job(1);
    let before = all(&mut ranks, "open");
    for _ in 0..20 {
        let answers = all(&mut ranks, "meet at=/nowhere/at/all rank=0 world=2");
        assert_all(answers, "MeetingPlace");
        assert_all(all(&mut ranks, "meet at=/nowhere/at/all rank=1 world=2 wait=5"), "MeetingTimeout");
    }
    assert_eq!(all(&mut ranks, "open"), before);
    assert_eq!(all(&mut ranks, "mapped"), ["0"]);
}

/// Field case A32 (pytorch/pytorch#130890, flashinfer-ai/flashinfer#4089): descriptors were fetched from the other process,
/// which containers forbid. Here they are sent. Whether a peer is gone is seen without pidfds too.
#[test]
fn processes_that_may_not_look_into_each_other_meet_and_see_deaths() {
    let mut ranks = Rank::job(3);
    all_do(&mut ranks, "undumpable");
    all_do(&mut ranks, "filter");
    let before = (all(&mut ranks, "open"), all(&mut ranks, "inherited"));
    all_do(&mut ranks, "meet");
    all_do(&mut ranks, "reduce calls=20");
    assert_eq!(all(&mut ranks, "inherited"), before.1, "all are closed on exec");
    all_do(&mut ranks, "leave");
    assert_eq!((all(&mut ranks, "open"), all(&mut ranks, "inherited")), before);
    all_do(&mut ranks, "meet");
    ranks[1].kill();
    for rank in [0, 2] {
        ranks[rank].tell("reduce calls=5");
        let answer = ranks[rank].answer_within(AT_ONCE).expect("an answer at once");
        assert!(answer.starts_with("PeerGone") && answer.contains("peer: 1 }"), "{answer}");
    }
}

/// Field case A33 (vllm-project/vllm#51986): a deep folder for temporary files made the socket's name too long.
#[test]
fn a_path_may_be_longer_than_a_sockets_address() {
    let folder = tempfile::tempdir().unwrap();
    let deep = folder.path().join("a-folder-of-some-length/".repeat(12));
    std::fs::create_dir_all(&deep).unwrap();
    let path = deep.join("meeting");
    assert!(path.as_os_str().len() > 250);
    let answers =
        two([0, 1].map(|rank| format!("meet at={} rank={rank} world=2", path.display())).each_ref().map(|s| &s[..]));
    assert_all(answers, "done");
    assert_eq!(std::fs::read_dir(&deep).unwrap().count(), 0);
}
