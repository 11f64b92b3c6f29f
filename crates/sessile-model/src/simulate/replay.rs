//! A recorded trace on the virtual clock: its graphs, fences and launches under a plan, without the program that made it.
//!
//! ```text
//!  trace      points of each runner, and how long each took       ──▶  one graph a runner: kernels and collectives of that
//!  plan       fences                                              ──▶  length, events, wait and record nodes of fences
//!  protocol   as the storage runtime launches                     ──▶  spans, exposed time
//! ```
//!
//! The device is that of [`simulate`](super::simulate). Kernels of a rank take turns, collectives of one group too; groups
//! have links of their own, and delay no kernels: measured durations hold such delays. A graph launch takes 10 us of host
//! time. Alternative steps run one after the other.
//!
//! Durations are those that the trace holds. A trace without any gets modelled ones: see [`modelled_ns`].

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    time::Duration,
};

use sessile_hal::{Collective, Device, DeviceError, EventScope, Kernel, Note, Op, Span, Stream as _, View};
use sessile_host::{CostModel, Data, HostDevice, Link, World, WorldOptions};
use sessile_plan::{
    DType, Domain, Fence, LaunchOrder, Plan, Point, PointKind, RequestId, RequestSpec, Role, Runner, Trace,
};
use sessile_runtime::log::{Log, LogLevel, RankLog, Recorded};

use super::measure::{Kinds, PhaseTimes};

/// Two bytes an element, and two bytes a nanosecond: so an element is a nanosecond.
const BYTES_PER_SECOND: u64 = 2_000_000_000;
/// A gather between two ranks sends half of what it fills.
const RANKS: u32 = 2;

/// Tokens of a step where a trace has no durations.
const TOKENS: u64 = 4096;

/// Nanoseconds of each point of a runner whose trace has no durations, on the default modelled device: a kernel takes 2 us and
/// the two GEMMs of each weight whose gradient is first asked for there, at 4096 tokens and 1.2 PFLOP/s; a collective 20 us and
/// the largest request that is released after it, at 500 GB/s.
pub fn modelled_ns(runner: &Runner) -> Vec<u64> {
    let sizes: BTreeMap<RequestId, u64> =
        runner.requests.iter().map(|request| (request.id, request.spec.bytes().unwrap_or(0))).collect();
    let inputs: BTreeMap<RequestId, u64> = runner
        .requests
        .iter()
        .filter(|request| request.spec.role == Role::WgradInput)
        .map(|request| (request.id, request.spec.bytes().unwrap_or(0) / request.spec.dtype.size()))
        .collect();
    let on_stream = |at: usize| {
        let stream = runner.points[at].stream;
        move |&(_, point): &(usize, &Point)| point.stream == stream
    };
    let of = |at: usize| match &runner.points[at].kind {
        PointKind::Work => {
            let before = runner.points.iter().enumerate().take(at).rev().filter(on_stream(at));
            let acquired = before.take_while(|(_, point)| point.kind != PointKind::Work);
            let elements = acquired.filter_map(|(_, point)| match point.kind {
                PointKind::Acquire(id) => inputs.get(&id),
                _ => None,
            });
            // 4 · tokens flop an element, at 1.2e6 flop a nanosecond.
            2_000
                + elements
                    .fold(0u64, |sum, &each| sum.saturating_add(each.saturating_mul(4 * TOKENS) / 1_200_000))
        }
        PointKind::Collective(_) => {
            let after = runner.points.iter().enumerate().skip(at + 1).filter(on_stream(at));
            let until = after.take_while(|(_, point)| !matches!(point.kind, PointKind::Collective(_)));
            let largest = until.filter_map(|(_, point)| match point.kind {
                PointKind::Release(id) => sizes.get(&id).copied(),
                _ => None,
            });
            20_000 + largest.max().unwrap_or(0) / 500
        }
        _ => 0,
    };
    (0..runner.points.len()).map(of).collect()
}

/// Times of the steps of a trace under a plan of it.
///
/// # Errors
/// Those of the device.
pub fn replay(trace: &Trace, plan: &Plan) -> Result<PhaseTimes, DeviceError> {
    let (log, spans) = played(trace, plan)?;
    Ok(Kinds::new(&log).times(&spans, 0))
}

/// The same replay as a timeline takes it: the log of the one rank that ran, and its spans.
///
/// # Errors
/// Those of the device.
pub fn replay_spans(trace: &Trace, plan: &Plan) -> Result<(Log, Vec<Span>), DeviceError> {
    let (log, spans) = played(trace, plan)?;
    Ok((Log::from_ranks(vec![log]), spans))
}

