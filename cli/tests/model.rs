//! `peersum model` from the outside.

use std::process::{Command, Output};

use serde_json::Value;

fn peersum(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_peersum")).args(arguments).output().expect("the command starts")
}

fn model(flags: &str) -> Output {
    peersum(&[&["model"], &flags.split_whitespace().collect::<Vec<_>>()[..]].concat())
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("the output is UTF-8")
}

fn json(output: &Output) -> Value {
    let json: Value = serde_json::from_str(&stdout(output)).expect("it is JSON");
    assert_eq!((&json["schema"], &json["schema_version"]), (&"peersum-model".into(), &1.into()));
    json["tables"].clone()
}

#[test]
fn the_model_of_hops_has_every_algorithm_and_says_what_it_assumes() {
    let text = stdout(&model("--ranks 8 --bytes 64K,1M -L 0.5 -B 400 --t0 2"));
    assert!(text.contains("# Assumed, since not given: R 2 L, A 2 L, F 2 L\n"), "{text}");
    assert!(text.contains("T0 2, L 0.5, R 1, A 1, F 1 us, B 400 GB/s"), "{text}");
    let tables = json(&model("--ranks 8 --bytes 64K -L 0.5 -B 400 --t0 2 --json"));
    let row = &tables[0]["rows"][0];
    // T0 + L + 4/3 x 7 x 65536 / 400000
    let us = 2.0 + 0.5 + 4.0 / 3.0 * 7.0 * 65536.0 / 400e3;
    assert!((row["one_shot_ll_us"].as_f64().unwrap() - us).abs() < 1e-9, "{row}");
    assert_eq!((&row["best"], &row["bound_by"]), (&"two-shot-ll".into(), &"launch".into()));
    assert!(!stdout(&model("-L 1 -R 1 -A 1 -F 1 -B 1 --t0 1")).contains("Assumed"));
}

