//! A step: micro-batches forward and backward, gradients, optimizer.

use sessile_gtp::Pass;
use sessile_hal::{Comm, Device, Kernel, Note, View};
use sessile_runtime::RuntimeError;
use sha2::{Digest, Sha256};

use super::{Execution, Trainer};
use crate::{
    buffers::write_u32,
    heads::loss_weight,
    linear::run,
    report::StepResult,
    schedule::{Turn, one_f_one_b},
};

impl<D: Device> Trainer<'_, D> {
    /// Uploads the tokens of the next step and zeroes all gradients.
    ///
    /// # Errors
    /// Those of the device.
    pub fn begin_step(&mut self) -> Result<(), RuntimeError> {
        self.gtp.runtime_ref().device().note(Note::Step(""));
        self.shape = self.step as usize % self.shapes.len();
        self.step += 1;
        let device = self.gtp.runtime_ref().device().clone();
        let main = self.gtp.runtime_ref().main().clone();
        let (batch, seq) = (self.config.batch as usize, self.config.seq[self.shape] as usize);
        let tokens = self.shapes[self.shape].tokens;
        for (ids, targets) in self.tokens.iter().zip(&self.targets) {
            let drawn = self.sampler.draw(batch, seq, targets.len());
            write_u32(&device, &main, &ids.slice(0, tokens)?, &drawn.inputs)?;
            for (view, values) in targets.iter().zip(&drawn.targets) {
                write_u32(&device, &main, &view.slice(0, tokens)?, values)?;
            }
        }
        self.gtp.begin_step()?;
        for norm in &self.norms {
            run(&mut self.gtp, Kernel::Fill { value: 0.0 }, "zero main_grad", &[&norm.main_grad])?;
        }
        Ok(())
    }

    /// Forward of one micro-batch: losses and gradients of the logits.
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
        let (at, tokens) = (microbatch as usize, self.shapes[self.shape].tokens);
        let acts = &self.acts[self.shape][slot as usize];
        // Runners have addresses of their own for what they read.
        let ids = self.tokens[at].slice(0, tokens)?;
        run(&mut self.gtp, Kernel::Copy, "ids", &[&ids, &acts.ids])?;
        for (targets, prediction) in self.targets[at].iter().zip(&acts.predictions) {
            let targets = targets.slice(0, tokens)?;
            run(&mut self.gtp, Kernel::Copy, "targets", &[&targets, &prediction.targets])?;
        }
        self.run_pass(Pass::Forward, slot, units, execution)?;
        let acts = &self.acts[self.shape][slot as usize];
        let predictions = acts.predictions.len() as u64;
        for (prediction, number) in acts.predictions.iter().zip(0..) {
            let loss = self.losses.slice(u64::from(microbatch) * predictions + number, 1)?;
            run(&mut self.gtp, Kernel::Copy, "loss", &[&prediction.loss, &loss])?;
        }
        Ok(())
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
        self.run_pass(Pass::Backward, slot, units, execution)?;
        self.gtp.finish_backward()
    }

    fn run_pass(
        &mut self,
        pass: Pass,
        slot: u32,
        units: &[usize],
        execution: Execution,
    ) -> Result<(), RuntimeError> {
        self.gtp.begin_pass(pass);
        for piece in self.pieces(pass, units) {
            self.run_piece(piece, pass, slot, execution)?;
        }
        Ok(())
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

    /// Joins all that is in flight, reads loss and gradients, and steps the optimizer, which refuses gradients that are not
    /// whole. Collective.
    ///
    /// # Errors
    /// Those of the runtime and of [`Gtp::check_gradients`](sessile_gtp::Gtp::check_gradients).
    pub fn finish_step(&mut self) -> Result<StepResult, RuntimeError> {
        self.runtime_mut().join()?;
        self.gtp.finish_step()?;
        let result = self.read_result()?;
        self.gtp.check_gradients()?;
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
        // Steps of one sequence length do the same work.
        let name = format!("train, sequences of {}", self.config.seq[self.shape]);
        self.gtp.runtime_ref().device().note(Note::Step(&name));
        self.run_microbatches(execution)?;
        self.finish_step()
    }

    /// Gives a step up in the middle: what was started is finished, and the next [`Trainer::begin_step`] begins anew.
    ///
    /// # Errors
    /// Those of the device.
    pub fn abort_step(&mut self) -> Result<(), RuntimeError> {
        self.gtp.finish_backward()?;
        self.runtime_mut().join()
    }

    fn main_grads(&self) -> impl Iterator<Item = &View<D::Memory>> {
        let weights = self.gtp.weights().iter().flat_map(sessile_gtp::Weight::main_grads);
        weights.chain(self.norms.iter().map(|norm| &norm.main_grad))
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
        let predictions = self.network.predicts_from.len();
        let mut total = 0.0_f64;
        let mut all = Sha256::new();
        for rank in runtime.world().exchange(&payload)? {
            let (losses, digest) = rank.split_at(rank.len().saturating_sub(32));
            for (at, loss) in losses.chunks_exact(4).enumerate() {
                let loss = f32::from_le_bytes([loss[0], loss[1], loss[2], loss[3]]);
                total += f64::from(loss) * loss_weight(self.config, at % predictions);
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
