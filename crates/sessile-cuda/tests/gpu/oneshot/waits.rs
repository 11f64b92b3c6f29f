//! What launches wait for, and what they do if it does not come.

use std::time::Duration;

use sessile_conformance::{buffer, fill, read};
use sessile_cuda::{DeviceOptions, Way};
use sessile_hal::{Comm, Device, DeviceError};
use sessile_plan::DType;

use super::{SUM, everyone, going, registered, window};
use crate::worlds::{Threads, can_run};

/// [fill x; reduce; fill x with NaN] in one graph, 8 MiB, the second rank with one block and so slow: sums of the first
/// rank with a wrong value.
fn overwritten(mut worlds: Threads, ranks: u32, omit_exit: bool) -> u64 {
    worlds.options.one_shot.omit_exit = omit_exit;
    worlds.tune = |rank: u32, options: &mut DeviceOptions| {
        if rank == 1 {
            options.one_shot.blocks = Some(1);
        }
    };
    let wrong = worlds.results(ranks, |device| {
        let comm = everyone(&device);
        let s = device.stream("reduce").expect("stream");
        let n = 4u64 << 20;
        let n = n - n % u64::from(8 * ranks);
        let send = registered(&device, &comm, DType::Bf16, 0, n);
        let grad = buffer(&device, &vec![0.0; (n / u64::from(ranks)) as usize]);
        device.begin_capture(&s).expect("begin");
        fill(&device, &s, &send, 1.0);
        device.collective(&s, &comm, SUM, &send, &grad).expect("collective");
        fill(&device, &s, &send, f32::NAN);
        let graph = device.end_capture(&s).expect("end");
        let times = if omit_exit { 20 } else { 300 };
        for launch in 0..times {
            device.launch(&graph, &s).expect("launch");
            // Ranks of one process on one GPU share the driver's lock: a launch that blocks because too many are
            // outstanding would keep its peer from launching.
            if launch % 20 == 0 {
                device.wait_stream(&s).expect("wait");
            }
        }
        let want = (times * ranks) as f32;
        read(&device, &s, &grad).iter().filter(|x| **x != want).count() as u64
    });
    wrong.iter().sum()
}

#[test]
fn an_input_may_be_overwritten_as_soon_as_the_launch_has_ended() {
    if !can_run("an_input_may_be_overwritten_as_soon_as_the_launch_has_ended", 1) {
        return;
    }
    for ranks in [2, 3] {
        for way in [Way::Push, Way::Pull, Way::Bulk, Way::Copy] {
            assert_eq!(overwritten(going(Some(way)), ranks, false), 0, "{way:?}, {ranks} ranks");
        }
    }
}

/// A control of the test above.
#[test]
fn without_the_exit_a_slow_rank_reads_what_was_written_after_the_launch() {
    if !can_run("without_the_exit_a_slow_rank_reads_what_was_written_after_the_launch", 2) {
        return;
    }
    for way in [Way::Pull, Way::Bulk] {
        let wrong = overwritten(going(Some(way)), 2, true);
        assert_ne!(wrong, 0, "{way:?}");
        eprintln!("without the exit, {wrong} sums were wrong: {way:?}");
    }
}

/// What waits for what depends on the budget.
#[test]
fn members_with_different_budgets_make_no_group() {
    if !can_run("members_with_different_budgets_make_no_group", 1) {
        return;
    }
    let mut worlds = Threads::new();
    worlds.tune = |rank, options| options.one_shot.budget = (rank == 1).then_some(16);
    worlds.results(2, |device| {
        let error = device.communicator("all", &[0, 1]).map(|_| ()).expect_err("one has 16, one has all");
        assert!(matches!(&error, DeviceError::BadGroup { why, .. } if why.contains("budgets")), "{error}");
    });
}

#[test]
fn a_peer_that_does_not_launch_is_named_and_later_launches_do_nothing() {
    if !can_run("a_peer_that_does_not_launch_is_named_and_later_launches_do_nothing", 1) {
        return;
    }
    for way in [Way::Push, Way::Pull, Way::Bulk] {
        let mut worlds = going(Some(way));
        worlds.options.deadline = Duration::from_secs(3);
        worlds.results(2, |device| {
            let comm = everyone(&device);
            let s = device.stream("reduce").expect("stream");
            let send = window(&device, &comm, DType::F32, 0, &[1.0; 64]);
            let grad = buffer(&device, &[0.0; 32]);
            device.begin_capture(&s).expect("begin");
            device.collective(&s, &comm, SUM, &send, &grad).expect("collective");
            let graph = device.end_capture(&s).expect("end");
            for _ in 0..if device.rank() == 0 { 10 } else { 9 } {
                device.launch(&graph, &s).expect("launch");
            }
            if device.rank() == 1 {
                assert_eq!(read(&device, &s, &grad), [18.0; 32]);
                // Still there, and late.
                std::thread::sleep(Duration::from_secs(5));
                return;
            }
            let error = device.wait_stream(&s).expect_err("late");
            let named = matches!(
                &error,
                DeviceError::PeerTimeout { missing: 1, what, .. } if what.contains("round 10")
            );
            assert!(named, "{way:?}: {error}");
            assert!(device.launch(&graph, &s).is_err(), "refused from now on");
            device.wait_stream(&s).expect("told once, and nothing hangs");
            let still = comm.usable();
            assert!(matches!(still, Err(DeviceError::PeerTimeout { missing: 1, .. })), "{way:?}: {still:?}");
        });
    }
}
