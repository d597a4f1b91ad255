//! Variables of the environment, and of NCCL's configuration files, that turn paths off or force a choice.

use super::{
    finding::{Finding, Outcome, Weight},
    private,
};
use crate::topology::source::Source;

/// What is set: the environment's first, which NCCL prefers.
#[derive(Clone, Debug, Default)]
pub(super) struct Settings {
    set: Vec<Setting>,
}

/// A variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) name: String,
    pub(super) value: String,
    /// Where it is set.
    pub(super) from: String,
}

impl Settings {
    /// Of this process, as NCCL would find them in it.
    pub(super) fn of(source: &dyn Source) -> Self {
        let mut settings = Settings::default();
        let relevant = |name: &str| name.starts_with("NCCL_") || name.starts_with("CUDA_");
        for (name, value) in source.variables().into_iter().filter(|(name, _)| relevant(name)) {
            settings.add(name, value, "the environment");
        }
        let named = source.variable("NCCL_CONF_FILE");
        let own = source.variable("HOME").map(|home| (format!("{home}/.nccl.conf"), "~/.nccl.conf"));
        let own = named.map(|file| (file, "the file in NCCL_CONF_FILE")).or(own);
        for (file, from) in own.into_iter().chain([("/etc/nccl.conf".to_owned(), "/etc/nccl.conf")]) {
            let text = source.text(&file).unwrap_or_default();
            for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
                if let Some((name, value)) = line.split_once('=') {
                    settings.add(name.trim().into(), value.trim().into(), from);
                }
            }
        }
        settings
    }

    /// The first one counts.
    pub(super) fn add(&mut self, name: String, value: String, from: &str) {
        if self.get(&name).is_none() {
            self.set.push(Setting { name, value, from: from.into() });
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.set.iter().find(|setting| setting.name == name).map(|setting| setting.value.as_str())
    }
}

/// When a variable is worth a word.
enum When {
    /// A number other than 0.
    On,
    /// 0.
    Off,
    Set,
    /// One of these, in any case.
    Is(&'static [&'static str]),
}

impl When {
    fn holds(&self, value: &str) -> bool {
        match self {
            When::On => value.parse::<i64>().is_ok_and(|value| value != 0),
            When::Off => value.parse::<i64>().is_ok_and(|value| value == 0),
            When::Set => !value.is_empty(),
            When::Is(values) => values.iter().any(|known| value.eq_ignore_ascii_case(known)),
        }
    }
}

/// Variable, when, weight, what it does.
const KNOWN: [(&str, When, Weight, &str); 21] = [
    (
        "NCCL_P2P_DISABLE",
        When::On,
        Weight::Severe,
        "NCCL has no P2P at all, by NVLink neither: all goes through host memory",
    ),
    ("NCCL_P2P_LEVEL", When::Is(&["LOC", "0"]), Weight::Severe, "NCCL has no P2P at all"),
    ("NCCL_P2P_LEVEL", When::Is(&["NVL", "PIX", "1"]), Weight::Moderate, "NCCL has P2P over short paths alone"),
    (
        "NCCL_SHM_DISABLE",
        When::On,
        Weight::Severe,
        "pairs without P2P go through the network, and not through host memory",
    ),
    ("NCCL_IB_DISABLE", When::On, Weight::Moderate, "nodes talk by TCP sockets instead of RDMA"),
    (
        "NCCL_NET_GDR_LEVEL",
        When::Is(&["LOC", "0"]),
        Weight::Moderate,
        "NICs don't read GPUs' memory: messages between nodes go through host memory",
    ),
    (
        "NCCL_NVLS_ENABLE",
        When::Off,
        Weight::Moderate,
        "NVLink switches, where there are any, don't sum: large all-reduces take longer",
    ),
    ("NCCL_CUMEM_ENABLE", When::Off, Weight::Note, "NCCL can't have NVLS, nor windows of symmetric memory"),
    (
        "NCCL_ALGO",
        When::Set,
        Weight::Moderate,
        "the algorithm is forced for every size, so most sizes have the wrong one",
    ),
    (
        "NCCL_PROTO",
        When::Set,
        Weight::Moderate,
        "the protocol is forced for every size: LL wastes half of the link for long messages, Simple is slow for short \
         ones",
    ),
    ("NCCL_MAX_NCHANNELS", When::Set, Weight::Note, "fewer channels than NCCL would take can't fill NVLink"),
    ("NCCL_MAX_CTAS", When::Set, Weight::Note, "fewer blocks than NCCL would take can't fill NVLink"),
    ("NCCL_BUFFSIZE", When::Set, Weight::Note, "small buffers slow down long messages"),
    ("NCCL_TOPO_FILE", When::Set, Weight::Note, "NCCL believes this file, and not the machine"),
    ("NCCL_GRAPH_FILE", When::Set, Weight::Note, "NCCL takes its rings and trees from this file"),
    ("NCCL_NET", When::Is(&["Socket"]), Weight::Moderate, "nodes talk by TCP sockets instead of RDMA"),
    ("NCCL_IGNORE_DISABLED_P2P", When::On, Weight::Note, "NCCL doesn't say where the driver has refused P2P"),
    ("NCCL_LAUNCH_MODE", When::Is(&["GROUP"]), Weight::Note, "launches of one process wait for each other"),
    (
        "CUDA_LAUNCH_BLOCKING",
        When::On,
        Weight::Severe,
        "every launch waits for its kernel: nothing overlaps, and ranks of one thread can wait for each other for ever",
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        When::Is(&["1"]),
        Weight::Moderate,
        "all streams share one hardware queue, so all-reduce waits for kernels ahead of it",
    ),
    ("CUDA_DISABLE_PERF_BOOST", When::On, Weight::Note, "the driver doesn't raise the clocks for CUDA"),
];

