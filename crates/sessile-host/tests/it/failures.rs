//! What happens when ranks disagree, die or do not come: a typed error on every rank, in bounded time.

use std::time::{Duration, Instant};

use sessile_hal::{Collective, Comm, Device, DeviceError, Kernel, Op};
use sessile_host::{HostDevice, RankFailure, World, WorldOptions};

use crate::support::{all_modes, buffer, fill, raw, read, spin};

/// Runs and gives each rank's error.
fn errors(
    options: &WorldOptions,
    program: impl Fn(&HostDevice) -> Result<(), DeviceError> + Sync,
) -> Vec<Option<DeviceError>> {
    let begun = Instant::now();
    let world = World::new(options.clone());
    let results = world.run(|device| program(&device));
    assert!(begun.elapsed() < Duration::from_secs(10), "{options:?} took {:?}", begun.elapsed());
    for rank in 0..options.ranks {
        assert_eq!(world.live_bytes(rank), 0, "{options:?}: rank {rank} leaks");
    }
    let error = |result| match result {
        Ok(()) => None,
        Err(RankFailure::Failed { error, .. }) => Some(error),
        Err(RankFailure::Panicked { message, .. }) if message == "as planned" => None,
        Err(other) => panic!("{other}"),
    };
    results.into_iter().map(error).collect()
}

