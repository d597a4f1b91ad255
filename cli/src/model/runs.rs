//! Reads what was measured elsewhere: nccl-tests' and `peersum perf`'s tables and JSON, and CSV with a line of names.
//!
//! Names of hosts are counted and then forgotten.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// What a file has, run by run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Run {
    /// The tool, or the columns, that it is from.
    pub(crate) tool: String,
    /// Such as `all_reduce`; `None` if it isn't said.
    pub(crate) collective: Option<String>,
    /// What was measured, where a file has several: a library, an algorithm.
    pub(crate) label: String,
    pub(crate) ranks: Option<u32>,
    /// Machines; `None` if it isn't said.
    pub(crate) nodes: Option<u32>,
    /// The GPUs, where it is said.
    pub(crate) gpu: Option<String>,
    /// By size, each once.
    pub(crate) points: Vec<Point>,
    /// Lines or entries that look like a measurement and have no whole one.
    pub(crate) skipped: usize,
}

/// One size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) bytes: u64,
    pub(crate) us: f64,
    /// As the tool says it.
    pub(crate) bus_gb_per_s: Option<f64>,
    /// Elements; `None` if it was not checked.
    pub(crate) wrong: Option<u64>,
}

/// No more sizes, or runs, than a sane file has.
const MOST: usize = 100_000;

impl Run {
    /// All runs of a file.
    pub(crate) fn parse(text: &str) -> Result<Vec<Run>> {
        let start = text.trim_start_matches('\u{feff}').trim_start();
        let mut runs = if start.starts_with('{') {
            json(start)?
        } else if header(start).is_some() {
            csv(start)?
        } else {
            table(start)
        };
        for run in &mut runs {
            run.settle();
        }
        runs.retain(|run| !run.points.is_empty());
        ensure!(
            !runs.is_empty(),
            "there is no measurement in it: it must be what nccl-tests or `peersum perf` prints or writes as JSON, or CSV \
             whose first line names columns bytes and time_us"
        );
        Ok(runs)
    }

    /// Sorts by size; of several of one size the best time stays, and the most wrong elements.
    fn settle(&mut self) {
        self.points.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.us.total_cmp(&b.us)));
        let mut settled: Vec<Point> = Vec::new();
        for point in self.points.drain(..) {
            match settled.last_mut() {
                Some(last) if last.bytes == point.bytes => last.wrong = last.wrong.max(point.wrong),
                _ => settled.push(point),
            }
        }
        self.points = settled;
    }

    /// What a rank of it must send for each byte of the message, at least; `None` where that isn't known.
    pub(crate) fn bus_factor(&self) -> Option<f64> {
        let n = f64::from(self.ranks.filter(|&ranks| ranks > 1)?);
        match self.collective.as_deref() {
            None | Some("all_reduce") => Some(2.0 * (n - 1.0) / n),
            Some("all_gather" | "reduce_scatter" | "alltoall" | "gather" | "scatter") => Some((n - 1.0) / n),
            Some("broadcast" | "reduce" | "sendrecv") => Some(1.0),
            Some(_) => None,
        }
    }

    /// GB/s of a point: the tool's own, or by the formula.
    pub(crate) fn bus(&self, point: &Point) -> Option<f64> {
        point.bus_gb_per_s.or_else(|| Some(self.bus_factor()? * point.bytes as f64 / (point.us * 1e3)))
    }

    /// In a few words.
    pub(crate) fn title(&self) -> String {
        let mut title = self.tool.clone();
        let mut add = |text: String| {
            title.push_str(", ");
            title.push_str(&text);
        };
        add(self.collective.clone().unwrap_or("collective not said".into()));
        if !self.label.is_empty() {
            add(self.label.clone());
        }
        add(self.ranks.map_or("number of ranks not said".into(), |ranks| format!("{ranks} ranks")));
        if let Some(nodes) = self.nodes {
            add(format!("{nodes} node{}", if nodes == 1 { "" } else { "s" }));
        }
        title
    }
}

/// A number that a measurement can be.
fn positive(value: f64) -> Option<f64> {
    (value.is_finite() && value > 0.0).then_some(value)
}

