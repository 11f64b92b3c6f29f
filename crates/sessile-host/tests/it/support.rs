//! What the tests share. Generic over the device where the device does not matter.

use std::time::Duration;

pub(crate) use sessile_conformance::{add, buffer, bytes, copy, enqueue, fill, raw, read, spin};
use sessile_hal::DeviceError;
use sessile_host::{CostModel, Data, HostDevice, Order, World, WorldOptions};

/// Every way to run `ranks`, with few seeds.
pub(crate) fn all_modes(ranks: u32) -> Vec<WorldOptions> {
    let mut modes = vec![WorldOptions::threads(ranks, 1), WorldOptions::threads(ranks, 3)];
    modes.extend((0..4).map(|seed| WorldOptions::scheduled(ranks, seed, Order::Random)));
    modes.extend([Order::WritersEarly, Order::ReadersEarly].map(|o| WorldOptions::scheduled(ranks, 0, o)));
    modes.push(WorldOptions::simulated(ranks, CostModel::default(), Data::Real));
    modes.into_iter().map(|mode| WorldOptions { deadline: Duration::from_secs(20), ..mode }).collect()
}

/// Runs a program that must succeed on every rank.
pub(crate) fn run<T: Send>(options: &WorldOptions, program: impl Fn(HostDevice) -> T + Sync) -> Vec<T> {
    let world = World::new(options.clone());
    let results = world.run(|device| Ok::<T, DeviceError>(program(device)));
    results.into_iter().map(|result| result.unwrap_or_else(|why| panic!("{options:?}: {why}"))).collect()
}
