//! Ranks that are threads of one process.

use std::{
    any::Any,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{Error, Result};

/// One rank's seat at a meeting of the threads of one process.
///
/// What a rank shares reaches all others by [`Local::all_gather`], in as many rounds as they like. A seat that is
/// dropped before its rank is done tells the others, so that nobody waits for a rank that failed.
pub(crate) struct Local {
    rank: usize,
    table: Arc<Table>,
    round: usize,
    deadline: Duration,
}

struct Table {
    world: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// What each rank laid down, by round.
    rounds: Vec<Vec<Option<Arc<dyn Any + Send + Sync>>>>,
    /// Why a rank left, by rank.
    left: Vec<Option<String>>,
}

impl Local {
    /// The seats of a group, in rank order. No rank waits longer than `deadline` for another.
    pub(crate) fn group(world: usize, deadline: Duration) -> Vec<Local> {
        let state = State { rounds: Vec::new(), left: vec![None; world] };
        let table = Arc::new(Table { world, state: Mutex::new(state), changed: Condvar::new() });
        (0..world).map(|rank| Local { rank, table: table.clone(), round: 0, deadline }).collect()
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn world(&self) -> usize {
        self.table.world
    }

    /// Lays `value` down and returns what every rank laid down, in rank order.
    pub(crate) fn all_gather<T: Clone + Send + Sync + 'static>(&mut self, value: T) -> Result<Vec<T>> {
        let started = Instant::now();
        let world = self.table.world;
        let mut state = self.table.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.rounds.len() <= self.round {
            state.rounds.push(vec![None; world]);
        }
        state.rounds[self.round][self.rank] = Some(Arc::new(value));
        self.table.changed.notify_all();
        loop {
            let laid = &state.rounds[self.round];
            let missing: Vec<usize> = (0..world).filter(|&peer| laid[peer].is_none()).collect();
            if missing.is_empty() {
                let values = laid.iter().map(|value| {
                    let value = value.as_deref().and_then(|value| (value as &dyn Any).downcast_ref::<T>());
                    value.expect("all ranks run the same rounds of a meeting").clone()
                });
                let values = values.collect();
                self.round += 1;
                return Ok(values);
            }
            if let Some((peer, reason)) = missing.iter().find_map(|&peer| Some((peer, state.left[peer].clone()?))) {
                return Err(Error::PeerFailed { peer, reason });
            }
            let Some(left) = self.deadline.checked_sub(started.elapsed()) else {
                return Err(Error::MeetingTimeout { rank: self.rank, missing, waited: started.elapsed() });
            };
            let woken = self.table.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Tells the others why this rank leaves before the meeting is over.
    pub(crate) fn leave(self, reason: &Error) {
        self.set_left(reason.to_string());
    }

    fn set_left(&self, reason: String) {
        let mut state = self.table.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.left[self.rank].get_or_insert(reason);
        self.table.changed.notify_all();
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.set_left("it left the meeting".into());
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn everybody_gets_everything_in_rank_order_round_after_round() {
        let seats = Local::group(5, Duration::from_secs(10));
        std::thread::scope(|scope| {
            for mut seat in seats {
                scope.spawn(move || {
                    for round in 0..20 {
                        let all = seat.all_gather((round, seat.rank())).unwrap();
                        assert_eq!(all, (0..5).map(|rank| (round, rank)).collect::<Vec<_>>());
                    }
                    assert_eq!(seat.all_gather(seat.rank().to_string()).unwrap()[4], "4");
                });
            }
        });
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let mut seats = Local::group(3, Duration::from_millis(30));
        let absent = seats.remove(1);
        let error = seats[0].all_gather(()).unwrap_err();
        assert!(matches!(error, Error::MeetingTimeout { rank: 0, ref missing, .. } if *missing == [1, 2]), "{error}");
        drop(absent);
    }

    #[test]
    fn a_rank_that_fails_ends_the_wait_at_once() {
        let mut seats = Local::group(2, Duration::from_secs(600));
        seats.pop().unwrap().leave(&Error::Overlap);
        let error = seats[0].all_gather(()).unwrap_err();
        assert!(matches!(error, Error::PeerFailed { peer: 1, .. }), "{error}");
    }
}
