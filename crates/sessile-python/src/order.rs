//! Recorded order: marks at acquires and releases, which of them precede which, and the points of a trace made of that.
//!
//! The framework's own events are not seen here. What is known is either the program order of a device without streams,
//! or a graph that the framework captured, into which the marks were set as nodes:
//!
//! ```text
//!   captured      M(acquire a) → gemm → kernel → M(release a) → ...        edges are all that is believed
//!                                  └──→ gemm → M(acquire b) → ...
//!   points        stream 0: acquire a, work, record 0, work, release a      one `work` stands for all between two marks
//!                 stream 1: wait 0, acquire b, work
//! ```

use std::collections::HashMap;

use sessile_plan::{Point, PointKind, RequestId};

/// What is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Mark {
    /// Before the first write of a request.
    Acquire(RequestId),
    /// After its last read.
    Release(RequestId),
    /// The next runner may start.
    Complete,
    /// The end of a pass.
    End,
}

impl Mark {
    /// For people.
    pub(crate) fn text(self) -> String {
        match self {
            Mark::Acquire(id) => format!("acquire of {id}"),
            Mark::Release(id) => format!("release of {id}"),
            Mark::Complete => "complete".to_owned(),
            Mark::End => "the end".to_owned(),
        }
    }
}

/// A node of a captured graph: its identity, and the nodes before it.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) after: Vec<u64>,
}

/// Marks in one possible order, and for each those that are proven to come before it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Order {
    marks: Vec<Mark>,
    before: Vec<Bits>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(len: usize) -> Bits {
        Bits(vec![0; len.div_ceil(64)])
    }

    fn set(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    fn has(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 == 1
    }

    fn join(&mut self, other: &Bits) {
        self.0.iter_mut().zip(&other.0).for_each(|(word, more)| *word |= more);
    }
}

impl Order {
    /// The order in which a program without streams made its marks.
    pub(crate) fn program(marks: &[Mark]) -> Order {
        let before = (0..marks.len()).map(|at| {
            let mut bits = Bits::new(marks.len());
            (0..at).for_each(|earlier| bits.set(earlier));
            bits
        });
        Order { before: before.collect(), marks: marks.to_vec() }
    }

    /// What the edges of a captured graph prove. `marked` holds each mark with its node. `None` if the edges form a cycle
    /// or a mark has no node, which no capture gives.
    pub(crate) fn captured(nodes: &[Node], marked: &[(Mark, u64)]) -> Option<Order> {
        let index: HashMap<u64, usize> = nodes.iter().enumerate().map(|(at, node)| (node.id, at)).collect();
        let place: HashMap<usize, usize> = marked
            .iter()
            .enumerate()
            .map(|(mark, (_, node))| Some((*index.get(node)?, mark)))
            .collect::<Option<_>>()?;
        let mut left: Vec<usize> = vec![0; nodes.len()];
        let mut next: Vec<Vec<usize>> = vec![Vec::new(); nodes.len()];
        for (at, node) in nodes.iter().enumerate() {
            for before in &node.after {
                let Some(&before) = index.get(before) else { continue };
                next[before].push(at);
                left[at] += 1;
            }
        }
        // The lowest index first, so that equal captures give equal orders.
        let mut ready: std::collections::BTreeSet<usize> =
            (0..nodes.len()).filter(|&at| left[at] == 0).collect();
        let mut known = vec![Bits::new(marked.len()); nodes.len()];
        let (mut sequence, mut done) = (Vec::new(), 0);
        while let Some(at) = ready.pop_first() {
            done += 1;
            let mut told = known[at].clone();
            if let Some(&mark) = place.get(&at) {
                sequence.push((mark, told.clone()));
                told.set(mark);
            }
            for &after in &next[at] {
                known[after].join(&told);
                left[after] -= 1;
                if left[after] == 0 {
                    ready.insert(after);
                }
            }
        }
        if done != nodes.len() {
            return None;
        }
        // Renumber from the order of marking to the order found.
        let mut new = vec![0; marked.len()];
        sequence.iter().enumerate().for_each(|(at, (mark, _))| new[*mark] = at);
        let before = sequence.iter().map(|(_, told)| {
            let mut bits = Bits::new(marked.len());
            (0..marked.len()).filter(|&mark| told.has(mark)).for_each(|mark| bits.set(new[mark]));
            bits
        });
        let before = before.collect();
        Some(Order { marks: sequence.iter().map(|(mark, _)| marked[*mark].0).collect(), before })
    }

