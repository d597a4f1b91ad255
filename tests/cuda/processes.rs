//! Ranks that are processes, which do as they are told, line by line. Where they share a device they should run under MPS;
//! without it they take turns, and everything takes longer.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver},
    },
    time::{Duration, Instant},
};

use cudarc::driver::{DevicePtr, sys};
use peersum::{
    Algorithm, DType, Meeting, Nccl, ReduceOp,
    cuda::{self, Communicator, Lie, Verifier},
};

use crate::{common::Random, harness};

const PATIENCE: Duration = Duration::from_secs(60);
/// A process that is gone is noticed within this, though calls wait for longer.
const SOON: Duration = Duration::from_secs(3);
const MOST: usize = 1 << 20;

/// A process that obeys. It is killed with the test.
struct Process {
    child: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Process {
    fn start(variables: &[(&str, String)]) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::obey", "--nocapture", "--test-threads=1"]);
        command.env("PEERSUM_TEST_OBEY", "1").envs(variables.iter().map(|(name, value)| (name, value)));
        // MPS has no more for a process.
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", "8");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (commands, lines) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()).lines());
        let (send, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some((_, answer)) = line.split_once("@ ") {
                    let _ = send.send(answer.to_owned());
                }
            }
        });
        Process { child, commands, answers }
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.commands.as_mut().unwrap(), "{command}").unwrap();
    }

    #[track_caller]
    fn answer(&mut self) -> String {
        self.answers.recv_timeout(PATIENCE).expect("an answer in time")
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn end(mut self) -> bool {
        self.commands.take();
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        false
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether processes can be tested: asked of the driver by a process of its own, since one that has a context here would be
/// in the way of MPS.
fn devices() -> Option<harness::Devices> {
    harness::devices()
}

fn job(world: usize) -> Vec<Process> {
    job_of(world).1
}

/// And the job's secret.
fn job_of(world: usize) -> (String, Vec<Process>) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let secret = format!("{} {}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let processes = (0..world).map(|rank| member(&secret, rank, world)).collect();
    (secret, processes)
}

fn member(secret: &str, rank: usize, world: usize) -> Process {
    Process::start(&variables(secret, rank, world))
}

fn variables(secret: &str, rank: usize, world: usize) -> Vec<(&'static str, String)> {
    vec![
        ("PEERSUM_RANK", rank.to_string()),
        ("PEERSUM_WORLD_SIZE", world.to_string()),
        ("PEERSUM_SECRET", secret.to_owned()),
    ]
}

#[track_caller]
fn all_do(processes: &mut [Process], command: &str) {
    processes.iter_mut().for_each(|process| process.tell(command));
    for (rank, process) in processes.iter_mut().enumerate() {
        assert_eq!(process.answer(), "done", "{command}, rank {rank}");
    }
}

/// What a process does for each line, and says then.
struct Obeying {
    rank: Option<Rank>,
}

struct Rank {
    communicator: Communicator,
    stream: std::sync::Arc<cudarc::driver::CudaStream>,
    verifier: Verifier,
    memory: cudarc::driver::CudaSlice<u8>,
    words: cudarc::driver::CudaSlice<u64>,
}

impl Obeying {
    fn obey(&mut self, line: &str) -> Result<(), String> {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        match verb {
            "meet" => self.meet(rest),
            "reduce" => self.reduce(rest.parse().unwrap()),
            "replay" => self.replay(rest.parse().unwrap()),
            "nccl" => self.by_nccl(rest.parse().unwrap()),
            "kept" => Err(Obeying::kept()),
            "leave" => {
                self.rank = None;
                Ok(())
            }
            _ => Err(format!("'{line}' is not known")),
        }
    }

    /// `off`, or `nccl` where NCCL may take the calls, and perhaps what the rank lies about.
    fn meet(&mut self, how: &str) -> Result<(), String> {
        let words = |error: &dyn std::fmt::Debug| format!("{error:?}");
        let meeting = Meeting::from_env().map_err(|error| words(&error))?;
        let count = cuda::device_count().map_err(|error| words(&error))?;
        let device = meeting.rank() * count.min(meeting.world_size()) / meeting.world_size();
        let how: Vec<_> = how.split(' ').collect();
        let mut options = harness::options().nccl(if how[0] == "nccl" { Nccl::Tabled } else { Nccl::Off });
        options.nccl_library = std::env::var_os("PEERSUM_TEST_NCCL").map(Into::into);
        // SAFETY: it takes the context away from this thread, as a caller's may be without one.
        unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) }.result().unwrap();
        let communicator = match how[1..] {
            [about, lie] => {
                let lies = [Lie::NoAccess, Lie::Refused, Lie::Mirror, Lie::StaleLines];
                let lie = lies.into_iter().find(|known| format!("{known:?}") == lie).unwrap();
                Communicator::meet_lying(&meeting, device, &options, about.parse().unwrap(), lie)
            }
            _ => Communicator::meet(&meeting, device, &options),
        };
        let mut current = std::ptr::null_mut();
        // SAFETY: `current` is a place for the answer.
        unsafe { sys::cuCtxGetCurrent(&mut current) }.result().unwrap();
        assert!(current.is_null(), "the caller's context is another than before");
        let communicator = communicator.map_err(|error| words(&error))?;
        let stream = harness::stream(device, 0);
        self.rank = Some(Rank {
            verifier: Verifier::new(device).unwrap(),
            memory: stream.alloc_zeros(2 * MOST).unwrap(),
            words: stream.clone_htod(&[0u64, 0]).unwrap(),
            communicator,
            stream,
        });
        self.rank.as_ref().unwrap().stream.synchronize().unwrap();
        Ok(())
    }

    /// So many replays of a graph of calls, every element checked on the device.
    fn replay(&mut self, replays: usize) -> Result<(), String> {
        const COUNT: usize = 5000;
        let Rank { communicator, stream, verifier, memory, words } = self.rank.as_mut().expect("a rank that has met");
        let (tensor, state) = (memory.device_ptr(stream).0, words.device_ptr(stream).0);
        let raw = stream.cu_stream().cast();
        let (rank, world) = (communicator.rank() as u32, communicator.world_size() as u32);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).unwrap();
        let mut calls = || {
            for _ in 0..5 {
                // SAFETY: the memory has room, and the words are the round and the wrong elements; both outlive the graph.
                unsafe {
                    verifier.fill(tensor, COUNT, DType::F32, rank, state, raw)?;
                    communicator.all_reduce_raw(tensor, tensor, COUNT, DType::F32, ReduceOp::Sum, raw)?;
                    verifier.check(tensor, COUNT, DType::F32, world, ReduceOp::Sum, state, state + 8, raw)?;
                    verifier.advance(state, raw)?;
                }
            }
            Ok::<_, peersum::Error>(())
        };
        let called = calls();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
        called.map_err(|error| format!("{error:?}"))?;
        for replay in 0..replays {
            graph.launch().unwrap();
            if replay % 10 == 9 {
                stream.synchronize().unwrap();
                if communicator.check().is_err() {
                    break;
                }
            }
        }
        self.right(replays)
    }

    fn right(&self, calls: usize) -> Result<(), String> {
        let Rank { communicator, stream, words, .. } = self.rank.as_ref().expect("a rank that has met");
        stream.synchronize().unwrap();
        communicator.check().map_err(|error| format!("{error:?}"))?;
        let words = stream.clone_dtoh(words).unwrap();
        stream.synchronize().unwrap();
        if words[1] == 0 { Ok(()) } else { Err(format!("{} elements of {calls} calls are wrong", words[1])) }
    }

    /// Whether all calls go to NCCL, and since when they do, sums of small integers, which are exact in any order.
    fn by_nccl(&mut self, calls: usize) -> Result<(), String> {
        let Rank { communicator, stream, verifier, memory, words } = self.rank.as_mut().expect("a rank that has met");
        *words = stream.clone_htod(&[Verifier::EXACT, 0u64]).unwrap();
        stream.synchronize().unwrap();
        let (input, state) = (memory.device_ptr(stream).0, words.device_ptr(stream).0);
        let raw = stream.cu_stream().cast();
        let (rank, world) = (communicator.rank() as u32, communicator.world_size() as u32);
        let why = communicator.fallback().map(|error| format!("{error:?}")).ok_or("the calls don't go to NCCL")?;
        for call in 0..calls {
            let count = [1, 999, 30_000, MOST / 4][call % 4];
            let plan = communicator.plan(count, DType::F32).unwrap().unwrap();
            assert_eq!(plan.algorithm, Algorithm::Nccl);
            // SAFETY: as in `reduce`.
            unsafe {
                verifier.fill(input, count, DType::F32, rank, state, raw).unwrap();
                let called = communicator.all_reduce_raw(input, input, count, DType::F32, ReduceOp::Sum, raw);
                called.map_err(|error| format!("{error:?}"))?;
                verifier.check(input, count, DType::F32, world, ReduceOp::Sum, state, state + 8, raw).unwrap();
                verifier.advance(state, raw).unwrap();
            }
        }
        let explained = communicator.explain(4096, DType::F32).unwrap().unwrap().to_string();
        assert!(explained.contains("it has all calls") && !why.is_empty(), "{explained}");
        self.right(calls)
    }

    /// What this process has of the system: descriptors, threads, and mappings.
    fn kept() -> String {
        let entries = |folder: &str| std::fs::read_dir(folder).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        format!("{} descriptors, {} threads, {maps} mappings", entries("/proc/self/fd"), entries("/proc/self/task"))
    }

    /// So many calls of random sizes by all algorithms, every element checked on the device.
    fn reduce(&mut self, calls: usize) -> Result<(), String> {
        let Rank { communicator, stream, verifier, memory, words } = self.rank.as_mut().expect("a rank that has met");
        let (input, state) = (memory.device_ptr(stream).0, words.device_ptr(stream).0);
        let raw = stream.cu_stream().cast();
        let (rank, world) = (communicator.rank() as u32, communicator.world_size() as u32);
        let mut random = Random::new(calls as u64);
        let mut enqueue = |call: usize| {
            let algorithm = Algorithm::STAGED[call % Algorithm::STAGED.len()];
            let choice = peersum::Choice { algorithm, blocks: 2, threads: 128 };
            communicator.force((!call.is_multiple_of(3)).then_some(choice))?;
            let count = *random.of(&[1, 999, 4096, 30_000, MOST / 4]);
            let output = if random.below(2) == 0 { input } else { input + MOST as u64 };
            // SAFETY: both halves of the memory have room for the largest, and the words are the round and the wrong elements.
            unsafe {
                verifier.fill(input, count, DType::F32, rank, state, raw)?;
                communicator.all_reduce_raw(input, output, count, DType::F32, ReduceOp::Sum, raw)?;
                verifier.check(output, count, DType::F32, world, ReduceOp::Sum, state, state + 8, raw)?;
                verifier.advance(state, raw)
            }
        };
        let mut outcome = Ok(());
        for call in 0..calls {
            outcome = enqueue(call);
            if outcome.is_err() {
                break;
            }
            if call % 50 == 49 {
                stream.synchronize().unwrap();
            }
        }
        stream.synchronize().unwrap();
        outcome.map_err(|error| format!("{error:?}"))?;
        self.right(calls)
    }
}

