//! The computations, over the byte slices of a lease.
//!
//! [`Op`](sessile_hal::Op) has checked numbers, dtypes and sizes of the operands; the kernels rest on that, and
//! what they find wrong nevertheless is an error of the operation, not a panic. Sums run in a fixed order, so equal
//! inputs give equal bits wherever the operands lie.

mod activation;
mod attention;
mod copy;
mod embedding;
mod experts;
#[allow(unsafe_code, reason = "the GEMM library takes raw pointers; wrapped once, with shape checks")]
mod gemm;
mod loss;
mod norm;
mod optimizer;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use bytemuck::Pod;
use half::bf16;
use sessile_hal::{DeviceError, Kernel, Op};
use sessile_plan::DType;

use crate::memory::{HostMemory, Lease, Slot};
use crate::sync::thread;

/// What a kernel found wrong, as "expected ...".
type Fault = String;

/// Runs an operation on its leased bytes.
pub(crate) fn run(op: &Op<HostMemory>, lease: &mut Lease, real_time: bool) -> Result<(), DeviceError> {
    if let Kernel::Spin { micros } = op.kernel() {
        if real_time {
            thread::sleep(Duration::from_micros(*micros));
        }
        return Ok(());
    }
    let dtypes = op.operands().iter().map(|operand| operand.view.dtype());
    let args = Args(lease.slots().into_iter().zip(dtypes).collect::<Vec<_>>().into_iter());
    // A worker must survive whatever an operation does.
    let result = catch_unwind(AssertUnwindSafe(|| dispatch(op.kernel(), args)))
        .unwrap_or_else(|_| Err("a kernel that does not panic".to_owned()));
    result.map_err(|expected| DeviceError::Operands {
        kernel: op.kernel().name(),
        expected,
        given: op.operands().iter().map(|o| (o.view.dtype(), o.view.elements())).collect(),
    })
}

fn dispatch(kernel: &Kernel, args: Args<'_>) -> Result<(), Fault> {
    match *kernel {
        Kernel::Fill { value } => copy::fill(args, value),
        Kernel::Copy => copy::copy(args),
        Kernel::Cast => copy::cast(args),
        Kernel::Add => copy::add(args),
        Kernel::AddScaled { scale } => copy::add_scaled(args, scale),
        Kernel::SumParts { .. } => copy::sum_parts(args),
        Kernel::Scale { factor } => copy::scale(args, factor),
        Kernel::Gemm(shape) => gemm::gemm(args, shape),
        Kernel::EmbeddingForward { hidden, vocab, .. } => embedding::forward(args, hidden, vocab),
        Kernel::EmbeddingBackward { hidden, vocab, .. } => embedding::backward(args, hidden, vocab),
        Kernel::RmsNormForward { cols, eps, .. } => norm::forward(args, cols, eps),
        Kernel::RmsNormBackward { cols, .. } => norm::backward(args, cols),
        Kernel::AttentionForward(shape) => attention::forward(args, shape),
        Kernel::AttentionBackward(shape) => attention::backward(args, shape),
        Kernel::SquaredReluForward => activation::forward(args),
        Kernel::SquaredReluBackward => activation::backward(args),
        Kernel::RouterForward { experts, top_k, .. } => experts::route(args, experts, top_k),
        Kernel::RouterBackward { experts, .. } => experts::route_backward(args, experts),
        Kernel::CombineForward(shape) => experts::combine(args, shape),
        Kernel::CombineBackward(shape) => experts::combine_backward(args, shape),
        Kernel::CrossEntropy { rows, classes, scale } => loss::cross_entropy(args, rows, classes, scale),
        Kernel::AdamW(settings) => optimizer::adamw(args, settings, true),
        Kernel::AdamWF32(settings) => optimizer::adamw(args, settings, false),
        Kernel::Spin { .. } => Ok(()),
    }
}

/// The operands of a kernel, taken in order.
struct Args<'a>(std::vec::IntoIter<(Slot<'a>, DType)>);

