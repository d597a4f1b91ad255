//! Ranks as processes that do as they are told, line by line, and say what came of it.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use half::{bf16, f16};
use peersum::{
    Meeting, Options, ReduceOp,
    host::{self, Communicator},
};

use crate::common::{Value, assert_bits, integer, integer_sum, references, wild};

/// Nothing that is not meant to takes as long.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// What is noticed at once is noticed within this, on a busy machine.
pub const AT_ONCE: Duration = Duration::from_secs(1);

/// A process that obeys. It is killed with the test.
pub struct Rank {
    child: Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
}

impl Rank {
    /// A process with these variables in its environment, and none that a launcher sets beside them.
    pub fn start(variables: &[(&str, &str)]) -> Rank {
        Rank::start_as(None, variables).expect("this executable can be started")
    }

    /// The same as another user.
    pub fn start_as(user: Option<u32>, variables: &[(&str, &str)]) -> std::io::Result<Rank> {
        Rank::start_under(&[], user, variables)
    }

    /// The same by a command that takes a program and its arguments.
    fn start_under(command: &[&str], user: Option<u32>, variables: &[(&str, &str)]) -> std::io::Result<Rank> {
        let program = std::env::current_exe().unwrap();
        let mut command = match command {
            [] => Command::new(program),
            [first, rest @ ..] => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
        };
        for name in
            ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PEERSUM_SECRET", "PEERSUM_GROUP"]
        {
            command.env_remove(name);
        }
        command.args(["--exact", "harness::obey", "--nocapture", "--test-threads=1"]);
        command.env("PEERSUM_TEST_OBEY", "1").envs(variables.iter().copied());
        if let Some(user) = user {
            command.uid(user);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (commands, lines) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()).lines());
        let (send, answers) = mpsc::channel();
        std::thread::spawn(move || {
            // What the test harness prints comes between.
            for line in lines.map_while(Result::ok) {
                if let Some((_, answer)) = line.split_once("@ ") {
                    let _ = send.send(answer.to_owned());
                }
            }
        });
        Ok(Rank { child, commands, answers })
    }

    /// The ranks of a job of so many, as `peersum launch` would start them.
    pub fn job(world: usize) -> Vec<Rank> {
        Rank::job_under(&[], world)
    }

    /// The same by a command that takes a program and its arguments.
    pub fn job_under(command: &[&str], world: usize) -> Vec<Rank> {
        let secret = secret();
        let world_size = world.to_string();
        let start = |rank: usize| {
            let rank = rank.to_string();
            let variables =
                [("PEERSUM_RANK", &rank[..]), ("PEERSUM_WORLD_SIZE", &world_size), ("PEERSUM_SECRET", &secret)];
            Rank::start_under(command, None, &variables).expect("this executable can be started")
        };
        (0..world).map(start).collect()
    }

    pub fn tell(&mut self, command: &str) {
        writeln!(self.commands.as_mut().unwrap(), "{command}").unwrap();
    }

    /// The next answer.
    #[track_caller]
    pub fn answer(&mut self) -> String {
        self.answer_within(PATIENCE).expect("an answer in time")
    }

    pub fn answer_within(&mut self, limit: Duration) -> Option<String> {
        self.answers.recv_timeout(limit).ok()
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// As `kill -9` does.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Lets it end by itself, and says whether it did so in peace.
    pub fn end(mut self) -> bool {
        self.commands.take();
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.success();
            }
            assert!(Instant::now() < until, "process {} does not end", self.id());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Of this test alone.
pub fn secret() -> String {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("{} {}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Tells all the same, and returns what each answers.
#[track_caller]
pub fn all(ranks: &mut [Rank], command: &str) -> Vec<String> {
    ranks.iter_mut().for_each(|rank| rank.tell(command));
    ranks.iter_mut().map(Rank::answer).collect()
}

/// Tells all the same, which all must do.
#[track_caller]
pub fn all_do(ranks: &mut [Rank], command: &str) {
    for (rank, answer) in all(ranks, command).into_iter().enumerate() {
        assert_eq!(answer, "done", "{command}, rank {rank}");
    }
}

/// The other side: does what it is told until there is nothing more.
#[test]
fn obey() {
    if std::env::var_os("PEERSUM_TEST_OBEY").is_none() {
        return;
    }
    let mut communicators: Vec<Communicator> = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match perform(&mut communicators, &words) {
            Ok(answer) => answer,
            Err(error) => format!("{error:?} | {error}"),
        };
        println!("@ {answer}");
    }
}

fn perform(communicators: &mut Vec<Communicator>, words: &[&str]) -> Result<String, peersum::Error> {
    let given = |name: &str| words.iter().find_map(|word| word.split_once('=').filter(|word| word.0 == name));
    let text = |name: &str| given(name).map(|(_, value)| value);
    let number = |name: &str| text(name).map(|value| value.parse::<usize>().unwrap());
    let millis = |name: &str, default| Duration::from_millis(number(name).unwrap_or(default) as u64);
    match words[0] {
        "meet" => {
            let algorithm = text("algorithm").map(|name| name.parse().unwrap());
            let mut options = Options::default().timeout(millis("timeout", 20_000));
            options.algorithm = algorithm;
            options.staging_bytes = number("staging").or(Some(1 << 16));
            options.self_test = number("untested").is_none();
            options.first_epoch = number("epoch").unwrap_or(0) as u32;
            let (rank, world) = (number("rank").unwrap_or(0), number("world").unwrap_or(1));
            let mut meeting = match text("at") {
                Some(path) if path.starts_with('/') => Meeting::at_path(path, rank, world),
                Some(address) => Meeting::at_address(address, rank, world),
                None => Meeting::from_env()?,
            };
            meeting = meeting.timeout(millis("wait", 20_000));
            if let Some(group) = text("group") {
                meeting = meeting.group(group);
            }
            if let Some(secret) = text("secret") {
                meeting = meeting.secret(secret);
            }
            if let Some(ranks) = text("among") {
                let ranks: Vec<_> = ranks.split(',').map(|rank| rank.parse().unwrap()).collect();
                meeting = meeting.among(&ranks)?;
            }
            communicators.push(Communicator::meet(&meeting, &options)?);
        }
        "reduce" => {
            let calls = number("calls").unwrap_or(1);
            let Some(communicator) = communicators.get_mut(number("of").unwrap_or(0)) else {
                return Ok("there is no such group".into());
            };
            for call in 0..calls {
                let count = number("count").unwrap_or(1 + call * 7 % 3000);
                reduce(communicator, call, count)?;
            }
        }
        // So many meetings, one after the other: the least and the middle of how long they took.
        "time" => {
            let mut options = Options::default().self_test(number("untested").is_none());
            options.staging_bytes = number("staging");
            let mut took = Vec::new();
            for time in 0..number("meetings").unwrap_or(1) {
                let meeting = Meeting::from_env()?.group(format!("{time} {}", options.self_test));
                let started = Instant::now();
                let communicator = Communicator::meet(&meeting, &options)?;
                took.push(started.elapsed());
                drop(communicator);
            }
            took.sort();
            return Ok(format!("{:?} {:?}", took[0], took[took.len() / 2]));
        }
        // So many calls, of other numbers each: who sees a peer's flag must see what the peer wrote before it.
        "litmus" => litmus(&mut communicators[0], number("rounds").unwrap_or(1000))?,
        // As processes of another user, or of a debugger's distrust, see it.
        "undumpable" => {
            // SAFETY: the call has no memory of this process to do with.
            assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }, 0);
        }
        // As containers do by default, and more.
        "filter" => filter(),
        // Descriptors that a program which this process started would have.
        "inherited" => {
            let inherited = |number: &i32| {
                // SAFETY: the number may be of no descriptor, which is an error of the call alone.
                let descriptor = unsafe { std::os::fd::BorrowedFd::borrow_raw(*number) };
                rustix::io::fcntl_getfd(descriptor).is_ok_and(|flags| !flags.contains(rustix::io::FdFlags::CLOEXEC))
            };
            return Ok((3..200).filter(inherited).count().to_string());
        }
        "values" => values(&mut communicators[0])?,
        "check" => communicators[number("of").unwrap_or(0)].check()?,
        "abort" => communicators[0].abort(),
        "leave" => communicators.clear(),
        // Without telling anybody, as a program that calls exit() in the middle.
        "forget" => communicators.drain(..).for_each(std::mem::forget),
        // Leaves all its descriptors to a child that lives on.
        "bequeath" => {
            for number in 3..100 {
                // SAFETY: the number may be of no descriptor, which is an error of the call alone; nothing is closed.
                let descriptor = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
                let _ = rustix::io::fcntl_setfd(descriptor, rustix::io::FdFlags::empty());
            }
            let mut heir = Command::new("sleep");
            heir.arg("20").stdin(Stdio::null()).stdout(Stdio::null());
            #[expect(clippy::zombie_processes, reason = "the test kills both, this process first")]
            let heir = heir.spawn().unwrap();
            return Ok(heir.id().to_string());
        }
        "epochs" => return Ok(format!("{:?}", communicators[0].epochs())),
        "open" => return Ok(format!("{}", std::fs::read_dir("/proc/self/fd").unwrap().count())),
        "mapped" => {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            return Ok(format!("{}", maps.lines().filter(|line| line.contains("memfd:peersum")).count()));
        }
        word => panic!("{word} is no command"),
    }
    Ok("done".into())
}

