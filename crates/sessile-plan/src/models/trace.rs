//! From a model to the trace that one rank's discovery of its backward would record.
//!
//! ```text
//!  stream 0, compute    GEMM j ── record ── wait j-1, add j-1 ── GEMM j+1 ── ...  complete  wait, add the last
//!  stream 1, of group         └─ reduce-scatter j ── record ─────────────┘
//! ```
//!
//! Weight j's reduce-scatter starts when its GEMM ends and is added one weight later; the last one of a runner after the
//! completion point. A weight that is used again is added before its next GEMM. Gathered weights, where asked for, are
//! gathered one weight ahead, also for the next runner, into the memory that gradients lie in.

use super::{Model, Module, Weight};
use crate::{
    request::{DType, Domain, Request, RequestId, RequestSpec, Role},
    trace::{Point, PointKind, Runner, TRACE_VERSION, Trace},
};

/// What one graph holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// A module.
    Module,
    /// A block: a layer.
    Layer,
}

/// How gradients are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kinds {
    /// NCCL's reduce-scatter, in the wire dtype.
    Plain,
    /// All-to-all and a local FP32 sum, where the wire is BF16 and the group has more than two ranks.
    Fp32,
    /// Buffers in registered memory.
    Registered,
}

/// Which buffers those need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KindSet {
    /// As Megatron-LM: FP32 accumulation into `rs_output`; of registered buffers the inputs alone.
    Upstream,
    /// As sessile: an `fp32_output` in place of `rs_output`; outputs registered too.
    Own,
}

/// What shapes a model's trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// What one graph holds.
    pub scope: Scope,
    /// Dtype of gradients on the wire.
    pub wgrad_dtype: DType,
    /// How gradients are reduced.
    pub kinds: Kinds,
    /// Which buffers that needs.
    pub set: KindSet,
    /// Whether gathered weights are planned too.
    pub gathered: bool,
}

impl Default for TraceOptions {
    fn default() -> Self {
        TraceOptions {
            scope: Scope::Module,
            wgrad_dtype: DType::Bf16,
            kinds: Kinds::Plain,
            set: KindSet::Own,
            gathered: false,
        }
    }
}

/// Rows are padded to this many times the group's ranks.
const PAD: u64 = 16;

/// The trace of one backward of a model. The model must have passed [`Model::check`].
pub fn model_trace(model: &Model, options: &TraceOptions) -> Trace {
    let mut nodes: Vec<(String, Vec<Node<'_>>)> = Vec::new();
    for block in &model.blocks {
        for repeat in (0..block.repeat).rev() {
            let name = if block.repeat == 1 { block.name.clone() } else { format!("{}{repeat}", block.name) };
            let of = |module: &'_ Module| format!("{name}.{}", module.name);
            match options.scope {
                Scope::Layer => {
                    let all = block.modules.iter().flat_map(|module| Node::all(of(module), module));
                    nodes.push((name.clone(), all.collect()));
                }
                Scope::Module => {
                    nodes.extend(
                        block
                            .modules
                            .iter()
                            .map(|module| (of(module), Node::all(of(module), module).collect())),
                    );
                }
            }
        }
    }
    let mut builder = Builder { model, options, runners: Vec::new(), next: 0, gathered: None };
    for at in 0..nodes.len() {
        let following = nodes.get(at + 1).and_then(|(_, nodes)| nodes.first());
        builder.runner(&nodes[at].0, &nodes[at].1, following);
    }
    let steps = vec![(0..builder.runners.len() as u32).collect()];
    let runners = builder.runners;
    Trace {
        schema: Trace::SCHEMA.into(),
        version: TRACE_VERSION,
        name: model.name.clone(),
        runners,
        steps,
        durations_ns: Vec::new(),
    }
}

/// One use of a weight.
struct Node<'a> {
    name: String,
    weight: &'a Weight,
    again: bool,
}

impl<'a> Node<'a> {
    fn all(module: String, of: &'a Module) -> impl Iterator<Item = Node<'a>> {
        of.weights.iter().flat_map(move |weight| {
            let name = format!("{module}.{}", weight.name);
            (0..weight.uses).map(move |used| Node { name: name.clone(), weight, again: used > 0 })
        })
    }
}

struct Builder<'a> {
    model: &'a Model,
    options: &'a TraceOptions,
    runners: Vec<Runner>,
    next: u32,
    /// Gathered weights that the runner before prefetched for this one.
    gathered: Option<Vec<RequestId>>,
}

const COMPUTE: u32 = 0;

