//! The runners of a step: which there are, what each does, and their capture.

use std::collections::BTreeSet;

use sessile_gtp::{Gtp, Pass};
use sessile_hal::{Device, Span};
use sessile_plan::PlanOptions;
use sessile_runtime::{Footprint, RuntimeError};

use super::{Execution, Trainer};
use crate::{
    heads,
    schedule::{Turn, one_f_one_b},
    simulate::{DepthTable, depth_of_trace},
};

/// One piece of a pass: a runner, or eager work in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Piece {
    Embedding,
    /// Modules that run together.
    Unit(usize),
    /// Final norm, output layer, losses.
    Head,
}

impl<D: Device> Trainer<'_, D> {
    /// Seals what was discovered and captures every runner, in the sealed order. Collective.
    ///
    /// # Errors
    /// Those of [`Runtime::seal`](sessile_runtime::Runtime::seal) and of the captures.
    pub fn seal_and_capture(&mut self) -> Result<(), RuntimeError> {
        self.seal()?;
        self.capture_all()
    }

    /// What a seal with these options will allocate on this rank.
    ///
    /// # Errors
    /// Those of [`Runtime::footprint`](sessile_runtime::Runtime::footprint).
    pub fn footprint(&self, options: &PlanOptions) -> Result<Footprint, RuntimeError> {
        self.gtp.runtime_ref().footprint(options)
    }

    /// Seals what was discovered. Collective.
    ///
    /// # Errors
    /// Those of [`Runtime::seal`](sessile_runtime::Runtime::seal).
    pub fn seal(&mut self) -> Result<(), RuntimeError> {
        let options = self.config.plan_options();
        self.seal_with(&options)
    }

    /// Takes the spans of the discovery and says what to seal with: as configured, with depths that rank 0 chooses from
    /// the spans if the configuration says so; rank 0 also gets what it chose from. Collective, after all work of the
    /// discovery has ended.
    ///
    /// # Errors
    /// [`RuntimeError::Undecided`] where no depths fit the memory limit; those of the exchanges.
    pub fn measure(&mut self, spans: &[Span]) -> Result<(PlanOptions, Option<DepthTable>), RuntimeError> {
        self.runtime_mut().measure(spans)?;
        let mut options = self.config.plan_options();
        let mut table = None;
        if self.config.depth_auto {
            let trace = self.gtp.runtime_ref().discovered(&self.name());
            options = self.gtp.runtime_ref().decide(|| {
                let chosen = depth_of_trace(&trace, &options, self.config.memory_limit);
                let chosen = chosen.map_err(|error| RuntimeError::Undecided { reason: error.to_string() })?;
                table = Some((chosen.candidates, chosen.chosen));
                Ok(chosen.plan.options)
            })?;
        }
        Ok((options, table))
    }

    fn name(&self) -> String {
        format!("train, {} layers, hidden {}", self.config.layers, self.config.hidden)
    }

    /// Seals what was discovered with these options, the same on all ranks. Collective.
    ///
    /// # Errors
    /// Those of [`Runtime::seal`](sessile_runtime::Runtime::seal).
    pub fn seal_with(&mut self, options: &PlanOptions) -> Result<(), RuntimeError> {
        let name = self.name();
        self.runtime_mut().seal(&name, options)?;
        Ok(())
    }

    /// Captures every runner, in the sealed order.
    ///
    /// # Errors
    /// Those of the captures.
    pub fn capture_all(&mut self) -> Result<(), RuntimeError> {
        let mut captured = BTreeSet::new();
        for shape in 0..self.shapes.len() {
            self.shape = shape;
            for (pass, slot) in self.turns() {
                self.gtp.begin_pass(pass);
                for piece in self.pieces(pass, &self.unit_order(pass)) {
                    let name = self.runner_name(piece, pass, slot, shape);
                    if self.is_graphed(piece) && captured.insert(name.clone()) {
                        Gtp::capture(self, &name, |trainer| trainer.body(piece, pass, slot))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Names of all runners in launch order: of one step, or of one step of each sequence length.
    pub fn launch_names(&self) -> Vec<String> {
        let mut names = Vec::new();
        for shape in 0..self.shapes.len() {
            for (pass, slot) in self.turns() {
                let pieces = self.pieces(pass, &self.unit_order(pass));
                let graphed = pieces.into_iter().filter(|&piece| self.is_graphed(piece));
                names.extend(graphed.map(|piece| self.runner_name(piece, pass, slot, shape)));
            }
        }
        names
    }

    /// Passes of a step in order, each with its micro-batch's slot.
    fn turns(&self) -> Vec<(Pass, u32)> {
        let in_flight = self.config.microbatches_in_flight;
        one_f_one_b(self.config.microbatches, in_flight)
            .into_iter()
            .map(|turn| match turn {
                Turn::Forward(mb) => (Pass::Forward, mb % in_flight),
                Turn::Backward(mb) => (Pass::Backward, mb % in_flight),
            })
            .collect()
    }

    pub(super) fn pieces(&self, pass: Pass, units: &[usize]) -> Vec<Piece> {
        let (first, last) = match pass {
            Pass::Forward => (Piece::Embedding, Piece::Head),
            Pass::Backward => (Piece::Head, Piece::Embedding),
        };
        let units = units.iter().map(|&unit| Piece::Unit(unit));
        std::iter::once(first).chain(units).chain([last]).collect()
    }

    fn is_graphed(&self, piece: Piece) -> bool {
        match piece {
            Piece::Embedding | Piece::Head => self.graphed && self.config.graph_heads,
            Piece::Unit(unit) => self.units[unit].graphed,
        }
    }

    fn runner_name(&self, piece: Piece, pass: Pass, slot: u32, shape: usize) -> String {
        let name = match piece {
            Piece::Embedding => "embedding",
            Piece::Unit(unit) => &self.units[unit].name,
            Piece::Head => "head",
        };
        let pass = match pass {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        let mut name = format!("{name}.{pass}");
        if self.config.microbatches_in_flight > 1 {
            name.push_str(&format!(".slot{slot}"));
        }
        if let [_, _, ..] = self.config.seq[..] {
            name.push_str(&format!(".seq{}", self.config.seq[shape]));
        }
        name
    }

    pub(super) fn run_piece(
        &mut self,
        piece: Piece,
        pass: Pass,
        slot: u32,
        execution: Execution,
    ) -> Result<(), RuntimeError> {
        let name = self.runner_name(piece, pass, slot, self.shape);
        match execution {
            Execution::Discover if self.is_graphed(piece) => {
                Gtp::discover(self, &name, |trainer| trainer.body(piece, pass, slot))
            }
            Execution::Replay if self.is_graphed(piece) => self.gtp.replay(&name).map(drop),
            _ => self.body(piece, pass, slot),
        }
    }

    fn body(&mut self, piece: Piece, pass: Pass, slot: u32) -> Result<(), RuntimeError> {
        let Self { config, gtp, network, norms, shapes, acts, units, shape, .. } = self;
        let (extents, acts) = (shapes[*shape], &acts[*shape][slot as usize]);
        let last_norm = &norms[network.norms - 1];
        match (piece, pass) {
            (Piece::Embedding, Pass::Forward) => heads::embedding_forward(network, gtp, extents, acts),
            (Piece::Embedding, Pass::Backward) => heads::embedding_backward(network, gtp, extents, acts),
            (Piece::Head, Pass::Forward) => heads::forward(config, network, gtp, extents, last_norm, acts),
            (Piece::Head, Pass::Backward) => heads::backward(network, gtp, extents, last_norm, acts),
            (Piece::Unit(unit), Pass::Forward) => units[unit].modules.iter().try_for_each(|&at| {
                let module = &network.modules[at];
                module.forward(gtp, extents, &norms[module.norm], acts)
            }),
            (Piece::Unit(unit), Pass::Backward) => units[unit].modules.iter().rev().try_for_each(|&at| {
                let module = &network.modules[at];
                module.backward(gtp, extents, &norms[module.norm], acts)
            }),
        }
    }
}
