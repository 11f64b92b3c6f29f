//! Recorded order: marks at acquires and releases, which of them precede which, and the points of a trace made of that.
//!
//! The framework's own events are not seen here. What is known is either the program order of a device without streams,
//! or a graph that the framework captured, and where the capture stood on a stream at each mark: the nodes on which the
//! next node of that stream would depend. A mark precedes another if all nodes that it stood at lie before or among those
//! that the other stood at.
//!
//! ```text
//!   captured      gemm ──→ kernel ──→ gemm          release a at {kernel}, acquire b at {gemm 2}: kernel lies before gemm 2
//!                   └────→ copy                     release c at {copy}: neither before b nor after
//!   points        stream 0: acquire a, work, release a, acquire b, work     one `work` stands for all between two marks
//! ```

use std::collections::{BTreeSet, HashMap};

use sessile_plan::{Point, PointKind, RequestId};

/// What is marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mark {
    /// Before the first write of a request.
    Acquire(RequestId),
    /// After its last read.
    Release(RequestId),
    /// Right after work on a request that sessile enqueued itself.
    Use(RequestId),
    /// Right after a node that waits for the event with this number.
    Wait(usize),
    /// Right after a node that records it.
    Record(usize),
    /// The next runner may start.
    Complete,
    /// The end of a pass.
    End,
}

impl Mark {
    /// For people.
    #[must_use]
    pub fn text(self) -> String {
        match self {
            Mark::Acquire(id) => format!("acquire of {id}"),
            Mark::Release(id) => format!("release of {id}"),
            Mark::Use(id) => format!("use of {id}"),
            Mark::Wait(event) => format!("wait for fence {event}"),
            Mark::Record(event) => format!("record of fence {event}"),
            Mark::Complete => "complete".to_owned(),
            Mark::End => "the end".to_owned(),
        }
    }
}

/// A node of a captured graph.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its identity.
    pub id: u64,
    /// The nodes that end before it.
    pub after: Vec<u64>,
}

/// Marks in one possible order, and for each those that are proven to come before it.
#[derive(Clone, Debug, Default)]
pub struct Order {
    marks: Vec<Mark>,
    before: Vec<Bits>,
    /// For each mark the first one that stands at exactly its place, perhaps itself.
    place: Vec<usize>,
    /// For each mark its place among all as the program made them.
    made: Vec<usize>,
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
    #[must_use]
    pub fn program(marks: &[Mark]) -> Order {
        let before = (0..marks.len()).map(|at| {
            let mut bits = Bits::new(marks.len());
            (0..at).for_each(|earlier| bits.set(earlier));
            bits
        });
        Order {
            before: before.collect(),
            marks: marks.to_vec(),
            place: (0..marks.len()).collect(),
            made: (0..marks.len()).collect(),
        }
    }

    /// What the edges of a captured graph prove. `marked` holds the marks as the program made them, each with the nodes
    /// that its stream stood at. `None` if the edges form a cycle or name unknown nodes, which no capture gives.
    #[must_use]
    pub fn captured(nodes: &[Node], marked: &[(Mark, Vec<u64>)]) -> Option<Order> {
        let index: HashMap<u64, usize> = nodes.iter().enumerate().map(|(at, node)| (node.id, at)).collect();
        let stood: Vec<Vec<usize>> = marked
            .iter()
            .map(|(_, at)| at.iter().map(|node| index.get(node).copied()).collect())
            .collect::<Option<_>>()?;
        // Nodes that marks stood at, numbered; and for each node which of them lie before or at it.
        let mut number: HashMap<usize, usize> = HashMap::new();
        for &node in stood.iter().flatten() {
            let next = number.len();
            number.entry(node).or_insert(next);
        }
        let known = reach(nodes, &index, &number)?;
        let precedes = |early: usize, late: usize| {
            stood[early].iter().all(|node| stood[late].iter().any(|other| known[*other].has(number[node])))
        };
        let count = marked.len();
        // Marks at the same place keep the order of the program.
        let before: Vec<Vec<usize>> = (0..count)
            .map(|late| {
                let strictly =
                    |&early: &usize| precedes(early, late) && (early < late || !precedes(late, early));
                (0..count).filter(|&early| early != late).filter(strictly).collect()
            })
            .collect();
        // Who comes before has fewer before it.
        let mut sequence: Vec<usize> = (0..count).collect();
        sequence.sort_by_key(|&mark| (before[mark].len(), mark));
        let mut new = vec![0; count];
        sequence.iter().enumerate().for_each(|(at, &mark)| new[mark] = at);
        let bits = |&mark: &usize| {
            let mut bits = Bits::new(count);
            before[mark].iter().for_each(|&early| bits.set(new[early]));
            bits
        };
        let before = sequence.iter().map(bits).collect();
        let place = |&mark: &usize| {
            let there = |&other: &usize| precedes(mark, other) && precedes(other, mark);
            new[(0..count).find(there).unwrap_or(mark)]
        };
        let place = sequence.iter().map(place).collect();
        let marks = sequence.iter().map(|&mark| marked[mark].0).collect();
        Some(Order { marks, before, place, made: sequence })
    }