fn played(trace: &Trace, plan: &Plan) -> Result<(RankLog, Vec<Span>), DeviceError> {
    let mut links = Vec::new();
    for group in groups(trace) {
        let link = Link { name: group.clone(), bytes_per_second: BYTES_PER_SECOND, latency_ns: 0, hop_ns: 0 };
        links.push((group, link));
    }
    let costs = CostModel {
        memory_bytes: BYTES_PER_SECOND,
        kernel_ns: 0,
        launch_ns: 0,
        links,
        ..CostModel::default()
    };
    let world = World::new(WorldOptions {
        deadline: Duration::from_secs(600),
        ..WorldOptions::simulated(RANKS, costs, Data::Folded)
    });
    world.record_spans(false);
    let run = |device| Player::new(trace, plan, device)?.play(&world);
    let result = world.run(run).into_iter().next();
    match result {
        Some(Ok(played)) => Ok(played),
        Some(Err(sessile_host::RankFailure::Failed { error, .. })) => Err(error),
        Some(Err(sessile_host::RankFailure::Panicked { message, .. })) => std::panic::panic_any(message),
        None => Ok(Default::default()),
    }
}

/// Groups with collectives, in order of name.
fn groups(trace: &Trace) -> Vec<String> {
    let points = trace.runners.iter().flat_map(|runner| &runner.points);
    let mut groups: Vec<String> = points
        .filter_map(|point| match &point.kind {
            PointKind::Collective(group) => Some(group.clone()),
            _ => None,
        })
        .collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

type On = Recorded<HostDevice>;
type Stream = <On as Device>::Stream;
type Event = <On as Device>::Event;

struct Player<'a> {
    trace: &'a Trace,
    plan: &'a Plan,
    device: On,
    main: Stream,
    comms: BTreeMap<String, <On as Device>::Comm>,
    /// What kernels write and collectives move: as many elements as the longest takes nanoseconds, and twice as many.
    scratch: [View<<On as Device>::Memory>; 2],
    durations: Vec<Vec<u64>>,
    fences: BTreeMap<RequestId, Event>,
    waits: BTreeMap<RequestId, Vec<RequestId>>,
    /// Requests with a point of their own.
    acquired: BTreeSet<RequestId>,
    released: BTreeSet<RequestId>,
    runners: Vec<Captured>,
}

struct Captured {
    stream: Stream,
    start: Event,
    completion: Event,
    end: Event,
    completes: bool,
    graph: Option<<On as Device>::Graph>,
}

