//! α–β costs of collectives: time = steps × α + bytes a rank sends / β.
//!
//! The formulas are the usual ones (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in
//! MPICH, 2005) with the counts of steps of direct algorithms, in which all peers are written at once. They know
//! neither a cost for each operation nor contention: `docs/model.md` has what that leaves out.

use std::fmt;

/// α and β of a network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Network {
    /// µs of a step.
    pub(crate) alpha_us: f64,
    /// GB/s that a rank sends.
    pub(crate) gb_per_s: f64,
}

/// A time, by what it is spent on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Cost {
    /// µs of steps.
    pub(crate) steps_us: f64,
    /// µs of bytes.
    pub(crate) bytes_us: f64,
}

impl Cost {
    pub(crate) fn us(self) -> f64 {
        self.steps_us + self.bytes_us
    }

    fn plus(self, other: Cost) -> Cost {
        Cost { steps_us: self.steps_us + other.steps_us, bytes_us: self.bytes_us + other.bytes_us }
    }
}

impl Network {
    fn cost(self, steps: f64, bytes: f64) -> Cost {
        Cost { steps_us: steps * self.alpha_us, bytes_us: bytes / (self.gb_per_s * 1e3) }
    }
}

/// Ways to all-reduce between ranks that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllReduce {
    Ring,
    /// Recursive halving, then doubling; for powers of 2.
    HalvingDoubling,
    TwoShot,
    OneShot,
}

impl AllReduce {
    pub(crate) const ALL: [AllReduce; 4] =
        [AllReduce::Ring, AllReduce::HalvingDoubling, AllReduce::TwoShot, AllReduce::OneShot];

    /// Of `bytes` bytes between `ranks` ranks; none where it isn't defined.
    pub(crate) fn cost(self, ranks: u32, bytes: f64, network: Network) -> Option<Cost> {
        let p = f64::from(ranks);
        let (steps, factor) = match self {
            AllReduce::Ring => (2.0 * (p - 1.0), 2.0 * (p - 1.0) / p),
            AllReduce::HalvingDoubling if ranks.is_power_of_two() => (2.0 * p.log2(), 2.0 * (p - 1.0) / p),
            AllReduce::HalvingDoubling => return None,
            AllReduce::TwoShot => (2.0, 2.0 * (p - 1.0) / p),
            AllReduce::OneShot => (1.0, p - 1.0),
        };
        Some(network.cost(steps, factor * bytes))
    }
}

impl fmt::Display for AllReduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            AllReduce::Ring => "ring",
            AllReduce::HalvingDoubling => "halving-doubling",
            AllReduce::TwoShot => "two-shot",
            AllReduce::OneShot => "one-shot",
        })
    }
}

/// Ways to reduce-scatter and to all-gather between ranks that are alike. One is the other backwards, so both cost the
/// same; bytes are those of the whole message, of which each rank has, or gets, its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scatter {
    Ring,
    /// Recursive halving, or doubling; for powers of 2.
    Halving,
    Direct,
}

impl Scatter {
    pub(crate) const ALL: [Scatter; 3] = [Scatter::Ring, Scatter::Halving, Scatter::Direct];

    /// Of `bytes` bytes between `ranks` ranks; none where it isn't defined.
    pub(crate) fn cost(self, ranks: u32, bytes: f64, network: Network) -> Option<Cost> {
        let p = f64::from(ranks);
        let steps = match self {
            Scatter::Ring => p - 1.0,
            Scatter::Halving if ranks.is_power_of_two() => p.log2(),
            Scatter::Halving => return None,
            Scatter::Direct => 1.0,
        };
        Some(network.cost(steps, (p - 1.0) / p * bytes))
    }
}

impl fmt::Display for Scatter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Scatter::Ring => "ring",
            Scatter::Halving => "halving",
            Scatter::Direct => "direct",
        })
    }
}

/// Ways to broadcast between ranks that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broadcast {
    /// The root writes to all.
    Direct,
    /// A binomial tree.
    Tree,
    /// Scattered down a binomial tree, and gathered in a ring.
    ScatterRing,
    /// Scattered by the root to all, and gathered by all from all.
    ScatterDirect,
}

impl Broadcast {
    pub(crate) const ALL: [Broadcast; 4] =
        [Broadcast::Direct, Broadcast::Tree, Broadcast::ScatterRing, Broadcast::ScatterDirect];

