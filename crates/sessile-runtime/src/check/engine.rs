//! Takes the points in order, with a clock each, and looks at their bytes.

use std::collections::{HashMap, VecDeque};

use super::bytes::{Bytes, Mark};
use super::content::Content;
use super::order::{MAX_NAMED, NONE, Order, Role, accesses};
use super::report::{Operation, Reason, Report};
use super::tally::Tally;
use super::{program, waits, windows};
use crate::log::{Log, Mode};

/// Most memory that clocks in use may take together.
const MAX_CLOCK_BYTES: u64 = 4 << 30;

/// Clocks of the points whose followers are not all taken yet, in one slab.
struct Clocks {
    width: usize,
    slab: Vec<u32>,
    free: Vec<u32>,
    /// Place in the slab, by point.
    place: Vec<u32>,
}

impl Clocks {
    fn new(points: usize, chains: u32) -> Clocks {
        Clocks { width: chains as usize, slab: Vec::new(), free: Vec::new(), place: vec![NONE; points] }
    }

    fn get(&self, point: u32) -> &[u32] {
        let at = self.place[point as usize] as usize * self.width;
        &self.slab[at..at + self.width]
    }

    /// Keeps a point's clock; false if there is no room.
    fn keep(&mut self, point: u32, clock: &[u32]) -> bool {
        let place = match self.free.pop() {
            Some(place) => place as usize,
            None => {
                let place = self.slab.len() / self.width.max(1);
                if (self.slab.len() + self.width) as u64 * 4 > MAX_CLOCK_BYTES {
                    return false;
                }
                self.slab.resize(self.slab.len() + self.width, 0);
                place
            }
        };
        self.slab[place * self.width..(place + 1) * self.width].copy_from_slice(clock);
        self.place[point as usize] = u32::try_from(place).unwrap_or(NONE);
        true
    }

    fn release(&mut self, point: u32) {
        let place = std::mem::replace(&mut self.place[point as usize], NONE);
        if place != NONE {
            self.free.push(place);
        }
    }
}

/// Checks the order; what is found goes to `report`.
pub(super) fn run(log: &Log, order: &Order, report: &mut Report) {
    report.chains = order.chains;
    let mut tally = Tally::new(log, order);
    program::faults(log, &mut |fault| tally.fault(fault));
    windows::faults(log, &mut |fault| tally.fault(fault));
    waits::faults(log, &mut |fault| tally.fault(fault));
    for fault in &order.faults {
        tally.fault(fault.clone());
    }
    let count = order.points.len();
    let ids = 0..u32::try_from(count).unwrap_or(u32::MAX);
    let mut awaited: Vec<u32> = ids.clone().map(|id| size(order.before.get(id))).collect();
    let mut followers: Vec<u32> = ids.clone().map(|id| size(order.after.get(id))).collect();
    let mut ready: VecDeque<u32> = ids.clone().filter(|&id| awaited[id as usize] == 0).collect();
    // With no chain at all nothing touches bytes; a width of one keeps the slab simple.
    let mut clocks = Clocks::new(count, order.chains.max(1));
    let mut clock = vec![0_u32; order.chains.max(1) as usize];
    let mut memories: HashMap<(u32, u64), Bytes> = HashMap::new();
    let mut content = Content::new(log);
    let mut races = Vec::new();
    let mut taken = 0_usize;
    while let Some(id) = ready.pop_front() {
        taken += 1;
        let point = &order.points[id as usize];
        join(order.before.get(id), &mut clocks, &mut followers, &mut clock);
        if matches!(point.role, Role::Work | Role::Start) {
            report.operations += 1;
        }
        for (at, access) in accesses(log, point).iter().enumerate() {
            let mark = Mark {
                chain: point.chain,
                number: point.number,
                point: id,
                access: u32::try_from(at).unwrap_or(u32::MAX),
                writes: access.mode != Mode::Read,
                leaves: content.leaves(point),
            };
            let bytes = memories.entry((access.rank, access.memory)).or_default();
            content.access(point, access, bytes, &mut tally);
            bytes.access((access.start, access.end), mark, &clock, &mut races);
            report.accesses += 1;
            for earlier in races.drain(..) {
                tally.race(&earlier, &mark);
            }
        }
        if point.chain != NONE && matches!(point.role, Role::Work | Role::End) {
            clock[point.chain as usize] = point.number;
        }
        if followers[id as usize] > 0 && !clocks.keep(id, &clock) {
            let needed = clocks.slab.len() as u64 * 4;
            tally.fault(Reason::TooLarge { what: "bytes of clocks", needed, limit: MAX_CLOCK_BYTES });
            taken = count;
            break;
        }
        for &next in order.after.get(id) {
            let left = &mut awaited[next as usize];
            *left -= 1;
            if *left == 0 {
                ready.push_back(next);
            }
        }
    }
    content.finish(&mut tally);
    if taken < count {
        tally.fault(deadlock(log, order, &awaited));
    }
    (report.violations, report.unlisted) = tally.finish();
}

/// The start clock of a point that follows `before`; gives back the clocks that nobody else needs.
fn join(before: &[u32], clocks: &mut Clocks, followers: &mut [u32], clock: &mut [u32]) {
    match before.first() {
        Some(&first) => clock.copy_from_slice(clocks.get(first)),
        None => clock.fill(0),
    }
    for &other in before.iter().skip(1) {
        for (mine, &theirs) in clock.iter_mut().zip(clocks.get(other)) {
            *mine = (*mine).max(theirs);
        }
    }
    for &other in before {
        let left = &mut followers[other as usize];
        *left -= 1;
        if *left == 0 {
            clocks.release(other);
        }
    }
}

/// Every point that was not taken awaits another one: walking back must come round.
fn deadlock(log: &Log, order: &Order, awaited: &[u32]) -> Reason {
    let stuck = |id: &u32| awaited[*id as usize] > 0;
    let unreached = awaited.iter().filter(|&&left| left > 0).count() as u64;
    let mut seen: HashMap<u32, usize> = HashMap::new();
    let mut path = Vec::new();
    let mut at = (0..size(awaited)).find(stuck);
    while let Some(id) = at {
        if let Some(&from) = seen.get(&id) {
            path.drain(..from);
            break;
        }
        seen.insert(id, path.len());
        path.push(id);
        at = order.before.get(id).iter().copied().find(stuck);
    }
    path.reverse();
    let named = |id: &u32| matches!(order.points[*id as usize].role, Role::Work | Role::Start | Role::Border);
    let mut cycle: Vec<Operation> = path
        .iter()
        .filter(|id| named(id))
        .take(2 * MAX_NAMED)
        .map(|&id| Operation::of(log, &order.points[id as usize]))
        .collect();
    cycle.dedup();
    cycle.truncate(MAX_NAMED);
    Reason::Deadlock { cycle, unreached }
}

fn size<T>(list: &[T]) -> u32 {
    u32::try_from(list.len()).unwrap_or(u32::MAX)
}