#[test]
fn different_collectives_are_an_error_on_every_rank() {
    for options in all_modes(2) {
        let told = errors(&options, |device| {
            let comm = device.communicator("g", &[0, 1])?;
            let s = device.stream("s")?;
            let (x, y) = (buffer(device, &[1.0; 2]), buffer(device, &[1.0; 2]));
            device.collective(&s, &comm, Collective::AllReduce, &x, &y)?;
            let n = 1 + u64::from(device.rank());
            let (from, to) = (x.slice(0, n)?, y.slice(0, n)?);
            device.collective(&s, &comm, Collective::AllReduce, &from, &to)?;
            let first = device.wait_stream(&s);
            assert!(matches!(first, Err(DeviceError::CollectiveMismatch { number: 1, .. })), "{first:?}");
            assert_eq!(device.wait_stream(&s), Ok(()), "told once");
            assert_eq!(read(device, &s, &y), [2.0; 2], "the failed one did nothing");
            device.collective(&s, &comm, Collective::AllReduce, &x, &y)?; // fails too
            device.wait_stream(&s)
        });
        for error in told {
            match error {
                Some(DeviceError::CollectiveMismatch { group, number: 1, have, want, .. }) => {
                    assert_eq!(group, "g");
                    assert_ne!(have, want);
                }
                other => panic!("{options:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_rank_that_ends_is_lost_to_those_that_wait_for_it() {
    for options in all_modes(3) {
        for panics in [false, true] {
            let told = errors(&options, |device| {
                let comm = device.communicator("g", &[0, 1, 2])?;
                let s = device.stream("s")?;
                let (x, y) = (buffer(device, &[1.0]), buffer(device, &[0.0]));
                device.collective(&s, &comm, Collective::AllReduce, &x, &y)?;
                if device.rank() == 1 {
                    assert!(!panics, "as planned");
                    return Ok(());
                }
                device.collective(&s, &comm, Collective::AllReduce, &y, &x)?;
                device.wait_stream(&s)
            });
            for rank in [0, 2] {
                let lost = matches!(&told[rank], Some(DeviceError::PeerLost { rank: r, peer: 1, .. }) if *r == rank as u32);
                assert!(lost, "{options:?}: {:?}", told[rank]);
            }
        }
    }
}

#[test]
fn a_rank_that_ends_is_lost_in_exchanges_and_communicators() {
    for options in all_modes(2) {
        let told = errors(&options, |device| {
            let comm = device.communicator("g", &[0, 1])?;
            if device.rank() == 1 {
                return Ok(());
            }
            let made = device.communicator("late", &[0, 1]).map(drop);
            assert!(matches!(made, Err(DeviceError::PeerLost { peer: 1, .. })), "{made:?}");
            comm.exchange(&[0]).map(drop)
        });
        assert!(matches!(told[0], Some(DeviceError::PeerLost { peer: 1, .. })), "{:?}", told[0]);
    }
}

#[test]
fn ranks_that_wait_for_each_other_stall_at_once() {
    for options in all_modes(2) {
        let told = errors(&options, |device| {
            let comm = device.communicator("g", &[0, 1])?;
            let s = device.stream("s")?;
            let x = buffer(device, &[1.0]);
            if device.rank() == 0 {
                device.collective(&s, &comm, Collective::AllReduce, &x, &x)?;
                device.wait_stream(&s)
            } else {
                comm.exchange(&[1]).map(drop)
            }
        });
        for (rank, error) in told.into_iter().enumerate() {
            match error {
                Some(DeviceError::Stalled { rank: r, what }) => {
                    assert_eq!(r as usize, rank);
                    assert!(what.contains(&format!("rank {}", 1 - rank)), "{what}");
                }
                other => panic!("{options:?}: {other:?}"),
            }
        }
    }
}

#[test]
fn crossed_collectives_of_two_groups_stall() {
    for options in all_modes(2) {
        let told = errors(&options, |device| {
            let (a, b) = (device.communicator("a", &[0, 1])?, device.communicator("b", &[0, 1])?);
            let s = device.stream("s")?;
            let x = buffer(device, &[1.0]);
            let order = if device.rank() == 0 { [&a, &b] } else { [&b, &a] };
            for comm in order {
                device.collective(&s, comm, Collective::AllReduce, &x, &x)?;
            }
            device.wait_stream(&s)
        });
        for error in told {
            assert!(matches!(error, Some(DeviceError::Stalled { .. })), "{options:?}: {error:?}");
        }
    }
}

#[test]
fn a_peer_that_does_not_come_in_time_is_named() {
    let options = WorldOptions { deadline: Duration::from_millis(100), ..WorldOptions::threads(2, 1) };
    let told = errors(&options, |device| {
        let comm = device.communicator("g", &[0, 1])?;
        let s = device.stream("s")?;
        let x = buffer(device, &[1.0]);
        if device.rank() == 1 {
            std::thread::sleep(Duration::from_millis(500)); // busy elsewhere, not gone
            return Ok(());
        }
        let exchange = comm.exchange(&[0]);
        assert!(matches!(exchange, Err(DeviceError::PeerTimeout { missing: 1, .. })), "{exchange:?}");
        device.collective(&s, &comm, Collective::AllReduce, &x, &x)?;
        device.wait_stream(&s)
    });
    match &told[0] {
        Some(error @ DeviceError::PeerTimeout { rank: 0, missing: 1, what, after }) => {
            assert!(what.contains("`g`"), "{what}");
            assert_eq!(*after, options.deadline);
            assert!(error.is_transient());
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_late_peer_is_still_met_after_a_timeout() {
    let options = WorldOptions { deadline: Duration::from_millis(150), ..WorldOptions::threads(2, 1) };
    let told = errors(&options, |device| {
        let comm = device.communicator("g", &[0, 1])?;
        let s = device.stream("s")?;
        let x = buffer(device, &[1.0]);
        if device.rank() == 1 {
            std::thread::sleep(Duration::from_millis(225));
        }
        device.collective(&s, &comm, Collective::AllReduce, &x, &x)?;
        if device.rank() == 0 {
            assert!(device.wait_stream(&s).expect_err("early").is_transient());
        }
        assert_eq!(read(device, &s, &x), [2.0]);
        Ok(())
    });
    assert_eq!(told, [None, None]);
}

#[test]
fn what_a_kernel_runs_into_surfaces_at_the_next_named_wait() {
    for options in all_modes(1) {
        let told = errors(&options, |device| {
            let s = device.stream("s")?;
            let ids = raw(device, 1, "ids"); // poison: no valid id
            let ids = sessile_hal::View::whole(ids.memory(), sessile_plan::DType::U32)?;
            let table = device.alloc(4, &sessile_plan::Domain::Default, "table")?;
            let table = sessile_hal::View::whole(&table, sessile_plan::DType::Bf16)?;
            let out = raw(device, 1, "out");
            let kernel = Kernel::EmbeddingForward { tokens: 1, hidden: 1, vocab: 2 };
            device.enqueue(&s, Op::new(kernel, "embed", vec![ids, table, out.clone()])?)?;
            device.wait_stream(&s)
        });
        match &told[0] {
            Some(DeviceError::Operands { kernel: "embedding_forward", expected, .. }) => {
                assert!(expected.contains("below 2"), "{expected}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn dropping_everything_with_work_in_flight_hangs_nothing() {
    for options in all_modes(2) {
        let world = World::new(options);
        let device = world.device(0);
        let s = device.stream("s").expect("stream");
        let x = raw(&device, 4, "x");
        spin(&device, &s, 1000);
        for value in 0..50u8 {
            fill(&device, &s, &x, value.into());
        }
        drop(world);
        drop(s);
        drop(device);
        drop(x);
    }
}

#[test]
fn a_world_can_run_again_with_the_same_communicators() {
    for options in all_modes(2) {
        let world = World::new(options);
        let made = world.run(|device| {
            let comm = device.communicator("g", &[0, 1])?;
            Ok::<_, DeviceError>((comm, device.stream("s")?))
        });
        let made: Vec<_> = made.into_iter().map(|made| made.expect("made")).collect();
        for _ in 0..2 {
            let results = world.run(|device| {
                let (comm, s) = &made[device.rank() as usize];
                let x = buffer(&device, &[1.0]);
                device.collective(s, comm, Collective::AllReduce, &x, &x)?;
                comm.exchange(&[])?;
                Ok::<_, DeviceError>(read(&device, s, &x))
            });
            assert!(results.into_iter().all(|result| result == Ok(vec![2.0])));
        }
    }
}