    /// Of `bytes` bytes between `ranks` ranks.
    pub(crate) fn cost(self, ranks: u32, bytes: f64, network: Network) -> Cost {
        let p = f64::from(ranks);
        let (rounds, part) = (p.log2().ceil(), (p - 1.0) / p);
        let (steps, factor) = match self {
            Broadcast::Direct => (1.0, p - 1.0),
            Broadcast::Tree => (rounds, rounds),
            Broadcast::ScatterRing => (rounds + p - 1.0, 2.0 * part),
            Broadcast::ScatterDirect => (2.0, 2.0 * part),
        };
        network.cost(steps, factor * bytes)
    }
}

impl fmt::Display for Broadcast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Broadcast::Direct => "direct",
            Broadcast::Tree => "tree",
            Broadcast::ScatterRing => "scatter-ring",
            Broadcast::ScatterDirect => "scatter-direct",
        })
    }
}

/// A cluster of nodes that are alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cluster {
    pub(crate) nodes: u32,
    /// GPUs of a node.
    pub(crate) ranks: u32,
    pub(crate) within: Network,
    pub(crate) between: Network,
}

impl Cluster {
    /// Reduce-scatter in the node, two-shot of each rank's part between the nodes, all-gather in the node.
    pub(crate) fn hierarchical_all_reduce(self, bytes: f64) -> Cost {
        let (k, n) = (f64::from(self.ranks), f64::from(self.nodes));
        let half = self.within.cost(1.0, (k - 1.0) / k * bytes);
        half.plus(self.between.cost(2.0, 2.0 * (n - 1.0) / n * bytes / k)).plus(half)
    }

    /// A direct reduce-scatter in the node, and one of each rank's part between the nodes; or an all-gather, which is that
    /// backwards.
    pub(crate) fn hierarchical_scatter(self, bytes: f64) -> Cost {
        let (k, n) = (f64::from(self.ranks), f64::from(self.nodes));
        self.within.cost(1.0, (k - 1.0) / k * bytes).plus(self.between.cost(1.0, (n - 1.0) / n * bytes / k))
    }

    /// Scattered in the root's node, each part by a tree to the other nodes through a NIC of its own, and gathered in each.
    pub(crate) fn hierarchical_broadcast(self, bytes: f64) -> Cost {
        let (k, rounds) = (f64::from(self.ranks), f64::from(self.nodes).log2().ceil());
        let half = self.within.cost(1.0, (k - 1.0) / k * bytes);
        half.plus(self.between.cost(rounds, rounds * bytes / k)).plus(half)
    }

    /// All-to-all of `bytes` bytes that each rank has for all.
    pub(crate) fn all_to_all(self, way: AllToAll, bytes: f64) -> Option<Cost> {
        let (k, n) = (f64::from(self.ranks), f64::from(self.nodes));
        let (away, near) = ((n - 1.0) / n * bytes, (k - 1.0) / (k * n) * bytes);
        let remote = k * (n - 1.0);
        Some(match way {
            AllToAll::Direct if self.nodes == 1 => self.within.cost(1.0, near),
            // Each remote peer is a message of its own for the NIC.
            AllToAll::Direct => self.between.cost(remote, away).plus(self.within.cost(0.0, near)),
            AllToAll::Pairwise if self.nodes == 1 => self.within.cost(k, near),
            AllToAll::Pairwise => self.between.cost(remote, away).plus(self.within.cost(k - 1.0, near)),
            AllToAll::Bruck if self.nodes == 1 && self.ranks.is_power_of_two() => {
                self.within.cost(k.log2(), k.log2() / 2.0 * bytes)
            }
            AllToAll::Bruck => return None,
            // Gathered in the node by destination, sent once to each node, and scattered there.
            AllToAll::TwoLevel if self.nodes > 1 => {
                self.between.cost(n - 1.0, away).plus(self.within.cost(0.0, 2.0 * (k - 1.0) / k * bytes))
            }
            AllToAll::TwoLevel => return None,
        })
    }
}

/// Ways to all-to-all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllToAll {
    Direct,
    Pairwise,
    /// Within a node of a power of 2 of ranks.
    Bruck,
    /// Between nodes.
    TwoLevel,
}

impl AllToAll {
    pub(crate) const ALL: [AllToAll; 4] = [AllToAll::Direct, AllToAll::Pairwise, AllToAll::Bruck, AllToAll::TwoLevel];
}

