//! `peersum perf` from the outside, on the host backend.

use std::process::{Command, Output, Stdio};

mod printed;

use printed::{report, rows, stderr, stdout};
use serde_json::Value;

fn perf(flags: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peersum"))
        .arg("perf")
        .args(flags.split_whitespace())
        .output()
        .expect("the command starts")
}

#[test]
fn every_type_and_reduction_is_right_on_any_number_of_ranks() {
    for ranks in [1, 2, 3, 5] {
        let output = perf(&format!("--backend host -g {ranks} -b 2 -e 20K -f 20 -n 3 -d all -o all"));
        assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
        let rows = rows(&output);
        // 2, 40, 800 and 16000 bytes of three types and four reductions.
        assert_eq!(rows.len(), 4 * 3 * 4);
        for row in rows {
            assert_eq!(row.len(), 13);
            assert_eq!((row[8].as_str(), row[12].as_str()), ("0", "0"), "{row:?}");
            assert_eq!(row[7] == "N/A", ranks == 1, "{row:?}");
        }
        assert!(stdout(&output).contains("# Out of bounds values : 0 OK\n"));
    }
}

#[test]
fn unaligned_buffers_and_messages_beyond_the_staging_are_right() {
    for flags in ["-u 1", "-u 3 --staging 4K", "--staging 4K --algorithm two-shot"] {
        let output = perf(&format!("--backend host -g 3 -b 1002 -e 70K -f 7 -n 3 -d float,bf16 {flags}"));
        assert!(output.status.success(), "{flags}: {}{}", stdout(&output), stderr(&output));
    }
}

/// Field case A66 (pytorch/pytorch#131739): a figure without the way it was timed misleads.
#[test]
fn the_table_says_what_was_measured_and_how() {
    let output = perf("--backend host -g 2 -e 4K -n 2");
    let text = stdout(&output);
    for line in [
        "# nRanks 2 minBytes 1024 maxBytes 4096 step: 4(factor) warmup iters: 5 iters: 2 validation: 1 graph: 0 unalign: 0",
        "# Timing: blocking calls, by the host's clock; 2 calls; max over ranks",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong ",
    ] {
        assert!(text.lines().any(|printed| printed == line), "{line}\nis not in\n{text}");
    }
    assert!(text.contains("# Backend: host, threads of one process, one for each rank, "));
    assert!(text.contains("#  Rank  1 Group  0 Pid "));
    assert!(text.contains("# Plan: 1K to 4K: ") || text.contains("# Plan: 1K: "), "{text}");
    assert_eq!(stderr(&output), "", "nothing but the table, and that in a pipe without a bar");
    let row = text.lines().find(|line| !line.starts_with('#')).expect("a row");
    assert!(row.starts_with("        1024           256     float     sum      -1  "), "{row}");
}

#[test]
fn rows_are_held_against_what_a_probe_found() {
    let folder = tempfile::tempdir().unwrap();
    let [limits, report] = ["limits.toml", "report.json"].map(|name| folder.path().join(name));
    std::fs::write(&limits, "t0_us = 0.1\nL = 0.1\nF = 0.2\nB = 10\n").unwrap();
    let flags = format!(
        "--backend host -g 2 -b 1K -e 4K -n 2 --algorithm one-shot --limits {} -J {}",
        limits.display(),
        report.display()
    );
    let text = stdout(&perf(&flags));
    assert!(text.contains("# What a call must take, by launch, hops and bytes: T0 0.1, L 0.1, R 0.2,"), "{text}");
    assert!(text.contains("# Not measured: R 2 L"), "{text}");
    let rows: Vec<Vec<_>> = text
        .lines()
        .skip_while(|line| !line.ends_with("bound"))
        .skip(1)
        .take(4)
        .map(|line| line.trim_start_matches('#').split_whitespace().collect())
        .collect();
    // Launch, a hop, a fence, and 1024 or 4096 bytes at 10 GB/s.
    for (row, [bytes, limit]) in
        rows.iter().zip([["1024", "0.50"], ["1024", "0.50"], ["4096", "0.81"], ["4096", "0.81"]])
    {
        assert_eq!((row[0], row[5], row[6]), (bytes, "one-shot", limit), "{text}");
        let [time, ratio] = [row[4], row[7]].map(|figure| figure.parse::<f64>().unwrap());
        let limit: f64 = limit.parse().unwrap();
        assert!((time / limit / ratio - 1.0).abs() < 0.05, "{text}");
    }
    let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&report).unwrap()).unwrap();
    assert_eq!(report["results"][0]["limit"]["own_us"].as_f64().map(|us| (us * 100.0).round()), Some(50.0));

    let missing = perf("--backend host -g 2 --limits /nowhere/limits.json");
    assert!(!missing.status.success() && stderr(&missing).contains("/nowhere/limits.json"), "{}", stderr(&missing));
}