/// Not a test, but what the processes of the tests run.
#[test]
fn obey() {
    if std::env::var_os("PEERSUM_TEST_OBEY").is_none() {
        return;
    }
    let mut obeying = Obeying { rank: None };
    for line in std::io::stdin().lines() {
        let outcome = obeying.obey(&line.unwrap());
        println!("@ {}", outcome.err().unwrap_or_else(|| "done".into()));
    }
}

#[test]
fn processes_reduce_as_threads_do() {
    let Some(_devices) = devices() else { return };
    for world in [2, 4] {
        let mut processes = job(world);
        all_do(&mut processes, "meet off");
        all_do(&mut processes, &format!("reduce {}", 3 * harness::calls()));
        all_do(&mut processes, "leave");
        // And once more, where the group before met too.
        all_do(&mut processes, "meet off");
        all_do(&mut processes, "reduce 12");
        assert!(processes.into_iter().all(Process::end), "{world} ranks");
    }
}

/// A process that is killed between calls, and while the others wait for it in one: all are told whose it was, at once, and
/// a new group of the rest and another in its place works.
#[test]
fn a_process_that_is_killed_is_named_and_can_be_replaced() {
    let Some(_devices) = devices() else { return };
    for in_a_call in [false, true] {
        let mut processes = job(4);
        all_do(&mut processes, "meet off");
        all_do(&mut processes, "reduce 30");
        let victim = 2;
        let mut killed = processes.remove(victim);
        if in_a_call {
            processes.iter_mut().for_each(|process| process.tell("reduce 5"));
            std::thread::sleep(Duration::from_millis(200));
        }
        killed.kill();
        let since = Instant::now();
        if !in_a_call {
            processes.iter_mut().for_each(|process| process.tell("reduce 5"));
        }
        let answers: Vec<_> = processes.iter_mut().map(Process::answer).collect();
        let took = since.elapsed();
        eprintln!("in a call: {in_a_call}: told within {took:?}");
        for answer in &answers {
            assert!(answer.starts_with("PeerGone") && answer.contains(&format!("peer: {victim} }}")), "{answer}");
        }
        assert!(took < SOON, "{took:?}");
        all_do(&mut processes, "leave");
        // Ranks are told by the environment, so new processes take all places.
        drop(processes);
        let mut processes = job(4);
        all_do(&mut processes, "meet off");
        all_do(&mut processes, "reduce 12");
        assert!(processes.into_iter().all(Process::end));
    }
}

