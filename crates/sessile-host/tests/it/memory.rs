//! Memory: limits, accounting, injected failures, and that it all comes back.

use sessile_hal::{Collective, Device, DeviceError, Memory};
use sessile_host::{World, WorldOptions};
use sessile_plan::Domain;

use crate::support::{all_modes, buffer, enqueue, fill, raw, read, spin};

#[test]
fn fresh_bytes_are_nan() {
    let device = World::new(WorldOptions::threads(1, 1)).device(0);
    let view = raw(&device, 3, "fresh");
    let s = device.stream("s").expect("stream");
    assert_eq!(device.read(&s, &view).expect("read"), [0xFF; 12]);
    assert!(read(&device, &s, &view).iter().all(|x| x.is_nan()));
}

#[test]
fn a_limit_is_kept_per_rank_and_told_with_its_numbers() {
    let world = World::new(WorldOptions { memory_limit: Some(100), ..WorldOptions::threads(2, 1) });
    let device = world.device(1);
    let first = device.alloc(60, &Domain::Default, "first").expect("fits");
    let told = device.alloc(41, &Domain::Default, "second").expect_err("too much");
    let label = "second".to_owned();
    assert_eq!(told, DeviceError::OutOfMemory { rank: 1, label, requested: 41, free: 40 });
    world.device(0).alloc(100, &Domain::Default, "other rank").expect("fits");
    assert_eq!((world.live_bytes(1), world.peak_bytes(1)), (60, 60));
    let clone = first.clone();
    drop(first);
    assert_eq!(world.live_bytes(1), 60, "a handle is left");
    drop(clone);
    assert_eq!((world.live_bytes(1), world.peak_bytes(1)), (0, 60));
    device.alloc(100, &Domain::Default, "all").expect("fits again");
}

#[test]
fn absurd_sizes_are_out_of_memory() {
    let device = World::new(WorldOptions::threads(1, 1)).device(0);
    for bytes in [u64::MAX, u64::MAX / 2, 1 << 62] {
        let told = device.alloc(bytes, &Domain::Default, "absurd");
        assert!(matches!(told, Err(DeviceError::OutOfMemory { requested, .. }) if requested == bytes));
    }
    assert_eq!(device.alloc(0, &Domain::Default, "nothing").expect("fits").bytes(), 0);
}

#[test]
fn the_injected_failure_hits_the_nth_allocation_once() {
    let world = World::new(WorldOptions::threads(1, 1));
    let device = world.device(0);
    world.fail_allocation(0, 2);
    let mut ok = Vec::new();
    for label in ["a", "b", "c"] {
        ok.push(device.alloc(8, &Domain::Default, label).is_ok());
    }
    assert_eq!(ok, [true, false, true]);
}

#[test]
fn a_panic_with_captures_graphs_and_work_in_flight_frees_everything() {
    for options in all_modes(2) {
        let world = World::new(options.clone());
        let results = world.run(|device| {
            let comm = device.communicator("g", &[0, 1])?;
            let (s, side) = (device.stream("s")?, device.stream("side")?);
            let x = buffer(&device, &[1.0; 2]);
            device.begin_capture(&s)?;
            device.collective(&s, &comm, Collective::AllReduce, &x, &x)?;
            enqueue(&device, &s, sessile_hal::Kernel::Scale { factor: 2.0 }, &[&x]);
            let graph = device.end_capture(&s)?;
            spin(&device, &s, 1000);
            for _ in 0..3 {
                device.launch(&graph, &s)?;
            }
            device.begin_capture(&side)?;
            fill(&device, &side, &x, 1.0);
            assert!(device.rank() != 1, "half way through a capture");
            drop((graph, x));
            device.abort_capture(&side);
            device.wait_stream(&s)
        });
        assert!(results[0].is_ok(), "{options:?}: {:?}", results[0]);
        assert!(results[1].as_ref().is_err_and(|why| why.to_string().contains("half way")));
        assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0], "{options:?}");
    }
}

#[test]
fn spans_can_be_switched_off() {
    let world = World::new(WorldOptions::threads(1, 1));
    let device = world.device(0);
    let s = device.stream("s").expect("stream");
    let x = buffer(&device, &[1.0]);
    fill(&device, &s, &x, 1.0);
    device.wait_stream(&s).expect("wait");
    assert_eq!(device.take_spans().len(), 1);
    assert!(device.take_spans().is_empty(), "taken");
    world.record_spans(false);
    fill(&device, &s, &x, 1.0);
    device.wait_stream(&s).expect("wait");
    assert!(device.take_spans().is_empty());
}
