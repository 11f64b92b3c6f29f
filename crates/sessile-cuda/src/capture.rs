//! Capture as a state machine, beside the driver's own: what is refused before the driver sees it, and which enqueue
//! added which nodes.
//!
//! A capture has *lanes*, one for each stream that is part of it. A lane knows the enqueues that its next one must wait
//! for. The driver would find an unjoined lane too, but breaks the capture; and it takes a wait for an event of
//! another time without a word.

use std::collections::BTreeMap;

use sessile_hal::{DeviceError, EventScope, NodeKind, Stream, Ticket};

use crate::comm::CudaComm;
use crate::event::CudaEvent;
use crate::exec::NodeId;
use crate::graph::{Owned, Step};
use crate::stream::CudaStream;

/// The one capture that a rank may have.
pub(crate) struct Capture {
    pub(crate) origin: CudaStream,
    /// By stream.
    lanes: BTreeMap<u32, Lane>,
    /// Enqueues that were joined so far need not be known by name: each has the ones it waits for.
    after: Vec<Vec<usize>>,
    pub(crate) steps: Vec<Step>,
    /// Internal events recorded in this capture, and the enqueues they stand for.
    events: BTreeMap<u64, Vec<usize>>,
    broken: bool,
    /// What the graph will own.
    pub(crate) owned: Vec<Box<dyn Owned>>,
    /// Symmetric collectives, and their groups.
    pub(crate) symmetric: Vec<(Ticket, String)>,
    /// Communicators used, and the last nodes of their collectives.
    pub(crate) comms: Vec<(CudaComm, Vec<NodeId>)>,
}

struct Lane {
    stream: CudaStream,
    frontier: Vec<usize>,
}

/// What a wait means to a stream that may or may not be part of a capture.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WaitIs {
    /// The stream stays outside: an eager wait.
    Eager,
    /// A node.
    Node,
    /// An edge.
    Edge,
}

impl Capture {
    pub(crate) fn begin(origin: &CudaStream) -> Self {
        let lane = Lane { stream: origin.clone(), frontier: Vec::new() };
        Capture {
            origin: origin.clone(),
            lanes: BTreeMap::from([(origin.id(), lane)]),
            after: Vec::new(),
            steps: Vec::new(),
            events: BTreeMap::new(),
            broken: false,
            owned: Vec::new(),
            symmetric: Vec::new(),
            comms: Vec::new(),
        }
    }

    pub(crate) fn has(&self, stream: &CudaStream) -> bool {
        self.lanes.contains_key(&stream.id())
    }

    /// Checks that the capture of `stream`, which must be part of it, can go on.
    pub(crate) fn check(&self, stream: &CudaStream) -> Result<(), DeviceError> {
        if self.broken {
            return Err(DeviceError::CaptureInvalid { stream: stream.label().to_owned() });
        }
        Ok(())
    }

    /// Makes every later call but an abort fail.
    pub(crate) fn break_it(&mut self) {
        self.broken = true;
    }

    /// Notes an enqueue on a lane.
    pub(crate) fn push(
        &mut self,
        stream: &CudaStream,
        ticket: Ticket,
        kind: NodeKind,
        nodes: (Vec<NodeId>, Vec<NodeId>),
    ) {
        let index = self.steps.len();
        let frontier =
            self.lanes.get_mut(&stream.id()).map(|lane| std::mem::replace(&mut lane.frontier, vec![index]));
        self.after.push(frontier.unwrap_or_default());
        self.steps.push(Step { ticket, kind, before: nodes.0, after: nodes.1 });
    }

    /// Notes the record of an internal event on a lane.
    pub(crate) fn record(&mut self, stream: &CudaStream, event: &CudaEvent) {
        if let Some(lane) = self.lanes.get(&stream.id()) {
            self.events.insert(event.0.id, lane.frontier.clone());
        }
    }

    /// An eager record: the event no longer stands for work of this capture.
    pub(crate) fn forget(&mut self, event: &CudaEvent) {
        self.events.remove(&event.0.id);
    }

    /// What a wait on any stream of the rank is; an internal event that was not recorded in this capture breaks it.
    pub(crate) fn wait_is(&mut self, stream: &CudaStream, event: &CudaEvent) -> Result<WaitIs, DeviceError> {
        let inside = self.has(stream);
        if inside {
            self.check(stream)?;
        }
        if event.0.scope == EventScope::External {
            return Ok(if inside { WaitIs::Node } else { WaitIs::Eager });
        }
        match (self.events.contains_key(&event.0.id), inside) {
            (true, _) => self.check(stream).map(|()| WaitIs::Edge),
            (false, false) => Ok(WaitIs::Eager),
            (false, true) => {
                // The graph would lack this edge: what was captured so far can't be trusted.
                self.broken = true;
                Err(DeviceError::CaptureIsolation { stream: stream.label().to_owned() })
            }
        }
    }

    /// Notes the wait of a lane for an internal event. The stream joins if it was outside.
    pub(crate) fn join(&mut self, stream: &CudaStream, event: &CudaEvent) {
        let Some(frontier) = self.events.get(&event.0.id) else { return };
        let lane = self
            .lanes
            .entry(stream.id())
            .or_insert_with(|| Lane { stream: stream.clone(), frontier: Vec::new() });
        for step in frontier {
            if !lane.frontier.contains(step) {
                lane.frontier.push(*step);
            }
        }
    }

    /// Checks that every lane was joined back to the origin.
    pub(crate) fn joined(&self) -> Result<(), DeviceError> {
        self.check(&self.origin)?;
        let mut joined = vec![false; self.steps.len()];
        for step in self.lanes.get(&self.origin.id()).into_iter().flat_map(|lane| &lane.frontier) {
            joined[*step] = true;
        }
        // An enqueue waits for earlier ones, so one pass from the last to the first finds all of them.
        for at in (0..self.steps.len()).rev() {
            if joined[at] {
                for before in &self.after[at] {
                    joined[*before] = true;
                }
            }
        }
        match self.lanes.values().find(|lane| lane.frontier.iter().any(|step| !joined[*step])) {
            None => Ok(()),
            Some(lane) => Err(DeviceError::CaptureUnjoined {
                origin: self.origin.label().to_owned(),
                joined: lane.stream.label().to_owned(),
            }),
        }
    }
}
