//! AdamW over sharded weights and replicated norms.

use sessile_gtp::{Gtp, Part, Weight};
use sessile_hal::{AdamW, Collective, Comm, Device, Kernel, Op, View};
use sessile_plan::DType;
use sessile_runtime::RuntimeError;

use crate::{
    buffers::{buffer, write_f32},
    config::TrainConfig,
    data::normal,
    module::Norm,
};

/// For each group of the [`Gtp`], in order: the ranks that hold the same shards as this one.
pub(crate) struct Replicas<D: Device>(pub(crate) Vec<D::Comm>);

/// Optimizer state of one parameter, FP32.
struct State<D: Device> {
    master: View<D::Memory>,
    m: View<D::Memory>,
    v: View<D::Memory>,
}

/// State of all parameters.
pub(crate) struct Optimizer<D: Device> {
    /// An entry a matrix, in the order of weights and their parts.
    parts: Vec<State<D>>,
    norms: Vec<State<D>>,
    /// As large as the largest gradient: an all-reduce does not work in place.
    all_reduced: View<D::Memory>,
}

impl<D: Device> Optimizer<D> {
    /// Allocates the state of all weights and of `norms` norms of `hidden` elements.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn new(gtp: &Gtp<D>, norms: usize, hidden: u64) -> Result<Self, RuntimeError> {
        let device = gtp.runtime_ref().device();
        let state = |label: &str, elements| {
            Ok::<_, RuntimeError>(State {
                master: buffer(device, &format!("{label} master"), elements, DType::F32)?,
                m: buffer(device, &format!("{label} m"), elements, DType::F32)?,
                v: buffer(device, &format!("{label} v"), elements, DType::F32)?,
            })
        };
        let parts = parts(gtp).map(|(weight, part)| state(&part.name, weight.shard.shard_elements()));
        let largest = gtp.weights().iter().map(|weight| weight.shard.shard_elements()).max().unwrap_or(0);
        Ok(Optimizer {
            parts: parts.collect::<Result<_, _>>()?,
            norms: (0..norms).map(|at| state(&format!("norm{at}"), hidden)).collect::<Result<_, _>>()?,
            all_reduced: buffer(device, "all-reduced gradient", largest.max(hidden), DType::F32)?,
        })
    }

    /// Draws the parameters of this rank's shards from the seed. Blocks the host.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn initialize(
        &self,
        config: &TrainConfig,
        gtp: &Gtp<D>,
        norms: &[Norm<D>],
    ) -> Result<(), RuntimeError> {
        let device = gtp.runtime_ref().device();
        let main = gtp.runtime_ref().main();
        let residual_scale = 1.0 / ((2 * config.layers) as f32).sqrt();
        for ((weight, part), state) in parts(gtp).zip(&self.parts) {
            let shard = weight.shard;
            let cols = usize::try_from(shard.cols).unwrap_or(usize::MAX);
            let all = normal(config.seed, &part.name, usize::try_from(shard.elements()).unwrap_or(0));
            let scale = if weight.name.ends_with("down") { 0.05 * residual_scale } else { 0.05 };
            let group = gtp.runtime_ref().group(&gtp.group(weight.group).name)?;
            let real = shard.real_rows(group.rank().into());
            let (first, last) = (real.start as usize * cols, real.end as usize * cols);
            let mut values: Vec<f32> = all[first..last].iter().map(|value| value * scale).collect();
            values.resize(usize::try_from(shard.shard_elements()).unwrap_or(0), 0.0);
            write_f32(device, main, &state.master, &values)?;
            let zeros = vec![0.0; values.len()];
            write_f32(device, main, &state.m, &zeros)?;
            write_f32(device, main, &state.v, &zeros)?;
            let op = Op::new(
                Kernel::Cast,
                format!("{} from master", part.name),
                vec![state.master.clone(), part.value.clone()],
            )?;
            device.enqueue(main, op)?;
        }
        for (norm, state) in norms.iter().zip(&self.norms) {
            let hidden = usize::try_from(config.hidden).unwrap_or(0);
            write_f32(device, main, &norm.value, &vec![1.0; hidden])?;
            write_f32(device, main, &state.master, &vec![1.0; hidden])?;
            write_f32(device, main, &state.m, &vec![0.0; hidden])?;
            write_f32(device, main, &state.v, &vec![0.0; hidden])?;
        }
        Ok(())
    }

    /// Averages gradients over the replicas (of norms: over all ranks) and steps AdamW. Collective; enqueues on the main
    /// stream.
    ///
    /// # Errors
    /// Those of the device.
    pub(crate) fn step(
        &self,
        config: &TrainConfig,
        gtp: &Gtp<D>,
        replicas: &Replicas<D>,
        norms: &[Norm<D>],
        step: u32,
    ) -> Result<(), RuntimeError> {
        let device = gtp.runtime_ref().device();
        let main = gtp.runtime_ref().main();
        let average = |comm: &D::Comm, grad: &View<D::Memory>| -> Result<(), RuntimeError> {
            if comm.size() > 1 {
                let scratch = self.all_reduced.slice(0, grad.elements())?;
                device.collective(main, comm, Collective::AllReduce, grad, &scratch)?;
                let factor = 1.0 / comm.size() as f32;
                let scale = Kernel::Scale { factor };
                device.enqueue(main, Op::new(scale, "mean", vec![scratch.clone()])?)?;
                let copy = Op::new(Kernel::Copy, "mean", vec![scratch, grad.clone()])?;
                device.enqueue(main, copy)?;
            }
            Ok(())
        };
        for (weight, part) in parts(gtp) {
            average(&replicas.0[weight.group.index()], &part.main_grad)?;
        }
        let world = gtp.runtime_ref().world();
        for norm in norms {
            average(world, &norm.main_grad)?;
        }
        let adamw = AdamW {
            lr: config.learning_rate_micro as f32 * 1e-6,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.01,
            step,
        };
        for ((_, part), state) in parts(gtp).zip(&self.parts) {
            let views = vec![
                part.main_grad.clone(),
                state.master.clone(),
                state.m.clone(),
                state.v.clone(),
                part.value.clone(),
            ];
            device.enqueue(main, Op::new(Kernel::AdamW(adamw), part.name.as_str(), views)?)?;
        }
        let plain = AdamW { weight_decay: 0.0, ..adamw };
        for (norm, state) in norms.iter().zip(&self.norms) {
            let views = vec![norm.main_grad.clone(), state.master.clone(), state.m.clone(), state.v.clone()];
            device.enqueue(main, Op::new(Kernel::AdamWF32(plain), "norm", views)?)?;
            let views = vec![state.master.clone(), norm.value.clone()];
            device.enqueue(main, Op::new(Kernel::Copy, "norm", views)?)?;
        }
        Ok(())
    }
}

/// Every matrix, with the weight it belongs to.
fn parts<D: Device>(gtp: &Gtp<D>) -> impl Iterator<Item = (&Weight<D>, &Part<D>)> {
    gtp.weights().iter().flat_map(|weight| weight.parts.iter().map(move |part| (weight, part)))
}
