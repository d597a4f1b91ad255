//! What is measured of each pair, and in which order. Who measures is behind a trait, so that this is tested without GPUs.

use serde::Serialize;

/// Who moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Engine {
    CopyEngine,
    Kernel,
}

/// Who drives: the one that the data come from, or the one that they go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Way {
    Write,
    Read,
}

/// A way from one device's memory to another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Route {
    pub(crate) engine: Engine,
    pub(crate) way: Way,
    /// Straight from device to device; if not, through memory of the host's.
    pub(crate) p2p: bool,
}

impl Route {
    const fn new(engine: Engine, way: Way, p2p: bool) -> Route {
        Route { engine, way, p2p }
    }

    /// All that are measured.
    pub(crate) const ALL: [Route; 6] = [
        Route::new(Engine::CopyEngine, Way::Write, true),
        Route::new(Engine::CopyEngine, Way::Read, true),
        Route::new(Engine::Kernel, Way::Write, true),
        Route::new(Engine::Kernel, Way::Read, true),
        Route::new(Engine::CopyEngine, Way::Write, false),
        Route::new(Engine::Kernel, Way::Write, false),
    ];

    pub(crate) fn name(self) -> String {
        let engine = match self.engine {
            Engine::CopyEngine => "copy engine",
            Engine::Kernel => "kernel",
        };
        match (self.way, self.p2p) {
            (_, false) => format!("{engine}, P2P off"),
            (Way::Write, true) => format!("{engine}, P2P writes"),
            (Way::Read, true) => format!("{engine}, P2P reads"),
        }
    }
}

/// A figure, or why there is none.
pub(crate) type Cell<T> = Result<T, String>;

/// Of 100 copies of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct CopyLatency {
    /// From one copy to the next on the device.
    pub(crate) gpu_us: f64,
    /// What a copy took the host to enqueue.
    pub(crate) host_us: f64,
}

/// What the owner found in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Compared {
    /// Of 8 bytes.
    pub(crate) words: u64,
    pub(crate) wrong: u64,
    pub(crate) first_wrong: Option<u64>,
}

/// A device's line in the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) name: String,
    pub(crate) pci: String,
    pub(crate) memory_gb_per_s: Option<f64>,
}

/// Who measures. Places are those in `devices`; a device may stand there several times.
pub(crate) trait Links {
    fn devices(&self) -> Vec<Device>;
    /// Whether the two places are of one device.
    fn same_device(&self, a: usize, b: usize) -> bool;
    /// Whether one can reach the other's memory; if not, why.
    fn reaches(&mut self, from: usize, to: usize) -> Result<(), String>;
    /// Lets all reach each other that can, or none.
    fn let_reach(&mut self, on: bool) -> Cell<()>;
    /// GB/s.
    fn one_way(&mut self, route: Route, from: usize, to: usize) -> Cell<f64>;
    /// GB/s of both directions together.
    fn both_ways(&mut self, route: Route, a: usize, b: usize) -> Cell<f64>;
    fn copy_latency(&mut self, from: usize, to: usize) -> Cell<CopyLatency>;
    /// µs until the other sees what a kernel stored in its memory.
    fn store_latency(&mut self, from: usize, to: usize) -> Cell<f64>;
    /// µs of a load from the other's memory.
    fn load_latency(&mut self, from: usize, to: usize) -> Cell<f64>;
    /// Moves a pattern, and has the owner of the memory where it went to compare it.
    fn compare(&mut self, route: Route, from: usize, to: usize) -> Cell<Compared>;
}

/// A matrix, by row (from) and column (to); what doesn't apply is none.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Matrix<T> {
    pub(crate) title: String,
    pub(crate) unit: &'static str,
    pub(crate) route: Option<Route>,
    pub(crate) cells: Vec<Vec<Option<Entry<T>>>>,
}

/// As [`Cell`], the way it is in JSON.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Entry<T> {
    Value(T),
    Error(String),
}

impl<T> From<Cell<T>> for Entry<T> {
    fn from(cell: Cell<T>) -> Self {
        match cell {
            Ok(value) => Entry::Value(value),
            Err(error) => Entry::Error(error),
        }
    }
}

impl<T> Entry<T> {
    pub(crate) fn value(&self) -> Option<&T> {
        match self {
            Entry::Value(value) => Some(value),
            Entry::Error(_) => None,
        }
    }
}

/// All that was found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    /// Whether the row's device reaches the column's memory, or why not.
    pub(crate) reaches: Vec<Vec<Option<Entry<bool>>>>,
    pub(crate) compared: Vec<Matrix<Compared>>,
    pub(crate) one_way: Vec<Matrix<f64>>,
    pub(crate) both_ways: Vec<Matrix<f64>>,
    pub(crate) copy_latency: Vec<Matrix<CopyLatency>>,
    pub(crate) kernel_latency: Vec<Matrix<f64>>,
}