#[test]
fn without_a_gpu_the_host_runs_and_says_why() {
    let hide_gpus = |backend: &str| {
        Command::new(env!("CARGO_BIN_EXE_peersum"))
            .args(["perf", "-g", "2", "-e", "1K", "-n", "1", "--backend", backend])
            .env("CUDA_VISIBLE_DEVICES", "")
            .output()
            .expect("the command starts")
    };
    let auto = hide_gpus("auto");
    assert!(auto.status.success(), "{}", stderr(&auto));
    assert!(stdout(&auto).contains("Not GPUs, because "), "{}", stdout(&auto));
    let cuda = hide_gpus("cuda");
    assert_eq!(cuda.status.code(), Some(2));
    assert_eq!(stdout(&cuda), "");
    let said = stderr(&cuda);
    assert!(said.starts_with("peersum: error: --backend cuda: ") && said.len() > 50, "{said}");
}

/// Field case A67 (NVIDIA/nccl-tests#118, #176): what the error column means.
#[test]
fn a_flipped_bit_is_counted_told_and_fails_the_run() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("report.json");
    let output = perf(&format!(
        "--backend host -g 3 -b 50176 -e 401408 -f 2 -n 2 --inject-fault 2:200704 -J {}",
        file.display()
    ));
    assert_eq!(output.status.code(), Some(1));
    let wrong: Vec<_> = rows(&output).into_iter().map(|row| [0, 8, 12].map(|column| row[column].clone())).collect();
    assert_eq!(
        wrong,
        [["50176", "0", "0"], ["100352", "0", "0"], ["200704", "1", "0"], ["401408", "0", "0"]]
            .map(|row| row.map(str::to_owned))
    );
    let text = stdout(&output);
    let told: Vec<_> = text.lines().filter(|line| line.starts_with("# WRONG")).collect();
    assert_eq!(told.len(), 1);
    assert!(
        told[0].starts_with("# WRONG: 200704 B f32 sum out-of-place: 1 element; the first on rank 2, element 25088: "),
        "{}",
        told[0]
    );
    assert!(text.contains("# Out of bounds values : 1 FAILED\n"));

    let report = report(&file);
    assert_eq!(report["passed"], false);
    let failed: Vec<_> =
        report["results"].as_array().expect("records").iter().filter(|record| record["wrong_elements"] != 0).collect();
    assert_eq!(failed.len(), 1);
    assert_eq!((&failed[0]["bytes"], &failed[0]["placement"]), (&200_704.into(), &"out_of_place".into()));
    let first = &failed[0]["first_wrong"];
    assert_eq!((&first["rank"], &first["index"]), (&2.into(), &25088.into()));
    assert_ne!(first["expected_bits"], first["got_bits"]);
}