/// nccl-tests' table, and this command's, which has the same columns.
fn table(text: &str) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut run = Run { tool: "a table".into(), ..Run::default() };
    let mut hosts = BTreeSet::new();
    let mut ranks = 0;
    // How many words a half of a line has: time, algbw, busbw, #wrong, and four more with -I.
    let mut half = 4;
    let finish = |run: &mut Run, ranks: &mut u32, hosts: &mut BTreeSet<String>, runs: &mut Vec<Run>| {
        let mut done = std::mem::replace(run, Run { tool: run.tool.clone(), ..Run::default() });
        if *ranks > 0 {
            done.ranks = Some(std::mem::take(ranks));
            done.nodes = Some(hosts.len().max(1) as u32);
        }
        hosts.clear();
        runs.push(done);
    };
    for line in text.lines() {
        // A log of mpirun may have its own words ahead of each line.
        let line = line.trim_start();
        if let Some(comment) = line.strip_prefix('#') {
            let words: Vec<_> = comment.split_whitespace().collect();
            match words[..] {
                ["nccl-tests", "version", version, ..] => run.tool = format!("nccl-tests {version}"),
                ["peersum", "version", version, ..] => run.tool = format!("peersum {version}"),
                ["Collective", "test", "starting:", name, ..] => {
                    if !run.points.is_empty() {
                        finish(&mut run, &mut ranks, &mut hosts, &mut runs);
                    }
                    run.collective = Some(name.trim_end_matches("_perf").to_owned());
                }
                ["Rank", number, ref rest @ ..] if number.parse::<u32>().is_ok() => {
                    if !run.points.is_empty() {
                        finish(&mut run, &mut ranks, &mut hosts, &mut runs);
                    }
                    ranks = ranks.saturating_add(1);
                    if let Some(on) = rest.iter().position(|word| *word == "on") {
                        hosts.insert(rest.get(on + 1).copied().unwrap_or_default().to_owned());
                    }
                    if let Some(at) = rest.iter().position(|word| word.starts_with('[') || word.starts_with("0x")) {
                        run.gpu = Some(rest[at + 1..].join(" ")).filter(|name| !name.is_empty());
                    }
                }
                ["size", "count", ..] => half = if words.contains(&"i_min") { 8 } else { 4 },
                _ => (),
            }
            continue;
        }
        let words: Vec<_> = line.split_whitespace().collect();
        let Some(Ok(bytes)) = words.first().map(|word| word.parse::<u64>()) else { continue };
        if words.len() < 9 || run.points.len() >= MOST {
            run.skipped += usize::from(words.len() > 2);
            continue;
        }
        // size, count, type, redop, root; then one half or two.
        let mut any = false;
        for half in words[5..].chunks(half) {
            let [us, _, bus, wrong, ..] = half else { continue };
            let number = |word: &str| word.parse::<f64>().ok().and_then(positive);
            let Some(us) = number(us).filter(|_| bytes > 0) else { continue };
            any = true;
            let wrong = wrong.parse::<f64>().ok().filter(|wrong| *wrong >= 0.0).map(|wrong| wrong.ceil() as u64);
            run.points.push(Point { bytes, us, bus_gb_per_s: number(bus), wrong });
        }
        run.skipped += usize::from(!any && bytes > 0);
    }
    finish(&mut run, &mut ranks, &mut hosts, &mut runs);
    runs
}