/// Measures all of it; says each step's name before it. `reason` may know why a pair has no P2P.
pub(crate) fn measure(
    links: &mut dyn Links,
    reason: &dyn Fn(usize, usize) -> Option<String>,
    step: &mut dyn FnMut(&str),
) -> Measured {
    let count = links.devices().len();
    let reach: Vec<Vec<_>> = (0..count)
        .map(|from| {
            (0..count)
                .map(|to| {
                    if links.same_device(from, to) {
                        return Ok(());
                    }
                    links.reaches(from, to).map_err(|why| match reason(from, to) {
                        Some(reason) => format!("{why}: {reason}"),
                        None => why,
                    })
                })
                .collect()
        })
        .collect();
    let mut measured = Measured {
        reaches: grid(count, |from, to| {
            (from != to).then(|| match &reach[from][to] {
                Ok(()) => Entry::Value(true),
                Err(why) => Entry::Error(why.clone()),
            })
        }),
        compared: Vec::new(),
        one_way: Vec::new(),
        both_ways: Vec::new(),
        copy_latency: Vec::new(),
        kernel_latency: Vec::new(),
    };
    // P2P first: once it is off, a mapping of it that is still there would show.
    for p2p in [true, false] {
        let switched = links.let_reach(p2p);
        let routes = || Route::ALL.into_iter().filter(|route| route.p2p == p2p);
        // Why a pair can't be measured so.
        let refused = |from: usize, to: usize| -> Cell<()> {
            switched.clone()?;
            if p2p { reach[from][to].clone() } else { Ok(()) }
        };
        let pair = |from: usize, to: usize, same: bool| p2p || (from != to && !same);
        for route in routes() {
            step(&format!("data, {}", route.name()));
            let cells = grid(count, |from, to| {
                pair(from, to, links.same_device(from, to)).then(|| {
                    refused(driver(route, from, to).0, driver(route, from, to).1)
                        .and_then(|()| links.compare(route, from, to))
                        .into()
                })
            });
            measured.compared.push(Matrix { title: route.name(), unit: "words", route: Some(route), cells });
            step(&format!("bandwidth, {}", route.name()));
            let cells = grid(count, |from, to| {
                pair(from, to, links.same_device(from, to)).then(|| {
                    refused(driver(route, from, to).0, driver(route, from, to).1)
                        .and_then(|()| links.one_way(route, from, to))
                        .into()
                })
            });
            measured.one_way.push(Matrix { title: route.name(), unit: "GB/s", route: Some(route), cells });
        }
        for route in routes().filter(|route| route.way == Way::Write) {
            step(&format!("both ways, {}", route.name()));
            let mut cells: Vec<Vec<Option<Entry<f64>>>> = grid(count, |_, _| None);
            for a in 0..count {
                for b in a..count {
                    if a == b || !pair(a, b, links.same_device(a, b)) {
                        continue;
                    }
                    let both = || refused(a, b).and_then(|()| refused(b, a));
                    let entry: Entry<f64> = both().and_then(|()| links.both_ways(route, a, b)).into();
                    (cells[a][b], cells[b][a]) = (Some(entry.clone()), Some(entry));
                }
            }
            measured.both_ways.push(Matrix { title: route.name(), unit: "GB/s", route: Some(route), cells });
        }
        let state = if p2p { "P2P on" } else { "P2P off" };
        step(&format!("latency of copies, {state}"));
        let cells = grid(count, |from, to| {
            pair(from, to, links.same_device(from, to))
                .then(|| refused(from, to).and_then(|()| links.copy_latency(from, to)).into())
        });
        let title = format!("copy engine, {state}, 16 bytes");
        measured.copy_latency.push(Matrix { title, unit: "us", route: None, cells });
        if p2p {
            step("latency of kernels");
            let stores = grid(count, |from, to| {
                (from != to).then(|| {
                    let both = refused(from, to).and_then(|()| refused(to, from));
                    both.and_then(|()| links.store_latency(from, to)).into()
                })
            });
            let loads =
                grid(count, |from, to| Some(refused(from, to).and_then(|()| links.load_latency(from, to)).into()));
            let matrix = |title: &str, cells| Matrix { title: title.into(), unit: "us", route: None, cells };
            measured.kernel_latency = vec![
                matrix("kernel, a store until the peer's poll sees it", stores),
                matrix("kernel, a load from the peer, there and back", loads),
            ];
        }
    }
    measured
}

/// Whose access it is, and to whose memory.
fn driver(route: Route, from: usize, to: usize) -> (usize, usize) {
    if route.way == Way::Read { (to, from) } else { (from, to) }
}

fn grid<T>(count: usize, mut cell: impl FnMut(usize, usize) -> T) -> Vec<Vec<T>> {
    (0..count).map(|from| (0..count).map(|to| cell(from, to)).collect()).collect()
}
