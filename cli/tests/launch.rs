//! `peersum launch` from the outside.

use std::{
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

const PATIENCE: Duration = Duration::from_secs(20);

fn launch(flags: &str, script: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peersum"));
    command.arg("launch").args(flags.split_whitespace()).args(["--", "sh", "-c", script]);
    command.stdin(Stdio::null());
    command
}

fn run(flags: &str, script: &str) -> Output {
    launch(flags, script).output().expect("the command starts")
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<_> = String::from_utf8(bytes.to_vec()).expect("UTF-8").lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

/// Started, with all that its ranks print until then: one line from each.
fn started(flags: &str, script: &str, ranks: usize) -> (Child, Vec<String>, BufReader<std::process::ChildStdout>) {
    let mut child = launch(flags, script).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut from = BufReader::new(child.stdout.take().unwrap());
    let mut lines = Vec::new();
    for _ in 0..ranks {
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        lines.push(line.trim_end().to_owned());
    }
    lines.sort();
    (child, lines, from)
}

fn send(to: &Child, signal: Signal) {
    kill_process(Pid::from_child(to), signal).unwrap();
}

/// The numbers behind the prefixes.
fn processes(lines: &[String]) -> Vec<Pid> {
    let number = |line: &String| line.rsplit_once(' ')?.1.parse().ok().and_then(Pid::from_raw);
    lines.iter().filter_map(number).collect()
}

#[track_caller]
fn assert_gone(processes: &[Pid]) {
    let until = Instant::now() + PATIENCE;
    for &process in processes {
        // One that nobody has reaped yet is as good as gone.
        let zombie = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero())).unwrap_or_default();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" Z"))
        };
        while test_kill_process(process).is_ok() && !zombie() {
            assert!(Instant::now() < until, "{process:?} is still there");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn code(mut child: Child) -> Option<i32> {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        assert!(Instant::now() < until, "the launcher does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranks_are_told_who_they_are_and_their_lines_say_whose_they_are() {
    let script = r#"echo "$PEERSUM_RANK/$PEERSUM_WORLD_SIZE $PEERSUM_LOCAL_RANK ${#PEERSUM_SECRET} $PEERSUM_GROUP"
        echo "to $PEERSUM_RANK" >&2; printf 'no end'"#;
    let output = run("-n 3 --group tp", script);
    assert_eq!(output.status.code(), Some(0));
    let told = ["[0] 0/3 0 64 tp", "[0] no end", "[1] 1/3 1 64 tp", "[1] no end", "[2] 2/3 2 64 tp", "[2] no end"];
    assert_eq!(lines(&output.stdout), told);
    assert_eq!(lines(&output.stderr), ["[0] to 0", "[1] to 1", "[2] to 2"]);
    let output = run("-n 2 --no-prefix", "echo $PEERSUM_SECRET");
    let secrets = lines(&output.stdout);
    assert_eq!((secrets.len(), secrets[0].len()), (2, 64));
    assert_eq!(secrets[0], secrets[1], "one for the job");
    assert_ne!(secrets[0], lines(&run("-n 1 --no-prefix", "echo $PEERSUM_SECRET").stdout)[0], "and each has its own");
}

#[test]
fn arguments_are_the_programs_own() {
    let output = Command::new(env!("CARGO_BIN_EXE_peersum"))
        .args(["launch", "-n", "1", "printf", "%s,", "-n", "--group", "a b", "--"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "[0] -n,--group,a b,--,\n");
}

#[test]
fn many_long_lines_come_whole() {
    let script = "i=0; while [ $i -lt 200 ]; do printf '%s-%01000d\n' $PEERSUM_RANK $i; i=$((i+1)); done";
    let lines = lines(&run("-n 4", script).stdout);
    assert_eq!(lines.len(), 800);
    for line in lines {
        let rank = &line[1..2];
        assert!(line.starts_with(&format!("[{rank}] {rank}-0000")) && line.len() == 1006, "{line}");
    }
}

#[test]
fn the_first_failure_counts_and_ends_the_others() {
    let started = Instant::now();
    let script = r#"case $PEERSUM_RANK in 1) sleep 0.2; exit 3;; 2) sleep 0.6; exit 4;; *) sleep 60;; esac"#;
    let output = run("-n 3 --grace 1", script);
    assert_eq!(output.status.code(), Some(3));
    assert!(started.elapsed() < PATIENCE);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("rank 1 ended with exit code 3"), "{told}");
    // Who ends by itself within the grace is not disturbed.
    let script = r#"trap 'echo disturbed' TERM; [ $PEERSUM_RANK = 1 ] && exit 9; sleep 0.3; echo in peace"#;
    let output = run("-n 2 --grace 15", script);
    assert_eq!((output.status.code(), lines(&output.stdout)), (Some(9), vec!["[0] in peace".into()]));
    let output = run("-n 2", "[ $PEERSUM_RANK = 0 ] || kill -9 $$");
    assert_eq!(output.status.code(), Some(128 + 9));
}

#[test]
fn who_does_not_want_to_end_is_killed() {
    let started = Instant::now();
    let script = r#"trap '' TERM INT; [ $PEERSUM_RANK = 0 ] && exit 5; while :; do sleep 0.05; done"#;
    let output = run("-n 3 --grace 0.3", script);
    assert_eq!(output.status.code(), Some(5));
    assert!(started.elapsed() < PATIENCE / 2);
    assert!(String::from_utf8(output.stderr).unwrap().contains("ranks [1, 2] don't end"));
}

#[test]
fn signals_reach_the_ranks_and_their_codes_come_back() {
    for (signal, name) in [(Signal::INT, "INT"), (Signal::TERM, "TERM"), (Signal::HUP, "HUP"), (Signal::QUIT, "QUIT")] {
        let script = format!("trap 'exit 7' {name}; echo ready $$; while :; do sleep 0.02; done");
        let (child, lines, _from) = started("-n 2", &script, 2);
        send(&child, signal);
        assert_eq!(code(child), Some(7), "{name}");
        assert_gone(&processes(&lines));
    }
    // One that ends nothing, and then one that does, by its default.
    let (child, lines, mut from) =
        started("-n 1", "trap 'echo heard' USR1; echo ready $$; while :; do sleep 0.02; done", 1);
    send(&child, Signal::USR1);
    let mut heard = String::new();
    from.read_line(&mut heard).unwrap();
    assert_eq!(heard, "[0] heard\n");
    send(&child, Signal::TERM);
    assert_eq!(code(child), Some(128 + 15));
    assert_gone(&processes(&lines));
}

#[test]
fn who_asks_twice_does_not_wait() {
    let (child, lines, _from) =
        started("-n 2 --grace 600", "trap '' INT; echo ready $$; while :; do sleep 0.02; done", 2);
    send(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(200));
    send(&child, Signal::INT);
    assert_eq!(code(child), Some(128 + 9));
    assert_gone(&processes(&lines));
}

#[test]
fn nothing_is_left_when_the_launcher_is_killed() {
    let (child, lines, mut from) = started("-n 3", "echo ready $$; exec sleep 600", 3);
    send(&child, Signal::KILL);
    assert_eq!(code(child), None);
    assert_gone(&processes(&lines));
    from.read_to_end(&mut Vec::new()).unwrap();
}

#[test]
fn nothing_is_left_of_what_ranks_started() {
    let output = run("-n 2", "sleep 600 & echo left $!");
    assert_eq!(output.status.code(), Some(0));
    let left = processes(&lines(&output.stdout));
    assert_eq!(left.len(), 2);
    assert_gone(&left);
}

#[test]
fn what_can_not_be_run_is_an_error() {
    let peersum = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_peersum")).arg("launch").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(peersum(&["-n", "2", "/no/such/program"]).contains("rank 0: /no/such/program can't be run"));
    assert!(peersum(&["-n", "0", "true"]).contains("-n 0"));
    assert!(peersum(&["-n", "1", "--grace", "-1", "true"]).contains("--grace"));
    peersum(&["-n", "1"]);
    assert!(!Path::new("/no/such/program").exists());
}

#[test]
fn ranks_read_nothing_and_may_print_when_nobody_reads() {
    assert_eq!(lines(&run("-n 2", "wc -c").stdout), ["[0] 0", "[1] 0"]);
    let mut child = launch("-n 2", "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done; exit 6")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(code(child), Some(6));
}
