//! Which grids an algorithm may be tried with.

use peersum::{Algorithm, Choice};

/// Messages of this size and more go by few grids: they take long, and only the large ones are of use.
const LONG_BYTES: usize = 4 << 20;
/// The most multiprocessors that blocks of all ranks may ask for where ranks share a device.
const SHARED_BLOCKS: usize = 128;
const MOST_BLOCKS: usize = 64;
const THREADS: [usize; 5] = [64, 128, 256, 384, 512];

/// The grids to try: with one packet or two a thread, or with one to sixteen packs. What can't be resident is for the
/// library to refuse.
///
/// `sharing` is how many ranks are on one device. `few` keeps to one packet, or one pack or four, a thread.
pub(crate) fn all(algorithm: Algorithm, bytes: usize, sharing: usize, few: bool) -> Vec<Choice> {
    let most_blocks = (SHARED_BLOCKS / sharing.max(1)).clamp(1, MOST_BLOCKS);
    let long = bytes >= LONG_BYTES;
    if algorithm == Algorithm::Nccl {
        return vec![Choice::NCCL];
    }
    if by_packets(algorithm) && long {
        return Vec::new(); // which takes long, and a third more bytes
    }
    // Of a device that ranks share, the plan gives packets no more than half, so that the next call's blocks can come.
    let most_blocks = if by_packets(algorithm) && sharing > 1 { (most_blocks / 2).max(1) } else { most_blocks };
    let units = bytes.div_ceil(algorithm.unit_bytes() as usize).max(1);
    let mut grids = Vec::new();
    if by_packets(algorithm) {
        for blocks in [2, 3, 4, 6, 8, 11, 16, 22, 32, 43, 64].into_iter().filter(|&blocks| blocks <= most_blocks) {
            for a_thread in if few { 1..=1 } else { 1..=2 } {
                grids.push((blocks, units.div_ceil(blocks * a_thread).next_multiple_of(32)));
            }
        }
    }
    for threads in THREADS.into_iter().filter(|&threads| threads > if long || few { 256 } else { 0 }) {
        for a_thread in if few { &[1, 4][..] } else { &[1, 2, 4, 8, 16] } {
            grids.push((units.div_ceil(threads * a_thread).clamp(1, most_blocks), threads));
        }
    }
    grids.retain(|&(_, threads)| (64..=512).contains(&threads));
    grids.sort_unstable();
    grids.dedup();
    grids.into_iter().map(|(blocks, threads)| choice(algorithm, blocks, threads)).collect()
}

/// One grid for an algorithm that the library would not choose at this size: enough blocks for a unit a thread, and no
/// more than half of what the ranks of a device have to share, so that the next call's blocks can come while these run.
pub(crate) fn usual(algorithm: Algorithm, bytes: usize, sharing: usize) -> Choice {
    if algorithm == Algorithm::Nccl {
        return Choice::NCCL;
    }
    let units = bytes.div_ceil(algorithm.unit_bytes() as usize).max(1);
    let small = (SHARED_BLOCKS / 2 / sharing.max(1)).clamp(1, MOST_BLOCKS);
    let threads = units.div_ceil(small).next_multiple_of(32).clamp(128, 512);
    choice(algorithm, units.div_ceil(threads).clamp(1, small), threads)
}

/// The same on half of the blocks, for where they can't be resident; `None` for one block.
pub(crate) fn halved(choice: Choice) -> Option<Choice> {
    (choice.blocks > 1).then_some(Choice { blocks: choice.blocks / 2, ..choice })
}

fn by_packets(algorithm: Algorithm) -> bool {
    matches!(algorithm, Algorithm::OneShotLl | Algorithm::TwoShotLl)
}

fn choice(algorithm: Algorithm, blocks: usize, threads: usize) -> Choice {
    Choice { algorithm, blocks: blocks as u32, threads: threads as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: [usize; 7] = [2, 1 << 10, 8 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20];

    #[test]
    fn every_grid_is_one_that_a_kernel_may_have_and_none_comes_twice() {
        for algorithm in Algorithm::ALL {
            for bytes in SIZES {
                for sharing in [1, 2, 8] {
                    for few in [false, true] {
                        let grids = all(algorithm, bytes, sharing, few);
                        assert_eq!(
                            grids.is_empty(),
                            by_packets(algorithm) && bytes >= LONG_BYTES,
                            "{algorithm} {bytes}"
                        );
                        for (index, grid) in grids.iter().enumerate() {
                            assert!(
                                (1..=64).contains(&grid.blocks) && grid.blocks as usize * sharing <= 128,
                                "{grid:?}"
                            );
                            assert!((64..=512).contains(&grid.threads) && grid.threads % 32 == 0, "{grid:?}");
                            assert!(!grids[..index].contains(grid), "{grid:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_quick_run_tries_some_of_the_grids() {
        for algorithm in Algorithm::ALL {
            for bytes in SIZES {
                let (every, few) = (all(algorithm, bytes, 2, false), all(algorithm, bytes, 2, true));
                assert!(few.iter().all(|grid| every.contains(grid)), "{algorithm} {bytes}");
                let in_between = (64 << 10..LONG_BYTES).contains(&bytes);
                assert!(!in_between || few.len() <= every.len() / 2, "{algorithm} {bytes}");
            }
        }
    }

    #[test]
    fn the_usual_grid_grows_with_the_message_and_shrinks_to_one_block() {
        for algorithm in Algorithm::ALL {
            let grids = SIZES.map(|bytes| usual(algorithm, bytes, 2));
            assert!(grids.windows(2).all(|pair| pair[0].blocks * pair[0].threads <= pair[1].blocks * pair[1].threads));
            assert_eq!((grids[0].blocks, grids[6].blocks, grids[6].threads), (1, 32, 512));
        }
        let choice = usual(Algorithm::TwoShot, 1 << 20, 1);
        let halves: Vec<_> = std::iter::successors(Some(choice), |&choice| halved(choice)).collect();
        assert_eq!(halves.last().map(|choice| choice.blocks), Some(1));
    }

    #[test]
    fn nccl_has_no_grid() {
        assert_eq!(all(Algorithm::Nccl, 64 << 20, 2, true), [Choice::NCCL]);
        assert_eq!(usual(Algorithm::Nccl, 1 << 20, 2), Choice::NCCL);
    }
}
