//! One weight whose gradients are given, reduced eagerly and from a graph.

use std::collections::BTreeMap;

use half::bf16;
use sessile_gtp::{ChainKind, Gtp, ReduceScatter, Repeat, WeightId, WeightSpec};
use sessile_hal::{Device as _, Kernel, Op, View};
use sessile_host::{HostDevice, Mode, Order, World, WorldOptions};
use sessile_plan::{DType, Domain, Plan, PlanOptions, Strategy, Trace};
use sessile_runtime::{
    HasRuntime, Runtime, RuntimeError,
    check::check,
    log::{Log, LogLevel, Recorded},
};

pub(crate) type Device = Recorded<HostDevice>;
pub(crate) type Outcome<T> = Result<T, RuntimeError>;

/// What one weight is reduced with.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// World ranks, in group order.
    pub(crate) ranks: Vec<u32>,
    /// Name of the group.
    pub(crate) group: &'static str,
    pub(crate) rows: u64,
    pub(crate) cols: u64,
    pub(crate) wire: DType,
    pub(crate) kind: ReduceScatter,
    pub(crate) repeat: Repeat,
    pub(crate) experts: Option<u32>,
    /// Uses of one backward.
    pub(crate) uses: u32,
    /// Backwards of each step.
    pub(crate) microbatches: Vec<u32>,
    pub(crate) strategy: Strategy,
    pub(crate) depth: u32,
    pub(crate) mode: Mode,
}

impl Case {
    pub(crate) fn new(ranks: u32, kind: ReduceScatter) -> Case {
        Case {
            ranks: (0..ranks).collect(),
            group: "g",
            rows: 20,
            cols: 3,
            wire: DType::Bf16,
            kind,
            repeat: Repeat::Drain,
            experts: None,
            uses: 1,
            microbatches: vec![1],
            strategy: Strategy::Sessile,
            depth: 2,
            mode: Mode::Threads { workers: 4 },
        }
    }

    pub(crate) fn elements(&self) -> usize {
        (self.rows * self.cols) as usize
    }
}

/// Gradient of the member at a position of the group, in a use, at an element.
pub(crate) type Values = fn(usize, u32, usize) -> f32;

/// What a run leaves.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Reduced {
    /// After each step: bits of the whole gradient, padding included, every matrix one behind the other.
    pub(crate) steps: Vec<Vec<u32>>,
    /// How often the gradient became ready.
    pub(crate) ready: u64,
}

impl Reduced {
    /// As numbers, after one step.
    pub(crate) fn floats(&self, step: usize) -> Vec<f32> {
        self.steps[step].iter().map(|bits| f32::from_bits(*bits)).collect()
    }
}

/// What was planned.
pub(crate) struct Planned {
    pub(crate) trace: Trace,
    pub(crate) plan: Plan,
}

