//! What all-reduce should take on a cluster that is on paper, by the best of the usual algorithms, and what bounds it.
//!
//! Costs are those of [`collectives`](super::collectives), with an operation's own cost, and with a cost for each message
//! beyond the first that a NIC has to send in a step: without it, sending to a thousand nodes at once would be free.

use super::collectives::Network;

/// A cluster of nodes that are alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Plan {
    pub(crate) nodes: u32,
    /// Of a node.
    pub(crate) ranks: u32,
    /// µs of a call apart from its steps.
    pub(crate) operation_us: f64,
    pub(crate) within: Network,
    /// µs of a step between nodes.
    pub(crate) between_us: f64,
    /// Of a node, with GB/s of each.
    pub(crate) nics: u32,
    pub(crate) nic_gb_per_s: f64,
    /// µs of each further message of a step.
    pub(crate) message_us: f64,
}

/// How an all-reduce is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    /// One ring over all ranks; the NICs of a node share what goes out of it.
    FlatRing,
    /// Within one node.
    OneShot,
    TwoShot,
    HalvingDoubling,
    /// Reduce-scatter in the node, all-reduce of each part between nodes, all-gather in the node; between nodes by a ring,
    HierarchicalRing,
    /// by recursive halving and doubling,
    HierarchicalHalving,
    /// by a tree up and down, in pieces that follow each other,
    HierarchicalTree,
    /// or directly, to all at once.
    HierarchicalDirect,
}

/// What a call's time is spent on, in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spent {
    pub(crate) operation: f64,
    pub(crate) steps_within: f64,
    pub(crate) steps_between: f64,
    pub(crate) bytes_within: f64,
    pub(crate) bytes_between: f64,
}

impl Spent {
    pub(crate) fn us(&self) -> f64 {
        self.operation + self.steps_within + self.steps_between + self.bytes_within + self.bytes_between
    }

    /// The greatest part.
    pub(crate) fn bound(&self) -> &'static str {
        let parts = [
            (self.operation, "operation"),
            (self.steps_within, "steps in the node"),
            (self.steps_between, "steps between nodes"),
            (self.bytes_within, "bytes in the node"),
            (self.bytes_between, "bytes between nodes"),
        ];
        parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or("", |(_, name)| name)
    }
}

impl Scheme {
    pub(crate) const ALL: [Scheme; 8] = [
        Scheme::FlatRing,
        Scheme::OneShot,
        Scheme::TwoShot,
        Scheme::HalvingDoubling,
        Scheme::HierarchicalRing,
        Scheme::HierarchicalHalving,
        Scheme::HierarchicalTree,
        Scheme::HierarchicalDirect,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Scheme::FlatRing => "ring over all",
            Scheme::OneShot => "one-shot",
            Scheme::TwoShot => "two-shot",
            Scheme::HalvingDoubling => "halving-doubling",
            Scheme::HierarchicalRing => "hierarchical, ring",
            Scheme::HierarchicalHalving => "hierarchical, halving-doubling",
            Scheme::HierarchicalTree => "hierarchical, tree",
            Scheme::HierarchicalDirect => "hierarchical, direct",
        }
    }

    /// None where the scheme isn't for such a cluster.
    pub(crate) fn spent(self, plan: &Plan, bytes: f64) -> Option<Spent> {
        let (k, n) = (f64::from(plan.ranks), f64::from(plan.nodes));
        let all = k * n;
        let one = plan.nodes == 1;
        let us = |bytes: f64, gb_per_s: f64| bytes / (gb_per_s * 1e3);
        // GB/s out of a node.
        let out = f64::from(plan.nics) * plan.nic_gb_per_s;
        let spent = Spent { operation: plan.operation_us, ..Spent::default() };
        let within = |steps: f64, factor: f64| Spent {
            steps_within: steps * plan.within.alpha_us,
            bytes_within: us(factor * bytes, plan.within.gb_per_s),
            ..spent
        };
        // Each rank sends `factor` times its part, and a node's ranks share its NICs. With one rank a node there is
        // nothing to do within.
        let hierarchical = |steps: f64, messages: f64, factor: f64| {
            let steps_within = if plan.ranks > 1 { 2.0 * plan.within.alpha_us } else { 0.0 };
            Spent {
                steps_within,
                bytes_within: us(2.0 * (k - 1.0) / k * bytes, plan.within.gb_per_s),
                steps_between: steps * plan.between_us + messages * plan.message_us,
                bytes_between: us(factor * bytes, out),
                ..spent
            }
        };
        let halving = 2.0 * (n - 1.0) / n;
        match self {
            Scheme::OneShot if one => Some(within(1.0, k - 1.0)),
            Scheme::TwoShot if one => Some(within(2.0, 2.0 * (k - 1.0) / k)),
            Scheme::HalvingDoubling if one && plan.ranks.is_power_of_two() => {
                Some(within(2.0 * k.log2(), 2.0 * (k - 1.0) / k))
            }
            Scheme::FlatRing if one => Some(within(2.0 * (k - 1.0), 2.0 * (k - 1.0) / k)),
            // All ranks step together, so each step takes as long as the one between nodes; rings through each NIC share
            // the message.
            Scheme::FlatRing => {
                let factor = 2.0 * (all - 1.0) / all;
                let steps_between = 2.0 * (all - 1.0) * plan.between_us.max(plan.within.alpha_us);
                let (inside, outside) = (us(factor * bytes, plan.within.gb_per_s), us(factor * bytes, out));
                // Both carry it at the same time.
                let (bytes_within, bytes_between) = if inside > outside { (inside, 0.0) } else { (0.0, outside) };
                Some(Spent { steps_between, bytes_within, bytes_between, ..spent })
            }
            _ if one => None,
            Scheme::HierarchicalRing => Some(hierarchical(2.0 * (n - 1.0), 0.0, halving)),
            Scheme::HierarchicalHalving if plan.nodes.is_power_of_two() => {
                Some(hierarchical(2.0 * n.log2(), 0.0, halving))
            }
            // Two trees, in each of which half of the nodes are leaves: everybody sends and receives all of it once.
            Scheme::HierarchicalTree => Some(hierarchical(2.0 * n.log2().ceil(), 0.0, 2.0)),
            Scheme::HierarchicalDirect => {
                // Each of the node's ranks sends to all others of its rail; a NIC has the messages of k / nics ranks.
                let of_nic = (n - 1.0) * (k / f64::from(plan.nics)).max(1.0);
                Some(hierarchical(2.0, 2.0 * (of_nic - 1.0), halving))
            }
            _ => None,
        }
    }
}

