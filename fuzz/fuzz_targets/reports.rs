//! What the command writes and reads again: reports of `peersum perf`, `p2p` and `probe`, and tables of `peersum tune`. The
//! command's parsers are taken in by their paths, as in the target of topologies.

#![no_main]

use libfuzzer_sys::fuzz_target;
use peersum::crossover::Table;

#[allow(dead_code)]
#[path = "../../cli/src/model"]
mod model {
    pub(super) mod hops;
    mod results;

    pub(super) fn perf(text: &str) {
        if let Ok(results) = results::Results::parse(text) {
            assert!(results.config.world_size >= 2);
        }
    }
}

#[allow(dead_code)]
#[path = "../../cli/src/page"]
mod page {
    mod heat;
    pub(super) mod matrices;
    mod svg;

    /// As the command has it.
    #[derive(Clone, Debug)]
    pub(crate) struct Picture {
        pub(crate) title: String,
        pub(crate) svg: String,
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    model::perf(text);
    if let Ok((parameters, _)) = model::hops::Given::parse(text).and_then(model::hops::Given::complete) {
        // What is accepted gives a limit that a time can be held against.
        let (_, limit) = parameters.best(8, 1e6).expect("eight ranks have an algorithm");
        assert!(limit.us() >= 0.0, "{parameters}");
        let _ = parameters.to_string();
    }
    if let Ok(pictures) = page::matrices::matrices(text) {
        for picture in pictures {
            assert!(roxmltree::Document::parse(&picture.svg).is_ok(), "{}", picture.svg);
        }
    }
    if let Ok(table) = Table::parse(text) {
        // What is accepted is written, and read as the same.
        let again = Table::parse(&table.to_text()).expect("what was written is read");
        assert_eq!(again.to_text(), table.to_text());
    }
});
