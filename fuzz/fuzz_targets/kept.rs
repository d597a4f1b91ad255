//! What an interrupted `peersum tune` left, and the choices that are made of it. The command's files are taken in by their
//! paths, as in the target of topologies; of its measuring there is no more here than they name.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)]
mod measure {
    pub(crate) mod candidate {
        use peersum::Choice;
        use serde::{Deserialize, Serialize};

        #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub(crate) enum Home {
            Plain,
            Symmetric,
        }

        pub(crate) enum Way {
            Chosen,
            Forced(Choice),
            NcclAlone,
            Empty { blocks: u32, threads: u32 },
        }

        pub(crate) struct Candidate {
            pub(crate) way: Way,
            pub(crate) home: Home,
        }
    }

    pub(crate) mod run {
        pub(crate) struct Wrong {
            pub(crate) elements: u64,
        }

        pub(crate) struct Outcome {
            pub(crate) timings: Vec<Vec<f64>>,
            pub(crate) wrong: Option<Wrong>,
        }
    }

    pub(crate) mod statistics {
        pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
            let mut sorted: Vec<f64> = values.into_iter().collect();
            sorted.sort_by(f64::total_cmp);
            sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
        }

        pub(crate) fn slowest_of_each(_: &[Vec<f64>]) -> Vec<f64> {
            Vec::new()
        }
    }
}

#[allow(dead_code)]
#[path = "../../cli/src/tune"]
mod tune {
    use std::path::Path;

    use peersum::{DType, Placement};

    mod fit;
    mod kept;

    pub(super) fn choose(table: &Path) {
        let kept = kept::Kept::open(table, "key".into(), false).expect("whatever is there is taken or replaced");
        for dtype in [DType::F32, DType::BF16] {
            for placement in [Placement::Anywhere, Placement::Symmetric, Placement::SymmetricInPlace] {
                let _ = fit::fit(placement, dtype, &kept.of(placement, dtype));
            }
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let table = std::env::temp_dir().join(format!("peersum-fuzz-kept-{}", std::process::id()));
    fs::write(table.with_extension("partial"), text).expect("the folder for temporary files can be written to");
    tune::choose(&table);
});
