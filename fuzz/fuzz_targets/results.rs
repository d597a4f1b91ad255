//! The command's parsers of what other tools print: results of benchmarks, lspci's text, lists of visible devices. Taken in by
//! their paths, as in the target of topologies.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)]
#[path = "../../cli/src/model/runs.rs"]
mod runs;
#[allow(dead_code)]
#[path = "../../cli/src/topology/mod.rs"]
mod topology;

use runs::Run;
use topology::{
    lspci,
    machine::{Gpu, Machine},
    visible::Visible,
};

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(runs) = Run::parse(text) {
        for run in &runs {
            assert!(!run.points.is_empty());
            assert!(run.points.iter().all(|point| point.us > 0.0 && point.us.is_finite() && point.bytes > 0));
            assert!(run.points.windows(2).all(|pair| pair[0].bytes < pair[1].bytes));
        }
    }
    lspci::parse(text);
    let gpu = |index: usize| Gpu {
        address: format!("0000:{:02x}:00.0", index + 1).parse().ok(),
        uuid: Some(format!("GPU-{index}")),
        ..Gpu::default()
    };
    let machine = Machine { gpus: (0..4).map(gpu).collect(), ..Machine::default() };
    if let Ok(visible) = Visible::of_variables(&machine, Some(text), None) {
        assert!(visible.devices.iter().all(|device| device.gpu.is_none_or(|gpu| gpu < 4)));
    }
});