impl Builder<'_> {
    /// Streams of a group: reduce-scatter, and gather.
    fn streams(&self, group: &str) -> (u32, u32) {
        let at = self.model.groups.keys().position(|other| other == group).unwrap_or(0) as u32;
        (1 + 2 * at, 2 + 2 * at)
    }

    fn ask(&mut self, made: &mut Made, stream: u32, node: &Node<'_>, role: &Role) -> Vec<RequestId> {
        let weight = node.weight;
        let ranks = self.model.groups[&weight.group];
        let padded = weight.rows.next_multiple_of(PAD * ranks);
        let own = self.options.set == KindSet::Own;
        let registered = self.options.kinds == Kinds::Registered
            && (*role == Role::WgradInput || (own && matches!(role, Role::RsOutput | Role::GatheredWeight)));
        let wire = weight.wgrad_dtype.unwrap_or(self.options.wgrad_dtype);
        let (rows, dtype) = match role {
            Role::RsOutput => (padded / ranks, wire),
            Role::Fp32Output => (padded / ranks, DType::F32),
            Role::GatheredWeight => (padded, DType::Bf16),
            _ => (padded, wire),
        };
        let spec = |expert: Option<u32>| RequestSpec {
            weight: expert.map_or_else(|| node.name.clone(), |expert| format!("{}.{expert}", node.name)),
            role: role.clone(),
            dtype,
            shape: vec![rows, weight.cols],
            unsharded_shape: vec![weight.rows, weight.cols],
            domain: if registered { Domain::Symmetric(weight.group.clone()) } else { Domain::Default },
            group: Some(weight.group.clone()),
            expert,
            accumulates_into: None,
        };
        let experts: Vec<Option<u32>> = match weight.experts {
            Some(count) => (0..count).map(Some).collect(),
            None => vec![None],
        };
        let asked = experts.into_iter().map(|expert| {
            let id = RequestId(self.next);
            self.next += 1;
            made.requests.push(Request { id, spec: spec(expert) });
            made.point(stream, PointKind::Acquire(id));
            id
        });
        asked.collect()
    }

    fn gather(&mut self, made: &mut Made, node: &Node<'_>) -> (Vec<RequestId>, u32) {
        let (_, stream) = self.streams(&node.weight.group);
        let begun = made.record(COMPUTE);
        made.point(stream, PointKind::Wait(begun));
        let asked = self.ask(made, stream, node, &Role::GatheredWeight);
        made.point(stream, PointKind::Collective(format!("{}.gather", node.weight.group)));
        (asked, made.record(stream))
    }

    fn runner(&mut self, name: &str, nodes: &[Node<'_>], following: Option<&Node<'_>>) {
        let mut made = Made::default();
        let mut ready = None;
        let mut gathered = self.gathered.take().unwrap_or_default();
        if self.options.gathered && gathered.is_empty() {
            let (asked, event) = self.gather(&mut made, &nodes[0]);
            (gathered, ready) = (asked, Some(event));
        }
        // What was reduced and is still to be added: the event, and the outputs.
        let mut open: Option<(u32, Vec<RequestId>)> = None;
        for (at, node) in nodes.iter().enumerate() {
            let (stream, _) = self.streams(&node.weight.group);
            let ranks = self.model.groups[&node.weight.group];
            let wire = node.weight.wgrad_dtype.unwrap_or(self.options.wgrad_dtype);
            let fp32 = self.options.kinds == Kinds::Fp32 && wire == DType::Bf16 && ranks > 2;
            if node.again {
                made.add(open.take());
            }
            let mut ahead = None;
            if self.options.gathered {
                if let Some(event) = ready.take() {
                    made.point(COMPUTE, PointKind::Wait(event));
                }
                let next = nodes.get(at + 1);
                ahead = next.or(following).map(|next| self.gather(&mut made, next));
                made.point(COMPUTE, PointKind::Work);
                made.release(COMPUTE, &std::mem::take(&mut gathered));
            }
            let inputs = self.ask(&mut made, COMPUTE, node, &Role::WgradInput);
            made.point(COMPUTE, PointKind::Work);
            let written = made.record(COMPUTE);
            made.point(stream, PointKind::Wait(written));
            let collective = PointKind::Collective(node.weight.group.clone());
            let outputs;
            if fp32 {
                let scratch = self.ask(&mut made, stream, node, &Role::A2aScratch);
                made.point(stream, collective);
                made.release(stream, &inputs);
                let role = if self.options.set == KindSet::Own { Role::Fp32Output } else { Role::RsOutput };
                outputs = self.ask(&mut made, stream, node, &role);
                made.point(stream, PointKind::Work);
                made.release(stream, &scratch);
            } else {
                outputs = self.ask(&mut made, stream, node, &Role::RsOutput);
                made.point(stream, collective);
                made.release(stream, &inputs);
            }
            let reduced = made.record(stream);
            made.add(open.replace((reduced, outputs)));
            if let Some((asked, event)) = ahead {
                if at + 1 < nodes.len() {
                    (gathered, ready) = (asked, Some(event));
                } else {
                    // Stage 1 drains the gathers before the next runner starts.
                    made.point(COMPUTE, PointKind::Wait(event));
                    self.gathered = Some(asked);
                }
            }
        }
        made.point(COMPUTE, PointKind::Complete);
        made.add(open);
        self.runners.push(Runner { name: name.to_owned(), requests: made.requests, points: made.points });
    }
}

/// A runner in the making.
#[derive(Default)]
struct Made {
    requests: Vec<Request>,
    points: Vec<Point>,
    events: u32,
}

impl Made {
    fn point(&mut self, stream: u32, kind: PointKind) {
        self.points.push(Point { stream, kind });
    }

    fn record(&mut self, stream: u32) -> u32 {
        self.events += 1;
        self.point(stream, PointKind::Record(self.events - 1));
        self.events - 1
    }

    fn release(&mut self, stream: u32, requests: &[RequestId]) {
        requests.iter().for_each(|&request| self.point(stream, PointKind::Release(request)));
    }

    /// Waits for a reduce-scatter and adds its output.
    fn add(&mut self, reduced: Option<(u32, Vec<RequestId>)>) {
        let Some((event, outputs)) = reduced else { return };
        self.point(COMPUTE, PointKind::Wait(event));
        self.point(COMPUTE, PointKind::Work);
        self.release(COMPUTE, &outputs);
    }
}
