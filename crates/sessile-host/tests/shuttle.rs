//! Model checking of the engine's locking under random schedules: `cargo test -p sessile-host --features shuttle
//! --test shuttle`. The clock plays no part: waits never time out here.
#![cfg(feature = "shuttle")]

use sessile_hal::{Collective, Comm, Device, DeviceError, EventScope, Kernel, Op, View};
use sessile_host::{World, WorldOptions};
use sessile_plan::{DType, Domain};

const SCHEDULES: usize = 3000;

#[test]
fn collectives_and_events_of_two_ranks_end_with_the_right_bytes() {
    shuttle::check_random(
        || {
            let world = World::new(WorldOptions::threads(2, 2));
            let results = world.run(|device| {
                let comm = device.communicator("g", &[0, 1])?;
                let (compute, side) = (device.stream("compute")?, device.stream("side")?);
                let (written, read) =
                    (device.event(EventScope::Internal)?, device.event(EventScope::Internal)?);
                let (x, y) =
                    (device.alloc(4, &Domain::Default, "x")?, device.alloc(4, &Domain::Default, "y")?);
                let (x, y) = (View::whole(&x, DType::F32)?, View::whole(&y, DType::F32)?);
                for turn in 1..=2u8 {
                    let value = f32::from(turn);
                    device.enqueue(&compute, Op::new(Kernel::Fill { value }, "fill", vec![x.clone()])?)?;
                    device.record(&compute, &written)?;
                    device.wait(&side, &written)?;
                    device.collective(&side, &comm, Collective::AllReduce, &x, &y)?;
                    device.record(&side, &read)?;
                    device.wait(&compute, &read)?;
                }
                device.read(&side, &y)
            });
            for result in results {
                assert_eq!(
                    result.map_err(|why: sessile_host::RankFailure<DeviceError>| why.to_string()),
                    Ok(4.0f32.to_le_bytes().to_vec())
                );
            }
            assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0]);
        },
        SCHEDULES,
    );
}

#[test]
fn a_rank_that_dies_ends_every_wait_for_it() {
    shuttle::check_random(
        || {
            let world = World::new(WorldOptions::threads(3, 1));
            let results = world.run(|device| {
                let comm = device.communicator("g", &[0, 1, 2])?;
                let stream = device.stream("s")?;
                let x = device.alloc(4, &Domain::Default, "x")?;
                let x = View::whole(&x, DType::F32)?;
                match device.rank() {
                    0 => Ok(()),
                    1 => comm.exchange(&[1]).map(drop),
                    _ => {
                        device.collective(&stream, &comm, Collective::AllReduce, &x, &x)?;
                        device.wait_stream(&stream)
                    }
                }
            });
            assert_eq!(results[0], Ok(()));
            for rank in [1, 2] {
                // Whoever looks first sees rank 0 gone; the other may see the one that left after it.
                let why = results[rank].as_ref().expect_err("rank 0 never comes").to_string();
                assert!(why.contains("has gone"), "{why}");
            }
            assert_eq!([world.live_bytes(1), world.live_bytes(2)], [0, 0]);
        },
        SCHEDULES,
    );
}