/// A rank that leaves in order is not taken for dead, but no call can be made without it.
#[test]
fn a_rank_that_left_is_named_at_the_next_call() {
    let Some(_devices) = devices() else { return };
    let mut processes = job(3);
    all_do(&mut processes, "meet off");
    all_do(&mut processes, "reduce 30");
    let mut left = processes.remove(1);
    all_do(std::slice::from_mut(&mut left), "leave");
    std::thread::sleep(Duration::from_millis(100));
    processes.iter_mut().for_each(|process| process.tell("reduce 5"));
    for process in &mut processes {
        let answer = process.answer();
        assert!(answer.starts_with("PeerLeft") && answer.contains("peer: 1 }"), "{answer}");
    }
}

/// Ranks know devices by their UUIDs, so each process may be shown them in an order, and by names, of its own.
#[test]
fn processes_that_are_shown_devices_otherwise_meet() {
    let Some(_devices) = devices() else { return };
    let uuids: Vec<_> = (0..cuda_devices() as i32).map(uuid).collect();
    let mut shown = vec![(0..uuids.len()).map(|ordinal| ordinal.to_string()).collect::<Vec<_>>(), uuids.clone()];
    shown.extend(shown.clone().into_iter().map(|names| names.into_iter().rev().collect()));
    let secret = job_of(0).0;
    let start = |(rank, shown): (usize, &Vec<String>)| {
        let mut variables = variables(&secret, rank, 4);
        variables.push(("CUDA_VISIBLE_DEVICES", shown.join(",")));
        Process::start(&variables)
    };
    let mut processes: Vec<_> = shown.iter().enumerate().map(start).collect();
    all_do(&mut processes, "meet off");
    all_do(&mut processes, "reduce 30");
    assert!(processes.into_iter().all(Process::end));
}

