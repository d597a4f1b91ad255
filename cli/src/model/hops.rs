//! What a call of each algorithm of this library must take: the launch, the hops on its critical path, and its bytes.

use std::{fmt, fs, path::Path};

use anyhow::{Context, Result, ensure};
use peersum::Algorithm;
use serde::{Deserialize, Serialize};

/// Of a machine. Times are in µs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Parameters {
    /// An empty kernel of the same grid.
    pub(crate) t0_us: f64,
    /// L: a store into a peer's memory until the peer's poll sees it.
    pub(crate) push_us: f64,
    /// R: a load from a peer's memory, there and back.
    pub(crate) load_us: f64,
    /// A: an atomic in a peer's memory, there and back.
    pub(crate) atomic_us: f64,
    /// F: a release fence that waits for remote stores.
    pub(crate) fence_us: f64,
    /// B: what one GPU sends, in GB/s.
    pub(crate) gb_per_s: f64,
}

impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // To a nanosecond: measured ones have digits that say nothing.
        let shown = |figure: f64| {
            let text = format!("{figure:.3}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        };
        let Parameters { t0_us, push_us, load_us, atomic_us, fence_us, gb_per_s } = self;
        let [t0_us, push_us, load_us, atomic_us, fence_us, gb_per_s] =
            [t0_us, push_us, load_us, atomic_us, fence_us, gb_per_s].map(|&figure| shown(figure));
        write!(f, "T0 {t0_us}, L {push_us}, R {load_us}, A {atomic_us}, F {fence_us} us, B {gb_per_s} GB/s")
    }
}

/// The same as far as it is given, as in a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Given {
    pub(crate) t0_us: Option<f64>,
    #[serde(alias = "L")]
    pub(crate) push_us: Option<f64>,
    #[serde(alias = "R")]
    pub(crate) load_us: Option<f64>,
    #[serde(alias = "A")]
    pub(crate) atomic_us: Option<f64>,
    #[serde(alias = "F")]
    pub(crate) fence_us: Option<f64>,
    #[serde(alias = "B")]
    pub(crate) gb_per_s: Option<f64>,
}

/// What NCCL's tuning takes a hop by packets over NVLink to cost.
const PUSH_US: f64 = 0.6;
/// And what it takes a Hopper GPU to send: 320 GiB/s.
const GB_PER_S: f64 = 343.6;

impl Given {
    /// What `peersum probe` wrote, or an object, or a TOML table, of the parameters alone.
    pub(crate) fn parse(text: &str) -> Result<Given> {
        /// The report of a measurement, as far as it is of use here.
        #[derive(Deserialize)]
        struct Probe {
            schema: String,
            schema_version: u32,
            parameters: Given,
        }
        const FORM: &str = "the parameters are JSON or TOML: t0_us, L, R, A, F in us and B in GB/s, or what \
                            `peersum probe` writes";
        ensure!(!text.trim().is_empty(), "there is nothing in it: {FORM}");
        let value: serde_json::Value = match text.trim_start().starts_with('{') {
            true => serde_json::from_str(text).context(FORM)?,
            false => toml::from_str(text).context(FORM)?,
        };
        if value.get("schema").is_none() {
            return serde_json::from_value(value).context(FORM);
        }
        let probe: Probe = serde_json::from_value(value).context(FORM)?;
        ensure!(probe.schema == "peersum-probe", "this is a report of {}, not of peersum-probe", probe.schema);
        let version = probe.schema_version;
        ensure!(version == 1, "the report has schema_version {version}, and 1 is what is read here");
        Ok(probe.parameters)
    }

    /// This, and where it says nothing the other.
    pub(crate) fn or(self, other: Given) -> Given {
        Given {
            t0_us: self.t0_us.or(other.t0_us),
            push_us: self.push_us.or(other.push_us),
            load_us: self.load_us.or(other.load_us),
            atomic_us: self.atomic_us.or(other.atomic_us),
            fence_us: self.fence_us.or(other.fence_us),
            gb_per_s: self.gb_per_s.or(other.gb_per_s),
        }
    }

