//! One rank of a training run: parameters, a step, and the switch from eager to graphs.

use sessile_gtp::{ChainKind, Gtp, Pass, RankLayout, WeightId};
use sessile_hal::{Attention, Comm, Device, Kernel, Note, View};
use sessile_plan::{DType, LaunchOrder, PlanOptions};
use sessile_runtime::{HasRuntime, Runtime, RuntimeError};
use sha2::{Digest, Sha256};

use crate::{
    buffers::{Activations, activations, buffer, write_u32},
    config::{ModuleKind, Overlap, TrainConfig, VOCAB},
    data::Sampler,
    module::{Extents, Module, NORM_EPS, Norm, kind_name, linear_backward, run},
    optimizer::Optimizer,
    report::StepResult,
    schedule::{Turn, one_f_one_b},
    unit::{Unit, units},
};

/// How runners execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// Eagerly, and nothing is noted.
    Eager,
    /// Eagerly, noting what runners ask for.
    Discover,
    /// From their graphs.
    Replay,
}

/// One rank of a run.
pub struct Trainer<'a, D: Device> {
    config: &'a TrainConfig,
    gtp: Gtp<D>,
    replicas: D::Comm,
    extents: Extents,
    embedding: WeightId,
    output: WeightId,
    modules: Vec<Module>,
    units: Vec<Unit>,
    norms: Vec<Norm<D>>,
    optimizer: Optimizer<D>,
    acts: Vec<Activations<D>>,
    tokens: Vec<View<D::Memory>>,
    targets: Vec<View<D::Memory>>,
    losses: View<D::Memory>,
    sampler: Sampler<'a>,
    step: u32,
}

impl<D: Device> HasRuntime<D> for Trainer<'_, D> {
    fn runtime(&mut self) -> &mut Runtime<D> {
        self.gtp.runtime()
    }
}

impl<D: Device> AsMut<Gtp<D>> for Trainer<'_, D> {
    fn as_mut(&mut self) -> &mut Gtp<D> {
        &mut self.gtp
    }
}

/// Name of the group that weights are sharded over.
pub const DENSE: &str = "dense";