    /// Takes the end off, which must come after everything; else gives the first mark that does not come before it.
    pub(crate) fn without_end(mut self) -> Result<Order, Mark> {
        let Some(at) = self.marks.iter().position(|mark| *mark == Mark::End) else { return Ok(self) };
        let loose = (0..self.marks.len()).find(|&other| other != at && !self.before[at].has(other));
        if let Some(loose) = loose {
            return Err(self.marks[loose]);
        }
        // All others come before it, so it is the last.
        self.marks.truncate(at);
        self.before.truncate(at);
        Ok(self)
    }

    /// The first pair that is ordered here and not in `other`.
    pub(crate) fn lost(&self, other: &Order) -> Option<(Mark, Mark)> {
        let there: HashMap<Mark, usize> =
            other.marks.iter().enumerate().map(|(at, mark)| (*mark, at)).collect();
        for (at, mark) in self.marks.iter().enumerate() {
            for earlier in (0..self.marks.len()).filter(|&earlier| self.before[at].has(earlier)) {
                let found = there.get(mark).zip(there.get(&self.marks[earlier]));
                if !found.is_some_and(|(&late, &early)| other.before[late].has(early)) {
                    return Some((self.marks[earlier], *mark));
                }
            }
        }
        None
    }

    /// The points of a trace that prove exactly this order. What a mark stands before or after is one `work` beside it.
    pub(crate) fn points(&self) -> Vec<Point> {
        let count = self.marks.len();
        // Only the latest of what comes before: the rest follows.
        let latest: Vec<Vec<usize>> = (0..count)
            .map(|at| {
                let all: Vec<usize> = (0..count).filter(|&earlier| self.before[at].has(earlier)).collect();
                let implied = |earlier: usize| all.iter().any(|&later| self.before[later].has(earlier));
                all.iter().copied().filter(|&earlier| !implied(earlier)).collect()
            })
            .collect();
        // A lane's last mark, and each mark's lane.
        let (mut tails, mut lane): (Vec<usize>, Vec<usize>) = (Vec::new(), vec![0; count]);
        let mut waits: Vec<Vec<usize>> = vec![Vec::new(); count];
        for at in 0..count {
            let same = tails.iter().position(|tail| latest[at].contains(tail));
            lane[at] = same.unwrap_or(tails.len());
            waits[at] = latest[at].iter().copied().filter(|&earlier| lane[earlier] != lane[at]).collect();
            match same {
                Some(lane) => tails[lane] = at,
                None => tails.push(at),
            }
        }
        let mut event: HashMap<usize, u32> = HashMap::new();
        for &earlier in waits.iter().flatten() {
            let number = u32::try_from(event.len()).unwrap_or(u32::MAX);
            event.entry(earlier).or_insert(number);
        }
        let mut points = Points::default();
        for at in 0..count {
            let stream = lane[at];
            waits[at].iter().for_each(|earlier| points.push(stream, PointKind::Wait(event[earlier])));
            match self.marks[at] {
                Mark::Acquire(id) => {
                    points.push(stream, PointKind::Acquire(id));
                    points.work(stream);
                }
                Mark::Release(id) => {
                    points.work(stream);
                    points.push(stream, PointKind::Release(id));
                }
                Mark::Complete => {
                    points.work(stream);
                    points.push(stream, PointKind::Complete);
                }
                Mark::End => {}
            }
            if let Some(&event) = event.get(&at) {
                points.push(stream, PointKind::Record(event));
            }
        }
        points.0
    }
}

#[derive(Default)]
struct Points(Vec<Point>);

impl Points {
    fn push(&mut self, lane: usize, kind: PointKind) {
        self.0.push(Point { stream: u32::try_from(lane).unwrap_or(u32::MAX), kind });
    }

    /// One `work` for all that lies between two other points of a lane.
    fn work(&mut self, lane: usize) {
        let last = self.0.iter().rev().find(|point| point.stream as usize == lane);
        if last.is_none_or(|point| point.kind != PointKind::Work) {
            self.push(lane, PointKind::Work);
        }
    }
}
