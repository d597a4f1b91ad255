//! All-reduce between processes: `peersum launch -n 4 -- target/debug/examples/ranks`, or by torchrun, mpirun or srun.

use peersum::{Options, ReduceOp, host::Communicator};

fn main() -> Result<(), peersum::Error> {
    let mut rank = Communicator::from_env(&Options::default())?;
    let world = rank.world_size();
    let mut tensor = vec![rank.rank() as f32; 100_000];
    rank.all_reduce_in_place(&mut tensor, ReduceOp::Sum)?;
    assert!(tensor.iter().all(|&sum| sum == (world * (world - 1) / 2) as f32));
    println!("rank {} of {world}: the sum is {}", rank.rank(), tensor[0]);
    Ok(())
}