impl fmt::Display for AllToAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            AllToAll::Direct => "direct",
            AllToAll::Pairwise => "pairwise",
            AllToAll::Bruck => "bruck",
            AllToAll::TwoLevel => "two-level",
        })
    }
}

/// The bytes from which a two-shot takes less time than a one-shot; none between two ranks, where both send the same.
pub(crate) fn crossover(ranks: u32, network: Network) -> Option<f64> {
    let p = f64::from(ranks);
    let more = (p - 1.0) - 2.0 * (p - 1.0) / p;
    (more > 0.0).then(|| network.alpha_us * network.gb_per_s * 1e3 / more)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WITHIN: Network = Network { alpha_us: 2.0, gb_per_s: 350.0 };
    const BETWEEN: Network = Network { alpha_us: 15.0, gb_per_s: 20.0 };
    /// MB are 10⁶ bytes in the published table.
    const SIZES: [f64; 4] = [64e3, 1e6, 16e6, 128e6];

    /// Whether a figure, rounded as the printed one is, is the printed one.
    fn is_printed(printed: &str, us: f64) -> bool {
        let decimals = printed.split_once('.').map_or(0, |(_, decimals)| decimals.len() as i32);
        (printed.parse::<f64>().unwrap() - us).abs() <= 0.5 * 10f64.powi(-decimals) + 1e-9
    }

    /// What is printed that the formulas don't give, and what they give: size, column.
    const NOT_REPRODUCED: [(usize, usize, f64); 6] =
        [(0, 4, 215.6), (0, 5, 95.6), (0, 6, 35.6), (0, 7, 37.4), (3, 4, 11410.0), (3, 6, 11230.0)];

    #[test]
    fn the_published_all_reduce_table_comes_out_cell_by_cell() {
        let printed = [
            ["28.3", "12.3", "4.3", "3.3", "213", "93", "33", "31"],
            ["33", "17", "9", "22", "297", "178", "118", "365"],
            ["108", "92", "84", "322", "1610", "1490", "1430", "5615"],
            ["668", "652", "644", "2562", "11400", "11290", "11210", "44815"],
        ];
        for (size, row) in printed.iter().enumerate() {
            for (column, printed) in row.iter().enumerate() {
                let network = if column < 4 { WITHIN } else { BETWEEN };
                let us = AllReduce::ALL[column % 4].cost(8, SIZES[size], network).unwrap().us();
                match NOT_REPRODUCED.iter().find(|cell| (cell.0, cell.1) == (size, column)) {
                    Some((.., formula)) => {
                        assert!((us / formula - 1.0).abs() < 0.01 && !is_printed(printed, us), "{size} {column}: {us}");
                    }
                    None => assert!(is_printed(printed, us), "{size} {column}: {us}, printed {printed}"),
                }
            }
        }
    }

    #[test]
    fn hierarchical_all_reduce_comes_out() {
        let cluster = |nodes| Cluster { nodes, ranks: 8, within: WITHIN, between: BETWEEN };
        for (nodes, row) in [(2, ["34.7", "45.3", "214", "1474"]), (8, ["35.0", "49.9", "289", "2074"])] {
            for (size, printed) in row.into_iter().enumerate() {
                let us = cluster(nodes).hierarchical_all_reduce(SIZES[size]).us();
                assert!((us / printed.parse::<f64>().unwrap() - 1.0).abs() < 0.01, "{nodes} {size}: {us}, {printed}");
            }
        }
    }

    #[test]
    fn the_published_all_to_all_table_comes_out_but_for_one_cell() {
        let printed = [
            ["2.2", "16.2", "6.3", "62", "68", "17"],
            ["4.5", "18.5", "10.3", "86", "92", "44"],
            ["42", "56", "75", "477", "484", "484"],
            ["322", "336", "555", "3397", "3403", "3764"],
        ];
        let one = Cluster { nodes: 1, ranks: 8, within: WITHIN, between: BETWEEN };
        let two = Cluster { nodes: 2, ranks: 4, ..one };
        let columns = [
            (one, AllToAll::Direct),
            (one, AllToAll::Pairwise),
            (one, AllToAll::Bruck),
            (two, AllToAll::Direct),
            (two, AllToAll::Pairwise),
            (two, AllToAll::TwoLevel),
        ];
        for (size, row) in printed.iter().enumerate() {
            for (printed, (cluster, way)) in row.iter().zip(columns) {
                let us = cluster.all_to_all(way, SIZES[size]).unwrap().us();
                if (size, way, cluster.nodes) == (2, AllToAll::Pairwise, 2) {
                    assert!((us - 483.1).abs() < 0.1, "{us}");
                } else {
                    assert!(is_printed(printed, us), "{way} {size}: {us}, printed {printed}");
                }
            }
        }
    }

    /// Thakur, Rabenseifner and Gropp (2005): an all-reduce by Rabenseifner's algorithm is a reduce-scatter by halving and an
    /// all-gather by doubling, a ring is both by rings.
    #[test]
    fn two_halves_are_an_all_reduce() {
        for (half, whole) in [
            (Scatter::Ring, AllReduce::Ring),
            (Scatter::Halving, AllReduce::HalvingDoubling),
            (Scatter::Direct, AllReduce::TwoShot),
        ] {
            let half = half.cost(8, 16e6, WITHIN).unwrap();
            assert!((2.0 * half.us() - whole.cost(8, 16e6, WITHIN).unwrap().us()).abs() < 1e-9, "{whole}");
        }
        // 7 steps of 2 us and 7/8 of 16 MB at 350 GB/s.
        assert!((Scatter::Ring.cost(8, 16e6, WITHIN).unwrap().us() - (14.0 + 40.0)).abs() < 1e-9);
        assert_eq!(Scatter::Halving.cost(6, 1e6, WITHIN), None);
        let cluster = Cluster { nodes: 8, ranks: 8, within: WITHIN, between: BETWEEN };
        let both = 2.0 * cluster.hierarchical_scatter(1e6).us();
        assert!((both - cluster.hierarchical_all_reduce(1e6).us()).abs() < 1e-9);
        // Of one node it is the direct one, but for the step between nodes that isn't taken.
        let one = Cluster { nodes: 1, ..cluster };
        assert_eq!(one.hierarchical_scatter(1e6).bytes_us, Scatter::Direct.cost(8, 1e6, WITHIN).unwrap().bytes_us);
    }

    #[test]
    fn broadcasts_of_short_messages_go_down_a_tree_or_direct_and_long_ones_are_scattered() {
        let us = |way: Broadcast, ranks, bytes| way.cost(ranks, bytes, BETWEEN).us();
        // 3 rounds of 15 us and 3 times 20 MB at 20 GB/s.
        assert!((us(Broadcast::Tree, 8, 20e6) - (45.0 + 3000.0)).abs() < 1e-9);
        assert!((us(Broadcast::Tree, 5, 0.0) - 45.0).abs() < 1e-9);
        assert!((us(Broadcast::ScatterRing, 8, 20e6) - (150.0 + 1750.0)).abs() < 1e-9);
        let best = |ranks, bytes| {
            Broadcast::ALL.into_iter().min_by(|&a, &b| us(a, ranks, bytes).total_cmp(&us(b, ranks, bytes))).unwrap()
        };
        assert_eq!((best(8, 1e3), best(8, 20e6)), (Broadcast::Direct, Broadcast::ScatterDirect));
        assert!(us(Broadcast::Tree, 1024, 300e3) < us(Broadcast::Direct, 1024, 300e3));
        let cluster = Cluster { nodes: 4, ranks: 8, within: WITHIN, between: BETWEEN };
        // 2 (2 + 7/8 S / 350) and two rounds of S/8 between the nodes.
        let should = 2.0 * (2.0 + 0.875 * 16e6 / 350e3) + 2.0 * (15.0 + 2e6 / 20e3);
        assert!((cluster.hierarchical_broadcast(16e6).us() - should).abs() < 1e-9);
    }

    #[test]
    fn the_crossover_is_where_both_take_the_same() {
        let bytes = crossover(8, WITHIN).unwrap();
        assert!((bytes / 133e3 - 1.0).abs() < 0.01, "{bytes}");
        let at = |way: AllReduce| way.cost(8, bytes, WITHIN).unwrap().us();
        assert!((at(AllReduce::OneShot) - at(AllReduce::TwoShot)).abs() < 1e-9);
        assert_eq!(crossover(2, WITHIN), None);
    }

    #[test]
    fn what_is_not_defined_has_no_cost() {
        assert_eq!(AllReduce::HalvingDoubling.cost(6, 1e6, WITHIN), None);
        let six = Cluster { nodes: 1, ranks: 6, within: WITHIN, between: BETWEEN };
        assert_eq!(six.all_to_all(AllToAll::Bruck, 1e6), None);
        assert_eq!(six.all_to_all(AllToAll::TwoLevel, 1e6), None);
    }
}