/// Those that concern paths between the GPUs of one machine alone.
const BETWEEN_GPUS: [&str; 4] = ["NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE"];

/// Looks at all of them; `alone` is a GPU that is its machine's only one.
pub(super) fn check(settings: &Settings, alone: bool, outcome: &mut Outcome) {
    let before = outcome.findings.len();
    for setting in &settings.set {
        let said = KNOWN.iter().filter(|(name, when, ..)| *name == setting.name && when.holds(&setting.value));
        for (name, _, weight, effect) in said {
            let idle = alone && BETWEEN_GPUS.contains(name);
            let mut evidence = vec![format!("{name}={} is set in {}", setting.value, setting.from)];
            if idle {
                evidence.push("there is one GPU here, so nothing of this machine's goes that way".into());
            }
            outcome.found(Finding {
                id: "variable",
                weight: if idle { Weight::Note } else { *weight },
                title: format!("{name}={}", setting.value),
                evidence,
                cost: format!("{effect}."),
                remedy: vec![format!("Unset {name}, unless it works around something that is still there.")],
            });
        }
    }
    if let Some(devices) = settings.get("CUDA_VISIBLE_DEVICES") {
        visible(devices, outcome);
    }
    if outcome.findings.len() == before {
        outcome.fine("variables: none of NCCL's or CUDA's turns a path off or forces a choice");
    }
}

