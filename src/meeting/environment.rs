//! What launchers tell a process about the ranks of its job, by variables of the environment.

use super::secret::Secret;
use crate::{Error, Result};

/// How a launcher tells.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    /// The first that is set counts.
    world: &'static [&'static str],
    local_rank: &'static str,
    /// Ranks on this machine, where it is told.
    local_world: Option<&'static str>,
}

/// From the innermost to the outermost, where one was started by another.
const LAUNCHERS: [Launcher; 5] = [
    Launcher {
        name: "peersum launch",
        rank: "PEERSUM_RANK",
        world: &["PEERSUM_WORLD_SIZE"],
        local_rank: "PEERSUM_LOCAL_RANK",
        local_world: None,
    },
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world: &["WORLD_SIZE"],
        local_rank: "LOCAL_RANK",
        local_world: Some("LOCAL_WORLD_SIZE"),
    },
    Launcher {
        name: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
    },
    Launcher {
        name: "MPICH",
        rank: "PMI_RANK",
        world: &["PMI_SIZE"],
        local_rank: "MPI_LOCALRANKID",
        local_world: Some("MPI_LOCALNRANKS"),
    },
    Launcher {
        // A batch script has SLURM_PROCID and SLURM_NTASKS too, and is no rank of anything.
        name: "Slurm's srun",
        rank: "SLURM_PROCID",
        world: &["SLURM_STEP_NUM_TASKS"],
        local_rank: "SLURM_LOCALID",
        local_world: None,
    },
];

/// What tells a job, and a restart of it, from others on the machine. Alike on all of its ranks.
const JOB: [&str; 11] = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PMI_JOBID",
    "I_MPI_HYDRA_UUID",
];

/// Those of them that no other job has at the same time, each by itself.
const OF_ONE_JOB: [&str; 6] =
    ["MASTER_PORT", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "I_MPI_HYDRA_UUID"];

const SECRET: &str = "PEERSUM_SECRET";
const GROUP: &str = "PEERSUM_GROUP";

/// What was told.
#[derive(Debug, PartialEq)]
pub(super) struct Told {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) local_rank: Option<usize>,
    /// Why the job is known to be on more than one machine.
    pub(super) elsewhere: Option<String>,
    pub(super) group: String,
    pub(super) secret: Option<Secret>,
    pub(super) job: Job,
}

/// What tells this job from others.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Job {
    /// From the variables.
    told: Secret,
    /// Whether no other job has the same at the same time.
    alone: bool,
}

impl Job {
    /// The secrets to meet by, the best first: by the caller's if there is one. Else by one that processes of this user
    /// alone can know, if they have the same parent; and by one that the variables give, where they tell jobs apart.
    /// Other users can guess the latter, and by it keep a group from meeting at worst: sockets show whose they are.
    pub(super) fn secrets(&self, given: Option<&Secret>, parent: Option<Secret>) -> Vec<Secret> {
        let and_job = |secret: &Secret| secret.derive(b"job", [self.told.key().as_slice()]);
        match given {
            Some(secret) => vec![and_job(secret)],
            None => parent.iter().map(and_job).chain(self.alone.then(|| self.told.clone())).collect(),
        }
    }

    /// When [`Job::secrets`] has none.
    pub(super) fn unknown() -> Error {
        let reason = format!(
            "it is not set, and no other variable tells this job from others ({}): set it, or MASTER_PORT, to the same \
             on all ranks",
            OF_ONE_JOB.join(", ")
        );
        Error::Environment { variable: SECRET, reason }
    }
}

/// Reads the environment that `get` knows.
pub(super) fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Told> {
    let world_of = |launcher: &Launcher| launcher.world.iter().copied().find(|name| get(name).is_some());
    let told = LAUNCHERS.iter().find(|launcher| get(launcher.rank).is_some() && world_of(launcher).is_some());
    let Some(launcher) = told else { return Err(half_told(get)) };
    let number = |variable: &'static str| -> Result<Option<usize>> {
        let Some(text) = get(variable) else { return Ok(None) };
        let number = text
            .trim()
            .parse()
            .map_err(|_| Error::Environment { variable, reason: format!("{text:?} is not a number of ranks") });
        number.map(Some)
    };
    let world_variable = world_of(launcher).unwrap_or(launcher.world[0]);
    let (rank, world) = (number(launcher.rank)?.unwrap_or(0), number(world_variable)?.unwrap_or(0));
    if world == 0 {
        return Err(Error::Environment { variable: world_variable, reason: "a group of 0 ranks can't be".into() });
    }
    if rank >= world {
        let reason = format!("there is no rank {rank} where {world_variable} is {world}: ranks count from 0");
        return Err(Error::Environment { variable: launcher.rank, reason });
    }
    let local_world = launcher.local_world.map(number).transpose()?.flatten();
    let elsewhere = local_world.filter(|&local| local < world).map(|local| {
        let name = launcher.local_world.unwrap_or_default();
        format!("{world_variable} is {world} and {name} {local}")
    });
    let secret = match get(SECRET) {
        Some(secret) if secret.is_empty() => {
            return Err(Error::Environment { variable: SECRET, reason: "it is empty: set it, or unset it".into() });
        }
        secret => secret.map(|secret| Secret::given(secret.as_bytes())),
    };
    let values: Vec<(&str, String)> = JOB.iter().filter_map(|&name| Some((name, get(name)?))).collect();
    let parts = values.iter().flat_map(|(name, value)| [name.as_bytes(), value.as_bytes()]);
    Ok(Told {
        rank,
        world,
        local_rank: number(launcher.local_rank)?,
        elsewhere,
        group: get(GROUP).unwrap_or_default(),
        secret,
        job: Job { told: Secret::of(b"job", parts), alone: values.iter().any(|(name, _)| OF_ONE_JOB.contains(name)) },
    })
}