/// Field case A68 (NVIDIA/nccl-tests#318, microsoft/superbenchmark#675).
#[test]
fn the_report_holds_a_record_for_each_size_type_reduction_and_placement() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("a, \"quoted\" name.json");
    let output = Command::new(env!("CARGO_BIN_EXE_peersum"))
        .args(["perf", "--backend", "host", "-g", "2", "-e", "4K", "-n", "4", "-d", "f32,f16", "-o", "sum,max", "-J"])
        .arg(&file)
        .env("NCCL_DEBUG", "a \"quoted\", value")
        .env("SOME_PASSWORD", "secret")
        .output()
        .expect("the command starts");
    assert!(output.status.success(), "{}", stderr(&output));
    let report = report(&file);
    assert_eq!((&report["schema"], &report["schema_version"]), (&"peersum-perf".into(), &1.into()));
    assert_eq!((&report["passed"], &report["errors"]), (&true.into(), &serde_json::json!([])));
    assert_eq!(report["config"]["backend"], "host");
    assert_eq!(report["config"]["ranks"].as_array().map(Vec::len), Some(2));
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("# Backend: host, threads of one process, one for each rank")
    );
    assert_eq!(report["machine"]["environment"]["NCCL_DEBUG"], "a \"quoted\", value");
    assert!(!report.to_string().contains("secret"));

    let records = report["results"].as_array().expect("records");
    assert_eq!(records.len(), 2 * 2 * 2 * 2);
    for record in records {
        let number = |field: &str| record[field].as_f64().unwrap_or_else(|| panic!("{field} of {record}"));
        assert_eq!(record["timing"], "blocking");
        assert_eq!(number("bytes"), number("count") * if record["dtype"] == "f32" { 4.0 } else { 2.0 });
        let algbw = number("bytes") / number("time_us") / 1e3;
        assert!((number("algbw_gb_per_s") - algbw).abs() < 1e-9 * algbw);
        // 2(n-1)/n is 1 for two ranks.
        assert_eq!(record["algbw_gb_per_s"], record["busbw_gb_per_s"]);
        let spread = |field: &str| record["spread"][field].as_f64().expect("a number");
        assert_eq!(spread("samples"), 4.0);
        // Field case A69 (NVIDIA/nccl-tests#55): the spread, the number of calls, and how ranks ran, with each figure.
        let order = ["min_us", "p50_us", "p95_us", "p99_us", "max_us"].map(spread);
        assert!(order.is_sorted() && order[0] > 0.0, "{record}");
        assert_eq!(number("iterations") * number("replays"), 4.0);
        assert!((spread("mean_us") - number("time_us")).abs() < 1e-6 * number("time_us"), "{record}");
        assert!(record["plan"]["algorithm"].is_string());
        assert_eq!(record["wrong_elements"], 0);
    }
    assert!(!directory.path().join("a, \"quoted\" name.json.partial").exists());
}

#[test]
fn cycles_repeat_the_rows_and_are_told_apart() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("report.json");
    let output = perf(&format!("--backend host -g 2 -e 4K -n 2 -N 3 -J {}", file.display()));
    assert!(output.status.success(), "{}", stderr(&output));
    let sizes: Vec<_> = rows(&output).into_iter().map(|row| row[0].clone()).collect();
    assert_eq!(sizes, ["1024", "4096", "1024", "4096", "1024", "4096"]);
    assert!(stdout(&output).contains("# Cycle 2 of 3\n"));
    let report = report(&file);
    let cycles: Vec<_> =
        report["results"].as_array().expect("records").iter().map(|record| record["cycle"].clone()).collect();
    // Each size out of place and in place.
    assert_eq!(cycles, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]);
    assert_eq!((&report["config"]["run_cycles"], &report["config"]["timeout_s"]), (&3.into(), &10.0.into()));
    assert!(report["config"]["overlap"].is_null());
}

#[test]
fn what_has_no_meaning_is_not_a_number() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("report.json");
    let output = perf(&format!("--backend host -g 1 -e 1K -c 0 -n 2 -J {}", file.display()));
    assert!(output.status.success());
    let row = &rows(&output)[0];
    assert_eq!([7, 8, 11, 12].map(|column| row[column].as_str()), ["N/A"; 4]);
    assert!(stdout(&output).contains("# Out of bounds values : N/A (not checked)\n# Avg bus bandwidth    : N/A \n"));
    let record = &report(&file)["results"][0];
    assert!(record["busbw_gb_per_s"].is_null() && record["wrong_elements"].is_null());
}

/// Field case A65 (NVIDIA/nccl#1984): a reported time that depends on how many calls were timed.
#[test]
fn the_divisor_is_the_number_of_calls() {
    // One call of 4 MiB takes long enough for the clock: 1 and 8 calls must agree about it within a factor of 4.
    let time = |iterations: u32| {
        let output = perf(&format!("--backend host -g 2 -b 4M -e 4M -c 0 -n {iterations}"));
        rows(&output)[0][5].parse::<f64>().expect("a time")
    };
    let (one, many) = (time(1), time(8));
    assert!(many < one * 4.0 && one < many * 4.0, "{one} {many}");
}

