//! What a rank that is a process returns, as words in a pipe.

use std::{sync::OnceLock, time::Duration};

use peersum::{Algorithm, Call, DType, Error, Options, Phase, Plan, ReduceOp, host::Communicator};

/// What a rank returns.
pub trait Returned: Send + Sized {
    fn give(self, to: &mut Vec<u64>);
    /// What was given, which is taken out of the words.
    fn take(from: &mut impl Iterator<Item = u64>) -> Self;
}

fn next(from: &mut impl Iterator<Item = u64>) -> u64 {
    from.next().expect("as many words as were given")
}

impl Returned for u64 {
    fn give(self, to: &mut Vec<u64>) {
        to.push(self);
    }

    fn take(from: &mut impl Iterator<Item = u64>) -> u64 {
        next(from)
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Returned for $number {
            fn give(self, to: &mut Vec<u64>) {
                to.push(self as u64);
            }

            fn take(from: &mut impl Iterator<Item = u64>) -> $number {
                next(from) as $number
            }
        }
    )*};
}

numbers!(u32, usize);

/// A value of a type that has few: its place among them.
macro_rules! choices {
    ($($choice:ty: $all:expr),*) => {$(
        impl Returned for $choice {
            fn give(self, to: &mut Vec<u64>) {
                to.push($all.into_iter().position(|choice| choice == self).expect("one of all") as u64);
            }

            fn take(from: &mut impl Iterator<Item = u64>) -> $choice {
                $all[next(from) as usize]
            }
        }
    )*};
}

const PHASES: [Phase; 6] =
    [Phase::Exchange, Phase::Entry, Phase::Exit, Phase::Gate, Phase::ReduceScatter, Phase::AllGather];

choices!(DType: DType::ALL, ReduceOp: ReduceOp::ALL, Algorithm: Algorithm::ALL, Phase: PHASES);

macro_rules! tuples {
    ($(($($part:ident),*))*) => {$(
        impl<$($part: Returned),*> Returned for ($($part,)*) {
            #[allow(non_snake_case, unused_variables)]
            fn give(self, to: &mut Vec<u64>) {
                let ($($part,)*) = self;
                $($part.give(to);)*
            }

            #[allow(unused_variables, clippy::unused_unit)]
            fn take(from: &mut impl Iterator<Item = u64>) -> Self {
                ($($part::take(from),)*)
            }
        }
    )*};
}

tuples! { () (A, B) (A, B, C, D) (A, B, C, D, E, F) }

impl<T: Returned> Returned for Vec<T> {
    fn give(self, to: &mut Vec<u64>) {
        to.push(self.len() as u64);
        self.into_iter().for_each(|item| item.give(to));
    }

    fn take(from: &mut impl Iterator<Item = u64>) -> Vec<T> {
        (0..next(from)).map(|_| T::take(from)).collect()
    }
}

impl<T: Returned, const N: usize> Returned for [T; N] {
    fn give(self, to: &mut Vec<u64>) {
        self.into_iter().for_each(|item| item.give(to));
    }

    fn take(from: &mut impl Iterator<Item = u64>) -> [T; N] {
        std::array::from_fn(|_| T::take(from))
    }
}

impl<T: Returned> Returned for Option<T> {
    fn give(self, to: &mut Vec<u64>) {
        Vec::from_iter(self).give(to);
    }

    fn take(from: &mut impl Iterator<Item = u64>) -> Option<T> {
        Vec::take(from).pop()
    }
}

impl<T: Returned> Returned for Result<T, Error> {
    fn give(self, to: &mut Vec<u64>) {
        match self {
            Ok(value) => (Some(value), None::<Error>).give(to),
            Err(error) => (None::<T>, Some(error)).give(to),
        }
    }

    fn take(from: &mut impl Iterator<Item = u64>) -> Result<T, Error> {
        let (value, error): (Option<T>, Option<Error>) = Returned::take(from);
        value.ok_or_else(|| error.expect("one of the two"))
    }
}

impl Returned for Duration {
    fn give(self, to: &mut Vec<u64>) {
        to.push(self.as_nanos() as u64);
    }

    fn take(from: &mut impl Iterator<Item = u64>) -> Duration {
        Duration::from_nanos(next(from))
    }
}

/// Only the library makes plans. This one's fields are written over.
fn any_plan() -> Plan {
    static PLAN: OnceLock<Plan> = OnceLock::new();
    *PLAN.get_or_init(|| {
        let ranks = Communicator::local(2, &Options::default()).expect("a group of two");
        ranks[0].plan(1, DType::F32).expect("a plan").expect("something to exchange")
    })
}

impl Returned for Call {
    fn give(self, to: &mut Vec<u64>) {
        let Call { bytes, dtype, op, plan, offsets } = self;
        (bytes, dtype, op, offsets).give(to);
        (plan.algorithm, plan.blocks, plan.threads, plan.chunk_bytes).give(to);
    }

    fn take(from: &mut impl Iterator<Item = u64>) -> Call {
        let (bytes, dtype, op, offsets) = Returned::take(from);
        let mut plan = any_plan();
        (plan.algorithm, plan.blocks, plan.threads, plan.chunk_bytes) = Returned::take(from);
        Call { bytes, dtype, op, plan, offsets }
    }
}

/// Those that end a group of the host backend.
impl Returned for Error {
    fn give(self, to: &mut Vec<u64>) {
        match self {
            Error::PeerTimeout { rank, peer, block, epoch, phase, waited } => {
                (0u64, (rank, peer, block, epoch, phase, waited)).give(to)
            }
            Error::Mismatch { rank, call, peer, peer_call, block, epoch } => {
                (1u64, (rank, *call, peer, peer_call.map(|call| *call), block, epoch)).give(to)
            }
            Error::PeerGone { rank, peer } => (2u64, (rank, peer)).give(to),
            Error::PeerLeft { rank, peer } => (3u64, (rank, peer)).give(to),
            Error::Aborted { by } => (4u64, by).give(to),
            other => panic!("no error that ends a group: {other}"),
        }
    }

    fn take(from: &mut impl Iterator<Item = u64>) -> Error {
        match next(from) {
            0 => {
                let (rank, peer, block, epoch, phase, waited) = Returned::take(from);
                Error::PeerTimeout { rank, peer, block, epoch, phase, waited }
            }
            1 => {
                let (rank, call, peer, peer_call, block, epoch): (_, _, _, Option<Call>, _, _) = Returned::take(from);
                Error::Mismatch { rank, call: Box::new(call), peer, peer_call: peer_call.map(Box::new), block, epoch }
            }
            kind @ (2 | 3) => {
                let (rank, peer) = Returned::take(from);
                if kind == 2 { Error::PeerGone { rank, peer } } else { Error::PeerLeft { rank, peer } }
            }
            _ => Error::Aborted { by: Returned::take(from) },
        }
    }
}