/// Why nobody can tell a rank by this environment.
fn half_told(get: &dyn Fn(&str) -> Option<String>) -> Error {
    for launcher in &LAUNCHERS {
        let (here, variable) = match (get(launcher.rank), launcher.world.iter().find(|name| get(name).is_some())) {
            (Some(_), _) => (launcher.rank, launcher.world[launcher.world.len() - 1]),
            (None, Some(world)) => (*world, launcher.rank),
            (None, None) => continue,
        };
        let reason = format!("it is not set, but {here} is: {} sets both", launcher.name);
        return Error::Environment { variable, reason };
    }
    let others: Vec<_> = LAUNCHERS[1..].iter().map(|other| format!("{} ({})", other.rank, other.name)).collect();
    Error::Environment {
        variable: LAUNCHERS[0].rank,
        reason: format!(
            "neither it nor {} is set: start the ranks by `peersum launch`, or by one of those",
            others.join(", ")
        ),
    }
}

/// What this process's parent has that processes of other users can't see and no other process has: where the kernel
/// put its parts in memory. A launcher's ranks have the same parent, where they are not wrapped in scripts.
pub(super) fn parent() -> Option<Secret> {
    let parent = rustix::process::getppid().filter(|parent| !parent.is_init())?.as_raw_nonzero();
    let places = std::fs::read(format!("/proc/{parent}/auxv")).ok().filter(|places| !places.is_empty())?;
    let stat = std::fs::read_to_string(format!("/proc/{parent}/stat")).ok()?;
    let start = start_time(&stat)?;
    Some(Secret::of(b"parent", [&places[..], start.as_bytes()]))
}

/// The field of /proc/PID/stat that says when the process started. The name before it may hold anything.
fn start_time(stat: &str) -> Option<&str> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(22 - 3)
}