#[test]
fn what_can_not_run_is_said_before_anything_is_measured() {
    for (flags, says) in [
        ("-b 2M -e 1M", "the first size (-b 2M) is greater than the last (-e 1M)"),
        ("-n 0", "-n 0"),
        ("-o prod", "sum, avg, max, min, all"),
        ("-d double", "float, half, bfloat16, all"),
        ("--algorithm ring", "one-shot, two-shot"),
        ("--backend host --blocks 100000 -e 1K", "blocks = 100000"),
        ("--backend host -G 5", "--cudagraph"),
        ("--backend host --devices 0", "--devices"),
        ("--backend host --threads 64", "--threads"),
        ("--backend host --overlap late", "--overlap"),
        (
            "--backend host --algorithm two-shot-direct",
            "two-shot-direct can't run this call: it needs tensors in symmetric memory",
        ),
        ("--backend host -R 2", "-R 2"),
        ("-N 0", "-N 0"),
        ("--backend host -g 100000", "100000"),
        ("--backend host -J out.txt", ".json"),
        ("--backend host -e 1K -J /nowhere/at/all.json", "/nowhere/at/all.json"),
        ("--backend host -T 0", "-T 0"),
        ("--backend host --compare ring", "there are one-shot"),
        ("--backend host --nccl-library /a", "--nccl-library"),
        ("--backend host --table none", "--table"),
        ("--backend host --deterministic", "--deterministic"),
        ("--backend host -e 1K --plot /nowhere/at/all.svg", "/nowhere/at/all.svg"),
        ("--backend host --plot all.png", ".svg"),
        ("-x 3", "-x"),
    ] {
        let output = perf(flags);
        assert_eq!(output.status.code(), Some(2), "{flags}: {}{}", stdout(&output), stderr(&output));
        assert!(stderr(&output).contains(says), "{flags}: {}", stderr(&output));
        assert_eq!(stdout(&output), "", "{flags}");
    }
}

#[test]
fn a_reader_that_goes_is_no_panic() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_peersum"))
        .args(["perf", "--backend", "host", "-g", "2", "-e", "4K", "-n", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the command ends");
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
}

/// Field case A64 (NVIDIA/nccl-tests#274): what bus bandwidth is, and what it is not.
#[test]
fn help_explains_the_bandwidths() {
    let output = perf("--help");
    assert!(output.status.success());
    for words in ["2(n-1)/n", "not measured traffic", "1 GB = 10^9 bytes", "--cudagraph", "--output_file", "--compare"]
    {
        assert!(stdout(&output).contains(words), "{words}");
    }
}

#[test]
fn a_run_that_fails_says_so_in_the_table_the_report_and_the_exit_code() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("report.json");
    // Nobody's machine has the memory.
    let output = perf(&format!("--backend host -g 2 -b 900G -e 900G -J {}", file.display()));
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("# ERROR: the buffers of 2 ranks need "), "{}", stdout(&output));
    assert!(stderr(&output).contains("lower -e"));
    let report = report(&file);
    assert_eq!((&report["passed"], report["errors"].as_array().map(Vec::len)), (&false.into(), Some(1)));
}

