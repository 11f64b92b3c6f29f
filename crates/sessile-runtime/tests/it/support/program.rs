//! Small programs of storage operations, the same code in eager work, discovery and capture.
//!
//! ```text
//!  compute    request input ─ write ─┐      (next gradient)      ┌─ add into accumulator ─ release output
//!  side                              └─ request output ─ collective ─┘  release input
//! ```
//!
//! What a runner reads comes from *sources*, which change between steps, so that stale bytes give wrong numbers.

use std::collections::BTreeMap;

use sessile_hal::{Collective, Device, Kernel, Op, Span, View};
use sessile_host::{HostDevice, HostMemory, HostStream, Mode, World};
use sessile_plan::{DType, Domain, Fence, Plan, PlanOptions, RequestSpec, Role};
use sessile_runtime::log::{LogLevel, RankLog, Recorded};
use sessile_runtime::{Counters, HasRuntime, Marker, Runtime, RuntimeError, Slot, capture, discover};

use super::{Dev, Outcome, bytes_of, floats, persistent};

/// Elements of every accumulator.
pub(crate) const ACCUMULATOR: u64 = 256;

/// Where an input is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release {
    /// On the side stream, right after the collective.
    Side,
    /// On the compute stream, after it has waited for the collective.
    Compute,
    /// Nowhere: it lives to the end of the runner.
    Never,
}

/// One gradient: an input, an output, an addition.
#[derive(Clone, Debug)]
pub(crate) struct Grad {
    pub(crate) dtype: DType,
    /// Elements of the output; the input of a reduce-scatter has as many for each rank.
    pub(crate) elements: u64,
    pub(crate) kind: Collective,
    /// Which of [`GROUPS`].
    pub(crate) group: usize,
    /// Whether the input comes from registered memory.
    pub(crate) symmetric: bool,
    /// Which side stream.
    pub(crate) side: usize,
    pub(crate) accumulator: usize,
    pub(crate) release: Release,
    /// Time that the side stream is busy before the collective.
    pub(crate) spin: u64,
}

impl Grad {
    /// A reduce-scatter of f32 into this accumulator.
    pub(crate) fn reduce_scatter(elements: u64, accumulator: usize) -> Grad {
        Grad {
            dtype: DType::F32,
            elements,
            kind: Collective::ReduceScatter,
            group: 0,
            symmetric: false,
            side: 0,
            accumulator,
            release: Release::Side,
            spin: 0,
        }
    }

    fn input_elements(&self, ranks: u32) -> u64 {
        let ranks = members(self.group, 0, ranks).len() as u64;
        match self.kind {
            Collective::ReduceScatter => self.elements * ranks,
            Collective::AllToAll => self.elements.next_multiple_of(ranks),
            _ => self.elements,
        }
    }

    fn output_elements(&self, ranks: u32) -> u64 {
        match self.kind {
            Collective::AllToAll => self.input_elements(ranks),
            Collective::AllGather => self.elements * members(self.group, 0, ranks).len() as u64,
            _ => self.elements,
        }
    }
}

/// One runner.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    pub(crate) grads: Vec<Grad>,
    /// Whether it fills a buffer that the runner after it reads and gives back.
    pub(crate) carries: bool,
    /// Whether it has a completion point, so that later runners may overlap its tail.
    pub(crate) completes: bool,
}

/// What all ranks run.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) ranks: u32,
    pub(crate) modules: Vec<Module>,
    /// One step, as indices into `modules`. A module that carries is always followed by the next one.
    pub(crate) launches: Vec<usize>,
    pub(crate) accumulators: usize,
}

/// Names of the groups: two over all ranks, and one over each half of four ranks (over all of fewer).
pub(crate) const GROUPS: [&str; 3] = ["gtp", "twin", "half"];

/// World ranks of the group of this rank.
fn members(group: usize, rank: u32, ranks: u32) -> Vec<u32> {
    match (group, ranks, rank) {
        (2, 4, 0 | 1) => vec![0, 1],
        (2, 4, _) => vec![2, 3],
        _ => (0..ranks).collect(),
    }
}

const CARRY: u64 = 32;

/// Name of a module's runner.
pub(crate) fn name(module: usize) -> String {
    format!("m{module}")
}

