//! Capture as a state machine: what each call does to the capture of a rank.
//!
//! A capture has *lanes*, one per stream that is part of it. A lane knows its *frontier*: the nodes that the next
//! node of the lane must wait for.
//!
//! ```text
//! origin  A ──┬── B ───────┬── D        record(e) after A on the origin, wait(e) on `side`: `side` joins, with
//! side        └── C ───────┘            frontier {A}; record(f) after C, wait(f) on the origin: frontier {B, C}
//! ```
//!
//! Streams exist during capture only: the graph keeps the nodes, in order of enqueue, and their edges. The
//! machine itself knows nothing of tasks or workers.

use std::collections::BTreeMap;

use sessile_hal::{DeviceError, EventScope, Stream, Ticket};

use crate::event::HostEvent;
use crate::graph::{Node, NodeWork};
use crate::stream::HostStream;

/// One lane of a capture.
struct Lane {
    label: String,
    frontier: Vec<u32>,
}

/// The one capture that a rank may have.
pub(crate) struct Capture {
    origin: HostStream,
    /// By stream.
    lanes: BTreeMap<u32, Lane>,
    nodes: Vec<Node>,
    /// Internal events recorded in this capture, and the frontier they stand for.
    events: BTreeMap<u64, Vec<u32>>,
    broken: bool,
}

/// What a wait means to a stream that may or may not be part of a capture.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WaitIs {
    /// The stream stays outside: an eager wait.
    Eager,
    /// The capture has taken it.
    Captured,
}

impl Capture {
    pub(crate) fn begin(origin: &HostStream) -> Self {
        let lane = Lane { label: origin.label().to_owned(), frontier: Vec::new() };
        Capture {
            origin: origin.clone(),
            lanes: BTreeMap::from([(origin.id(), lane)]),
            nodes: Vec::new(),
            events: BTreeMap::new(),
            broken: false,
        }
    }

    pub(crate) fn origin(&self) -> &HostStream {
        &self.origin
    }

    pub(crate) fn has(&self, stream: &HostStream) -> bool {
        self.lanes.contains_key(&stream.id())
    }

    /// Checks that the capture of `stream`, which must be part of it, can go on.
    pub(crate) fn check(&self, stream: &HostStream) -> Result<(), DeviceError> {
        if self.broken {
            return Err(DeviceError::CaptureInvalid { stream: stream.label().to_owned() });
        }
        Ok(())
    }

    /// Appends a node to the lane of `stream`.
    pub(crate) fn push(
        &mut self,
        stream: &HostStream,
        ticket: Ticket,
        work: NodeWork,
    ) -> Result<(), DeviceError> {
        self.check(stream)?;
        let index = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
        let Some(lane) = self.lanes.get_mut(&stream.id()) else {
            return Err(DeviceError::NotCapturing { stream: stream.label().to_owned() });
        };
        let dependencies = std::mem::replace(&mut lane.frontier, vec![index]);
        self.nodes.push(Node { ticket, work, dependencies });
        Ok(())
    }

    /// Records an event on a stream of the capture.
    pub(crate) fn record(
        &mut self,
        stream: &HostStream,
        event: &HostEvent,
        ticket: Ticket,
    ) -> Result<(), DeviceError> {
        if event.0.scope == EventScope::External {
            return self.push(stream, ticket, NodeWork::Record(event.clone()));
        }
        self.check(stream)?;
        if let Some(lane) = self.lanes.get(&stream.id()) {
            self.events.insert(event.0.id, lane.frontier.clone());
        }
        Ok(())
    }

    /// An eager record: the event no longer stands for work of this capture.
    pub(crate) fn forget(&mut self, event: &HostEvent) {
        self.events.remove(&event.0.id);
    }

    /// Waits for an event on any stream of the rank. May make the stream join.
    pub(crate) fn wait(
        &mut self,
        stream: &HostStream,
        event: &HostEvent,
        ticket: Ticket,
    ) -> Result<WaitIs, DeviceError> {
        let inside = self.has(stream);
        if event.0.scope == EventScope::External {
            if !inside {
                return Ok(WaitIs::Eager);
            }
            self.push(stream, ticket, NodeWork::Wait(event.clone()))?;
            return Ok(WaitIs::Captured);
        }
        match (self.events.get(&event.0.id), inside) {
            (None, false) => Ok(WaitIs::Eager),
            (None, true) => {
                self.check(stream)?;
                // The graph would lack this edge: what was captured so far can't be trusted.
                self.broken = true;
                Err(DeviceError::CaptureIsolation { stream: stream.label().to_owned() })
            }
            (Some(frontier), _) => {
                self.check(stream)?;
                let lane = self
                    .lanes
                    .entry(stream.id())
                    .or_insert_with(|| Lane { label: stream.label().to_owned(), frontier: Vec::new() });
                for &node in frontier {
                    if !lane.frontier.contains(&node) {
                        lane.frontier.push(node);
                    }
                }
                Ok(WaitIs::Captured)
            }
        }
    }

    /// Ends the capture: its nodes, if every lane was joined back to the origin.
    pub(crate) fn end(self) -> Result<Vec<Node>, DeviceError> {
        self.check(&self.origin)?;
        let mut joined = vec![false; self.nodes.len()];
        if let Some(lane) = self.lanes.get(&self.origin.id()) {
            for &node in &lane.frontier {
                joined[node as usize] = true;
            }
        }
        // Dependencies point to earlier nodes, so one pass from the last to the first finds all ancestors.
        for at in (0..self.nodes.len()).rev() {
            if joined[at] {
                for &dependency in &self.nodes[at].dependencies {
                    joined[dependency as usize] = true;
                }
            }
        }
        for lane in self.lanes.values() {
            if lane.frontier.iter().any(|&node| !joined[node as usize]) {
                return Err(DeviceError::CaptureUnjoined {
                    origin: self.origin.label().to_owned(),
                    joined: lane.label.clone(),
                });
            }
        }
        Ok(self.nodes)
    }
}
