//! What the discovery pass notes down, and the trace made of it.

use std::collections::BTreeMap;

use sessile_hal::{Span, Ticket};
use sessile_plan::{Point, PointKind, Request, RequestId, RequestSpec, Runner, TRACE_VERSION, Trace};

use crate::RuntimeError;

/// One pass over one runner.
#[derive(Debug)]
pub(crate) struct Pass {
    pub(crate) runner: usize,
    requests: Vec<Request>,
    points: Vec<Point>,
    lanes: BTreeMap<u32, u32>,
    records: u32,
    /// What was enqueued, and the point it belongs to.
    enqueued: Vec<(Ticket, usize)>,
    /// Tells this pass from all others.
    serial: u64,
}

impl Pass {
    /// A pass over runner number `runner`. `origin` becomes its stream 0.
    pub(crate) fn new(runner: usize, origin: u32, serial: u64) -> Pass {
        let lanes = BTreeMap::from([(origin, 0)]);
        Pass {
            runner,
            requests: Vec::new(),
            points: Vec::new(),
            lanes,
            records: 0,
            enqueued: Vec::new(),
            serial,
        }
    }

    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    fn lane(&mut self, stream: u32) -> u32 {
        let next = u32::try_from(self.lanes.len()).expect("a runner uses fewer than 2^32 streams");
        *self.lanes.entry(stream).or_insert(next)
    }

    /// Notes a point on a stream.
    pub(crate) fn point(&mut self, stream: u32, kind: PointKind) {
        let stream = self.lane(stream);
        self.points.push(Point { stream, kind });
    }

    /// Notes an operation. Operations with nothing between on their stream are one point.
    pub(crate) fn work(&mut self, stream: u32, ticket: Ticket) {
        let lane = self.lane(stream);
        let last = self.points.iter().rposition(|point| point.stream == lane);
        match last.filter(|&at| self.points[at].kind == PointKind::Work) {
            Some(at) => self.enqueued.push((ticket, at)),
            None => {
                self.enqueued.push((ticket, self.points.len()));
                self.point(stream, PointKind::Work);
            }
        }
    }

    /// Notes a collective.
    pub(crate) fn collective(&mut self, stream: u32, group: &str, ticket: Ticket) {
        self.enqueued.push((ticket, self.points.len()));
        self.point(stream, PointKind::Collective(group.to_owned()));
    }

    /// Notes a record and gives its number.
    pub(crate) fn record(&mut self, stream: u32) -> u32 {
        let number = self.records;
        self.records += 1;
        self.point(stream, PointKind::Record(number));
        number
    }

    /// The first point that differs from those of an earlier pass: its index, what was there, what is there now.
    pub(crate) fn differs(&self, before: &[Point]) -> Option<(usize, String, String)> {
        let (points, len) = (&self.points[..], self.points.len().max(before.len()));
        let at = (0..len).find(|&at| before.get(at) != points.get(at))?;
        let text = |points: &[Point]| match points.get(at) {
            Some(point) => format!("{:?} on stream {} (order point {at})", point.kind, point.stream),
            None => format!("the end (order point {at})"),
        };
        Some((at, text(before), text(points)))
    }
}

/// Durations by name of the runner, and point.
pub(crate) type Durations = BTreeMap<String, Vec<Option<u64>>>;

/// All runners that were discovered, and the order of their launches.
#[derive(Debug, Default)]
pub(crate) struct Discovery {
    runners: Vec<Runner>,
    by_name: BTreeMap<String, usize>,
    /// Alternative steps before the current one.
    done: Vec<Vec<u32>>,
    /// Launches of the current one.
    launches: Vec<u32>,
    requests: u32,
    /// Runner, point and pass of each piece of work.
    enqueued: BTreeMap<Ticket, (usize, usize, u64)>,
    /// By runner and point, once measured.
    durations_ns: Vec<Vec<u64>>,
}

impl Discovery {
    /// Starts a pass over the runner of this name. `origin` becomes its stream 0.
    pub(crate) fn begin(&self, name: &str, origin: u32, serial: u64) -> Pass {
        let runner = self.by_name.get(name).copied().unwrap_or(self.runners.len());
        Pass::new(runner, origin, serial)
    }

    /// Identity of the next request of the pass: that of the first discovery, if there was one.
    pub(crate) fn request(
        &mut self,
        pass: &mut Pass,
        name: &str,
        stream: u32,
        spec: RequestSpec,
    ) -> Result<RequestId, RuntimeError> {
        let index = pass.requests.len();
        let id = match self.runners.get(pass.runner) {
            Some(known) => match known.requests.get(index) {
                Some(first) if first.spec == spec => first.id,
                first => {
                    return Err(RuntimeError::DiscoveryDiffers {
                        runner: name.to_owned(),
                        index,
                        first: first.map_or("nothing".into(), |request| request.spec.to_string()),
                        second: spec.to_string(),
                    });
                }
            },
            None => {
                let id = RequestId(self.requests);
                self.requests += 1;
                id
            }
        };
        pass.requests.push(Request { id, spec });
        pass.point(stream, PointKind::Acquire(id));
        Ok(id)
    }