/// A call whose sums are exact in any order.
fn reduce(communicator: &mut Communicator, call: usize, count: usize) -> Result<(), peersum::Error> {
    let input: Vec<f32> = (0..count).map(|index| integer(call, communicator.rank(), index)).collect();
    let mut output = vec![f32::NAN; count];
    communicator.all_reduce(&input, &mut output, ReduceOp::Sum)?;
    for (index, sum) in output.into_iter().enumerate() {
        assert_eq!(sum, integer_sum(call, communicator.world_size(), index), "call {call}, element {index}");
    }
    Ok(())
}

/// Numbers that no other call of the last million has, in a payload of one line.
fn litmus(communicator: &mut Communicator, rounds: usize) -> Result<(), peersum::Error> {
    let (rank, world) = (communicator.rank(), communicator.world_size());
    let mut output = [0.0f32; 16];
    for round in 0..rounds {
        let value = |rank: usize| (round % (1 << 20) * 2 + rank) as f32;
        communicator.all_reduce(&[value(rank); 16], &mut output, ReduceOp::Sum)?;
        let sum: f32 = (0..world).map(value).sum();
        assert_eq!(output, [sum; 16], "round {round}");
    }
    Ok(())
}

/// Lets this process look into no other: what asks for another's descriptors or memory, and pidfds at all, is denied.
fn filter() {
    const DENIED: [libc::c_long; 5] = [
        libc::SYS_pidfd_open,
        libc::SYS_pidfd_getfd,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
    ];
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    // The number of the call.
    let mut program = vec![statement(load, 0)];
    for (index, call) in DENIED.into_iter().enumerate() {
        let is = statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, call as u32);
        program.push(libc::sock_filter { jt: (DENIED.len() - index) as u8, ..is });
    }
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32));
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which copy it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
    let own = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty());
    assert_eq!(own.unwrap_err(), rustix::io::Errno::PERM, "the filter filters");
}

