//! Algorithm and bus bandwidth, by nccl-tests' definitions. 1 GB is 10⁹ bytes.

/// What `--help` says about the two columns.
pub(crate) const EXPLANATION: &str = "\
What the columns mean:
  size    bytes of one rank's tensor (count x bytes of an element)
  time    microseconds of one call: total time / (iterations x replays), combined over the ranks
          by --average
  algbw   algorithm bandwidth: size / time, in GB/s with 1 GB = 10^9 bytes. How fast tensors get
          summed; it falls as ranks are added even where every link is full
  busbw   bus bandwidth: algbw x 2(n-1)/n for n ranks. Any all-reduce without help from the switch
          must send and receive 2(n-1)/n x size per rank, so busbw can be held against the speed
          of one rank's link, in one direction
  #wrong  elements with wrong bits, summed over all ranks and all checks; 0 is right, anything
          else fails the run
  ratio   with --compare: time of what the library chose / time of the other; below 1 the
          library's choice is faster

What busbw is not: it is not measured traffic. It is computed from the time alone and does not
know the algorithm (a one-shot sends (n-1) x size per rank, more than busbw counts), nor the
topology; a reduction in the switch can exceed the link's speed in it. For small messages it says
nothing: there the time is latency. Between runs compare time at equal size; between numbers of
ranks compare busbw.

Flags of nccl-tests that have another form here, or none:
  -z, --blocking 1       is --timing synchronized
  -C, --report_cputime   the host's clock is wall_time_us in the JSON, beside the device's
  -N, --run_cycles 0     cycles without end: give a number
  -t, -p                 one process has a thread for each rank, and all join at the same time
  -m, --agg_iters        calls are not aggregated
  -r, --root             all-reduce has none
  -R, --local_register 1 no buffer has to be registered; 2 is here, as symmetric memory
  -S, -y                 no timestamps, no null stream";

/// Bytes per second, in GB/s, at which a call of `bytes` bytes that takes `time_us` reduces its tensor.
///
/// 0 where the time is not positive, as of a call of no elements on a coarse clock.
pub(crate) fn algorithm(bytes: usize, time_us: f64) -> f64 {
    if time_us > 0.0 { bytes as f64 / (time_us * 1e3) } else { 0.0 }
}

/// The factor from algorithm to bus bandwidth of an all-reduce: 2(n−1)/n, the least that a rank must send and receive
/// per byte of its tensor.
pub(crate) fn bus_factor(world: usize) -> f64 {
    2.0 * (world as f64 - 1.0) / world as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Field case A64 (NVIDIA/nccl-tests#274, #212, #45): what the bandwidths mean.
    #[test]
    fn one_mebibyte_in_ten_microseconds() {
        let algbw = algorithm(1 << 20, 10.0);
        assert_eq!(algbw, 104.8576);
        for (world, busbw) in [(1, 0.0), (2, 104.8576), (4, 157.2864), (8, 183.5008)] {
            assert!((algbw * bus_factor(world) - busbw).abs() < 1e-12, "{world}");
        }
    }

    #[test]
    fn the_explanation_is_not_broken_where_help_goes_to_a_pipe() {
        // The width that clap takes there.
        assert!(EXPLANATION.lines().all(|line| line.len() <= 100));
    }

    #[test]
    fn no_time_is_no_bandwidth() {
        assert_eq!(algorithm(0, 0.0), 0.0);
        assert_eq!(algorithm(1024, 0.0), 0.0);
    }
}