impl<'a> Player<'a> {
    fn new(trace: &'a Trace, plan: &'a Plan, device: HostDevice) -> Result<Player<'a>, DeviceError> {
        let device = Recorded::new(device, LogLevel::On);
        let everyone: Vec<u32> = (0..RANKS).collect();
        let mut comms = BTreeMap::new();
        for group in groups(trace) {
            comms.insert(group.clone(), device.communicator(&group, &everyone)?);
        }
        let durations: Vec<Vec<u64>> = match trace.durations_ns.is_empty() {
            true => trace.runners.iter().map(modelled_ns).collect(),
            false => trace.durations_ns.clone(),
        };
        let longest = durations.iter().flatten().copied().max().unwrap_or(0).max(1);
        let [send, recv] = [2, 4].map(|bytes| device.alloc(bytes * longest, &Domain::Default, "scratch"));
        let scratch =
            [View::new(&send?, 0, longest, DType::Bf16)?, View::new(&recv?, 0, 2 * longest, DType::Bf16)?];
        let mut fences = BTreeMap::new();
        let mut waits: BTreeMap<RequestId, Vec<RequestId>> = BTreeMap::new();
        for &Fence { release, acquire } in &plan.fences {
            if let Entry::Vacant(vacant) = fences.entry(release) {
                vacant.insert(external(&device)?);
            }
            waits.entry(acquire).or_default().push(release);
        }
        let captured = |runner: &Runner| -> Result<Captured, DeviceError> {
            Ok(Captured {
                stream: device.stream(&runner.name)?,
                start: device.event(EventScope::Internal)?,
                completion: external(&device)?,
                end: device.event(EventScope::Internal)?,
                completes: runner.points.iter().any(|point| point.kind == PointKind::Complete),
                graph: None,
            })
        };
        let runners = trace.runners.iter().map(captured).collect::<Result<_, _>>()?;
        let main = device.stream("main")?;
        let (mut acquired, mut released) = (BTreeSet::new(), BTreeSet::new());
        for point in trace.runners.iter().flat_map(|runner| &runner.points) {
            match point.kind {
                PointKind::Acquire(id) => _ = acquired.insert(id),
                PointKind::Release(id) => _ = released.insert(id),
                _ => {}
            }
        }
        Ok(Player {
            trace,
            plan,
            main,
            comms,
            scratch,
            durations,
            fences,
            waits,
            acquired,
            released,
            runners,
            device,
        })
    }

    fn play(mut self, world: &World) -> Result<(RankLog, Vec<Span>), DeviceError> {
        for at in 0..self.runners.len() {
            self.capture(at)?;
        }
        self.device.wait_stream(&self.main)?;
        world.record_spans(true);
        for step in &self.trace.steps {
            for &launch in step {
                self.launch(launch as usize)?;
            }
            for &launch in step {
                let runner = &self.runners[launch as usize];
                self.device.record(&runner.stream, &runner.end)?;
                self.device.wait(&self.main, &runner.end)?;
            }
        }
        self.device.wait_stream(&self.main)?;
        let spans = self.device.take_spans();
        Ok((self.device.take_log(), spans))
    }

    /// One graph: the points, and the fences where requests are acquired and released.
    fn capture(&mut self, at: usize) -> Result<(), DeviceError> {
        let runner = &self.trace.runners[at];
        let device = self.device.clone();
        let origin = self.runners[at].stream.clone();
        device.begin_capture(&origin)?;
        for request in runner.requests.iter().filter(|request| !self.acquired.contains(&request.id)) {
            self.wait_fences(&origin, request.id)?;
        }
        let begin = device.event(EventScope::Internal)?;
        device.record(&origin, &begin)?;
        let mut lanes: BTreeMap<u32, Stream> = BTreeMap::from([(0, origin.clone())]);
        let mut events: BTreeMap<u32, Event> = BTreeMap::new();
        let specs: BTreeMap<RequestId, &RequestSpec> =
            runner.requests.iter().map(|request| (request.id, &request.spec)).collect();
        // What was acquired on each stream since its last work, which writes it.
        let mut writes: BTreeMap<u32, String> = BTreeMap::new();
        for (point, &duration) in runner.points.iter().zip(&self.durations[at]) {
            let stream = match lanes.get(&point.stream) {
                Some(stream) => stream.clone(),
                None => {
                    let stream = device.stream(&format!("lane {}", point.stream))?;
                    device.wait(&stream, &begin)?;
                    lanes.insert(point.stream, stream.clone());
                    stream
                }
            };
            match &point.kind {
                PointKind::Acquire(id) => {
                    if let Some(spec) = specs.get(id) {
                        writes.insert(point.stream, format!("{} {}", spec.weight, spec.role));
                    }
                    self.wait_fences(&stream, *id)?;
                }
                PointKind::Release(id) => {
                    if let Some(event) = self.fences.get(id) {
                        device.record(&stream, event)?;
                    }
                }
                PointKind::Record(number) => {
                    let event = device.event(EventScope::Internal)?;
                    device.record(&stream, &event)?;
                    events.insert(*number, event);
                }
                PointKind::Wait(number) => {
                    if let Some(event) = events.get(number) {
                        device.wait(&stream, event)?;
                    }
                }
                PointKind::Collective(group) => {
                    let [send, recv] = &self.scratch;
                    let elements = duration.max(1);
                    let (send, recv) = (send.slice(0, elements)?, recv.slice(0, 2 * elements)?);
                    writes.remove(&point.stream);
                    device.collective(&stream, &self.comms[group], Collective::AllGather, &send, &recv)?;
                }
                PointKind::Work => {
                    let view = self.scratch[0].slice(0, duration.max(1))?;
                    let label = writes.remove(&point.stream).unwrap_or_else(|| "work".to_owned());
                    device.enqueue(&stream, Op::new(Kernel::Fill { value: 0.0 }, label, vec![view])?)?;
                }
                PointKind::Complete => {
                    device.record(&stream, &self.runners[at].completion)?;
                }
            }
        }
        for stream in lanes.values().filter(|stream| stream.id() != origin.id()) {
            let event = device.event(EventScope::Internal)?;
            device.record(stream, &event)?;
            device.wait(&origin, &event)?;
        }
        // What no point releases lives to the end of its runner.
        for request in runner.requests.iter().filter(|request| !self.released.contains(&request.id)) {
            if let Some(event) = self.fences.get(&request.id) {
                device.record(&origin, event)?;
            }
        }
        let graph = device.end_capture(&origin)?;
        device.note(Note::Captured { runner: &runner.name, graph: &graph, views: Vec::new() });
        self.runners[at].graph = Some(graph);
        Ok(())
    }

    fn wait_fences(&self, stream: &Stream, acquire: RequestId) -> Result<(), DeviceError> {
        for release in self.waits.get(&acquire).into_iter().flatten() {
            self.device.wait(stream, &self.fences[release])?;
        }
        Ok(())
    }

    /// As the storage runtime launches.
    fn launch(&self, at: usize) -> Result<(), DeviceError> {
        let Captured { stream, start, completion, end, completes, graph } = &self.runners[at];
        let Some(graph) = graph else { return Ok(()) };
        let (device, main) = (&self.device, &self.main);
        device.record(main, start)?;
        device.wait(stream, start)?;
        device.launch(graph, stream)?;
        if *completes && self.plan.launch_order == LaunchOrder::Overlapped {
            device.wait(main, completion)?;
        } else {
            device.record(stream, end)?;
            device.wait(main, end)?;
        }
        Ok(())
    }
}

fn external(device: &On) -> Result<Event, DeviceError> {
    device.event(EventScope::External)
}
