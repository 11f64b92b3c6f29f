//! Buffers and enqueues, generic over the device.

use sessile_hal::{Device, Kernel, Op, View};
use sessile_plan::{DType, Domain};

/// A buffer of `n` FP32 elements, its bytes as allocated.
///
/// # Panics
/// If the device refuses.
pub fn raw<D: Device>(device: &D, n: u64, label: &str) -> View<D::Memory> {
    let memory = device.alloc(4 * n, &Domain::Default, label).expect("alloc");
    View::whole(&memory, DType::F32).expect("aligned")
}

/// A buffer that holds `values`.
///
/// # Panics
/// If the device refuses.
pub fn buffer<D: Device>(device: &D, values: &[f32]) -> View<D::Memory> {
    let view = raw(device, values.len() as u64, "buffer");
    let stream = device.stream("upload").expect("stream");
    device.write(&stream, &view, &bytes(values)).expect("write");
    view
}

/// Little-endian bytes of `values`.
///
/// # Panics
/// If the device refuses.
pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// The values of little-endian bytes.
///
/// # Panics
/// If the device refuses.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().expect("4 bytes"))).collect()
}

/// Waits for the stream and reads.
///
/// # Panics
/// If the device refuses.
pub fn read<D: Device>(device: &D, stream: &D::Stream, view: &View<D::Memory>) -> Vec<f32> {
    floats(&device.read(stream, view).expect("read"))
}

/// Enqueues a fill.
///
/// # Panics
/// If the device refuses.
pub fn fill<D: Device>(device: &D, stream: &D::Stream, to: &View<D::Memory>, value: f32) {
    enqueue(device, stream, Kernel::Fill { value }, &[to]);
}

/// Enqueues a copy.
///
/// # Panics
/// If the device refuses.
pub fn copy<D: Device>(device: &D, stream: &D::Stream, from: &View<D::Memory>, to: &View<D::Memory>) {
    enqueue(device, stream, Kernel::Copy, &[from, to]);
}

/// `to += from`.
///
/// # Panics
/// If the device refuses.
pub fn add<D: Device>(device: &D, stream: &D::Stream, from: &View<D::Memory>, to: &View<D::Memory>) {
    enqueue(device, stream, Kernel::Add, &[from, to]);
}

/// Enqueues a wait of about `micros`.
///
/// # Panics
/// If the device refuses.
pub fn spin<D: Device>(device: &D, stream: &D::Stream, micros: u64) {
    enqueue(device, stream, Kernel::Spin { micros }, &[]);
}

/// Enqueues a kernel on views.
///
/// # Panics
/// If the device refuses.
pub fn enqueue<D: Device>(device: &D, stream: &D::Stream, kernel: Kernel, views: &[&View<D::Memory>]) {
    let views = views.iter().map(|view| (*view).clone()).collect();
    device.enqueue(stream, Op::new(kernel, "test", views).expect("operands")).expect("enqueue");
}
