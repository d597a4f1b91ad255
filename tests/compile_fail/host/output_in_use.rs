//! Nobody reads the output while a call writes it, and the input is not the output.

use peersum::{ReduceOp, host::Communicator};

fn read_meanwhile(mut rank: Communicator, tensor: &mut [f32]) {
    std::thread::scope(|scope| {
        scope.spawn(|| rank.all_reduce_in_place(tensor, ReduceOp::Sum));
        tensor.iter().sum::<f32>();
    });
}

fn looked_at_before_and_after(rank: &mut Communicator, tensor: &mut [f32]) -> f32 {
    let first = &tensor[0];
    let _ = rank.all_reduce_in_place(tensor, ReduceOp::Sum);
    *first
}

fn input_is_output(rank: &mut Communicator, tensor: &mut [f32]) {
    let _ = rank.all_reduce(&*tensor, tensor, ReduceOp::Sum);
}

fn input_overlaps_output(rank: &mut Communicator, tensor: &mut [f32]) {
    let _ = rank.all_reduce(&tensor[..4], &mut tensor[2..6], ReduceOp::Sum);
}

fn output_is_shared(rank: &mut Communicator, input: &[f32], output: &[f32]) {
    let _ = rank.all_reduce(input, output, ReduceOp::Sum);
}

fn main() {}