/// One rank while it runs a program.
pub(crate) struct Rig {
    pub(crate) runtime: Runtime<Dev>,
    program: Program,
    sides: [HostStream; 2],
    /// By module and gradient; the carry's source is the last of its module.
    sources: Vec<Vec<View<HostMemory>>>,
    accumulators: Vec<View<HostMemory>>,
    /// The buffer that a module left for another, and that module.
    carry: Option<(usize, Slot<Dev>)>,
    /// The module whose code ran last: only right behind it its buffer is taken, as replay does.
    last: Option<usize>,
    /// What a module finds filled: the source it was filled from, and the bytes.
    imports: BTreeMap<usize, (View<HostMemory>, View<HostMemory>)>,
}

impl HasRuntime<Dev> for Rig {
    fn runtime(&mut self) -> &mut Runtime<Dev> {
        &mut self.runtime
    }
}

struct Pending {
    accumulator: View<HostMemory>,
    label: String,
    output: Slot<Dev>,
    input: Option<Slot<Dev>>,
    done: Marker<Dev>,
}

impl Rig {
    pub(crate) fn new(device: HostDevice, program: &Program) -> Outcome<Rig> {
        let rank = device.rank();
        let device = Recorded::new(device, LogLevel::On);
        let all: Vec<u32> = (0..program.ranks).collect();
        let mut runtime = Runtime::new(device.clone(), device.communicator("world", &all)?)?;
        for (at, group) in GROUPS.into_iter().enumerate() {
            let members = members(at, rank, program.ranks);
            let comm = device.communicator(&format!("{group} of {members:?}"), &members)?;
            runtime.add_group(group, comm);
        }
        let sides = [device.stream("side 0")?, device.stream("side 1")?];
        // Fractions that f32 rounds: sums in another order give other bits.
        let mut rng = fastrand::Rng::with_seed(u64::from(rank) + 1);
        let main = runtime.main().clone();
        let mut sources = Vec::new();
        for (at, module) in program.modules.iter().enumerate() {
            let sizes = module.grads.iter().map(|grad| grad.input_elements(program.ranks)).chain([CARRY]);
            let mut of_module = Vec::new();
            for elements in sizes {
                let view = persistent(&device, &format!("source {at}"), elements)?;
                let values: Vec<f32> = (0..elements).map(|_| (rng.f32() - 0.5) * 3.0).collect();
                device.write(&main, &view, &bytes_of(&values))?;
                of_module.push(view);
            }
            sources.push(of_module);
        }
        let mut accumulators = Vec::new();
        // One more for each module: nobody else adds what it reads from a carry there, so no request names it.
        for at in 0..program.accumulators + program.modules.len() {
            let view = persistent(&device, &format!("accumulator {at}"), ACCUMULATOR)?;
            device.write(&main, &view, &bytes_of(&vec![0.0; ACCUMULATOR as usize]))?;
            accumulators.push(view);
        }
        let program = program.clone();
        Ok(Rig {
            runtime,
            program,
            sides,
            sources,
            accumulators,
            carry: None,
            last: None,
            imports: BTreeMap::new(),
        })
    }

    fn spec(&self, module: usize, at: usize, output: bool) -> RequestSpec {
        let grad = &self.program.modules[module].grads[at];
        let ranks = self.program.ranks;
        let group = GROUPS[grad.group].to_owned();
        let elements = if output { grad.output_elements(ranks) } else { grad.input_elements(ranks) };
        let symmetric = grad.symmetric && !output;
        RequestSpec {
            weight: format!("m{module}.w{at}"),
            role: if output { Role::RsOutput } else { Role::WgradInput },
            dtype: grad.dtype,
            shape: vec![elements],
            unsharded_shape: vec![elements],
            domain: if symmetric { Domain::Symmetric(group.clone()) } else { Domain::Default },
            group: Some(group),
            expert: None,
            accumulates_into: output.then(|| format!("accumulator {}", grad.accumulator)),
        }
    }

    fn carry_spec(module: usize) -> RequestSpec {
        RequestSpec {
            weight: format!("m{module}.carry"),
            role: Role::GatheredWeight,
            dtype: DType::F32,
            shape: vec![CARRY],
            unsharded_shape: vec![CARRY],
            domain: Domain::Default,
            group: None,
            expert: None,
            accumulates_into: None,
        }
    }

    /// Fills a buffer for the module after `module`.
    fn fill_carry(&mut self, module: usize) -> Outcome<Slot<Dev>> {
        let compute = self.runtime.compute().clone();
        let slot = self.runtime.request(&compute, Rig::carry_spec(module))?;
        let source = self.carry_source(module);
        let op = Op::new(Kernel::Copy, format!("m{module} carry"), vec![source, slot.view().clone()])?;
        self.runtime.enqueue(&compute, op)?;
        Ok(slot)
    }

    fn carry_source(&self, module: usize) -> View<HostMemory> {
        self.sources[module].last().expect("every module has a carry source").clone()
    }