#[cfg(fuzzing)]
pub(super) fn fuzz(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let values: Vec<&str> = text.split('\0').collect();
    let names = LAUNCHERS.iter().flat_map(|launcher| [launcher.rank, launcher.world[0], launcher.local_rank]);
    let names: Vec<_> = names.chain(JOB).chain([SECRET, GROUP]).collect();
    let _ = read(&|name| {
        let value = values.get(names.iter().position(|&known| known == name)?)?;
        (!value.is_empty()).then(|| (*value).to_owned())
    });
    start_time(&text);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn told(variables: &[(&str, &str)]) -> Result<Told> {
        read(&|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string()))
    }

    fn rank(variables: &[(&str, &str)]) -> (usize, usize, Option<usize>) {
        let told = told(variables).unwrap();
        (told.rank, told.world, told.local_rank)
    }

    #[track_caller]
    fn wrong(variables: &[(&str, &str)], expected: &str, words: &str) {
        let error = told(variables).unwrap_err();
        let Error::Environment { variable, reason } = &error else { panic!("{error}") };
        assert_eq!(*variable, expected, "{error}");
        assert!(reason.contains(words), "{error}");
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "2"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn every_launcher_is_understood() {
        assert_eq!(rank(&TORCHRUN), (2, 4, Some(1)));
        let peersum = [("PEERSUM_RANK", "0"), ("PEERSUM_WORLD_SIZE", "1"), ("PEERSUM_LOCAL_RANK", "0")];
        assert_eq!(rank(&peersum), (0, 1, Some(0)));
        let open_mpi =
            [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
        assert_eq!(rank(&open_mpi), (1, 2, Some(1)));
        assert_eq!(rank(&[("PMI_RANK", "3"), ("PMI_SIZE", "8"), ("MPI_LOCALRANKID", "3")]), (3, 8, Some(3)));
        assert_eq!(
            rank(&[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", "0")]),
            (1, 2, Some(0))
        );
        let step = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "16"), ("SLURM_STEP_NUM_TASKS", "2")];
        assert_eq!(rank(&step), (1, 2, None));
    }

    #[test]
    fn the_innermost_launcher_counts_and_half_of_another_does_not_matter() {
        let inner = [("PEERSUM_RANK", "1"), ("PEERSUM_WORLD_SIZE", "3")];
        assert_eq!(rank(&[&TORCHRUN[..], &inner].concat()), (1, 3, None));
        assert_eq!(rank(&[("RANK", "7"), ("PMI_RANK", "0"), ("PMI_SIZE", "2")]), (0, 2, None));
    }

    #[test]
    fn what_is_missing_or_makes_no_sense_is_named() {
        wrong(&[], "PEERSUM_RANK", "RANK (torchrun)");
        wrong(&[("RANK", "0")], "WORLD_SIZE", "RANK is");
        wrong(&[("WORLD_SIZE", "2")], "RANK", "WORLD_SIZE is");
        // In a batch script.
        wrong(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")], "SLURM_STEP_NUM_TASKS", "srun sets both");
        wrong(&[("RANK", "0"), ("WORLD_SIZE", "two")], "WORLD_SIZE", "\"two\"");
        wrong(&[("RANK", "-1"), ("WORLD_SIZE", "2")], "RANK", "\"-1\"");
        wrong(&[("RANK", ""), ("WORLD_SIZE", "2")], "RANK", "\"\"");
        wrong(&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK", "no rank 2");
        wrong(&[("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE", "0 ranks");
        wrong(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "x")], "LOCAL_RANK", "\"x\"");
        wrong(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("PEERSUM_SECRET", "")], "PEERSUM_SECRET", "empty");
    }

    /// Field case A47 (vllm-project/vllm#52778): a group over two machines.
    #[test]
    fn a_job_on_several_machines_is_known_before_anybody_is_met() {
        assert_eq!(told(&TORCHRUN).unwrap().elsewhere, None);
        let more = [&TORCHRUN[..], &[("LOCAL_WORLD_SIZE", "2")]].concat();
        assert_eq!(told(&more).unwrap().elsewhere.unwrap(), "WORLD_SIZE is 4 and LOCAL_WORLD_SIZE 2");
        let all = [&TORCHRUN[..], &[("LOCAL_WORLD_SIZE", "4")]].concat();
        assert_eq!(told(&all).unwrap().elsewhere, None);
    }

    #[test]
    fn jobs_have_secrets_of_their_own() {
        let base = told(&TORCHRUN).unwrap().job;
        let parent = Secret::given(b"parent");
        let secrets = base.secrets(None, Some(parent.clone()));
        assert_eq!(secrets.len(), 2);
        assert_eq!(base.secrets(None, None), secrets[1..]);
        for other in [("MASTER_PORT", "29501"), ("TORCHELASTIC_RESTART_COUNT", "1"), ("SLURM_STEP_ID", "3")] {
            let mut variables: Vec<_> = TORCHRUN.iter().copied().filter(|(name, _)| *name != other.0).collect();
            variables.push(other);
            let others = told(&variables).unwrap().job.secrets(None, Some(parent.clone()));
            assert!(others.iter().all(|other| !secrets.contains(other)), "{other:?}");
        }
        // The rank is no part of it.
        let mut variables = TORCHRUN;
        variables[0].1 = "3";
        assert_eq!(told(&variables).unwrap().job.secrets(None, Some(parent.clone())), secrets);
        // Variables that jobs share tell nothing apart.
        let shared = told(&[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("SLURM_JOB_ID", "7")]).unwrap().job;
        assert_eq!(shared.secrets(None, None), []);
        assert_eq!(shared.secrets(None, Some(parent.clone())).len(), 1);
        // One that was given is all there is.
        assert_eq!(base.secrets(Some(&parent), Some(Secret::given(b"other"))).len(), 1);
    }

    #[test]
    fn the_parent_is_the_same_for_its_children() {
        assert_eq!(parent(), parent());
        assert_eq!(start_time("7 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20"), Some("4242"));
        assert_eq!(start_time("7 (a"), None);
    }

    proptest! {
        #[test]
        fn any_environment_is_a_rank_or_an_error(rank: String, world: String, secret: String, stat: String) {
            let variables =
                [("RANK", &rank[..]), ("WORLD_SIZE", &world), ("PEERSUM_SECRET", &secret), ("MASTER_PORT", &rank)];
            if let Ok(told) = told(&variables) {
                prop_assert!(told.rank < told.world);
            }
            start_time(&stat);
        }
    }
}