/// An operand that is read, of a float dtype.
#[derive(Clone, Copy)]
enum Floats<'a> {
    Bf16(&'a [bf16]),
    F32(&'a [f32]),
}

/// An operand that is written, of a float dtype.
enum FloatsMut<'a> {
    Bf16(&'a mut [bf16]),
    F32(&'a mut [f32]),
}

impl<'a> Args<'a> {
    fn next(&mut self) -> Result<(Slot<'a>, DType), Fault> {
        self.0.next().ok_or_else(|| "one more operand".to_owned())
    }

    fn read<T: Pod>(&mut self) -> Result<&'a [T], Fault> {
        match self.next()?.0 {
            Slot::Read(bytes) => bytemuck::try_cast_slice(bytes).map_err(|why| why.to_string()),
            Slot::Write(_) => Err("an operand to read".to_owned()),
        }
    }

    fn write<T: Pod>(&mut self) -> Result<&'a mut [T], Fault> {
        match self.next()?.0 {
            Slot::Write(bytes) => bytemuck::try_cast_slice_mut(bytes).map_err(|why| why.to_string()),
            Slot::Read(_) => Err("an operand to write".to_owned()),
        }
    }

    fn peek_dtype(&self) -> Option<DType> {
        self.0.as_slice().first().map(|(_, dtype)| *dtype)
    }

    fn read_floats(&mut self) -> Result<Floats<'a>, Fault> {
        match self.peek_dtype() {
            Some(DType::Bf16) => self.read().map(Floats::Bf16),
            Some(DType::F32) => self.read().map(Floats::F32),
            _ => Err("a float operand".to_owned()),
        }
    }

    fn write_floats(&mut self) -> Result<FloatsMut<'a>, Fault> {
        match self.peek_dtype() {
            Some(DType::Bf16) => self.write().map(FloatsMut::Bf16),
            Some(DType::F32) => self.write().map(FloatsMut::F32),
            _ => Err("a float operand".to_owned()),
        }
    }
}

/// `extent` as a length; operands of a checked operation fit the address space.
fn length(extent: u64) -> Result<usize, Fault> {
    usize::try_from(extent).map_err(|_| "extents that fit the address space".to_owned())
}

fn widen(from: &[bf16]) -> Vec<f32> {
    from.iter().map(|x| x.to_f32()).collect()
}

fn narrow(to: &mut [bf16], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = bf16::from_f32(*from);
    }
}

#[cfg(test)]
mod testing {
    //! Kernels on plain vectors, for the tests beside them.

    use super::*;

    /// A buffer of a test.
    #[derive(Clone, Debug, PartialEq)]
    pub(crate) enum Buffer {
        Bf16(Vec<bf16>),
        F32(Vec<f32>),
        U32(Vec<u32>),
    }

    impl Buffer {
        pub(crate) fn bf16(values: &[f32]) -> Self {
            Buffer::Bf16(values.iter().map(|x| bf16::from_f32(*x)).collect())
        }

        pub(crate) fn f32(values: &[f32]) -> Self {
            Buffer::F32(values.to_vec())
        }

        pub(crate) fn floats(&self) -> Vec<f32> {
            match self {
                Buffer::Bf16(values) => widen(values),
                Buffer::F32(values) => values.clone(),
                Buffer::U32(_) => unreachable!("the test asks a float buffer"),
            }
        }

        fn dtype(&self) -> DType {
            match self {
                Buffer::Bf16(_) => DType::Bf16,
                Buffer::F32(_) => DType::F32,
                Buffer::U32(_) => DType::U32,
            }
        }

        fn bytes(&mut self) -> &mut [u8] {
            match self {
                Buffer::Bf16(values) => bytemuck::cast_slice_mut(values),
                Buffer::F32(values) => bytemuck::cast_slice_mut(values),
                Buffer::U32(values) => bytemuck::cast_slice_mut(values),
            }
        }
    }

    /// Runs a kernel; the first `reads` operands are read, the others written.
    pub(crate) fn run(kernel: &Kernel, reads: usize, operands: &mut [Buffer]) -> Result<(), Fault> {
        let slots: Vec<_> = operands
            .iter_mut()
            .enumerate()
            .map(|(at, buffer)| {
                let dtype = buffer.dtype();
                let bytes = buffer.bytes();
                (if at < reads { Slot::Read(bytes) } else { Slot::Write(bytes) }, dtype)
            })
            .collect();
        dispatch(kernel, Args(slots.into_iter()))
    }

    /// `n` values in [-1, 1), the same for the same seed.
    pub(crate) fn random(seed: u64, n: usize) -> Vec<f32> {
        let mut rng = fastrand::Rng::with_seed(seed);
        (0..n).map(|_| rng.f32() * 2.0 - 1.0).collect()
    }

    /// Checks a gradient against central differences of `value`, which computes a scalar from the input.
    pub(crate) fn check_gradient(
        input: &[f32],
        gradient: &[f32],
        step: f32,
        within: f64,
        value: impl Fn(&[f32]) -> f64,
    ) {
        assert_eq!(input.len(), gradient.len());
        for at in 0..input.len() {
            let moved = |by: f32| {
                let mut input = input.to_vec();
                input[at] += by;
                (f64::from(input[at]), value(&input))
            };
            let ((x1, y1), (x0, y0)) = (moved(step), moved(-step));
            let slope = (y1 - y0) / (x1 - x0);
            let error = (slope - f64::from(gradient[at])).abs();
            assert!(
                error <= within * (1.0 + slope.abs()),
                "at {at}: slope {slope}, gradient {}",
                gradient[at]
            );
        }
    }
}