    /// The code of a runner.
    fn body(&mut self, module: usize) -> Outcome<()> {
        let compute = self.runtime.compute().clone();
        let shape = self.program.modules[module].clone();
        if module > 0 && self.program.modules[module - 1].carries {
            let slot = match self.carry.take() {
                Some((from, slot)) if from == module - 1 && self.last == Some(from) => slot,
                stale => {
                    if let Some((_, slot)) = stale {
                        self.runtime.release(&compute, slot)?;
                    }
                    self.fill_carry(module - 1)?
                }
            };
            if self.runtime.is_capturing() {
                self.imports.insert(module, (self.carry_source(module - 1), slot.view().clone()));
            }
            let target = self.accumulators[self.program.accumulators + module].slice(0, CARRY)?;
            let op =
                Op::new(Kernel::Add, format!("m{module} reads carry"), vec![slot.view().clone(), target])?;
            self.runtime.enqueue(&compute, op)?;
            self.runtime.release(&compute, slot)?;
        }
        if shape.carries {
            let slot = self.fill_carry(module)?;
            if let Some((_, stale)) = self.carry.replace((module, slot)) {
                self.runtime.release(&compute, stale)?;
            }
        }
        let mut used = [false; 2];
        let mut pending = None;
        for (at, grad) in shape.grads.iter().enumerate() {
            let next = self.start(module, at, grad)?;
            used[grad.side] = true;
            self.finalize(pending.replace(next))?;
        }
        if shape.completes {
            self.runtime.complete()?;
        }
        self.finalize(pending)?;
        self.last = Some(module);
        for (side, _) in used.iter().enumerate().filter(|(_, used)| **used) {
            let end = self.runtime.mark(&self.sides[side].clone())?;
            self.runtime.wait(&compute, &end)?;
        }
        Ok(())
    }

    fn start(&mut self, module: usize, at: usize, grad: &Grad) -> Outcome<Pending> {
        let (compute, side) = (self.runtime.compute().clone(), self.sides[grad.side].clone());
        let label = |what: &str| format!("m{module}g{at} {what}");
        let (input, output) = (self.spec(module, at, false), self.spec(module, at, true));
        let input = self.runtime.request(&compute, input)?;
        let kernel = if grad.dtype == DType::F32 { Kernel::Copy } else { Kernel::Cast };
        let views = vec![self.sources[module][at].clone(), input.view().clone()];
        self.runtime.enqueue(&compute, Op::new(kernel, label("write"), views)?)?;
        let written = self.runtime.mark(&compute)?;
        self.runtime.wait(&side, &written)?;
        if grad.spin > 0 {
            self.runtime
                .enqueue(&side, Op::new(Kernel::Spin { micros: grad.spin }, label("spin"), vec![])?)?;
        }
        let output = self.runtime.request(&side, output)?;
        self.runtime.collective(&side, GROUPS[grad.group], grad.kind, input.view(), output.view())?;
        let input = match grad.release {
            Release::Side => {
                self.runtime.release(&side, input)?;
                None
            }
            Release::Compute => Some(input),
            Release::Never => None,
        };
        let done = self.runtime.mark(&side)?;
        let accumulator = self.accumulators[grad.accumulator].slice(0, output.view().elements())?;
        Ok(Pending { accumulator, label: label("add"), output, input, done })
    }

    fn finalize(&mut self, pending: Option<Pending>) -> Outcome<()> {
        let Some(Pending { accumulator, label, output, input, done }) = pending else { return Ok(()) };
        let compute = self.runtime.compute().clone();
        self.runtime.wait(&compute, &done)?;
        let views = vec![output.view().clone(), accumulator];
        let op = Op::new(Kernel::AddScaled { scale: 0.5 }, label, views)?;
        self.runtime.enqueue(&compute, op)?;
        self.runtime.release(&compute, output)?;
        if let Some(input) = input {
            self.runtime.release(&compute, input)?;
        }
        Ok(())
    }

    /// Runs a module eagerly.
    pub(crate) fn eager(&mut self, module: usize) -> Outcome<()> {
        self.body(module)
    }

    /// Discovers one step, seals and captures every module.
    pub(crate) fn prepare(&mut self, options: &PlanOptions, omitted: &[Fence]) -> Outcome<()> {
        for module in self.program.launches.clone() {
            discover(self, &name(module), |rig: &mut Rig| rig.body(module))?;
        }
        self.runtime.seal("program", options)?;
        self.runtime.omit_fences(omitted.iter().copied());
        for module in 0..self.program.modules.len() {
            capture(self, &name(module), |rig: &mut Rig| rig.body(module))?;
        }
        Ok(())
    }

