//! What the tests share. Generic over the device where the device does not matter.

use std::time::Duration;

use sessile_hal::{Device, DeviceError, Kernel, Op, View};
use sessile_host::{CostModel, Data, HostDevice, Order, World, WorldOptions};
use sessile_plan::{DType, Domain};

/// A buffer of `n` FP32 elements, its bytes as allocated.
pub(crate) fn raw<D: Device>(device: &D, n: u64, label: &str) -> View<D::Memory> {
    let memory = device.alloc(4 * n, &Domain::Default, label).expect("alloc");
    View::whole(&memory, DType::F32).expect("aligned")
}

/// A buffer that holds `values`.
pub(crate) fn buffer<D: Device>(device: &D, values: &[f32]) -> View<D::Memory> {
    let view = raw(device, values.len() as u64, "buffer");
    let stream = device.stream("upload").expect("stream");
    device.write(&stream, &view, &bytes(values)).expect("write");
    view
}

pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().expect("4 bytes"))).collect()
}

/// Waits for the stream and reads.
pub(crate) fn read<D: Device>(device: &D, stream: &D::Stream, view: &View<D::Memory>) -> Vec<f32> {
    floats(&device.read(stream, view).expect("read"))
}

pub(crate) fn fill<D: Device>(device: &D, stream: &D::Stream, to: &View<D::Memory>, value: f32) {
    enqueue(device, stream, Kernel::Fill { value }, &[to]);
}

pub(crate) fn copy<D: Device>(device: &D, stream: &D::Stream, from: &View<D::Memory>, to: &View<D::Memory>) {
    enqueue(device, stream, Kernel::Copy, &[from, to]);
}

/// `to += from`.
pub(crate) fn add<D: Device>(device: &D, stream: &D::Stream, from: &View<D::Memory>, to: &View<D::Memory>) {
    enqueue(device, stream, Kernel::Add, &[from, to]);
}

pub(crate) fn spin<D: Device>(device: &D, stream: &D::Stream, micros: u64) {
    enqueue(device, stream, Kernel::Spin { micros }, &[]);
}

pub(crate) fn enqueue<D: Device>(device: &D, stream: &D::Stream, kernel: Kernel, views: &[&View<D::Memory>]) {
    let views = views.iter().map(|view| (*view).clone()).collect();
    device.enqueue(stream, Op::new(kernel, "test", views).expect("operands")).expect("enqueue");
}

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