#[test]
fn candidates_are_timed_beside_the_choice_checked_and_reported() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("report.json");
    let output = perf(&format!(
        "--backend host -g 2 -b 1K -e 16K -n 4 -o sum,max --compare two-shot,nccl,one-shot-ll -J {}",
        file.display()
    ));
    assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let text = stdout(&output);
    for line in [
        "# Compared: two-shot, nccl, one-shot-ll, in 5 rounds in turns, medians of the rounds",
        "# Not compared: nccl, 1K to 16K: NCCL is for GPUs",
    ] {
        assert!(text.lines().any(|printed| printed == line), "{line}\nis not in\n{text}");
    }
    assert_eq!(text.matches("---------- two-shot -----------").count(), 2, "over each half: {text}");
    let rows = rows(&output);
    assert_eq!(rows.len(), 3 * 2);
    let number = |row: &[String], column: usize| row[column].parse::<f64>().expect("a figure");
    for row in &rows {
        // What says which row it is, then per half the choice's four figures and four of each other.
        assert_eq!(row.len(), 5 + 2 * (4 + 3 * 4), "{row:?}");
        for half in [5, 21] {
            let (time, other, ratio) = (number(row, half), number(row, half + 4), number(row, half + 7));
            assert!((time / other - ratio).abs() < 0.02 + 0.02 * ratio, "{row:?}");
            assert_eq!((row[half + 3].as_str(), row[half + 6].as_str(), row[half + 14].as_str()), ("0", "0", "0"));
            assert_eq!(row[half + 8..half + 12], ["-"; 4], "{row:?}");
        }
    }
    let report = report(&file);
    for record in report["results"].as_array().expect("records") {
        assert_eq!((&record["rounds"], record["samples_us"].as_array().map(Vec::len)), (&5.into(), Some(5 * 4)));
        let [two_shot, nccl, packets] = [0, 1, 2].map(|index| &record["compared"][index]);
        for (other, name) in [(two_shot, "two-shot"), (packets, "one-shot-ll")] {
            assert_eq!((&other["name"], &other["plan"]["algorithm"]), (&name.into(), &name.into()));
            assert_eq!((&other["wrong_elements"], &other["spread"]["samples"]), (&0.into(), &20.into()));
            let [time, of_other, ratio] = [&record["time_us"], &other["time_us"], &other["ratio"]]
                .map(|figure| figure.as_f64().expect("a figure"));
            assert!((time / of_other - ratio).abs() < 1e-9 * ratio);
        }
        assert_eq!((&nccl["unavailable"], &nccl["ratio"]), (&"NCCL is for GPUs".into(), &Value::Null));
        assert!(nccl.get("time_us").is_none());
    }
    assert_eq!(report["config"]["nccl"], Value::Null);
    assert_eq!(report["config"]["nccl_missing"], "NCCL is for GPUs");
}

#[test]
fn all_are_those_of_the_backend() {
    let output = perf("--backend host -g 3 -b 4K -e 4K -n 2 -c 0 --compare all");
    assert!(output.status.success(), "{}", stderr(&output));
    let compared = "# Compared: one-shot, two-shot, one-shot-pull, two-shot-pull, one-shot-ll, two-shot-ll, in ";
    assert!(stdout(&output).contains(compared), "{}", stdout(&output));
    assert!(!stdout(&output).contains("# Not compared"));
}

#[test]
fn a_flipped_bit_of_the_choice_is_not_laid_to_the_others() {
    let output = perf("--backend host -g 2 -b 4K -e 4K -n 2 --compare two-shot-pull --inject-fault 1:4096");
    assert_eq!(output.status.code(), Some(1));
    let rows = rows(&output);
    assert_eq!((rows[0][8].as_str(), rows[0][11].as_str(), rows[0][16].as_str()), ("1", "0", "0"), "{rows:?}");
    assert!(stdout(&output).contains("# Out of bounds values : 1 FAILED\n"));
}

#[test]
fn the_plot_shows_what_was_timed_and_where_the_choice_changes() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("all.svg");
    let output =
        perf(&format!("--backend host -g 4 -b 1K -e 64K -n 2 -c 0 -N 2 --compare one-shot --plot {}", file.display()));
    assert!(output.status.success(), "{}", stderr(&output));
    let svg = std::fs::read_to_string(&file).expect("the drawing is there");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    // Four ranks: a one-shot up to 32 KiB, whose border no size of the run has.
    for words in ["peersum", "one-shot", "two-shot-pull from 32 KiB", "busbw (GB/s)", "time of a call (µs)", "16 KiB"]
    {
        assert!(svg.contains(words), "{words}");
    }
    // In both panels a line for each, of four sizes whatever the cycles; and one for each in the legend.
    let lines: Vec<_> = svg
        .split("<polyline ")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once("points=\"")?.1.split_once('"')?.0.split_whitespace().count()))
        .collect();
    assert_eq!(lines.iter().filter(|&&points| points == 4).count(), 4, "{lines:?}");
    assert_eq!(std::fs::read_dir(directory.path()).expect("the directory").count(), 1, "nothing is left beside it");
}
