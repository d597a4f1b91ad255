//! Runs `peersum perf` in a process of its own: NCCL reads its variables once, when it starts.

use std::{
    env, fs,
    io::Read,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{Contender, Sizes, tiers::Tier};
use crate::model::runs::{Point, Run};

/// How often a child is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// What a contender's calls take in a tier, size by size.
pub(super) fn measure(tier: &Tier, contender: Contender, sizes: &Sizes, limit: Duration) -> Result<Vec<Point>> {
    let report = env::temp_dir().join(format!("peersum-paths-{}-{:x}.json", std::process::id(), nonce()));
    let outcome = child(tier, contender, sizes, limit, &report);
    let text = fs::read_to_string(&report);
    // There is none where the child failed early.
    let _ = fs::remove_file(&report);
    outcome?;
    let runs = Run::parse(&text.context("the run wrote no report")?)?;
    runs.into_iter().next().map(|run| run.points).context("the run measured nothing")
}

fn nonce() -> u64 {
    let mut bytes = [0; 8];
    // Names need to differ, no more: the process' number is in them too.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

fn child(tier: &Tier, contender: Contender, sizes: &Sizes, limit: Duration, report: &std::path::Path) -> Result<()> {
    let devices: Vec<_> = tier.devices.iter().map(ToString::to_string).collect();
    let mut command = Command::new(env::current_exe().context("this program's own file can't be found")?);
    command.args(["perf", "--backend", "cuda", "--devices", &devices.join(","), "--algorithm", contender.algorithm()]);
    command.args(["-b", &sizes.min.to_string(), "-e", &sizes.max.to_string(), "-f", &sizes.factor.to_string()]);
    command.args(["-n", "5", "-w", "2", "-G", "4", "-J"]).arg(report);
    command.envs(tier.path.variables().iter().copied());
    // Switches that sum are another path than the one that is measured here.
    if env::var_os("NCCL_NVLS_ENABLE").is_none() {
        command.env("NCCL_NVLS_ENABLE", "0");
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("can't start `peersum perf`")?;
    let mut errors = child.stderr.take().context("there is no pipe from the child")?;
    // Read meanwhile, or a child that says much would wait.
    let said = thread::spawn(move || {
        let mut text = Vec::new();
        let _ = errors.by_ref().take(1 << 20).read_to_end(&mut text);
        let _ = std::io::copy(&mut errors, &mut std::io::sink());
        String::from_utf8_lossy(&text).into_owned()
    });
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().context("can't wait for `peersum perf`")? {
            break status;
        }
        if began.elapsed() > limit {
            // It is this process' own child, and was not waited for.
            let _ = child.kill();
            let _ = child.wait();
            bail!("it took longer than {} s and was ended", limit.as_secs());
        }
        thread::sleep(LOOK);
    };
    if status.success() {
        return Ok(());
    }
    let said = said.join().unwrap_or_default();
    let line = said.lines().rev().find(|line| line.contains("error: ")).or(said.lines().next_back());
    match line {
        Some(line) => bail!("{}", line.trim_start_matches("peersum: error: ")),
        None => bail!("`peersum perf` ended with {status}"),
    }
}
