//! Ranks that are processes, which do as they are told, line by line. Where they share a device they should run under MPS;
//! without it they take turns, and everything takes longer.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use cudarc::driver::{CudaContext, DevicePtr};
use peersum::{
    Algorithm, DType, Meeting, ReduceOp,
    cuda::{self, Communicator, Verifier},
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
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let secret = format!("{} {}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let start = |rank: usize| {
        Process::start(&[
            ("PEERSUM_RANK", rank.to_string()),
            ("PEERSUM_WORLD_SIZE", world.to_string()),
            ("PEERSUM_SECRET", secret.clone()),
        ])
    };
    (0..world).map(start).collect()
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
            "meet" => self.meet(),
            "reduce" => self.reduce(rest.parse().unwrap()),
            "leave" => {
                self.rank = None;
                Ok(())
            }
            _ => Err(format!("'{line}' is not known")),
        }
    }

    fn meet(&mut self) -> Result<(), String> {
        let words = |error: &dyn std::fmt::Debug| format!("{error:?}");
        let meeting = Meeting::from_env().map_err(|error| words(&error))?;
        let count = cuda::device_count().map_err(|error| words(&error))?;
        let device = meeting.rank() * count.min(meeting.world_size()) / meeting.world_size();
        let communicator = Communicator::meet(&meeting, device, &harness::options()).map_err(|error| words(&error))?;
        let stream = CudaContext::new(device).unwrap().new_stream().unwrap();
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
        outcome.and_then(|()| communicator.check()).map_err(|error| format!("{error:?}"))?;
        let words = stream.clone_dtoh(words).unwrap();
        if words[1] == 0 { Ok(()) } else { Err(format!("{} elements of {calls} calls are wrong", words[1])) }
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
        all_do(&mut processes, "meet");
        all_do(&mut processes, &format!("reduce {}", 3 * harness::calls()));
        all_do(&mut processes, "leave");
        // And once more, where the group before met too.
        all_do(&mut processes, "meet");
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
        all_do(&mut processes, "meet");
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
        all_do(&mut processes, "meet");
        all_do(&mut processes, "reduce 12");
        assert!(processes.into_iter().all(Process::end));
    }
}

/// A rank that leaves in order is not taken for dead, but no call can be made without it.
#[test]
fn a_rank_that_left_is_named_at_the_next_call() {
    let Some(_devices) = devices() else { return };
    let mut processes = job(3);
    all_do(&mut processes, "meet");
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
