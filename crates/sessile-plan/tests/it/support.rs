//! Short ways to write traces.

use sessile_plan::{
    DType, Domain, PlanOptions, Point, PointKind, Request, RequestId, RequestSpec, Role, Runner, StepCut,
    Strategy, TRACE_VERSION, Trace,
};

/// A request of `units` times 256 bytes.
pub(crate) fn request(id: u32, units: u64) -> Request {
    Request {
        id: RequestId(id),
        spec: RequestSpec {
            weight: format!("w{id}"),
            role: Role::WgradInput,
            dtype: DType::Bf16,
            shape: vec![units, 128],
            unsharded_shape: vec![units, 128],
            domain: Domain::Default,
            group: None,
            expert: None,
            accumulates_into: None,
        },
    }
}

pub(crate) fn symmetric(mut request: Request, group: &str) -> Request {
    request.spec.domain = Domain::Symmetric(group.into());
    request
}

pub(crate) fn accumulating(mut request: Request, into: &str) -> Request {
    request.spec.accumulates_into = Some(into.into());
    request
}

pub(crate) fn point(stream: u32, kind: PointKind) -> Point {
    Point { stream, kind }
}

/// A backward as the framework runs it: acquire on the compute stream, reduce-scatter on stream 1, completion
/// before the reduce-scatters end.
///
/// ```text
///  stream 0   acquire a  acquire b  record 0  complete
///  stream 1                         wait 0  collective dense  release a  release b
/// ```
pub(crate) fn backward(name: &str, requests: Vec<Request>) -> Runner {
    let mut points: Vec<Point> =
        requests.iter().map(|request| point(0, PointKind::Acquire(request.id))).collect();
    points.push(point(0, PointKind::Record(0)));
    points.push(point(1, PointKind::Wait(0)));
    points.push(point(1, PointKind::Collective("dense".into())));
    points.push(point(0, PointKind::Complete));
    points.extend(requests.iter().map(|request| point(1, PointKind::Release(request.id))));
    Runner { name: name.into(), requests, points }
}

/// A runner of which no order was recorded.
pub(crate) fn opaque(name: &str, requests: Vec<Request>) -> Runner {
    Runner { name: name.into(), requests, points: vec![] }
}

pub(crate) fn trace(runners: Vec<Runner>, launches: Vec<u32>) -> Trace {
    Trace {
        schema: Trace::SCHEMA.into(),
        version: TRACE_VERSION,
        name: "test".into(),
        runners,
        steps: vec![launches],
        durations_ns: Vec::new(),
    }
}

/// Four backwards of one request each; the picture of many tests.
///
/// ```text
///  launch    0   1   2   3
///  request   0   1   2   3      sizes 4, 2, 4, 2 times 256 bytes
/// ```
pub(crate) fn four() -> Trace {
    let units = [4, 2, 4, 2];
    let runners = (0..4).map(|r| backward(&format!("r{r}"), vec![request(r, units[r as usize])])).collect();
    trace(runners, vec![0, 1, 2, 3])
}

pub(crate) fn options(strategy: Strategy, depth: u32, step_cut: StepCut) -> PlanOptions {
    PlanOptions { strategy, depth, step_cut, ..PlanOptions::default() }
}

pub(crate) const CUTS: [StepCut; 2] = [StepCut::Barrier, StepCut::Wrap];

/// Every strategy, with small counts.
pub(crate) fn strategies() -> Vec<Strategy> {
    let mut all = vec![Strategy::Sessile, Strategy::PerRequest];
    all.extend((1..=3).map(Strategy::Generations));
    all.extend((1..=2).map(Strategy::Ring));
    all
}