/// As `CUDA_VISIBLE_DEVICES` takes it.
fn uuid(ordinal: i32) -> String {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the device is one of those that were counted, and `uuid` a place for the answer.
    unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, ordinal) }.result().unwrap();
    let hex: String = uuid.bytes.iter().map(|&byte| format!("{:02x}", byte as u8)).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// What all answer.
#[track_caller]
fn answers(processes: &mut [Process]) -> Vec<String> {
    processes.iter_mut().map(Process::answer).collect()
}

/// Field cases A10 (a user's public tracker), A11 (NVIDIA/nccl#2335) and A14 (sgl-project/sglang#4814): a rank's map of a peer
/// can't be made, or leads elsewhere. All are told which, the same; and then they meet again as if nothing had been.
#[test]
fn a_map_that_lies_is_named_on_every_rank() {
    let Some(_devices) = devices() else { return };
    let mut processes = job(4);
    for (lie, words) in [
        ("NoAccess", "Unmapped { rank: 2, peer: 1, reason: \"device "),
        ("Refused", "Unmapped { rank: 2, peer: 1,"),
        // Who waits for it says so, since it gets nothing.
        ("Mirror", "SelfTestFailed { rank: 1, peer: 2,"),
        ("StaleLines", "SelfTestFailed { rank: 0, peer: 2,"),
    ] {
        for (rank, process) in processes.iter_mut().enumerate() {
            process.tell(&if rank == 2 { format!("meet off 1 {lie}") } else { "meet off".into() });
        }
        let answers = answers(&mut processes);
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{lie}: {answers:?}");
        assert!(answers[0].starts_with(words) && answers[0].contains("Options::nccl"), "{lie}: {}", answers[0]);
    }
    all_do(&mut processes, "meet off");
    all_do(&mut processes, "reduce 12");
    assert!(processes.into_iter().all(Process::end));
}