    /// The marks in one possible order, each with the number of the place that it stands at: marks of one number have no
    /// work between them.
    pub fn places(&self) -> impl Iterator<Item = (Mark, usize)> {
        self.marks.iter().copied().zip(self.place.iter().copied())
    }

    /// Whether one mark is proven to come before another.
    #[must_use]
    pub fn precedes(&self, early: Mark, late: Mark) -> bool {
        let at = |mark: Mark| self.marks.iter().position(|known| *known == mark);
        at(early).zip(at(late)).is_some_and(|(early, late)| self.before[late].has(early))
    }

    /// Takes the end off, which must come after everything.
    ///
    /// # Errors
    /// The first mark that does not come before it.
    pub fn without_end(mut self) -> Result<Order, Mark> {
        let Some(at) = self.marks.iter().position(|mark| *mark == Mark::End) else { return Ok(self) };
        let loose = (0..self.marks.len()).find(|&other| other != at && !self.before[at].has(other));
        if let Some(loose) = loose {
            return Err(self.marks[loose]);
        }
        // All others come before it, so it is the last.
        self.marks.truncate(at);
        self.before.truncate(at);
        self.place.truncate(at);
        self.made.truncate(at);
        Ok(self)
    }

    /// The first pair that is ordered here and not in `other`.
    #[must_use]
    pub fn lost(&self, other: &Order) -> Option<(Mark, Mark)> {
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

    /// For each mark the latest of those before it: the rest follows.
    fn latest(&self) -> Vec<Vec<usize>> {
        (0..self.marks.len())
            .map(|at| {
                let all: Vec<usize> = (0..at).filter(|&earlier| self.before[at].has(earlier)).collect();
                let implied = |earlier: usize| all.iter().any(|&later| self.before[later].has(earlier));
                all.iter().copied().filter(|&earlier| !implied(earlier)).collect()
            })
            .collect()
    }

    /// The marks as nodes of a graph, each after the latest of those before it. Waits and records, which are nodes of the
    /// captured graph, follow each other as they were captured.
    #[must_use]
    pub fn nodes(&self) -> Vec<(Mark, Vec<usize>)> {
        let latest = self.latest();
        let count = self.marks.len();
        let is_node =
            |&at: &usize| matches!(self.marks[at], Mark::Wait(_) | Mark::Record(_) | Mark::Complete);
        let mut captured: Vec<usize> = (0..count).filter(is_node).collect();
        captured.sort_by_key(|&at| self.made[at]);
        // A completion counts from where its stream stood, perhaps before what was captured earlier.
        let all = captured.clone();
        captured.retain(|&at| {
            !all.iter().any(|&other| self.made[other] < self.made[at] && self.before[other].has(at))
        });
        let mut left: Vec<usize> = latest.iter().map(Vec::len).collect();
        let mut next: Vec<Vec<usize>> = vec![Vec::new(); count];
        let kept = captured.windows(2).map(|pair| (pair[0], pair[1]));
        for (early, late) in kept.filter(|&(early, late)| !latest[late].contains(&early)) {
            next[early].push(late);
            left[late] += 1;
        }
        latest.iter().enumerate().for_each(|(at, all)| all.iter().for_each(|&early| next[early].push(at)));
        let mut ready: BTreeSet<(usize, usize)> =
            (0..count).filter(|&at| left[at] == 0).map(|at| (self.made[at], at)).collect();
        let (mut number, mut nodes) = (vec![0; count], Vec::new());
        while let Some((_, at)) = ready.pop_first() {
            number[at] = nodes.len();
            nodes.push((self.marks[at], latest[at].iter().map(|&early| number[early]).collect()));
            for &after in &next[at] {
                left[after] -= 1;
                if left[after] == 0 {
                    ready.insert((self.made[after], after));
                }
            }
        }
        nodes
    }

    /// The points of a trace that prove exactly this order. What a mark stands before or after is one `work` beside it.
    #[must_use]
    pub fn points(&self) -> Vec<Point> {
        let count = self.marks.len();
        let latest = self.latest();
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
                Mark::Use(_) | Mark::Wait(_) | Mark::Record(_) | Mark::End => {}
            }
            if let Some(&event) = event.get(&at) {
                points.push(stream, PointKind::Record(event));
            }
        }
        points.0
    }
}