    /// Launches a module's graph; fills first what another module would have left for it.
    pub(crate) fn replay(&mut self, module: usize) -> Outcome<()> {
        if !self.runtime.in_order(&name(module))? {
            self.runtime.join()?;
            if let Some((source, view)) = self.imports.get(&module).cloned() {
                let main = self.runtime.main().clone();
                let op = Op::new(Kernel::Copy, format!("import of m{module}"), vec![source, view])?;
                self.runtime.enqueue(&main, op)?;
            }
        }
        self.runtime.replay(&name(module)).map(drop)
    }

    /// Changes all sources. They are read before the completion points, which the main stream has waited for: so steps
    /// are not joined here, and under the wrapped cut they do overlap.
    pub(crate) fn next_step(&mut self) -> Outcome<()> {
        let main = self.runtime.main().clone();
        for view in self.sources.iter().flatten().cloned().collect::<Vec<_>>() {
            self.runtime
                .enqueue(&main, Op::new(Kernel::Scale { factor: -1.25 }, "next step", vec![view])?)?;
        }
        Ok(())
    }

    /// What discovery left in accumulators is taken back.
    fn reset(&mut self) -> Outcome<()> {
        let main = self.runtime.main().clone();
        for view in self.accumulators.clone() {
            self.runtime.enqueue(&main, super::fill(&view, 0.0)?)?;
        }
        Ok(())
    }

    fn results(&mut self) -> Outcome<Vec<Vec<u32>>> {
        self.runtime.join()?;
        let main = self.runtime.main().clone();
        let device = self.runtime.device().clone();
        let bits = |view| {
            let values = floats(&device.read(&main, view)?);
            Ok(values.into_iter().map(f32::to_bits).collect())
        };
        self.accumulators.iter().map(bits).collect()
    }
}

/// How a program is run.
#[derive(Clone, Debug)]
pub(crate) enum Run {
    /// Every module's code at each launch.
    Eager,
    /// Graphs of a plan, without these fences.
    Replayed(PlanOptions, Vec<Fence>),
}

/// What a rank ends with.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Bits of the accumulators.
    pub(crate) bits: Vec<Vec<u32>>,
    pub(crate) counters: Counters,
    pub(crate) plan: Option<Plan>,
    pub(crate) log: RankLog,
    pub(crate) spans: Vec<Span>,
}

impl Ended {
    pub(crate) fn fences(&self) -> Vec<Fence> {
        self.plan.as_ref().map_or(Vec::new(), |plan| plan.fences.clone())
    }
}

/// Runs `steps`, each a list of modules, on all ranks of a new world.
///
/// # Panics
/// If a rank fails, or keeps bytes after all is dropped.
#[track_caller]
pub(crate) fn run(program: &Program, mode: Mode, how: &Run, steps: &[Vec<usize>]) -> Vec<Ended> {
    match try_run(program, mode, how, steps) {
        Ok(ended) => ended,
        Err(failure) => panic!("{failure}\n{program:?} {mode:?} {how:?}"),
    }
}

/// As [`run`], with a rank's failure as text.
pub(crate) fn try_run(
    program: &Program,
    mode: Mode,
    how: &Run,
    steps: &[Vec<usize>],
) -> Result<Vec<Ended>, String> {
    let world: World = super::world(program.ranks, mode);
    let results = world.run(|device| {
        let mut rig = Rig::new(device, program)?;
        if let Run::Replayed(options, omitted) = how {
            rig.prepare(options, omitted)?;
            rig.reset()?;
        }
        for step in steps {
            for &module in step {
                match how {
                    Run::Eager => rig.eager(module)?,
                    Run::Replayed(..) => rig.replay(module)?,
                }
            }
            rig.next_step()?;
        }
        let bits = rig.results()?;
        let plan = rig.runtime.plan().cloned();
        let device = rig.runtime.device().clone();
        let (log, spans) = (device.take_log(), device.take_spans());
        Ok::<_, RuntimeError>(Ended { bits, counters: rig.runtime.counters(), plan, log, spans })
    });
    let ended = results.into_iter().collect::<Result<Vec<_>, _>>().map_err(|failure| failure.to_string())?;
    let left: Vec<u64> = (0..program.ranks).map(|rank| world.live_bytes(rank)).collect();
    if left.iter().any(|&bytes| bytes != 0) {
        return Err(format!("bytes left on the ranks: {left:?}"));
    }
    Ok(ended)
}
