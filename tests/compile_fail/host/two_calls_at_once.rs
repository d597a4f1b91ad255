//! A communicator is one rank: two threads can't call it at once, neither by two exclusive references nor by shared ones.

use peersum::{ReduceOp, host::Communicator};

fn exclusively(mut rank: Communicator) {
    let (mut a, mut b) = ([1.0f32; 4], [2.0f32; 4]);
    std::thread::scope(|scope| {
        scope.spawn(|| rank.all_reduce_in_place(&mut a, ReduceOp::Sum));
        scope.spawn(|| rank.all_reduce_in_place(&mut b, ReduceOp::Sum));
    });
}

fn shared(rank: &Communicator) {
    let mut tensor = [1.0f32; 4];
    let _ = rank.all_reduce_in_place(&mut tensor, ReduceOp::Sum);
}

fn counted(rank: std::sync::Arc<Communicator>) {
    let (input, mut output) = ([1.0f32; 4], [0.0f32; 4]);
    let _ = rank.all_reduce(&input, &mut output, ReduceOp::Sum);
}

fn twice(rank: Communicator) -> [Communicator; 2] {
    [rank.clone(), rank]
}

fn main() {}