/// For each node of a graph, which of the numbered ones lie before or at it.
fn reach(nodes: &[Node], index: &HashMap<u64, usize>, number: &HashMap<usize, usize>) -> Option<Vec<Bits>> {
    let (mut left, mut next) = (vec![0; nodes.len()], vec![Vec::new(); nodes.len()]);
    for (at, node) in nodes.iter().enumerate() {
        for before in &node.after {
            next[*index.get(before)?].push(at);
            left[at] += 1;
        }
    }
    let mut ready: Vec<usize> = (0..nodes.len()).filter(|&at| left[at] == 0).collect();
    let mut known = vec![Bits::new(number.len()); nodes.len()];
    let mut done = 0;
    while let Some(at) = ready.pop() {
        done += 1;
        if let Some(&number) = number.get(&at) {
            known[at].set(number);
        }
        let told = known[at].clone();
        for &after in &next[at] {
            known[after].join(&told);
            left[after] -= 1;
            if left[after] == 0 {
                ready.push(after);
            }
        }
    }
    (done == nodes.len()).then_some(known)
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use super::*;

    fn acquire(id: u32) -> Mark {
        Mark::Acquire(RequestId(id))
    }

    fn release(id: u32) -> Mark {
        Mark::Release(RequestId(id))
    }

    fn graph(edges: &[&[u64]]) -> Vec<Node> {
        edges.iter().enumerate().map(|(id, after)| Node { id: id as u64, after: after.to_vec() }).collect()
    }

    fn pairs(order: &Order) -> BTreeSet<(String, String)> {
        let text = |at: usize| order.marks[at].text();
        (0..order.marks.len())
            .flat_map(|late| (0..order.marks.len()).map(move |early| (early, late)))
            .filter(|&(early, late)| order.before[late].has(early))
            .map(|(early, late)| (text(early), text(late)))
            .collect()
    }

    /// The order that points prove, read anew: streams, records and waits.
    fn proven(points: &[Point]) -> BTreeSet<(String, String)> {
        let (mut streams, mut events) = (HashMap::new(), HashMap::new());
        let mut all = BTreeSet::new();
        for point in points {
            let known: &mut BTreeSet<String> = streams.entry(point.stream).or_default();
            let mark = match point.kind {
                PointKind::Acquire(id) => Mark::Acquire(id),
                PointKind::Release(id) => Mark::Release(id),
                PointKind::Complete => Mark::Complete,
                PointKind::Record(event) => {
                    events.insert(event, known.clone());
                    continue;
                }
                PointKind::Wait(event) => {
                    known.extend(events[&event].clone());
                    continue;
                }
                _ => continue,
            };
            all.extend(known.iter().map(|early| (early.clone(), mark.text())));
            known.insert(mark.text());
        }
        all
    }

    #[test]
    fn a_release_behind_what_the_acquire_stands_at_is_before_it_and_one_on_a_loose_branch_is_not() {
        // 0 → 1 → 2 on the origin, 0 → 3 beside it.
        let nodes = graph(&[&[], &[0], &[1], &[0]]);
        let marked = vec![
            (acquire(0), vec![]),
            (release(0), vec![1]),
            (acquire(1), vec![2]),
            (release(1), vec![2]),
            (acquire(2), vec![3]),
        ];
        let order = Order::captured(&nodes, &marked).unwrap();
        let found = pairs(&order);
        let has = |early: Mark, late: Mark| found.contains(&(early.text(), late.text()));
        assert!(has(release(0), acquire(1)) && has(acquire(0), release(1)) && has(acquire(1), release(1)));
        assert!(!has(release(0), acquire(2)) && !has(acquire(2), release(0)));
        assert_eq!(proven(&order.points()), found);
    }

    #[test]
    fn a_mark_made_late_on_a_stream_that_stood_early_counts_from_where_it_stood() {
        let nodes = graph(&[&[], &[0], &[1]]);
        let marked = vec![(acquire(1), vec![2]), (release(0), vec![0])];
        let order = Order::captured(&nodes, &marked).unwrap();
        assert_eq!(pairs(&order), BTreeSet::from([(release(0).text(), acquire(1).text())]));
    }

    #[test]
    fn a_completion_on_a_stream_that_stood_early_is_a_node_before_the_waits_of_others() {
        let nodes = graph(&[&[], &[0], &[1]]);
        let marked = [
            (Mark::Wait(0), vec![1]),
            (acquire(0), vec![1]),
            (Mark::Complete, vec![0]),
            (Mark::Record(1), vec![2]),
        ];
        let order = Order::captured(&nodes, &marked).unwrap();
        let found: Vec<Mark> = order.nodes().into_iter().map(|(mark, _)| mark).collect();
        assert_eq!(found, [Mark::Complete, Mark::Wait(0), acquire(0), Mark::Record(1)]);
    }

    #[test]
    fn the_end_must_come_after_everything() {
        let nodes = graph(&[&[], &[0], &[0]]);
        let joined = [(acquire(0), vec![1]), (Mark::End, vec![1, 2])];
        assert!(Order::captured(&nodes, &joined).unwrap().without_end().is_ok());
        let loose = [(acquire(0), vec![2]), (Mark::End, vec![1])];
        assert_eq!(Order::captured(&nodes, &loose).unwrap().without_end().unwrap_err(), acquire(0));
    }

    #[test]
    fn what_another_order_lost_is_named_and_more_order_is_no_loss() {
        let marks = [acquire(0), release(0), acquire(1)];
        let program = Order::program(&marks);
        let nodes = graph(&[&[], &[]]);
        let loose = [(acquire(0), vec![]), (release(0), vec![0]), (acquire(1), vec![1])];
        let loose = Order::captured(&nodes, &loose).unwrap();
        assert_eq!(program.lost(&loose), Some((release(0), acquire(1))));
        assert_eq!(loose.lost(&program), None);
    }

    #[test]
    fn cycles_and_unknown_nodes_are_no_order() {
        assert!(Order::captured(&graph(&[&[1], &[0]]), &[(acquire(0), vec![0])]).is_none());
        assert!(Order::captured(&graph(&[&[]]), &[(acquire(0), vec![7])]).is_none());
    }

    /// Whether one node lies before or at another, by search.
    fn reaches(nodes: &[Node], from: u64, to: u64) -> bool {
        from == to || nodes[to as usize].after.iter().any(|&before| reaches(nodes, from, before))
    }

    #[test]
    fn random_graphs_prove_what_a_search_finds_and_their_points_prove_the_same() {
        let mut seed = 1u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for _ in 0..300 {
            let count = 1 + random(12);
            let nodes: Vec<Node> = (0..count)
                .map(|id| {
                    let after: BTreeSet<u64> =
                        (0..random(3)).filter(|_| id > 0).map(|_| random(id.max(1))).collect();
                    Node { id, after: after.into_iter().collect() }
                })
                .collect();
            let marked: Vec<(Mark, Vec<u64>)> = (0..1 + random(6) as u32)
                .map(|id| {
                    let stood = (0..random(3)).map(|_| random(count)).collect();
                    (if random(2) == 0 { acquire(id) } else { release(id) }, stood)
                })
                .collect();
            let order = Order::captured(&nodes, &marked).unwrap();
            let precedes = |a: &[u64], b: &[u64]| {
                a.iter().all(|&node| b.iter().any(|&other| reaches(&nodes, node, other)))
            };
            let mut expected = BTreeSet::new();
            for (late, (mark, stands)) in marked.iter().enumerate() {
                for (early, (before, stood)) in marked.iter().enumerate() {
                    let tie = precedes(stands, stood);
                    if early != late && precedes(stood, stands) && (early < late || !tie) {
                        expected.insert((before.text(), mark.text()));
                    }
                }
            }
            assert_eq!(pairs(&order), expected);
            assert_eq!(proven(&order.points()), expected);
        }
    }
}
