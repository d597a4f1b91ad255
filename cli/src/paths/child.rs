//! Runs `peersum perf` in a process of its own: NCCL reads its variables once, when it starts.

use std::{
    env, fs,
    io::Read,
    path::Path,
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
pub(super) fn measure(
    tier: &Tier,
    contender: Contender,
    sizes: &Sizes,
    limit: Duration,
    library: Option<&Path>,
) -> Result<Vec<Point>> {
    let report = env::temp_dir().join(format!("peersum-paths-{}-{:x}.json", std::process::id(), nonce()));
    let mut command = command(tier, contender, sizes, library)?;
    command.arg("-J").arg(&report);
    let outcome = run(command, limit);
    let text = fs::read_to_string(&report);
    // There is none where the child failed early.
    let _ = fs::remove_file(&report);
    of_report(outcome, text.context("the run wrote no report"))
}

/// The points of a run. One that failed since sums were wrong has some, which say so.
fn of_report(outcome: Result<()>, text: Result<String>) -> Result<Vec<Point>> {
    let points = text.and_then(|text| {
        let run = Run::parse(&text)?.into_iter().next();
        run.map(|run| run.points).context("the run measured nothing")
    });
    match (outcome, points) {
        (Ok(()), points) => points,
        (Err(_), Ok(points)) if points.iter().any(|point| point.wrong.unwrap_or(0) > 0) => Ok(points),
        (Err(error), _) => Err(error),
    }
}

fn nonce() -> u64 {
    let mut bytes = [0; 8];
    // Names need to differ, no more: the process' number is in them too.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

/// The child, but for where it writes.
fn command(tier: &Tier, contender: Contender, sizes: &Sizes, library: Option<&Path>) -> Result<Command> {
    let devices: Vec<_> = tier.devices.iter().map(ToString::to_string).collect();
    let mut command = Command::new(env::current_exe().context("this program's own file can't be found")?);
    command.args(["perf", "--backend", "cuda", "--devices", &devices.join(","), "--algorithm", contender.algorithm()]);
    command.args(["-b", &sizes.min.to_string(), "-e", &sizes.max.to_string(), "-f", &sizes.factor.to_string()]);
    command.args(["-n", "5", "-w", "2", "-G", "4"]);
    if let Some(library) = library.filter(|_| contender == Contender::Nccl) {
        command.arg("--nccl-library").arg(library);
    }
    command.envs(tier.path.variables().iter().copied());
    // Switches that sum are another path than the one that is measured here.
    if env::var_os("NCCL_NVLS_ENABLE").is_none() {
        command.env("NCCL_NVLS_ENABLE", "0");
    }
    Ok(command)
}

fn run(mut command: Command, limit: Duration) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::tiers::Path as Between;

    #[test]
    fn paths_of_nccl_s_are_switched_off_and_nvls_is_never_on_by_itself() {
        let of = |path, contender| {
            let tier = Tier { name: String::new(), devices: vec![2, 5], connection: None, path, theory: None };
            let sizes = Sizes { min: 1 << 20, max: 1 << 22, factor: 2 };
            let command = command(&tier, contender, &sizes, Some(Path::new("/opt/nccl"))).unwrap();
            let text = |of: &std::ffi::OsStr| of.to_string_lossy().into_owned();
            let variables: Vec<_> = command
                .get_envs()
                .filter_map(|(name, value)| Some(format!("{}={}", text(name), text(value?))))
                .collect();
            (variables, command.get_args().map(text).collect::<Vec<_>>().join(" "))
        };
        let (variables, flags) = of(Between::Network, Contender::Nccl);
        for variable in ["NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1"] {
            assert!(variables.iter().any(|set| set == variable), "{variables:?}");
        }
        // Unless the environment of the tests has it.
        assert!(env::var_os("NCCL_NVLS_ENABLE").is_some() || variables.iter().any(|set| set == "NCCL_NVLS_ENABLE=0"));
        assert!(flags.contains("--devices 2,5 --algorithm nccl -b 1048576 -e 4194304 -f 2"), "{flags}");
        assert!(flags.ends_with("--nccl-library /opt/nccl"), "{flags}");
        let (variables, flags) = of(Between::P2p, Contender::Peersum);
        assert!(!variables.iter().any(|set| set.contains("DISABLE")), "{variables:?}");
        assert!(flags.contains("--algorithm two-shot") && !flags.contains("nccl"), "{flags}");
    }

    #[test]
    fn a_run_whose_sums_are_wrong_has_figures_that_say_so() {
        let text = |wrong: u64| Ok(format!("bytes,ranks,time_us,wrong\n1048576,2,10,{wrong}\n"));
        let failed = || Err(anyhow::anyhow!("exit status: 1"));
        assert_eq!(of_report(failed(), text(3)).unwrap()[0].wrong, Some(3));
        assert!(of_report(failed(), text(0)).is_err());
        assert!(of_report(failed(), Err(anyhow::anyhow!("no file"))).unwrap_err().to_string().contains("status"));
        assert_eq!(of_report(Ok(()), text(0)).unwrap().len(), 1);
        assert!(of_report(Ok(()), Ok("hello".into())).is_err());
    }

    #[test]
    fn a_child_that_fails_says_why_and_one_that_hangs_is_ended() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        let long = Duration::from_secs(30);
        assert!(run(shell("exit 0"), long).is_ok());
        let error = |command, limit| run(command, limit).unwrap_err().to_string();
        assert_eq!(error(shell("echo noise >&2; echo 'peersum: error: no NCCL' >&2; exit 2"), long), "no NCCL");
        assert!(error(shell("exit 3"), long).contains("exit status: 3"));
        let began = Instant::now();
        assert!(error(shell("exec sleep 60"), Duration::from_millis(100)).contains("was ended"));
        assert!(began.elapsed() < Duration::from_secs(20));
    }
}
