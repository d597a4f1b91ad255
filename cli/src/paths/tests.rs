//! With what runs of made-up machines come to.

use super::*;

fn tier(name: &str, path: Path, theory: Option<f64>, count: usize) -> Tier {
    Tier {
        name: name.into(),
        devices: (0..count).collect(),
        connection: None,
        path,
        theory: theory.map(|gb_per_s| theory::Rate { gb_per_s, by: "NV18".into() }),
    }
}

const SIZES: Sizes = Sizes { min: 1 << 20, max: 1 << 29, factor: 2 };

/// The published tiers of a node: bus bandwidths of a pair at 1, 8, 64, 256 and 512 MB.
fn published() -> Report {
    let tiers = vec![
        tier("pair in one NUMA node", Path::P2p, Some(450.0), 2),
        tier("pair in one NUMA node, P2P off", Path::HostMemory, Some(32.0), 2),
    ];
    measure(tiers, SIZES, &mut |tier, contender| {
        if contender == Contender::Peersum {
            return Err("the kernels were not built".into());
        }
        let bus = match tier.path {
            Path::P2p => [22.7, 172.5, 266.8, 298.8, 315.8],
            _ => [15.6, 23.0, 23.6, 23.7, 23.8],
        };
        let bytes = [1u64, 8, 64, 256, 512].map(|mib| mib << 20);
        let point = |(bytes, bus): (u64, f64)| Point {
            bytes,
            us: bytes as f64 / (bus * 1e3),
            bus_gb_per_s: None,
            wrong: Some(0),
        };
        Ok(bytes.into_iter().zip(bus).map(point).collect())
    })
}

#[test]
fn the_published_tiers_come_out() {
    let report = published();
    let [first, second] = &report.ladder[..] else { panic!("{report:?}") };
    assert_eq!((first.efficiency_percent.unwrap().round(), second.efficiency_percent.unwrap().round()), (70.0, 74.0));
    assert_eq!(second.loss.unwrap().round(), 13.0);
    let text = report.text().unwrap();
    assert!(text.contains("315.80    512M     450.0         70%         -"), "{text}");
    assert!(text.contains("23.80    512M      32.0         74%    13.27x"), "{text}");
    // What failed is said where it would stand, and shows in the exit code.
    assert!(text.contains("peersum: not measured: the kernels were not built"), "{text}");
    assert_eq!(report.code(), 1);
}

#[test]
fn wrong_sums_have_no_place_among_the_fast() {
    let report = measure(vec![tier("all 4", Path::P2p, None, 4)], SIZES, &mut |_, contender| {
        let wrong = Some(u64::from(contender == Contender::Peersum) * 5);
        Ok(vec![Point { bytes: 1 << 20, us: 1.0, bus_gb_per_s: None, wrong }])
    });
    assert_eq!(report.ladder.len(), 1);
    assert_eq!(report.ladder[0].contender, Contender::Nccl);
    assert!(report.text().unwrap().contains("5 WRONG"));
    assert_eq!(report.code(), 1);
}

/// NCCL has no transport between ranks of one device, so nothing is switched off there, and nobody may read that host
/// memory is as fast as P2P.
#[test]
fn ranks_of_one_device_are_said_to_have_one_path() {
    let on = |devices: Vec<usize>, path| Tier { devices, ..tier("two", path, None, 2) };
    let point =
        |_: &Tier, _: Contender| Ok(vec![Point { bytes: 1 << 20, us: 1.0, bus_gb_per_s: None, wrong: Some(0) }]);
    let notes = |devices: &[usize]| {
        let tiers = [Path::P2p, Path::HostMemory, Path::Network].map(|path| on(devices.to_vec(), path));
        measure(tiers.into(), SIZES, &mut { point }).notes.join("\n")
    };
    let shared = notes(&[0, 0]);
    assert!(shared.contains("those paths are the first one again") && !shared.contains("with itself"), "{shared}");
    let apart = notes(&[0, 1]);
    assert!(apart.contains("with itself") && !apart.contains("first one again"), "{apart}");
    assert!(!apart.contains("share a device"), "{apart}");
}

#[test]
fn where_nothing_could_be_measured_the_code_says_so() {
    let report = measure(vec![tier("both 2", Path::P2p, None, 2)], SIZES, &mut |_, _| Err("no driver".into()));
    assert_eq!(report.code(), 2);
    assert!(report.text().unwrap().contains("NCCL: not measured: no driver"));
}

#[test]
fn the_picture_has_a_curve_for_each_path() {
    let svg = published().picture().unwrap().svg;
    for part in ["NCCL, pair in one NUMA node, P2P off", "busbw (GB/s)", "size of the message", "prefers-color-scheme"]
    {
        assert!(svg.contains(part), "{part}");
    }
    assert!(roxmltree::Document::parse(&svg).is_ok());
}

#[test]
fn the_json_has_a_schema() {
    let json = serde_json::to_value(published()).unwrap();
    assert_eq!((&json["schema"], &json["schema_version"]), (&"peersum-paths".into(), &1.into()));
    assert_eq!(json["tiers"][1]["path"], "host_memory");
    assert_eq!(json["tiers"][0]["measured"][0]["points"][0]["bytes"], 1 << 20);
    assert_eq!(json["ladder"][1]["loss"].as_f64().unwrap().round(), 13.0);
}