impl Plan {
    /// All schemes that are possible, the fastest first.
    pub(crate) fn schemes(&self, bytes: f64) -> Vec<(Scheme, Spent)> {
        let spent = |scheme: Scheme| Some((scheme, scheme.spent(self, bytes)?));
        let mut schemes: Vec<_> = Scheme::ALL.into_iter().filter_map(spent).collect();
        schemes.sort_by(|a, b| a.1.us().total_cmp(&b.1.us()));
        schemes
    }

    /// GB/s of bus bandwidth of a call that takes so long.
    pub(crate) fn bus(&self, bytes: f64, us: f64) -> f64 {
        let all = f64::from(self.ranks) * f64::from(self.nodes);
        2.0 * (all - 1.0) / all * bytes / (us * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::collectives::Cluster;

    /// What the published table is of: a rank sends 20 GB/s between nodes, so 8 of a node 160.
    fn published(nodes: u32) -> Plan {
        Plan {
            nodes,
            ranks: 8,
            operation_us: 0.0,
            within: Network { alpha_us: 2.0, gb_per_s: 350.0 },
            between_us: 15.0,
            nics: 8,
            nic_gb_per_s: 20.0,
            message_us: 0.0,
        }
    }

    #[test]
    fn the_direct_scheme_is_the_model_of_a_cluster() {
        for nodes in [2, 8] {
            let plan = published(nodes);
            let between = Network { alpha_us: 15.0, gb_per_s: 20.0 };
            let cluster = Cluster { nodes, ranks: 8, within: plan.within, between };
            for bytes in [64e3, 1e6, 16e6, 128e6] {
                let us = Scheme::HierarchicalDirect.spent(&plan, bytes).unwrap().us();
                assert!((us / cluster.hierarchical_all_reduce(bytes).us() - 1.0).abs() < 1e-9, "{nodes} {bytes} {us}");
            }
        }
    }

    #[test]
    fn one_node_is_the_model_of_a_node() {
        let plan = published(1);
        let us = |scheme: Scheme, bytes| scheme.spent(&plan, bytes).unwrap().us();
        for (scheme, printed) in
            [(Scheme::FlatRing, 33.0), (Scheme::HalvingDoubling, 17.0), (Scheme::TwoShot, 9.0), (Scheme::OneShot, 22.0)]
        {
            assert!((us(scheme, 1e6) - printed).abs() < 1e-9, "{scheme:?}");
        }
        assert_eq!(plan.schemes(1e6)[0].0, Scheme::TwoShot);
        assert_eq!(plan.schemes(1e3)[0].0, Scheme::OneShot);
        assert!(Scheme::HierarchicalRing.spent(&plan, 1e6).is_none());
    }

    #[test]
    fn thousands_of_ranks_are_not_reached_at_once_for_free() {
        let plan = Plan { message_us: 0.5, ..published(1024) };
        let short = plan.schemes(1e3);
        assert!(!matches!(short[0].0, Scheme::HierarchicalDirect | Scheme::FlatRing), "{short:?}");
        assert_eq!(short[0].1.bound(), "steps between nodes");
        let long = plan.schemes(8e9);
        assert_eq!(long[0].1.bound(), "bytes between nodes", "{long:?}");
        // A ring's steps are the worst there is for short messages.
        assert_eq!(short.last().map(|(scheme, _)| *scheme), Some(Scheme::FlatRing));
    }

    #[test]
    fn fewer_nics_make_the_node_wait_for_them() {
        let us = |nics| Plan { nics, ..published(4) }.schemes(1e9)[0].1.us();
        assert!(us(1) > 6.0 * us(8), "{} {}", us(1), us(8));
    }

    proptest! {
        #[test]
        fn the_fastest_is_first_and_times_grow_with_the_size(
            nodes in 1..5000u32, ranks in 1..17u32, nics in 1..17u32, shift in 0..32u32,
        ) {
            prop_assume!(nodes > 1 || ranks > 1);
            let plan = Plan { nodes, ranks, nics, message_us: 0.5, operation_us: 9.0, ..published(1) };
            let (bytes, schemes) = ((1u64 << shift) as f64, plan.schemes((1u64 << shift) as f64));
            prop_assert!(!schemes.is_empty());
            prop_assert!(schemes.windows(2).all(|pair| pair[0].1.us() <= pair[1].1.us()));
            prop_assert!(schemes[0].1.us() >= 9.0 && schemes[0].1.us().is_finite());
            prop_assert!(plan.schemes(2.0 * bytes)[0].1.us() >= schemes[0].1.us());
        }
    }
}