/// Writes values in the wire dtype.
pub(crate) fn fill(
    device: &Device,
    stream: &<Device as sessile_hal::Device>::Stream,
    view: &View<<Device as sessile_hal::Device>::Memory>,
    values: &[f32],
) -> Outcome<()> {
    let bytes: Vec<u8> = match view.dtype() {
        DType::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    Ok(device.write(stream, view, &bytes)?)
}

/// One rank with one weight and a source for each use and matrix.
pub(crate) struct Rank {
    gtp: Gtp<Device>,
    weight: WeightId,
    sources: Vec<Vec<View<<Device as sessile_hal::Device>::Memory>>>,
}

impl HasRuntime<Device> for Rank {
    fn runtime(&mut self) -> &mut Runtime<Device> {
        self.gtp.runtime()
    }
}

impl AsMut<Gtp<Device>> for Rank {
    fn as_mut(&mut self) -> &mut Gtp<Device> {
        &mut self.gtp
    }
}

impl Rank {
    fn new(device: &Device, case: &Case, chain: ChainKind, values: Values) -> Outcome<Self> {
        let all: Vec<u32> = (0..device.world_size()).collect();
        let world = device.communicator("world", &all)?;
        let group = device.communicator(&format!("comm of {}", case.group), &case.ranks)?;
        let position = sessile_hal::Comm::rank(&group) as usize;
        let mut gtp = Gtp::new(Runtime::new(device.clone(), world)?);
        let group = gtp.add_group(case.group, group, case.kind)?;
        let weight = gtp.add_weight(&WeightSpec {
            name: "w",
            rows: case.rows,
            cols: case.cols,
            group,
            chain,
            wgrad_dtype: case.wire,
            experts: case.experts,
            uses: case.uses,
            repeat: case.repeat,
        })?;
        let main = gtp.runtime_ref().main().clone();
        let mut sources = Vec::new();
        for number in 0..case.uses {
            let mut parts = Vec::new();
            for part in 0..case.experts.unwrap_or(1) as usize {
                let bytes = case.elements() as u64 * case.wire.size();
                let view = View::whole(&device.alloc(bytes, &Domain::Default, "source")?, case.wire)?;
                let at = |element| values(position, number, part * case.elements() + element);
                let values: Vec<f32> = (0..case.elements()).map(at).collect();
                fill(device, &main, &view, &values)?;
                parts.push(view);
            }
            sources.push(parts);
        }
        Ok(Rank { gtp, weight, sources })
    }

    /// One backward: every use in turn.
    fn backward(&mut self) -> Outcome<()> {
        for parts in &self.sources {
            self.gtp.reduce(self.weight, |runtime, dw| {
                let compute = runtime.compute().clone();
                for (source, dw) in parts.iter().zip(dw) {
                    let op = Op::new(Kernel::Copy, "gradient", vec![source.clone(), dw.clone()])?;
                    runtime.enqueue(&compute, op)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Bits of this rank's shards.
    fn finish(&mut self) -> Outcome<Vec<Vec<u32>>> {
        self.runtime().join()?;
        self.gtp.finish_step()?;
        let runtime = self.gtp.runtime_ref();
        let parts = &self.gtp.weight(self.weight).parts;
        parts
            .iter()
            .map(|part| {
                let bytes = runtime.device().read(runtime.main(), &part.main_grad)?;
                Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
            })
            .collect()
    }
}

/// Every step eagerly.
pub(crate) fn eager(case: &Case, values: Values) -> Reduced {
    run(case, values, false).0
}

/// The first step discovers, the others replay. Nothing may be unordered, and the plan must stand its validator.
pub(crate) fn replayed(case: &Case, values: Values) -> (Reduced, Planned) {
    let (reduced, planned) = run(case, values, true);
    (reduced, planned.expect("graphs have a plan"))
}

fn run(case: &Case, values: Values, graphs: bool) -> (Reduced, Option<Planned>) {
    let ranks = case.ranks.len() as u32;
    let world = World::new(WorldOptions { ranks, mode: case.mode, ..WorldOptions::default() });
    let results = world.run(|device| -> Outcome<_> {
        let device = Recorded::new(device, LogLevel::On);
        let chain = if graphs { ChainKind::Graphed } else { ChainKind::Eager };
        let mut rank = Rank::new(&device, case, chain, values)?;
        let mut steps = Vec::new();
        for (step, &microbatches) in case.microbatches.iter().enumerate() {
            rank.gtp.begin_step()?;
            for _ in 0..microbatches {
                match (graphs, step) {
                    (false, _) => rank.backward()?,
                    (true, 0) => Gtp::discover(&mut rank, "b", Rank::backward)?,
                    (true, _) => drop(rank.gtp.replay("b")?),
                }
                rank.gtp.finish_backward()?;
            }
            steps.push(rank.finish()?);
            if graphs && step == 0 {
                let options =
                    PlanOptions { strategy: case.strategy, depth: case.depth, ..PlanOptions::default() };
                rank.runtime().seal("test", &options)?;
                Gtp::capture(&mut rank, "b", Rank::backward)?;
            }
            rank.gtp.weights_changed();
        }
        let runtime = rank.gtp.runtime_ref();
        let planned = runtime.trace().zip(runtime.plan());
        let planned = planned.map(|(trace, plan)| Planned { trace: trace.clone(), plan: plan.clone() });
        Ok((steps, rank.gtp.ready()[0], planned, device.take_log()))
    });
    let mut planned = None;
    let mut logs = Vec::new();
    let mut by_world_rank = BTreeMap::new();
    for (at, result) in results.into_iter().enumerate() {
        let (steps, ready, plan, log) = result.expect("every rank ends well");
        planned = planned.or(plan);
        logs.push(log);
        by_world_rank.insert(at as u32, (steps, ready));
    }
    let report = check(&Log::from_ranks(logs));
    assert!(report.violations.is_empty(), "{case:?}: {}", report.violations[0]);
    if let Some(Planned { trace, plan }) = &planned {
        let faults = sessile_plan::validate(trace, plan);
        assert!(faults.is_empty(), "{case:?}: {}", faults[0]);
    }
    let parts = case.experts.unwrap_or(1) as usize;
    let whole = |step: usize| {
        let shard = |part: usize, rank: &u32| by_world_rank[rank].0[step][part].clone();
        (0..parts).flat_map(|part| case.ranks.iter().flat_map(move |rank| shard(part, rank))).collect()
    };
    let steps = (0..case.microbatches.len()).map(whole).collect();
    (Reduced { steps, ready: by_world_rank[&0].1 }, planned)
}

/// Eagerly and from graphs, which must agree to the bit and in how often the gradient becomes ready.
pub(crate) fn both(case: &Case, values: Values) -> (Reduced, Planned) {
    let one = eager(case, values);
    let (other, planned) = replayed(case, values);
    assert_eq!(one, other, "{case:?}");
    (one, planned)
}

/// The threads, and the two orders that look for missing fences.
pub(crate) fn modes() -> [Mode; 3] {
    let scheduled = |order| Mode::Scheduled { seed: 3, order };
    [Mode::Threads { workers: 4 }, scheduled(Order::WritersEarly), scheduled(Order::ReadersEarly)]
}