/// Asked of the harness, which has asked the driver.
fn cuda_devices() -> usize {
    cuda::device_count().unwrap_or(0)
}

/// Field cases A10, A14 and A46 (sgl-project/sglang#25650): where NCCL can be had, it takes the calls of such ranks, and all know why:
/// losing the best way leads to the next, not to none.
#[test]
fn ranks_that_can_not_reach_each_other_leave_their_calls_to_nccl() {
    let Some(_devices) = devices() else { return };
    if std::env::var_os("PEERSUM_TEST_NCCL").is_none() {
        assert!(std::env::var_os("PEERSUM_REQUIRE_NCCL").is_none());
        return eprintln!("skipped: PEERSUM_TEST_NCCL names no NCCL");
    }
    for lie in ["NoAccess", "Refused", "Mirror"] {
        let mut processes = job(2);
        processes[0].tell(&format!("meet nccl 1 {lie}"));
        processes[1].tell("meet nccl");
        assert_eq!(answers(&mut processes), ["done", "done"], "{lie}");
        all_do(&mut processes, "nccl 40");
        // A peer that is gone ends the others' waits here too, though the kernels are NCCL's.
        processes[0].tell("nccl 4");
        std::thread::sleep(Duration::from_millis(100));
        processes[1].kill();
        let since = Instant::now();
        let answer = processes[0].answer();
        assert!(answer.starts_with("PeerGone { rank: 0, peer: 1 }"), "{lie}: {answer}");
        assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
        processes[0].tell("leave");
    }
}

/// When a process is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Moment {
    /// While the ranks meet, map each other's memory and test it.
    Meeting,
    BetweenCalls,
    InCalls,
    InReplays,
}