    /// Ends a pass. A runner that was seen before must have made the same requests.
    pub(crate) fn end(&mut self, name: &str, pass: Pass) -> Result<(), RuntimeError> {
        let enqueued =
            pass.enqueued.iter().map(|&(ticket, point)| (ticket, (pass.runner, point, pass.serial)));
        self.enqueued.extend(enqueued);
        match self.runners.get(pass.runner) {
            Some(known) => {
                if let Some(left) = known.requests.get(pass.requests.len()) {
                    return Err(RuntimeError::DiscoveryDiffers {
                        runner: name.to_owned(),
                        index: pass.requests.len(),
                        first: left.spec.to_string(),
                        second: "nothing".into(),
                    });
                }
                if let Some((_, first, second)) = pass.differs(&known.points) {
                    let index = pass.requests.len();
                    return Err(RuntimeError::DiscoveryDiffers {
                        runner: name.to_owned(),
                        index,
                        first,
                        second,
                    });
                }
            }
            None => {
                self.by_name.insert(name.to_owned(), pass.runner);
                self.runners.push(Runner {
                    name: name.to_owned(),
                    requests: pass.requests,
                    points: pass.points,
                });
            }
        }
        self.launches.push(u32::try_from(pass.runner).expect("fewer than 2^32 runners"));
        Ok(())
    }

    /// Ends the current step; what comes next is an alternative to it. Nothing if it has no launch yet.
    pub(crate) fn next_alternative(&mut self) {
        if !self.launches.is_empty() {
            self.done.push(std::mem::take(&mut self.launches));
        }
    }

    /// The trace of everything discovered so far.
    pub(crate) fn trace(&self, name: &str) -> Trace {
        Trace {
            schema: Trace::SCHEMA.to_owned(),
            version: TRACE_VERSION,
            name: name.to_owned(),
            runners: self.runners.clone(),
            steps: self.done.iter().chain([&self.launches]).cloned().collect(),
            durations_ns: self.durations_ns.clone(),
        }
    }

    /// How long each point took on this rank, from the spans of the discovery: by name of the runner, `None` for points
    /// without a span. A collective begins when the one before it in its group has ended, or later. Of a runner that was
    /// discovered more than once, the longest of each point.
    pub(crate) fn durations(&self, spans: &[Span]) -> Durations {
        let mut spans: Vec<&Span> = spans.iter().filter(|span| span.node.is_none()).collect();
        spans.sort_unstable_by_key(|span| (span.end, span.ticket));
        let mut last_of_group: BTreeMap<&str, u64> = BTreeMap::new();
        // Of each pass the sum of what belongs to the point.
        let mut found: BTreeMap<(usize, usize, u64), u64> = BTreeMap::new();
        for span in spans {
            let Some(&(runner, point, pass)) = self.enqueued.get(&span.ticket) else { continue };
            let mut begin = span.begin;
            let kind = self.runners.get(runner).and_then(|runner| runner.points.get(point));
            if let Some(PointKind::Collective(group)) = kind.map(|point| &point.kind) {
                let last = last_of_group.insert(group, span.end);
                begin = begin.max(last.unwrap_or(0)).min(span.end);
            }
            *found.entry((runner, point, pass)).or_default() += span.end - begin;
        }
        let named = self.runners.iter().enumerate().map(|(at, runner)| {
            let longest =
                |point| found.range((at, point, 0)..=(at, point, u64::MAX)).map(|(_, &sum)| sum).max();
            let each = (0..runner.points.len()).map(longest);
            (runner.name.clone(), each.collect())
        });
        named.collect()
    }

    /// Takes what all ranks measured: of work the longest, of a collective the shortest, since a rank that comes early
    /// counts its wait for the others.
    pub(crate) fn reduce(&mut self, ranks: &[Durations]) {
        let of = |runner: &Runner| {
            let ranks: Vec<_> = ranks.iter().filter_map(|rank| rank.get(&runner.name)).collect();
            let each = runner.points.iter().enumerate().map(|(at, point)| {
                let all = ranks.iter().filter_map(|rank| *rank.get(at)?);
                match point.kind {
                    PointKind::Collective(_) => all.min(),
                    _ => all.max(),
                }
            });
            each.map(Option::unwrap_or_default).collect::<Vec<u64>>()
        };
        let durations: Vec<Vec<u64>> = self.runners.iter().map(of).collect();
        let measured = durations.iter().flatten().any(|&duration| duration > 0);
        self.durations_ns = if measured { durations } else { Vec::new() };
    }
}