/// `CUDA_VISIBLE_DEVICES`: the list ends where an entry can't be one, without a word from CUDA.
fn visible(devices: &str, outcome: &mut Outcome) {
    let entries: Vec<_> = devices.split(',').map(str::trim).collect();
    let is_entry = |entry: &&str| {
        entry.starts_with("GPU-")
            || entry.starts_with("MIG-")
            || entry.parse::<u32>().is_ok_and(|index| index < 1 << 16)
    };
    let kept = entries.iter().take_while(|entry| is_entry(entry)).count();
    let doubled = (0..kept).find(|&index| entries[..index].contains(&entries[index]));
    let shown: Vec<_> = entries.iter().map(|entry| private::of_device(entry)).collect();
    let mut say = |title: String, cost: &str, remedy: &str| {
        outcome.found(Finding {
            id: "visible-devices",
            weight: Weight::Severe,
            title,
            evidence: vec![format!("CUDA_VISIBLE_DEVICES={}", shown.join(","))],
            cost: cost.into(),
            remedy: vec![remedy.into()],
        });
    };
    if let Some(index) = doubled {
        let title = format!("CUDA_VISIBLE_DEVICES names {} twice", shown[index]);
        say(title, "CUDA then shows no device at all.", "Name each device once.");
    } else if kept == 0 {
        say("CUDA_VISIBLE_DEVICES hides every GPU".into(), "No program sees one.", "Unset it, or name devices.");
    } else if kept < entries.len() {
        let title = format!("CUDA_VISIBLE_DEVICES ends at '{}', its entry {}", shown[kept], kept + 1);
        say(
            title,
            "What stands behind it is not seen, without a word.",
            "Name devices by number or UUID, with commas.",
        );
    }
    if entries[..kept].iter().any(|entry| entry.starts_with("MIG-")) {
        say(
            "CUDA_VISIBLE_DEVICES names an instance of MIG".into(),
            "Instances have no P2P and no IPC, and a process sees one of them at most.",
            "Take whole GPUs for ranks that sum together.",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(name: &str, value: &str) -> Vec<(Weight, String)> {
        let (mut settings, mut outcome) = (Settings::default(), Outcome::default());
        settings.add(name.into(), value.into(), "the environment");
        check(&settings, false, &mut outcome);
        outcome.findings.into_iter().map(|finding| (finding.weight, finding.title)).collect()
    }

    #[test]
    fn what_turns_a_path_off_is_found_and_what_doesn_t_is_not() {
        assert_eq!(found("NCCL_P2P_DISABLE", "1"), [(Weight::Severe, "NCCL_P2P_DISABLE=1".into())]);
        for (name, value) in
            [("NCCL_P2P_DISABLE", "0"), ("NCCL_NVLS_ENABLE", "1"), ("NCCL_ALGO", ""), ("NCCL_DEBUG", "INFO")]
        {
            assert_eq!(found(name, value), [], "{name}");
        }
        assert_eq!(found("NCCL_NVLS_ENABLE", "0").len(), 1);
        assert_eq!(found("NCCL_P2P_LEVEL", "SYS"), []);
        assert_eq!(found("NCCL_P2P_LEVEL", "nvl").len(), 1);
    }

    #[test]
    fn what_concerns_other_gpus_is_a_note_where_there_is_one() {
        let (mut settings, mut outcome) = (Settings::default(), Outcome::default());
        for (name, value) in [("NCCL_NVLS_ENABLE", "0"), ("NCCL_IB_DISABLE", "1")] {
            settings.add(name.into(), value.into(), "the environment");
        }
        check(&settings, true, &mut outcome);
        let weights: Vec<_> = outcome.findings.iter().map(|finding| finding.weight).collect();
        assert_eq!(weights, [Weight::Note, Weight::Moderate]);
        assert!(outcome.findings[0].evidence[1].contains("one GPU here"), "{outcome:?}");
    }

    #[test]
    fn uuids_are_not_printed() {
        let (mut settings, mut outcome) = (Settings::default(), Outcome::default());
        settings.add("CUDA_VISIBLE_DEVICES".into(), "GPU-af7b61d8-1,GPU-af7b61d8-1".into(), "the environment");
        check(&settings, false, &mut outcome);
        assert_eq!(outcome.findings[0].title, "CUDA_VISIBLE_DEVICES names GPU-(UUID) twice");
        assert!(!format!("{outcome:?}").contains("af7b61d8"), "{outcome:?}");
    }

    /// Field case A53 (vllm-project/vllm#41848).
    #[test]
    fn lists_of_visible_devices_are_read_as_cuda_reads_them() {
        let titles =
            |value| found("CUDA_VISIBLE_DEVICES", value).into_iter().map(|(_, title)| title).collect::<Vec<_>>();
        for right in ["0,1", "0, 2", "3", "GPU-af7b61d8,GPU-b"] {
            assert!(titles(right).is_empty(), "{right}: {:?}", titles(right));
        }
        assert_eq!(titles("0,,2"), ["CUDA_VISIBLE_DEVICES ends at '', its entry 2"]);
        assert_eq!(titles("2,-1,3"), ["CUDA_VISIBLE_DEVICES ends at '-1', its entry 2"]);
        for hidden in ["", "-1", "nine"] {
            assert_eq!(titles(hidden), ["CUDA_VISIBLE_DEVICES hides every GPU"]);
        }
        assert_eq!(titles("0,0"), ["CUDA_VISIBLE_DEVICES names 0 twice"]);
        assert_eq!(titles("MIG-GPU-af7b61d8/1/0"), ["CUDA_VISIBLE_DEVICES names an instance of MIG"]);
    }
}
