//! `peersum perf` with ranks that are processes, on the host backend.

use std::{
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

mod printed;

use printed::{report, rows, stderr, stdout};

const PATIENCE: Duration = Duration::from_secs(60);

/// One rank of a job, as a launcher would start it.
fn rank(rank: usize, world: usize, secret: &str, flags: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_peersum"))
        .args(["perf", "--backend", "host"])
        .args(flags.split_whitespace())
        .envs([("PEERSUM_RANK", rank.to_string()), ("PEERSUM_WORLD_SIZE", world.to_string())])
        .envs([("PEERSUM_LOCAL_RANK", rank.to_string()), ("PEERSUM_SECRET", secret.to_owned())])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts")
}

/// All ranks of a job, and what each printed and ended with.
fn job(world: usize, secret: &str, flags: &str) -> Vec<Output> {
    let ranks: Vec<_> = (0..world).map(|number| rank(number, world, secret, flags)).collect();
    ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect()
}

fn codes(outputs: &[Output]) -> Vec<Option<i32>> {
    outputs.iter().map(|output| output.status.code()).collect()
}

#[test]
fn rank_0_alone_prints_what_all_have_found() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let flags = format!("-b 2 -e 20K -f 20 -n 3 -d all -o all -I 1 -J {}", file.display());
    let outputs = job(4, "prints", &flags);
    assert_eq!(codes(&outputs), [Some(0); 4], "{outputs:?}");
    assert!(outputs.iter().all(|output| output.stderr.is_empty()), "{outputs:?}");
    assert!(outputs[1..].iter().all(|output| output.stdout.is_empty()), "{outputs:?}");
    let text = stdout(&outputs[0]);
    assert!(text.contains("# nRanks 4 "), "{text}");
    assert!(text.contains("# Backend: host, processes, one for each rank, "), "{text}");
    let rows = rows(&outputs[0]);
    assert_eq!(rows.len(), 4 * 3 * 4);
    assert!(rows.iter().all(|row| (&row[8][..], &row[16][..]) == ("0", "0")), "{text}");

    let report = report(&file);
    let config = &report["config"];
    assert_eq!(
        (&report["passed"], &config["ranks_are"], &config["world_size"]),
        (&true.into(), &"processes".into(), &4.into())
    );
    let mut processes: Vec<_> = (0..4).map(|rank| config["ranks"][rank]["process_id"].as_u64().unwrap()).collect();
    assert_eq!(config["process_id"], processes[0]);
    for line in processes.iter().map(|process| format!(" Pid {process:6} on ")) {
        assert!(text.contains(&line), "{line} is not in {text}");
    }
    processes.sort_unstable();
    processes.dedup();
    assert_eq!(processes.len(), 4);
    for result in report["results"].as_array().unwrap() {
        assert_eq!(result["rank_time_us"].as_array().unwrap().len(), 4);
        assert_eq!(result["samples_us"].as_array().unwrap().len(), 3);
    }
}

#[test]
fn every_algorithm_is_compared_and_right() {
    let outputs = job(3, "compares", "-b 1002 -e 70K -f 7 -n 2 -u 1 --staging 8K --compare all");
    assert_eq!(codes(&outputs), [Some(0); 3], "{outputs:?}");
    let others = peersum::host::ALGORITHMS.len();
    for row in rows(&outputs[0]) {
        assert_eq!(row.len(), 5 + 2 * (4 + 4 * others));
        assert!(!row.contains(&"-".to_owned()), "{row:?}");
        for half in 0..2 {
            let first = 5 + half * (4 + 4 * others);
            let wrong = [first + 3].into_iter().chain((0..others).map(|other| first + 4 + 4 * other + 2));
            assert!(wrong.into_iter().all(|column| row[column] == "0"), "{row:?}");
        }
    }
}

