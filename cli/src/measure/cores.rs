//! Which cores the host's ranks run on.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A core for each of `world` ranks: the first that this process may run on. `None` where there are fewer, or where the
/// system does not tell.
///
/// Ranks wait for each other, and a run is over before the scheduler has spread them: two on one core would take turns
/// at 10 µs a call.
pub(crate) fn for_ranks(world: usize) -> Option<Vec<usize>> {
    let allowed = sched_getaffinity(None).ok()?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).take(world).collect();
    (cores.len() == world).then_some(cores)
}

/// The same for one of `world` ranks that are processes. A launcher may have left each of them cores of its own: the one
/// core then, and none of several, among which the system chooses.
pub(crate) fn for_process(rank: usize, world: usize) -> Option<usize> {
    let own = for_ranks(2).is_none().then(|| for_ranks(1)).flatten();
    own.map(|cores| cores[0]).or_else(|| for_ranks(world).map(|cores| cores[rank]))
}

/// Keeps the calling thread on a core, as far as the system lets it.
pub(crate) fn keep_to(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    // A container may forbid it; the figures are then noisier, and still right.
    let _ = sched_setaffinity(None, &set);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_core_for_one_rank_and_none_for_too_many() {
        assert_eq!(for_ranks(1).map(|cores| cores.len()), Some(1));
        assert_eq!(for_ranks(CpuSet::MAX_CPU + 1), None);
    }

    #[test]
    fn a_process_takes_the_one_core_that_it_was_left() {
        std::thread::spawn(|| {
            let all = for_ranks(1).unwrap();
            assert_eq!(for_process(0, 1), Some(all[0]));
            keep_to(all[0]);
            assert_eq!([for_process(0, 8), for_process(7, 8)], [Some(all[0]); 2]);
        })
        .join()
        .unwrap();
        assert_eq!(for_process(0, CpuSet::MAX_CPU + 1), None);
    }

    #[test]
    fn a_thread_keeps_to_its_core() {
        std::thread::spawn(|| {
            let core = for_ranks(1).unwrap()[0];
            keep_to(core);
            let allowed = sched_getaffinity(None).unwrap();
            assert_eq!((allowed.count(), allowed.is_set(core)), (1, true));
        })
        .join()
        .unwrap();
    }
}