    /// The parameters, and which of them were not given.
    pub(crate) fn complete(self) -> Result<(Parameters, Vec<&'static str>)> {
        let mut assumed = Vec::new();
        let mut take = |given: Option<f64>, otherwise: f64, how: &'static str| {
            given.unwrap_or_else(|| {
                assumed.push(how);
                otherwise
            })
        };
        let push_us = take(self.push_us, PUSH_US, "L 0.6 us, a hop by packets in NCCL's tuning");
        let gb_per_s = take(self.gb_per_s, GB_PER_S, "B 343.6 GB/s, Hopper in NCCL's tuning");
        let parameters = Parameters {
            t0_us: take(self.t0_us, 0.0, "T0 0: without the launch"),
            push_us,
            load_us: take(self.load_us, 2.0 * push_us, "R 2 L"),
            atomic_us: take(self.atomic_us, 2.0 * push_us, "A 2 L"),
            fence_us: take(self.fence_us, 2.0 * push_us, "F 2 L"),
            gb_per_s,
        };
        let Parameters { t0_us, push_us, load_us, atomic_us, fence_us, gb_per_s } = parameters;
        for time in [t0_us, push_us, load_us, atomic_us, fence_us] {
            ensure!(time.is_finite() && time >= 0.0, "{time} us is no time that a hop takes");
        }
        ensure!(gb_per_s.is_finite() && gb_per_s > 0.0, "{gb_per_s} GB/s is no bandwidth");
        Ok((parameters, assumed))
    }
}

/// What is on an algorithm's critical path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Hops {
    pushes: f64,
    loads: f64,
    atomics: f64,
    fences: f64,
    /// Bytes on the wire for each of the message.
    bytes: f64,
}

/// A row of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// One of this library's.
    Own(Algorithm),
    /// A one-shot that loads peers' inputs between two handshakes by atomics, as PyTorch's symmetric memory has it.
    Atomics,
}

impl Way {
    /// All that the model has.
    pub(crate) fn all() -> Vec<Way> {
        let own = Algorithm::ALL.iter().copied().map(Way::Own).filter(|way| way.hops(2).is_some());
        own.chain([Way::Atomics]).collect()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Own(algorithm) => algorithm.name(),
            Way::Atomics => "atomics",
        }
    }

    /// Between so many ranks; none of NCCL, which has a model of its own.
    pub(crate) fn hops(self, ranks: u32) -> Option<Hops> {
        let n = f64::from(ranks);
        let (one, two) = (n - 1.0, 2.0 * (n - 1.0) / n);
        // Of 16 bytes of a packet 12 are payload.
        let packet = 4.0 / 3.0;
        let hops = |pushes, loads, fences, bytes| Some(Hops { pushes, loads, atomics: 0.0, fences, bytes });
        match self {
            Way::Own(Algorithm::OneShot) => hops(1.0, 0.0, 1.0, one),
            Way::Own(Algorithm::TwoShot) => hops(2.0, 0.0, 2.0, two),
            Way::Own(Algorithm::OneShotPull) => hops(1.0, 1.0, 0.0, one),
            Way::Own(Algorithm::TwoShotPull) => hops(2.0, 2.0, 0.0, two),
            Way::Own(Algorithm::OneShotLl) => hops(1.0, 0.0, 0.0, packet * one),
            Way::Own(Algorithm::TwoShotLl) => hops(2.0, 0.0, 0.0, packet * two),
            Way::Own(Algorithm::OneShotDirect) => hops(2.0, 1.0, 0.0, one),
            Way::Own(Algorithm::TwoShotDirect) => hops(2.0, 1.0, 1.0, two),
            Way::Atomics => Some(Hops { pushes: 0.0, loads: 1.0, atomics: 2.0, fences: 0.0, bytes: one }),
            Way::Own(_) => None,
        }
    }
}

/// A time, by what it is spent on. In µs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Limit {
    pub(crate) launch_us: f64,
    pub(crate) hops_us: f64,
    pub(crate) bytes_us: f64,
}

impl Limit {
    pub(crate) fn us(self) -> f64 {
        self.launch_us + self.hops_us + self.bytes_us
    }