#[test]
fn parameters_come_from_a_file_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("machine.json");
    std::fs::write(&file, r#"{"t0_us": 1.5, "L": 0.7, "R": 1.3, "A": 1.4, "F": 0.8, "B": 370}"#).unwrap();
    let text = stdout(&peersum(&["model", "--parameters", file.to_str().unwrap(), "-B", "300"]));
    assert!(text.contains("T0 1.5, L 0.7, R 1.3, A 1.4, F 0.8 us, B 300 GB/s") && !text.contains("Assumed"), "{text}");
    std::fs::write(&file, r#"{"latency": 1}"#).unwrap();
    let output = peersum(&["model", "--parameters", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("unknown field `latency`"));
}

#[test]
fn alpha_and_beta_give_the_published_figures() {
    let flags = "--ranks 8 --alpha 2 --beta 350 --bytes 1000000 --json";
    let tables = json(&model(flags));
    let row = &tables[0]["rows"][0];
    for (name, us) in [("ring_us", 33.0), ("halving_doubling_us", 17.0), ("two_shot_us", 9.0), ("one_shot_us", 22.0)] {
        assert!((row[name].as_f64().unwrap() - us).abs() < 1e-9, "{name}: {row}");
    }
    // 7 steps, 3, 1; and what each rank has, or gets: 7/8 of the whole at 350 GB/s.
    let half = 875.0 / 350.0;
    for (name, us) in [("ring_us", 14.0 + half), ("halving_us", 6.0 + half), ("direct_us", 2.0 + half)] {
        assert!((tables[1]["rows"][0][name].as_f64().unwrap() - us).abs() < 1e-9, "{name}: {tables}");
    }
    assert!(tables[1]["title"].as_str().unwrap().starts_with("Reduce-scatter, and all-gather"), "{tables}");
    assert!((tables[2]["rows"][0]["tree_us"].as_f64().unwrap() - (6.0 + 3000.0 / 350.0)).abs() < 1e-9, "{tables}");
    assert_eq!(
        (&tables[2]["rows"][0]["best"], &tables[2]["rows"][0]["bound_by"]),
        (&"scatter-direct".into(), &"bytes".into())
    );
    assert_eq!(tables[3]["rows"][0]["two_level_us"], Value::Null);
    assert!(tables[0]["notes"][0].as_str().unwrap().contains("from 133333 bytes on"));
    let two = json(&model(&format!("{flags} --nodes 2 --alpha-between 15 --beta-between 20")));
    assert!((two[0]["rows"][0]["hierarchical_us"].as_f64().unwrap() / 45.3 - 1.0).abs() < 0.01, "{two}");
    for table in [1, 2] {
        assert!(two[table]["rows"][0]["hierarchical_us"].as_f64().unwrap() > 0.0, "{two}");
    }
    assert!(two[3]["rows"][0]["two_level_us"].as_f64().unwrap() > 0.0, "{two}");
}

#[test]
fn a_report_of_perf_is_held_against_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("perf.json");
    let path = file.to_str().unwrap();
    let perf = peersum(&["perf", "--backend", "host", "-g", "2", "-b", "1K", "-e", "4K", "-n", "2", "-J", path]);
    assert!(perf.status.success(), "{perf:?}");
    let tables = json(&peersum(&["model", "--results", path, "--json", "-L", "0.1", "-B", "10"]));
    let rows = tables[0]["rows"].as_array().unwrap();
    // Two sizes, out of place and in place.
    assert_eq!(rows.len(), 4, "{tables}");
    for row in rows {
        let (measured, limit) = (row["measured_us"].as_f64().unwrap(), row["limit_us"].as_f64().unwrap());
        assert!((row["over_limit"].as_f64().unwrap() - measured / limit).abs() < 1e-9, "{row}");
        assert!(row["predicted_us"].as_f64().unwrap() >= limit, "{row}");
    }
    assert!(tables[0]["notes"].to_string().contains("host backend"), "{tables}");
    for (text, why) in [
        ("{}", "no report of"),
        ("", "no report of"),
        (
            r#"{"schema":"peersum-topo","schema_version":1,"config":{"world_size":2,"backend":"cuda"},"results":[]}"#,
            "not of peersum-perf",
        ),
    ] {
        std::fs::write(&file, text).unwrap();
        let output = peersum(&["model", "--results", path]);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{output:?}");
    }
}

#[test]
fn what_can_not_be_is_said() {
    for (flags, why) in [
        ("-B 0", "0 GB/s is no bandwidth"),
        ("-L -1", "unexpected argument"),
        ("--ranks 1", "--ranks"),
        ("--alpha 2", "--beta"),
        ("--alpha 2 --beta 350 --nodes 2", "needs --alpha-between"),
        ("--bytes 8T", "'T'"),
    ] {
        let output = model(flags);
        assert_eq!(output.status.code(), Some(2), "{flags}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{flags}: {output:?}");
    }
}

#[test]
fn measurements_are_fitted_and_where_the_model_fails_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.csv");
    let mut text = String::from("algorithm,ranks,bytes,time_us\n");
    for shift in 10..28 {
        let bytes = 1u64 << shift;
        // Four times slower at one size, as if something had come in between.
        let times = if shift == 16 { 4.0 } else { 1.0 };
        text += &format!("two-shot,8,{bytes},{:.4}\n", times * (9.3 + 1.75 * bytes as f64 / 293e3));
    }
    std::fs::write(&file, text).unwrap();
    let path = file.to_str().unwrap();
    let plot = folder.path().join("fit.svg");
    let shown = stdout(&peersum(&["model", "--fit", path, "--plot", plot.to_str().unwrap()]));
    let svg = std::fs::read_to_string(&plot).unwrap();
    for part in ["measured", "predicted", "half of the time is alpha at", "busbw (GB/s)"] {
        assert!(svg.contains(part), "{part}");
    }
    assert!(shown.contains("The model fails at 64K"), "{shown}");
    let tables = json(&peersum(&["model", "--fit", path, "--json"]));
    let row = &tables[0]["rows"][10];
    let (measured, predicted) = (row["measured_us"].as_f64().unwrap(), row["predicted_us"].as_f64().unwrap());
    assert!((row["ratio"].as_f64().unwrap() - measured / predicted).abs() < 1e-9, "{row}");
    std::fs::write(&file, "hello").unwrap();
    let output = peersum(&["model", "--fit", path]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no measurement in it"));
}

#[test]
fn a_cluster_on_paper_has_a_plan() {
    let tables = json(&model("--plan --nodes 512 -g 8 -b 8K,8G --json"));
    let rows = tables[0]["rows"].as_array().unwrap();
    assert_eq!(rows[0]["bound_by"], "steps between nodes", "{tables}");
    assert!(rows[0]["best"].as_str().unwrap().starts_with("hierarchical"), "{tables}");
    assert!(rows[1]["time_us"].as_f64().unwrap() > 1000.0 * rows[0]["time_us"].as_f64().unwrap() / 10.0);
    let text = stdout(&model("--plan --nodes 512"));
    assert!(text.contains("(4096 in all)") && text.contains("Assumed, since not given: alpha 2"), "{text}");
    // One NIC for eight GPUs.
    let few = json(&model("--plan --nodes 4 --nics 1 --nic 25 -b 1G --json"));
    assert_eq!(few[0]["rows"][0]["bound_by"], "bytes between nodes");
    let one = json(&model("--plan -g 8 --alpha 2 --beta 350 -b 1000000 --json"));
    assert!((one[0]["rows"][0]["time_us"].as_f64().unwrap() - 9.0).abs() < 1e-9, "{one}");
    for (flags, why) in [
        ("--plan -g 1", "one rank has nobody"),
        ("--nodes 2", "has a meaning with"),
        ("--plan --nic 0 --nodes 2", "is no bandwidth"),
        ("--plan --nodes 2 --nic 50 --beta-between 20", "say the same"),
    ] {
        let output = model(flags);
        assert_eq!(output.status.code(), Some(2), "{flags}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{flags}: {output:?}");
    }
}

#[test]
fn the_model_is_drawn_with_where_the_best_changes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.svg");
    let path = file.to_str().unwrap();
    for (flags, parts) in [
        ("-g 8 --t0 2", &["two-shot-ll from", "one-shot-direct"][..]),
        (
            "--alpha 2 --beta 350",
            &["ring", "halving-doubling", "two-shot from", "Reduce-scatter", "Broadcast", "All-to-all"],
        ),
        ("--plan --nodes 64", &["busbw (GB/s)"]),
    ] {
        stdout(&model(&format!("{flags} --plot {path}")));
        let svg = std::fs::read_to_string(&file).unwrap();
        // The formula's is at 133 KB, which is between two sizes of the table.
        assert!(!svg.contains("two-shot from 256 KiB"), "{flags}");
        for part in parts.iter().chain(&["time of a call", "size of the message", "prefers-color-scheme:dark"]) {
            assert!(svg.contains(part), "{flags}: {part}");
        }
    }
}
