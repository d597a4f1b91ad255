use std::time::Duration;

use super::{
    super::{Entry, Question, Reason, Tuned, samples::*},
    *,
};
use crate::{DType, Error, Placement, meeting::Local};

fn tuned(entry: Entry, path: &str) -> Source {
    Source::Table(Tuned::new(entry.into(), path.into(), None).unwrap())
}

fn untuned() -> Source {
    Source::Priors(Reason::Untuned { path: None })
}

/// A table whose shortest messages take so many blocks.
fn marked(blocks: u32) -> Source {
    let mut entry = entry();
    entry.curves[0].steps[0].choice.blocks = blocks;
    tuned(entry, &format!("/tables/{blocks}.toml"))
}

fn seats(world: usize, deadline: Duration) -> Vec<Seat> {
    Local::group(world, deadline).into_iter().map(Seat::Threads).collect()
}

/// What every rank ends with: the blocks of a short message, and the warning.
fn agreed(sources: Vec<Source>) -> Vec<(u32, Option<String>)> {
    let seats = seats(sources.len(), Duration::from_secs(60));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = seats
            .into_iter()
            .zip(sources)
            .map(|(mut seat, source)| {
                scope.spawn(move || {
                    let Agreed { source, warning } = agree(&mut seat, source).unwrap();
                    // The meeting goes on, in step.
                    assert_eq!(seat.all_gather(seat.rank()).unwrap().len(), seat.world());
                    let (dtype, placement) = (DType::BF16, Placement::Anywhere);
                    let question = Question { bytes: 64, dtype, world: 2, placement, deterministic: false };
                    (source.choose(&question, priors).own.blocks, warning)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn the_same_table_is_agreed_in_silence_wherever_it_was_read() {
    assert_eq!(agreed(vec![tuned(entry(), "/a.toml"), tuned(entry(), "/b.toml")]), vec![(8, None); 2]);
    // Why there is none may differ.
    let damaged = Source::Priors(Reason::Damaged { path: "t".into(), cause: "c".into() });
    assert_eq!(agreed(vec![untuned(), damaged]), vec![(2, None); 2]);
}

#[test]
fn ranks_with_different_tables_take_that_of_rank_0() {
    let told = "ranks 1, 3 would choose by another table than rank 0: all take that of rank 0 (/tables/1.toml, \
                measured 2026-11-30; rank 1: /tables/2.toml, measured 2026-11-30)";
    assert_eq!(agreed(vec![marked(1), marked(2), marked(1), marked(3)]), vec![(1, Some(told.to_owned())); 4]);
    let told = "rank 1 would choose by another table than rank 0: all take that of rank 0 (priors: no table was \
                measured (neither XDG_CACHE_HOME nor HOME is set): run `peersum tune`; rank 1: /tables/7.toml, measured \
                2026-11-30)";
    assert_eq!(agreed(vec![untuned(), marked(7)]), vec![(2, Some(told.to_owned())); 2]);
    assert!(agreed(vec![marked(7), untuned()]).iter().all(|(blocks, warning)| *blocks == 7 && warning.is_some()));
}

#[test]
fn a_border_to_nccl_that_holds_on_one_rank_alone_is_a_difference() {
    let without = Tuned::new(entry().into(), "/b.toml".into(), Some("there is none here".into())).unwrap();
    let ranks = agreed(vec![tuned(entry(), "/a.toml"), Source::Table(without)]);
    assert!(
        ranks[0]
            .1
            .as_ref()
            .unwrap()
            .ends_with("rank 1: /b.toml, measured 2026-11-30, without NCCL: there is none here)")
    );
    assert_eq!(ranks[0], ranks[1]);
}

#[test]
fn a_rank_that_does_not_come_is_an_error_and_no_hang() {
    let mut seats = seats(2, Duration::from_secs(60));
    drop(seats.pop());
    let error = agree(&mut seats[0], untuned()).err().unwrap();
    assert!(matches!(error, Error::PeerFailed { peer: 1, .. }), "{error}");
}

/// Other releases and processes must compute the same.
#[test]
fn the_hash_is_fnv_1a() {
    assert_eq!(fnv1a("".bytes()), 0xcbf2_9ce4_8422_2325);
    assert_eq!(fnv1a("foobar".bytes()), 0x8594_4171_f739_67e8);
}