    /// What most of it is spent on.
    pub(crate) fn bound(self) -> &'static str {
        let Limit { launch_us, hops_us, bytes_us } = self;
        if bytes_us >= launch_us.max(hops_us) {
            "bytes"
        } else if hops_us >= launch_us {
            "hops"
        } else {
            "launch"
        }
    }
}

/// How near a measured time is to what it could be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Nearness {
    /// By the algorithm that was measured; none of one that has no model, as NCCL.
    pub(crate) own_us: Option<f64>,
    /// Measured over it.
    pub(crate) over_own: Option<f64>,
    /// The best algorithm of all, and its time.
    pub(crate) best: &'static str,
    pub(crate) limit_us: f64,
    pub(crate) over_limit: f64,
    /// What the limit is spent on, for the most part.
    pub(crate) bound: &'static str,
}

impl Parameters {
    /// Reads what `peersum probe` wrote, or a file of the parameters alone; the second are those that it doesn't have,
    /// as they were assumed.
    pub(crate) fn read(file: &Path) -> Result<(Parameters, Vec<&'static str>)> {
        let text = fs::read_to_string(file).with_context(|| format!("can't read {}", file.display()))?;
        Given::parse(&text)?.complete().with_context(|| format!("can't use {}", file.display()))
    }

    /// Of a call of `bytes` bytes between so many ranks, by this algorithm, that took so long. None between fewer than
    /// two.
    pub(crate) fn nearness(
        &self,
        ranks: u32,
        algorithm: Option<Algorithm>,
        bytes: u64,
        measured_us: f64,
    ) -> Option<Nearness> {
        if ranks < 2 {
            return None;
        }
        let own = algorithm.map(Way::Own).and_then(|way| way.hops(ranks));
        let own_us = own.map(|hops| self.limit(hops, bytes as f64).us());
        let (best, limit) = self.best(ranks, bytes as f64)?;
        Some(Nearness {
            own_us,
            over_own: own_us.map(|own| measured_us / own),
            best: best.name(),
            limit_us: limit.us(),
            over_limit: measured_us / limit.us(),
            bound: limit.bound(),
        })
    }

    /// What a call of `bytes` bytes takes at least.
    pub(crate) fn limit(&self, hops: Hops, bytes: f64) -> Limit {
        Limit {
            launch_us: self.t0_us,
            hops_us: hops.pushes * self.push_us
                + hops.loads * self.load_us
                + hops.atomics * self.atomic_us
                + hops.fences * self.fence_us,
            bytes_us: hops.bytes * bytes / (self.gb_per_s * 1e3),
        }
    }