/// `PEERSUM_TEST_KILLS` processes, 8 unless set otherwise, one after another, at any moment. Each time the others are told, and a
/// new one in its place is met at once. One process lives through all, and keeps nothing.
#[test]
fn processes_are_killed_at_any_moment_and_replaced() {
    let Some(_devices) = devices() else { return };
    let kills = std::env::var("PEERSUM_TEST_KILLS").map_or(8, |kills| kills.parse().expect("a number of kills"));
    let files = || {
        let mut names: Vec<_> =
            std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let (files_before, mut random) = (files(), Random::new(kills as u64));
    let (secret, mut processes) = job_of(4);
    all_do(&mut processes, "meet off");
    all_do(&mut processes, "leave");
    let since = Instant::now();
    all_do(&mut processes, "meet off");
    let (meeting, mut met) = (since.elapsed(), true);
    let (mut slowest, mut too_late, mut kept) = (Duration::ZERO, 0, Vec::new());
    for kill in 0..kills {
        let moment = [Moment::Meeting, Moment::BetweenCalls, Moment::InCalls, Moment::InReplays][kill % 4];
        let victim = random.below(3);
        if moment == Moment::Meeting {
            all_do(&mut processes, "leave");
            processes.iter_mut().for_each(|process| process.tell("meet off"));
            std::thread::sleep(meeting.mul_f64(0.05 + 0.9 * random.below(1000) as f64 / 1000.0));
        } else {
            if !met {
                all_do(&mut processes, "meet off");
            }
            all_do(&mut processes, "reduce 12");
            match moment {
                Moment::InCalls => processes.iter_mut().for_each(|process| process.tell("reduce 1000000")),
                Moment::InReplays => processes.iter_mut().for_each(|process| process.tell("replay 1000000")),
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(random.below(40) as u64));
        }
        processes[victim].kill();
        let since = Instant::now();
        let told: Vec<_> = (0..4)
            .filter(|&rank| rank != victim)
            .map(|rank| {
                let process = &mut processes[rank];
                if moment == Moment::BetweenCalls {
                    process.tell("reduce 5");
                }
                let mut answer = process.answer();
                if moment == Moment::Meeting && answer == "done" {
                    too_late += 1;
                    process.tell("reduce 5");
                    answer = process.answer();
                }
                answer
            })
            .collect();
        slowest = slowest.max(since.elapsed());
        let gone = format!("peer: {victim} }}");
        let failed = format!("PeerFailed {{ peer: {victim},");
        for answer in &told {
            let named = answer.starts_with("PeerGone") && answer.contains(&gone);
            // Whoever waits for another than the one that is gone, hears it from that.
            let passed_on = moment == Moment::Meeting && (answer.starts_with(&failed) || answer.contains("PeerGone"));
            assert!(named || passed_on, "kill {kill} of rank {victim}, {moment:?}: {told:?}");
        }
        assert!(since.elapsed() < SOON, "kill {kill} of rank {victim}, {moment:?}: {:?}", since.elapsed());
        processes[victim] = member(&secret, victim, 4);
        for (rank, process) in processes.iter_mut().enumerate() {
            if rank != victim {
                process.tell("leave");
                assert_eq!(process.answer(), "done");
            }
        }
        all_do(&mut processes, "meet off");
        met = true;
        if kill % 4 == 3 {
            processes[3].tell("kept");
            kept.push(processes[3].answer());
        }
    }
    eprintln!(
        "{kills} kills: told within {slowest:?}; {too_late} answers were too late for a meeting of {meeting:?}; {kept:?}"
    );
    all_do(&mut processes, "reduce 30");
    assert!(processes.into_iter().all(Process::end));
    assert_eq!(kept.first(), kept.last());
    assert_eq!(files(), files_before);
}

/// The tests that threads pass, by processes, each a rank of every group, which run them in the same order: eight of them, or
/// `PEERSUM_TEST_PARTS`, and then no larger groups.
#[test]
fn the_tests_of_threads_pass_with_processes() {
    // Those whose groups a test makes itself, or that say what threads do.
    const THREADS_ALONE: [&str; 17] = [
        "faults::",
        "processes::",
        "nccl::a_",
        "nccl::an_",
        "nccl::graphs",
        "nccl::replays",
        "nccl::the_",
        "nccl::without",
        "edges::access",
        "edges::impossible_groups",
        "graphs::a_graph_owns_its_buffers",
        "graphs::replays_after_an_abort",
        "stress::a_rank_that_allocates",
        "stress::groups_leave_no_memory",
        "stress::the_same_device",
        "symmetric::memory",
        "failures::",
    ];
    let Some(_devices) = devices() else { return };
    let parts = std::env::var("PEERSUM_TEST_PARTS").map_or(8, |parts| parts.parse().expect("a number of ranks"));
    let job = std::env::temp_dir().join(format!("peersum-suite-{}", std::process::id()));
    let run = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--test-threads=1", "--nocapture"]);
        THREADS_ALONE.iter().for_each(|name| {
            command.args(["--skip", name]);
        });
        command.env("PEERSUM_TEST_PART", rank.to_string()).env("PEERSUM_TEST_JOB", &job);
        command.env("PEERSUM_TEST_PARTS", parts.to_string());
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", "8");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let processes: Vec<_> = (0..parts).map(run).collect();
    // Each is read by a thread of its own, so that none waits to be.
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            processes.into_iter().map(|child| scope.spawn(move || child.wait_with_output().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (rank, output) in outputs.iter().enumerate() {
        let text = String::from_utf8_lossy(&output.stdout);
        if let Some(result) = text.lines().find(|line| line.starts_with("test result")) {
            eprintln!("rank {rank}: {result}");
        }
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            panic!("rank {rank}: {}\n{text}\n{errors}", output.status);
        }
    }
}