fn json(text: &str) -> Result<Vec<Run>> {
    let value: Value = serde_json::from_str(text).context("it is no JSON")?;
    match value.get("schema").and_then(Value::as_str) {
        Some("peersum-perf") => perf(&value),
        Some(other) => bail!("this is a report of {other}, which has no sizes and times of collectives"),
        None if value.get("nccl_version").is_some() || value["config"].get("nthreads").is_some() => nccl_tests(&value),
        None => bail!("this JSON is neither nccl-tests' nor `peersum perf`'s"),
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn perf(value: &Value) -> Result<Vec<Run>> {
    ensure!(
        value["schema_version"] == 1,
        "the report has schema_version {}, and 1 is what is read here",
        value["schema_version"]
    );
    let run = |label: &str| Run {
        tool: format!("peersum {}", value["peersum_version"].as_str().unwrap_or("")).trim_end().to_owned(),
        collective: Some("all_reduce".into()),
        label: label.to_owned(),
        ranks: value["config"]["world_size"].as_u64().and_then(|ranks| ranks.try_into().ok()),
        nodes: Some(1),
        gpu: value["machine"]["gpus"][0]["name"].as_str().map(str::to_owned),
        ..Run::default()
    };
    let mut runs: BTreeMap<String, Run> = BTreeMap::new();
    for row in list(&value["results"]).iter().take(MOST) {
        let bytes = row["bytes"].as_u64().filter(|&bytes| bytes > 0);
        let mut add = |label: &str, us: &Value, wrong: &Value| {
            let run = runs.entry(label.to_owned()).or_insert_with(|| run(label));
            match bytes.zip(us.as_f64().and_then(positive)) {
                Some((bytes, us)) => {
                    run.points.push(Point { bytes, us, bus_gb_per_s: None, wrong: wrong.as_u64() });
                }
                None => run.skipped += 1,
            }
        };
        // Another type or another way to time is another run.
        let of = ["dtype", "timing"].map(|key| row[key].as_str().unwrap_or("")).join(" ");
        add(&of, &row["time_us"], &row["wrong_elements"]);
        for other in list(&row["compared"]) {
            let name = ["algorithm", "name"].iter().find_map(|key| other[key].as_str());
            if let (Some(name), Some(_)) = (name, other["time_us"].as_f64()) {
                add(&format!("{of} {name}"), &other["time_us"], &other["wrong_elements"]);
            }
        }
    }
    Ok(runs.into_values().collect())
}

fn nccl_tests(value: &Value) -> Result<Vec<Run>> {
    let devices = list(&value["config"]["devices"]);
    let hosts: BTreeSet<_> = devices.iter().filter_map(|device| device["hostname"].as_str()).collect();
    let collective = list(&value["args"]).first().and_then(Value::as_str).and_then(|program| {
        let name = program.rsplit('/').next()?.strip_suffix("_perf")?;
        Some(name.to_owned())
    });
    let mut run = Run {
        tool: "nccl-tests".into(),
        collective,
        ranks: u32::try_from(devices.len()).ok().filter(|&ranks| ranks > 0),
        nodes: u32::try_from(hosts.len()).ok().filter(|&nodes| nodes > 0),
        gpu: devices.first().and_then(|device| device["device_info"].as_str()).map(str::to_owned),
        ..Run::default()
    };
    for row in list(&value["results"]).iter().take(MOST) {
        for half in ["out_of_place", "in_place"].iter().filter_map(|half| row.get(half)).filter(|half| half.is_object())
        {
            let us = half["time"].as_f64().or(half["cpu_time"].as_f64()).and_then(positive);
            match row["size"].as_u64().filter(|&bytes| bytes > 0).zip(us) {
                Some((bytes, us)) => run.points.push(Point {
                    bytes,
                    us,
                    bus_gb_per_s: half["bus_bw"].as_f64().and_then(positive),
                    wrong: half["nwrong"].as_u64(),
                }),
                None => run.skipped += 1,
            }
        }
    }
    Ok(vec![run])
}

/// The columns of a CSV file that are of use, by their places.
struct Columns {
    bytes: usize,
    us: usize,
    ranks: Option<usize>,
    nodes: Option<usize>,
    wrong: Option<usize>,
    bus: Option<usize>,
    labels: Vec<usize>,
}

fn header(text: &str) -> Option<Columns> {
    let line = text.lines().find(|line| !line.starts_with('#') && !line.trim().is_empty())?;
    let names = fields(line);
    let place = |known: &[&str]| {
        known.iter().find_map(|known| names.iter().position(|name| name.trim().eq_ignore_ascii_case(known)))
    };
    Some(Columns {
        bytes: place(&["bytes", "size_bytes", "size"])?,
        us: place(&["time_us", "median_us", "p50_us", "avg_us", "latency_us", "time(us)"])?,
        ranks: place(&["ranks", "world_size", "world", "nranks", "gpus"]),
        nodes: place(&["nodes"]),
        wrong: place(&["wrong", "wrong_elements", "#wrong"]),
        bus: place(&["busbw_gb_per_s", "busbw", "bus_bw"]),
        labels: ["system", "library", "kernel", "algorithm", "dtype", "memory"]
            .iter()
            .filter_map(|name| place(&[name]))
            .collect(),
    })
}

fn csv(text: &str) -> Result<Vec<Run>> {
    let columns = header(text).context("the first line names no columns")?;
    let mut runs: BTreeMap<(String, Option<u32>, Option<u32>), Run> = BTreeMap::new();
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    for line in lines.skip(1).take(MOST) {
        let fields = fields(line);
        let get = |place: Option<usize>| place.and_then(|place| fields.get(place)).map(|field| field.trim());
        let label: Vec<_> =
            columns.labels.iter().filter_map(|&place| get(Some(place))).filter(|text| !text.is_empty()).collect();
        let label = label.join(" ");
        // An empty kernel has no message.
        if label.split(' ').any(|word| word == "empty") {
            continue;
        }
        let number = |place| get(place).and_then(|field: &str| field.parse::<u32>().ok());
        let (ranks, nodes) = (number(columns.ranks), number(columns.nodes));
        let run = runs.entry((label.clone(), ranks, nodes)).or_insert_with(|| Run {
            tool: "CSV".into(),
            label,
            ranks,
            nodes,
            ..Run::default()
        });
        let bytes = get(Some(columns.bytes)).and_then(|field| field.parse::<u64>().ok()).filter(|&bytes| bytes > 0);
        let us = get(Some(columns.us)).and_then(|field| field.parse::<f64>().ok()).and_then(positive);
        match bytes.zip(us) {
            Some((bytes, us)) => run.points.push(Point {
                bytes,
                us,
                bus_gb_per_s: get(columns.bus).and_then(|field| field.parse::<f64>().ok()).and_then(positive),
                wrong: get(columns.wrong).and_then(|field| field.parse().ok()),
            }),
            None => run.skipped += 1,
        }
    }
    Ok(runs.into_values().collect())
}

/// The fields of a line, of which some may stand in quotes (RFC 4180). A quoted line break is none here.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let (mut quoted, mut characters) = (false, line.trim_end_matches('\r').chars().peekable());
    while let Some(character) = characters.next() {
        let last = fields.len() - 1;
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => {
                characters.next();
                fields[last].push('"');
            }
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(String::new()),
            character => fields[last].push(character),
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// As nccl-tests prints it.
    const TABLE: &str = "\
# nccl-tests version 2.19.6 nccl-headers=22907 nccl-library=22907
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 536870912 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  12345 on      nodea device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  12346 on      nodea device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  22345 on      nodeb device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  22346 on      nodeb device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    24.50    0.00    0.00       0    23.90    0.00    0.00       0
     8388608       2097152     float     sum      -1   120.34   69.71  104.56       0   118.90   70.55  105.83     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 52.5
";

    #[test]
    fn nccl_tests_table_is_read_and_hosts_are_counted() {
        let runs = Run::parse(TABLE).unwrap();
        assert_eq!(runs.len(), 1, "{runs:?}");
        let run = &runs[0];
        assert_eq!((run.tool.as_str(), run.collective.as_deref()), ("nccl-tests 2.19.6", Some("all_reduce")));
        assert_eq!((run.ranks, run.nodes, run.gpu.as_deref()), (Some(4), Some(2), Some("NVIDIA H100 80GB HBM3")));
        // The better half.
        assert_eq!(run.points[0], Point { bytes: 8, us: 23.9, bus_gb_per_s: None, wrong: Some(0) });
        assert_eq!((run.points[1].us, run.bus(&run.points[1])), (118.9, Some(105.83)));
        assert!(!format!("{run:?}").contains("nodea"));
    }

    /// Field case A68 (NVIDIA/nccl-tests#120): N/A, and words that are not there, break nothing.
    #[test]
    fn what_is_not_checked_or_cut_off_is_left_out() {
        let text =
            TABLE.replace("       0   118.90   70.55  105.83     N/A", "     N/A") + "    16777216       41943\n";
        let run = &Run::parse(&text).unwrap()[0];
        assert_eq!((run.points[1].wrong, run.points[1].us, run.skipped), (None, 120.34, 0));
        let run = &Run::parse(&text.replace("120.34", "nan")).unwrap()[0];
        assert_eq!((run.points.len(), run.skipped), (1, 1));
    }

    #[test]
    fn wrong_elements_of_either_half_stay() {
        let run =
            &Run::parse(&TABLE.replace("0.00    0.00       0    23.90", "0.00    0.00      17    23.90")).unwrap()[0];
        assert_eq!((run.points[0].us, run.points[0].wrong), (23.9, Some(17)));
    }

    #[test]
    fn several_runs_of_a_log_are_kept_apart() {
        let two = format!("{TABLE}{}", TABLE.replace("all_reduce_perf", "all_gather_perf"));
        let runs = Run::parse(&two).unwrap();
        assert_eq!(
            runs.iter().map(|run| run.collective.as_deref()).collect::<Vec<_>>(),
            [Some("all_reduce"), Some("all_gather")]
        );
        assert_eq!((runs[1].ranks, runs[1].points.len()), (Some(4), 2));
        assert_eq!(runs[1].bus_factor(), Some(0.75));
    }

    #[test]
    fn nccl_tests_json_is_read() {
        let text = r#"{"version": 3, "args": ["./build/all_reduce_perf", "-b", "8"], "env": ["SECRET=1"], "nccl_version": 22907,
            "config": {"nthreads": 1, "ngpus": 2, "devices": [
                {"rank": 0, "hostname": "a", "device_info": "NVIDIA L40S"}, {"rank": 1, "hostname": "a", "device_info": "NVIDIA L40S"}]},
            "results": [{"size": 1024, "out_of_place": {"time": 10.5, "alg_bw": 0.1, "bus_bw": 0.1, "nwrong": null},
                "in_place": {"time": "nan", "nwrong": 3}}]}"#;
        let run = &Run::parse(text).unwrap()[0];
        assert_eq!((run.ranks, run.nodes, run.skipped), (Some(2), Some(1), 1));
        assert_eq!(run.points, [Point { bytes: 1024, us: 10.5, bus_gb_per_s: Some(0.1), wrong: None }]);
    }

    #[test]
    fn csv_is_read_by_the_names_of_its_columns_and_the_best_grid_counts() {
        let text = "# a comment\nsystem,kernel,ranks,bytes,median_us,min_us,wrong\n\
            vllm,\"one, stage\",2,8192,2.52,2.47,0\nvllm,\"one, stage\",2,8192,2.40,2.30,1\nempty,empty,2,0,0.5,0.5,0\n\
            vllm,two_stage,2,8192,x,3.63,0\nnccl,,4,8192,9,9,0\n";
        let runs = Run::parse(text).unwrap();
        assert_eq!(runs.len(), 2, "{runs:?}");
        assert_eq!(
            (runs[1].label.as_str(), runs[1].points[0].us, runs[1].points[0].wrong),
            ("vllm one, stage", 2.4, Some(1))
        );
        assert_eq!((runs[0].label.as_str(), runs[0].ranks), ("nccl", Some(4)));
    }

    #[test]
    fn what_has_no_measurement_is_an_error() {
        for text in
            ["", "hello\n", "# Using devices\n", "{}", "[1]", "bytes,time_us\n", r#"{"schema": "peersum-topo"}"#]
        {
            assert!(Run::parse(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_breaks_it(text in "(# Rank |# size count |# Collective test starting: |[0-9]{1,20} |[0-9]{1,6}\\.[0-9]{2} |float |sum |-1 |N/A |nan |inf |bytes,|time_us\n|,|\"|\\{|\n|\\PC){0,60}") {
            if let Ok(runs) = Run::parse(&text) {
                for run in &runs {
                    prop_assert!(run.points.iter().all(|point| point.us > 0.0 && point.bytes > 0));
                    prop_assert!(run.points.windows(2).all(|pair| pair[0].bytes < pair[1].bytes));
                }
            }
        }

        #[test]
        fn no_cut_breaks_a_table(at in 0..TABLE.len(), cut in 0..200usize) {
            prop_assume!(TABLE.is_char_boundary(at));
            let text = format!("{}{}", &TABLE[..at], &TABLE[(at + cut).min(TABLE.len())..]);
            if let Ok(runs) = Run::parse(&text) {
                prop_assert!(runs.iter().all(|run| run.points.iter().all(|point| point.us > 0.0)));
            }
        }
    }
}