    /// The least of all ways.
    pub(crate) fn best(&self, ranks: u32, bytes: f64) -> Option<(Way, Limit)> {
        let limits = Way::all().into_iter().filter_map(|way| Some((way, self.limit(way.hops(ranks)?, bytes))));
        limits.min_by(|(_, a), (_, b)| a.us().total_cmp(&b.us()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: Parameters =
        Parameters { t0_us: 2.0, push_us: 0.6, load_us: 1.3, atomic_us: 1.4, fence_us: 0.9, gb_per_s: 350.0 };

    fn us(way: Way, ranks: u32, bytes: f64) -> f64 {
        GIVEN.limit(way.hops(ranks).unwrap(), bytes).us()
    }

    #[test]
    fn the_hops_are_those_of_the_algorithms() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        // T0 + F + L + 7 S / B, and so on.
        close(us(Way::Own(Algorithm::OneShot), 8, 350e3), 2.0 + 0.9 + 0.6 + 7.0);
        close(us(Way::Own(Algorithm::OneShotLl), 8, 350e3), 2.0 + 0.6 + 4.0 / 3.0 * 7.0);
        close(us(Way::Own(Algorithm::OneShotPull), 8, 350e3), 2.0 + 0.6 + 1.3 + 7.0);
        close(us(Way::Own(Algorithm::OneShotDirect), 8, 350e3), 2.0 + 1.2 + 1.3 + 7.0);
        close(us(Way::Own(Algorithm::TwoShot), 8, 350e3), 2.0 + 1.8 + 1.2 + 1.75);
        close(us(Way::Own(Algorithm::TwoShotLl), 8, 350e3), 2.0 + 1.2 + 4.0 / 3.0 * 1.75);
        close(us(Way::Own(Algorithm::TwoShotPull), 8, 350e3), 2.0 + 1.2 + 2.6 + 1.75);
        close(us(Way::Own(Algorithm::TwoShotDirect), 8, 350e3), 2.0 + 1.2 + 1.3 + 0.9 + 1.75);
        close(us(Way::Atomics, 8, 350e3), 2.0 + 2.8 + 1.3 + 7.0);
    }

    #[test]
    fn every_algorithm_of_the_library_s_own_is_there() {
        let own = Algorithm::ALL.iter().filter(|&&algorithm| algorithm != Algorithm::Nccl);
        assert!(own.clone().all(|&algorithm| Way::all().contains(&Way::Own(algorithm))));
        assert_eq!(Way::all().len(), own.count() + 1);
    }

    #[test]
    fn short_messages_go_by_packets_and_long_ones_are_bound_by_bytes() {
        let (way, limit) = GIVEN.best(8, 1024.0).unwrap();
        assert_eq!((way.name(), limit.bound()), ("one-shot-ll", "launch"));
        let (way, limit) = GIVEN.best(8, 64e6).unwrap();
        assert_eq!((way.name(), limit.bound()), ("two-shot", "bytes"));
        let without = Parameters { t0_us: 0.0, ..GIVEN };
        assert_eq!(without.best(8, 1024.0).unwrap().1.bound(), "hops");
    }

    #[test]
    fn a_measured_time_is_held_against_its_own_algorithm_and_the_best() {
        let near = GIVEN.nearness(8, Some(Algorithm::TwoShot), 350_000, 13.5).unwrap();
        assert!((near.own_us.unwrap() - 6.75).abs() < 1e-9 && (near.over_own.unwrap() - 2.0).abs() < 1e-9, "{near:?}");
        assert!(near.limit_us <= near.own_us.unwrap() && near.over_limit >= near.over_own.unwrap());
        // NCCL has no model of its own here.
        let nccl = GIVEN.nearness(8, Some(Algorithm::Nccl), 350_000, 13.9).unwrap();
        assert_eq!((nccl.own_us, nccl.best), (None, near.best));
        assert_eq!(GIVEN.nearness(1, None, 1024, 1.0), None);
    }

    proptest::proptest! {
        #[test]
        fn no_parameters_break_it(text in "(\\{|\\}|\"?(t0_us|L|R|A|F|B|schema|schema_version|parameters)\"?( = |: )|\\[parameters\\]|[0-9.e-]{1,8}|\"peersum-probe\"|,|\n|\\PC){0,30}") {
            if let Ok((parameters, _)) = Given::parse(&text).and_then(Given::complete) {
                proptest::prop_assert!(parameters.gb_per_s > 0.0 && parameters.push_us >= 0.0, "{:?}", parameters);
            }
        }
    }

    #[test]
    fn parameters_are_read_from_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("machine.toml");
        std::fs::write(&file, "L = 0.5\nB = 400\n").unwrap();
        let (parameters, assumed) = Parameters::read(&file).unwrap();
        assert_eq!((parameters.push_us, parameters.gb_per_s, assumed.len()), (0.5, 400.0, 4));
        assert!(Parameters::read(&folder.path().join("nowhere")).is_err());
    }

    #[test]
    fn what_is_given_goes_before_the_file_and_the_rest_is_said_to_be_assumed() {
        let file = Given::parse(r#"{"L": 0.5, "B": 400, "t0_us": 2}"#).unwrap();
        let flags = Given { gb_per_s: Some(300.0), ..Given::default() };
        let (parameters, assumed) = flags.or(file).complete().unwrap();
        assert_eq!((parameters.push_us, parameters.gb_per_s, parameters.load_us), (0.5, 300.0, 1.0));
        assert_eq!(assumed, ["R 2 L", "A 2 L", "F 2 L"]);
        assert!(Given::parse(r#"{"l": 0.5}"#).is_err());
        for wrong in [r#"{"L": -1}"#, r#"{"B": 0}"#] {
            assert!(Given::parse(wrong).unwrap().complete().is_err(), "{wrong}");
        }
    }
}