impl<'a, D: Device> Trainer<'a, D> {
    /// Builds the model on this rank's device. Collective. `graphed` says whether runners will be captured.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(
        config: &'a TrainConfig,
        device: D,
        text: &'a [u8],
        graphed: bool,
    ) -> Result<Self, RuntimeError> {
        let rank = device.rank();
        let layout = RankLayout::new(config.ranks, config.gtp).expect("TrainConfig::check was called");
        let everyone: Vec<u32> = (0..config.ranks).collect();
        let world = device.communicator("world", &everyone)?;
        let dense = device.communicator(&format!("dense.{}", layout.group_of(rank)), &layout.group(rank))?;
        let shard_index = rank % config.gtp;
        let replicas =
            device.communicator(&format!("replicas.{shard_index}"), &layout.replica_group(rank))?;
        let mut runtime = Runtime::new(device.clone(), world)?;
        runtime.add_group(DENSE, dense);
        let mut gtp = Gtp::new(runtime)?;

        let chain_of = |kind: ModuleKind| match graphed && config.graph_modules.contains(&kind) {
            true => ChainKind::Graphed,
            false => ChainKind::Eager,
        };
        let both = [Pass::Forward, Pass::Backward];
        let wgrad = config.wgrad_dtype;
        let embedding = gtp.add_weight(
            "embedding",
            VOCAB,
            config.hidden,
            DENSE,
            ChainKind::Eager,
            wgrad,
            &[Pass::Forward],
        )?;
        let mut modules = Vec::new();
        for layer in 0..config.layers {
            for kind in [ModuleKind::Attention, ModuleKind::Mlp] {
                let (up_rows, down_cols) = match kind {
                    ModuleKind::Attention => (3 * config.hidden, config.hidden),
                    ModuleKind::Mlp => (config.ffn, config.ffn),
                };
                let name = format!("layer{layer}.{}", kind_name(kind));
                let chain = chain_of(kind);
                let up = gtp.add_weight(
                    &format!("{name}.up"),
                    up_rows,
                    config.hidden,
                    DENSE,
                    chain,
                    wgrad,
                    &both,
                )?;
                let down = gtp.add_weight(
                    &format!("{name}.down"),
                    config.hidden,
                    down_cols,
                    DENSE,
                    chain,
                    wgrad,
                    &both,
                )?;
                let index = modules.len();
                modules.push(Module { kind, layer, index, norm: index, up, down });
            }
        }
        let output = gtp.add_weight("output", VOCAB, config.hidden, DENSE, ChainKind::Eager, wgrad, &both)?;

        let extents = Extents {
            tokens: config.seq * config.batch,
            hidden: config.hidden,
            ffn: config.ffn,
            attention: Attention {
                batch: config.batch,
                seq: config.seq,
                heads: config.heads,
                head_dim: config.hidden / config.heads,
            },
        };
        let tokens = extents.tokens;
        let new = |label: String, elements, dtype| buffer(&device, &label, elements, dtype);
        let norms = (0..=modules.len())
            .map(|at| {
                Ok(Norm {
                    value: new(format!("norm{at}"), config.hidden, DType::F32)?,
                    main_grad: new(format!("norm{at} main_grad"), config.hidden, DType::F32)?,
                })
            })
            .collect::<Result<Vec<_>, RuntimeError>>()?;
        let acts = (0..config.microbatches_in_flight)
            .map(|slot| activations(&device, extents, &modules, slot))
            .collect::<Result<Vec<_>, _>>()?;
        let per_microbatch = |what: &str| {
            (0..config.microbatches)
                .map(|mb| Ok(new(format!("{what} {mb}"), tokens, DType::U32)?))
                .collect::<Result<Vec<_>, RuntimeError>>()
        };
        let optimizer = Optimizer::new(&gtp, norms.len(), config.hidden)?;
        optimizer.initialize(config, &gtp, &norms, shard_index.into())?;
        let units = units(config, &modules, graphed);
        Ok(Trainer {
            config,
            replicas,
            extents,
            embedding,
            output,
            units,
            norms,
            optimizer,
            acts,
            tokens: per_microbatch("tokens")?,
            targets: per_microbatch("targets")?,
            losses: new("losses".into(), config.microbatches.into(), DType::F32)?,
            sampler: Sampler::new(text, config.seed, rank.into()),
            modules,
            gtp,
            step: 0,
        })
    }

    /// The sharded weights.
    pub fn gtp(&self) -> &Gtp<D> {
        &self.gtp
    }

    /// The storage runtime.
    pub fn runtime_mut(&mut self) -> &mut Runtime<D> {
        self.gtp.runtime()
    }

    /// Seals what was discovered and captures every runner, in the sealed order. Collective.
    ///
    /// # Errors
    /// Those of [`Runtime::seal`] and of the captures.
    pub fn seal_and_capture(&mut self) -> Result<(), RuntimeError> {
        self.seal()?;
        self.capture_all()
    }

    /// Seals what was discovered. Collective.
    ///
    /// # Errors
    /// Those of [`Runtime::seal`].
    pub fn seal(&mut self) -> Result<(), RuntimeError> {
        let options = PlanOptions {
            strategy: self.config.strategy,
            depth: self.config.depth,
            step_cut: self.config.step_cut,
            launch_order: match self.config.overlap {
                Overlap::On => LaunchOrder::Overlapped,
                Overlap::Off => LaunchOrder::Serial,
            },
            ..PlanOptions::default()
        };
        let name = format!("train, {} layers, hidden {}", self.config.layers, self.config.hidden);
        self.gtp.runtime().seal(&name, &options)?;
        Ok(())
    }

    /// Captures every runner, in the sealed order.
    ///
    /// # Errors
    /// Those of the captures.
    pub fn capture_all(&mut self) -> Result<(), RuntimeError> {
        let in_flight = self.config.microbatches_in_flight;
        let mut captured = std::collections::BTreeSet::new();
        for turn in one_f_one_b(self.config.microbatches, in_flight) {
            let (pass, microbatch) = match turn {
                Turn::Forward(mb) => (Pass::Forward, mb),
                Turn::Backward(mb) => (Pass::Backward, mb),
            };
            let slot = microbatch % in_flight;
            for at in self.unit_order(pass) {
                if self.units[at].graphed && captured.insert((pass, slot, at)) {
                    let name = self.runner_name(at, pass, slot);
                    Gtp::capture(self, &name, |trainer| trainer.unit_body(at, pass, slot))?;
                }
            }
        }
        Ok(())
    }

    /// Names of all runners in launch order of one step.
    pub fn launch_names(&self) -> Vec<String> {
        let in_flight = self.config.microbatches_in_flight;
        let mut names = Vec::new();
        for turn in one_f_one_b(self.config.microbatches, in_flight) {
            let (pass, mb) = match turn {
                Turn::Forward(mb) => (Pass::Forward, mb),
                Turn::Backward(mb) => (Pass::Backward, mb),
            };
            for at in self.unit_order(pass) {
                if self.units[at].graphed {
                    names.push(self.runner_name(at, pass, mb % in_flight));
                }
            }
        }
        names
    }

    fn runner_name(&self, unit: usize, pass: Pass, slot: u32) -> String {
        let pass = match pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        let name = &self.units[unit].name;
        match self.config.microbatches_in_flight {
            1 => format!("{name}.{pass}"),
            _ => format!("{name}.{pass}.slot{slot}"),
        }
    }

    /// Units (modules or layers) in the order in which a pass runs them.
    pub fn unit_order(&self, pass: Pass) -> Vec<usize> {
        let forward = 0..self.units.len();
        match pass {
            Pass::Forward => forward.collect(),
            Pass::Backward => forward.rev().collect(),
        }
    }

    fn unit_body(&mut self, unit: usize, pass: Pass, slot: u32) -> Result<(), RuntimeError> {
        let mut order = self.units[unit].modules.clone();
        if pass == Pass::Backward {
            order.reverse();
        }
        for at in order {
            let module = &self.modules[at];
            let (norm, acts) = (&self.norms[module.norm], &self.acts[slot as usize]);
            match pass {
                Pass::Forward => module.forward(&mut self.gtp, self.extents, norm, acts)?,
                Pass::Backward => module.backward(&mut self.gtp, self.extents, norm, acts)?,
            }
        }
        Ok(())
    }

    fn run_units(
        &mut self,
        pass: Pass,
        slot: u32,
        units: &[usize],
        execution: Execution,
    ) -> Result<(), RuntimeError> {
        for &at in units {
            let name = self.runner_name(at, pass, slot);
            match execution {
                Execution::Discover if self.units[at].graphed => {
                    Gtp::discover(self, &name, |trainer| trainer.unit_body(at, pass, slot))?;
                }
                Execution::Replay if self.units[at].graphed => {
                    self.gtp.replay(&name)?;
                }
                _ => self.unit_body(at, pass, slot)?,
            }
        }
        Ok(())
    }

    /// Forward of one micro-batch: loss and gradient of the logits.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn forward(&mut self, microbatch: u32, execution: Execution) -> Result<(), RuntimeError> {
        self.forward_through(microbatch, &self.unit_order(Pass::Forward), execution)
    }

    /// As [`Trainer::forward`], through these units in this order (of [`Trainer::unit_order`]).
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn forward_through(
        &mut self,
        microbatch: u32,
        units: &[usize],
        execution: Execution,
    ) -> Result<(), RuntimeError> {
        let slot = microbatch % self.config.microbatches_in_flight;
        let Extents { tokens, hidden, .. } = self.extents;
        let (ids, targets) = (&self.tokens[microbatch as usize], &self.targets[microbatch as usize]);
        let acts = &self.acts[slot as usize];
        let table = self.gtp.materialize(self.embedding, Pass::Forward)?;
        let value = table.view().slice(0, VOCAB * hidden)?;
        let kernel = Kernel::EmbeddingForward { tokens, hidden, vocab: VOCAB };
        run(&mut self.gtp, kernel, "embedding", &[ids, &value, &acts.residual[0]])?;
        self.gtp.release(table)?;
        let targets = targets.clone();

        self.run_units(Pass::Forward, slot, units, execution)?;

        let acts = &self.acts[slot as usize];
        let last = &acts.residual[self.modules.len()];
        let norm = &self.norms[self.modules.len()];
        let kernel = Kernel::RmsNormForward { rows: tokens, cols: hidden, eps: NORM_EPS };
        run(&mut self.gtp, kernel, "final norm", &[last, &norm.value, &acts.final_normed, &acts.final_rstd])?;
        let head = self.gtp.materialize(self.output, Pass::Forward)?;
        let value = head.view().slice(0, VOCAB * hidden)?;
        let gemm = sessile_hal::Gemm {
            m: tokens,
            n: VOCAB,
            k: hidden,
            a: sessile_hal::Transpose::No,
            b: sessile_hal::Transpose::Yes,
            beta: sessile_hal::Beta::Overwrite,
        };
        run(&mut self.gtp, Kernel::Gemm(gemm), "logits", &[&acts.final_normed, &value, &acts.logits])?;
        self.gtp.release(head)?;
        let scale = 1.0 / self.config.microbatches as f32;
        let loss = self.losses.slice(microbatch.into(), 1)?;
        let kernel = Kernel::CrossEntropy { rows: tokens, classes: VOCAB, scale };
        run(&mut self.gtp, kernel, "loss", &[&acts.logits, &targets, &loss, &acts.dlogits])
    }

    /// Backward of one micro-batch, after its forward.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn backward(&mut self, microbatch: u32, execution: Execution) -> Result<(), RuntimeError> {
        self.backward_through(microbatch, &self.unit_order(Pass::Backward), execution)
    }

    /// As [`Trainer::backward`], through these units in this order.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn backward_through(
        &mut self,
        microbatch: u32,
        units: &[usize],
        execution: Execution,
    ) -> Result<(), RuntimeError> {
        let slot = microbatch % self.config.microbatches_in_flight;
        let Extents { tokens, hidden, .. } = self.extents;
        let acts = &self.acts[slot as usize];
        let [_, dnormed] = &acts.narrow;
        linear_backward(
            &mut self.gtp,
            self.output,
            "output",
            &acts.dlogits,
            &acts.final_normed,
            dnormed,
            tokens,
        )?;
        run(&mut self.gtp, Kernel::Fill { value: 0.0 }, "zero dresidual", &[&acts.dresidual])?;
        let last = &acts.residual[self.modules.len()];
        let norm = &self.norms[self.modules.len()];
        let kernel = Kernel::RmsNormBackward { rows: tokens, cols: hidden };
        let views = [dnormed, last, &norm.value, &acts.final_rstd, &acts.dresidual, &norm.main_grad];
        run(&mut self.gtp, kernel, "final norm backward", &views)?;

        self.run_units(Pass::Backward, slot, units, execution)?;

        let acts = &self.acts[slot as usize];
        let (ids, dx) = (self.tokens[microbatch as usize].clone(), acts.dresidual.clone());
        self.gtp.reduce(self.embedding, |runtime, dtable| {
            let kernel = Kernel::EmbeddingBackward { tokens, hidden, vocab: VOCAB };
            let op = sessile_hal::Op::new(kernel, "embedding backward", vec![ids, dx, dtable.clone()])?;
            let compute = runtime.compute().clone();
            runtime.enqueue(&compute, op)?;
            Ok(())
        })?;
        self.gtp.finish_backward()
    }

    /// Uploads the tokens of the next step and zeroes all gradients.
    ///
    /// # Errors
    /// Those of the device.
    pub fn begin_step(&mut self) -> Result<(), RuntimeError> {
        self.gtp.runtime_ref().device().note(Note::Step(""));
        self.step += 1;
        let device = self.gtp.runtime_ref().device().clone();
        let main = self.gtp.runtime_ref().main().clone();
        for mb in 0..self.config.microbatches as usize {
            let batch = self.sampler.draw(self.config.batch as usize, self.config.seq as usize);
            write_u32(&device, &main, &self.tokens[mb], &batch.inputs)?;
            write_u32(&device, &main, &self.targets[mb], &batch.targets)?;
        }
        let grads: Vec<_> = self.main_grads().cloned().collect();
        for grad in &grads {
            run(&mut self.gtp, Kernel::Fill { value: 0.0 }, "zero main_grad", &[grad])?;
        }
        Ok(())
    }

    fn main_grads(&self) -> impl Iterator<Item = &View<D::Memory>> {
        let weights = self.gtp.weights().iter().map(|weight| &weight.main_grad);
        weights.chain(self.norms.iter().map(|norm| &norm.main_grad))
    }

    /// All micro-batches of a step in 1F1B order.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn run_microbatches(&mut self, execution: Execution) -> Result<(), RuntimeError> {
        for turn in one_f_one_b(self.config.microbatches, self.config.microbatches_in_flight) {
            match turn {
                Turn::Forward(mb) => self.forward(mb, execution)?,
                Turn::Backward(mb) => self.backward(mb, execution)?,
            }
        }
        Ok(())
    }

    /// Joins all that is in flight, reads loss and gradients, and steps the optimizer. Collective.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn finish_step(&mut self) -> Result<StepResult, RuntimeError> {
        self.gtp.runtime().join()?;
        let result = self.read_result()?;
        self.optimizer.step(self.config, &self.gtp, &self.replicas, &self.norms, self.step)?;
        self.gtp.weights_changed();
        Ok(result)
    }

    /// One whole step. Collective.
    ///
    /// # Errors
    /// Those of the runtime.
    pub fn train_step(&mut self, execution: Execution) -> Result<StepResult, RuntimeError> {
        self.begin_step()?;
        self.gtp.runtime_ref().device().note(Note::Step("train"));
        self.run_microbatches(execution)?;
        self.finish_step()
    }

    /// Gives a step up in the middle: what was started is finished, and the next [`Trainer::begin_step`] begins anew.
    ///
    /// # Errors
    /// Those of the device.
    pub fn abort_step(&mut self) -> Result<(), RuntimeError> {
        self.gtp.finish_backward()?;
        self.gtp.runtime().join()
    }

    fn read_result(&mut self) -> Result<StepResult, RuntimeError> {
        let runtime = self.gtp.runtime_ref();
        let (device, main) = (runtime.device(), runtime.main());
        let losses = device.read(main, &self.losses)?;
        let mut hash = Sha256::new();
        for grad in self.main_grads() {
            hash.update(device.read(main, grad)?);
        }
        let mut payload = losses;
        payload.extend_from_slice(&hash.finalize());
        let mut total = 0.0_f64;
        let mut all = Sha256::new();
        for rank in runtime.world().exchange(&payload)? {
            let (losses, digest) = rank.split_at(rank.len().saturating_sub(32));
            for loss in losses.chunks_exact(4) {
                total += f64::from(f32::from_le_bytes([loss[0], loss[1], loss[2], loss[3]]));
            }
            all.update(digest);
        }
        let count = f64::from(self.config.ranks) * f64::from(self.config.microbatches);
        let digest = all.finalize();
        Ok(StepResult {
            loss: total / count,
            main_grad_digest: digest.iter().map(|byte| format!("{byte:02x}")).collect(),
        })
    }
}
