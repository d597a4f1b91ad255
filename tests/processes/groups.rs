//! Several groups on one machine.

use std::time::{Duration, Instant};

use crate::harness::{PATIENCE, Rank, all, all_do, secret};

/// Four ranks are two tensor-parallel groups and two data-parallel ones, all at once.
#[test]
fn tensor_and_data_parallel_groups_of_one_job_do_not_mix() {
    let mut ranks = Rank::job(4);
    for (rank, process) in ranks.iter_mut().enumerate() {
        let (row, column) = (rank / 2 * 2, rank % 2);
        process.tell(&format!("meet among={row},{}", row + 1));
        process.tell(&format!("meet among={column},{}", column + 2));
        process.tell("meet group=world");
    }
    for process in &mut ranks {
        assert_eq!([process.answer(), process.answer(), process.answer()], ["done"; 3]);
    }
    for group in [0, 1, 2] {
        all_do(&mut ranks, &format!("reduce of={group} calls=50"));
    }
    // One that ends takes no other with it.
    ranks[3].kill();
    let mut others: Vec<_> = ranks.drain(..3).collect();
    all_do(&mut others[..2], "reduce of=0 calls=5");
    let answers = all(&mut others[2..], "reduce of=0 calls=5");
    assert!(answers[0].starts_with("PeerGone"), "{answers:?}");
}

/// Field case A16 (vllm-project/vllm#45917, flashinfer-ai/flashinfer#3408): subgroups waited for ranks of others. One comes
/// much later here, and then never.
#[test]
fn subgroups_that_come_at_different_times_do_not_wait_for_each_other() {
    let mut ranks = Rank::job(6);
    let (first, second) = ranks.split_at_mut(3);
    let started = Instant::now();
    all_do(first, "meet among=0,1,2");
    all_do(first, "reduce calls=10");
    assert!(started.elapsed() < PATIENCE / 10, "{:?}", started.elapsed());
    std::thread::sleep(Duration::from_secs(3));
    all_do(second, "meet among=3,4,5");
    all_do(second, "reduce calls=10");
    all_do(first, "reduce calls=10");
    // Only one of them ever makes another, and of the other a member stays away.
    all_do(first, "meet among=0,1,2 group=again");
    all_do(first, "reduce of=1 calls=10");
    for rank in [3, 5] {
        ranks[rank].tell("meet among=3,4,5 group=again wait=300");
    }
    for (rank, own) in [(3, 0), (5, 2)] {
        let answer = ranks[rank].answer();
        assert!(answer.starts_with(&format!("MeetingTimeout {{ rank: {own}, missing: [1]")), "{answer}");
    }
}

/// Under torchrun the store listens at MASTER_PORT; the ranks don't care.
#[test]
fn ranks_of_torchrun_meet_though_the_port_is_taken() {
    let store = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = store.local_addr().unwrap().port().to_string();
    let start = |rank: usize, run: &str| {
        let rank = rank.to_string();
        Rank::start(&[
            ("RANK", &rank),
            ("LOCAL_RANK", &rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
            ("TORCHELASTIC_RUN_ID", run),
        ])
    };
    // Two jobs at once, told apart by the id of the run alone.
    let mut ranks: Vec<_> = ["one", "two"]
        .into_iter()
        .flat_map(|run| (0..2).map(move |rank| (rank, run)))
        .map(|(rank, run)| start(rank, run))
        .collect();
    all_do(&mut ranks, "meet");
    all_do(&mut ranks, "reduce calls=20");
    // One after the other, and again.
    all_do(&mut ranks, "leave");
    all_do(&mut ranks, "meet");
    all_do(&mut ranks, "reduce calls=20");
    assert!(ranks.into_iter().all(Rank::end));
}

#[test]
fn mpirun_and_srun_are_understood() {
    let launchers: [&[(&str, &str)]; 3] = [
        &[("OMPI_COMM_WORLD_RANK", "r"), ("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_NAMESPACE", "job@1")],
        &[("PMI_RANK", "r"), ("PMI_SIZE", "2")],
        &[("SLURM_PROCID", "r"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0")],
    ];
    for variables in launchers {
        let start = |rank: &str| {
            let variables: Vec<_> =
                variables.iter().map(|&(name, value)| (name, if value == "r" { rank } else { value })).collect();
            Rank::start(&variables)
        };
        let mut ranks = [start("0"), start("1")];
        all_do(&mut ranks, "meet");
        all_do(&mut ranks, "reduce calls=5");
    }
}

#[test]
fn groups_that_are_given_one_port_take_turns() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let secret = secret().replace(' ', "-");
    let mut ranks = Rank::job(4);
    let started = Instant::now();
    for (rank, process) in ranks.iter_mut().enumerate() {
        let (group, rank) = (rank / 2, rank % 2);
        process.tell(&format!("meet at=127.0.0.1:{port} rank={rank} world=2 secret={secret} group={group}"));
    }
    for process in &mut ranks {
        assert_eq!(process.answer(), "done", "{:?}", started.elapsed());
    }
    all_do(&mut ranks, "reduce calls=20");
}