/// All types and reductions, in place and out of place, against the reference's bits.
fn values(communicator: &mut Communicator) -> Result<(), peersum::Error> {
    fn of<T: Value>(communicator: &mut Communicator) -> Result<(), peersum::Error> {
        let (rank, world) = (communicator.rank(), communicator.world_size());
        for count in [1, 3, 64, 1237, 40_001] {
            let inputs: Vec<Vec<T>> = (0..world).map(|rank| wild(count as u64, rank, count)).collect();
            for op in ReduceOp::ALL {
                let expected = references(op, &inputs);
                let what = format!("{op} of {count} on rank {rank}");
                let mut output = vec![T::of_bits(0x4242_4242); count];
                communicator.all_reduce(&inputs[rank], &mut output, op)?;
                assert_bits(&what, &output, &expected);
                let mut buffer = inputs[rank].clone();
                communicator.all_reduce_in_place(&mut buffer, op)?;
                assert_bits(&what, &buffer, &expected);
            }
        }
        Ok(())
    }
    of::<f32>(communicator)?;
    of::<f16>(communicator)?;
    of::<bf16>(communicator)
}

/// As a command names them.
pub fn algorithms() -> impl Iterator<Item = String> {
    host::ALGORITHMS.into_iter().map(|algorithm| algorithm.to_string())
}