/// Field case A67 (NVIDIA/nccl-tests#118, #176): what the error column means.
#[test]
fn a_wrong_element_on_any_rank_is_counted_told_and_fails_every_rank() {
    for wrong in [0, 2] {
        let flags = format!("-b 512 -e 4096 -f 2 -n 2 --inject-fault {wrong}:1024");
        let outputs = job(3, &format!("wrong on {wrong}"), &flags);
        assert_eq!(codes(&outputs), [Some(1); 3], "{outputs:?}");
        let counts: Vec<_> = rows(&outputs[0]).into_iter().map(|row| row[8].clone()).collect();
        assert_eq!(counts, ["0", "1", "0", "0"]);
        let text = stdout(&outputs[0]);
        assert!(text.contains(&format!("1 element; the first on rank {wrong}, element 128: ")), "{text}");
        assert!(text.contains("# Out of bounds values : 1 FAILED"), "{text}");
    }
}

#[test]
fn a_rank_that_is_killed_is_named_and_the_others_end_at_once() {
    let mut ranks: Vec<_> = (0..3).map(|number| rank(number, 3, "killed", "-b 64K -e 64K -n 1000 -N 1000")).collect();
    std::thread::sleep(Duration::from_millis(1500));
    ranks[1].kill().unwrap();
    let since = Instant::now();
    let outputs: Vec<_> = ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect();
    assert!(since.elapsed() < PATIENCE / 4, "{:?}", since.elapsed());
    assert_eq!(codes(&outputs), [Some(1), None, Some(1)], "{outputs:?}");
    let said: String = [&outputs[0], &outputs[2]].into_iter().map(stderr).collect();
    assert!(said.contains("rank 1"), "{said}");
    assert!(stdout(&outputs[0]).contains("# ERROR: "), "{outputs:?}");
}

#[test]
fn what_can_not_be_fails_every_rank_with_the_same_code() {
    for (flags, words) in [
        ("-g 2", "-g 2: the launcher started 2 processes"),
        ("--algorithm two-shot-direct", "two-shot-direct"),
        ("--inject-fault 2:8", "there is no rank 2 of 2"),
        ("-N 0", "-N 0"),
    ] {
        let outputs = job(2, flags, &format!("-e 1K -n 1 {flags}"));
        assert_eq!(codes(&outputs), [Some(2); 2], "{flags}: {outputs:?}");
        assert!(outputs.iter().any(|output| stderr(output).contains(words)), "{flags}: {outputs:?}");
    }
    // What rank 0 alone can't do.
    let outputs = job(2, "no folder", "-e 1K -n 1 -J /no/such/folder/report.json");
    assert_eq!(codes(&outputs), [Some(2), Some(1)], "{outputs:?}");
    assert!(stderr(&outputs[0]).contains("can't write") && stderr(&outputs[1]).is_empty(), "{outputs:?}");
}

#[test]
fn two_jobs_at_once_do_not_mix_and_a_launcher_may_be_ignored() {
    let jobs = [("one", 2), ("other", 3)];
    let threads = jobs.map(|(secret, world)| std::thread::spawn(move || job(world, secret, "-e 4K -n 2")));
    for (thread, (_, world)) in threads.into_iter().zip(jobs) {
        let outputs = thread.join().unwrap();
        assert_eq!(codes(&outputs), vec![Some(0); world], "{outputs:?}");
        assert!(stdout(&outputs[0]).contains(&format!("# nRanks {world} ")));
    }
    let alone = rank(1, 2, "alone", "-e 1K -n 1 -g 3 --ranks-are threads").wait_with_output().unwrap();
    assert!(alone.status.success() && stdout(&alone).contains("# nRanks 3 "), "{alone:?}");
    // One rank is no job.
    let alone = rank(0, 1, "alone", "-e 1K -n 1 -g 3").wait_with_output().unwrap();
    assert!(alone.status.success() && stdout(&alone).contains("threads of one process"), "{alone:?}");
}

#[test]
fn it_runs_under_the_launcher_of_this_command() {
    let peersum = env!("CARGO_BIN_EXE_peersum");
    let launch = |flags: &str| {
        let mut command = Command::new(peersum);
        command.args(["launch", "-n", "4", "--no-prefix", "--", peersum, "perf", "--backend", "host"]);
        command.args(flags.split_whitespace()).output().expect("the command starts")
    };
    let output = launch("-e 4K -n 2");
    assert!(output.status.success(), "{output:?}");
    assert_eq!((rows(&output).len(), stdout(&output).matches("# nRanks 4 ").count()), (2, 1));
    let output = launch("-e 1K -n 2 --inject-fault 3:1024");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}
