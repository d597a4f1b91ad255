//! What processes compute.

use crate::harness::{Rank, algorithms, all, all_do};

#[test]
fn four_processes_get_the_references_bits_of_every_type_reduction_and_algorithm() {
    let mut ranks = Rank::job(4);
    for algorithm in algorithms() {
        all_do(&mut ranks, &format!("meet algorithm={algorithm}"));
        all_do(&mut ranks, "values");
        all_do(&mut ranks, "leave");
    }
    assert!(ranks.into_iter().all(Rank::end));
}

#[test]
fn a_thousand_calls_of_four_processes_are_right_and_their_epochs_stay_equal() {
    let mut ranks = Rank::job(4);
    all_do(&mut ranks, "meet");
    all_do(&mut ranks, "reduce calls=1000");
    let epochs = all(&mut ranks, "epochs");
    assert!(epochs.iter().all(|epoch| *epoch == epochs[0]), "{epochs:?}");
    all_do(&mut ranks, "check");
    assert!(ranks.into_iter().all(Rank::end));
}

/// Field case A09 (vllm-project/vllm#27858, #29389, #30407): a flag of plain bytes came before the data that it was for, above
/// all on ARM.
#[test]
fn who_sees_the_flag_sees_the_data() {
    message_passing(1_000_000);
}

#[test]
#[ignore = "takes minutes where other tests run: ci/processes.sh"]
fn who_sees_the_flag_sees_the_data_ten_million_times() {
    message_passing(10_000_000);
}

fn message_passing(rounds: usize) {
    let mut ranks = Rank::job(2);
    all_do(&mut ranks, "meet");
    let started = std::time::Instant::now();
    ranks.iter_mut().for_each(|rank| rank.tell(&format!("litmus rounds={rounds}")));
    for rank in &mut ranks {
        assert_eq!(rank.answer_within(std::time::Duration::from_secs(600)).as_deref(), Some("done"));
    }
    eprintln!("{rounds} rounds took {:?}", started.elapsed());
}

/// Whether it was tested or not, and where the epochs wrap.
#[test]
fn groups_begin_at_their_first_epoch_and_are_right_from_there_on() {
    let mut ranks = Rank::job(3);
    for epoch in [0, 5, u32::MAX - 7, u32::MAX] {
        for untested in ["", " untested=1"] {
            all_do(&mut ranks, &format!("meet epoch={epoch}{untested}"));
            assert_eq!(all(&mut ranks, "epochs"), vec![format!("[{epoch}, {epoch}]"); 3]);
            all_do(&mut ranks, "reduce calls=50");
            all_do(&mut ranks, "leave");
        }
    }
    assert!(ranks.into_iter().all(Rank::end));
}

/// What the self-test adds to a meeting of four (docs/measurements.md). Run alone, with `--ignored --nocapture`.
#[test]
#[ignore = "measures"]
fn how_long_a_meeting_takes_with_the_self_test_and_without() {
    let mut ranks = Rank::job(4);
    for round in 0..3 {
        for staging in ["", " staging=65536", " staging=33554432"] {
            for untested in [" untested=1", ""] {
                let command = format!("time meetings=15{staging}{untested}");
                println!("{round}: {command}: {:?}", all(&mut ranks, &command));
            }
        }
    }
}

/// Field case A21 (sgl-project/sglang#30209): a rank that is late, but not too late, changes nothing.
#[test]
fn a_process_that_is_late_is_waited_for() {
    let mut ranks = Rank::job(4);
    all_do(&mut ranks, "meet timeout=20000");
    for (late, delay) in [(3, 50), (0, 5000)] {
        let started = std::time::Instant::now();
        let command = "reduce calls=10";
        ranks.iter_mut().enumerate().filter(|&(rank, _)| rank != late).for_each(|(_, rank)| rank.tell(command));
        let delay = std::time::Duration::from_millis(delay);
        std::thread::sleep(delay);
        ranks[late].tell(command);
        assert!(ranks.iter_mut().all(|rank| rank.answer() == "done"));
        assert!(started.elapsed() >= delay);
    }
    all_do(&mut ranks, "check");
}

#[test]
fn one_process_is_a_group_too() {
    let mut ranks = Rank::job(1);
    all_do(&mut ranks, "meet");
    all_do(&mut ranks, "values");
    assert!(ranks.into_iter().all(Rank::end));
}

#[test]
fn calls_that_differ_are_the_same_error_in_every_process() {
    let mut ranks = Rank::job(3);
    all_do(&mut ranks, "meet");
    for (rank, count) in ranks.iter_mut().zip([100, 200, 100]) {
        rank.tell(&format!("reduce count={count}"));
    }
    let errors: Vec<_> = ranks.iter_mut().map(Rank::answer).collect();
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert!(errors[0].starts_with("Mismatch") && errors[0].contains("all_reduce of 200 x f32"), "{errors:?}");
    assert_eq!(all(&mut ranks, "check"), errors);
}

#[test]
fn an_abort_reaches_every_process() {
    let mut ranks = Rank::job(3);
    all_do(&mut ranks, "meet");
    ranks[0].tell("reduce count=10");
    ranks[1].tell("reduce count=10");
    std::thread::sleep(std::time::Duration::from_millis(50));
    ranks[2].tell("abort");
    assert_eq!(ranks[2].answer(), "done");
    for rank in &mut ranks[..2] {
        assert!(rank.answer().starts_with("Aborted { by: None }"));
    }
    assert!(all(&mut ranks, "check").iter().all(|error| error.starts_with("Aborted { by: None }")));
}
