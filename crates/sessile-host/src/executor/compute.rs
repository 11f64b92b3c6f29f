//! The compute engine of a rank on the virtual clock: kernels take turns, and collectives beside slow the running one down.
//!
//! ```text
//!  kernel      ████▒▒▒▒▒▒▒▒████     12 of work at contention 0.5: 4, 4 at half the speed, 4
//!  collective      ░░░░░░░░         8, so the delay is 0.5 · 8
//! ```

use std::collections::VecDeque;

use crate::contention::Contention;
use crate::engine::TaskId;

/// A kernel that has its turn or waits for it.
struct Turn {
    task: TaskId,
    /// Nanoseconds that it takes alone.
    alone: u64,
    /// What is left of them, in millionths of a nanosecond.
    left: u128,
    /// Valid once it has its turn.
    begun: u64,
}

/// The kernels of one rank.
#[derive(Default)]
pub(crate) struct Compute {
    contention: Contention,
    /// The first one runs.
    turns: VecDeque<Turn>,
    /// Collectives in flight.
    beside: u64,
    /// Up to when the first one's progress is counted.
    counted: u64,
    /// How often the first one, or its end, has changed.
    revision: u64,
}

/// The kernel that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Running {
    pub(crate) task: TaskId,
    pub(crate) begun: u64,
    /// When it ends if nothing changes; `None` if it stands still.
    pub(crate) end: Option<u64>,
    /// Of an end that is still expected.
    pub(crate) revision: u64,
}

impl Compute {
    pub(crate) fn new(contention: Contention) -> Self {
        Compute { contention, ..Compute::default() }
    }

    /// A kernel waits for its turn. It, if it has it at once.
    pub(crate) fn push(&mut self, task: TaskId, alone: u64, now: u64) -> Option<Running> {
        let left = u128::from(alone) * u128::from(Contention::WHOLE);
        self.turns.push_back(Turn { task, alone, left, begun: now });
        if self.turns.len() > 1 { None } else { self.begin(now) }
    }

    /// The running kernel has ended: by how much it was delayed, and whose turn it is now.
    pub(crate) fn pop(&mut self, now: u64) -> (u64, Option<Running>) {
        let ended = self.turns.pop_front();
        let delay = ended.map_or(0, |turn| (now - turn.begun).saturating_sub(turn.alone));
        (delay, self.begin(now))
    }

    /// So many collectives are in flight from now on. The running kernel, whose end that may have moved.
    pub(crate) fn set_beside(&mut self, collectives: u64, now: u64) -> Option<Running> {
        self.advance(now);
        self.beside = collectives;
        self.running()
    }

    /// Collectives in flight.
    pub(crate) fn beside(&self) -> u64 {
        self.beside
    }

    /// Whether the end of this revision is still expected.
    pub(crate) fn expects(&self, revision: u64) -> bool {
        self.revision == revision
    }

    fn begin(&mut self, now: u64) -> Option<Running> {
        self.counted = now;
        if let Some(turn) = self.turns.front_mut() {
            turn.begun = now;
        }
        self.running()
    }

    fn advance(&mut self, now: u64) {
        let progress = u128::from(now - self.counted) * u128::from(self.contention.progress(self.beside));
        self.counted = now;
        if let Some(turn) = self.turns.front_mut() {
            turn.left = turn.left.saturating_sub(progress);
        }
    }

    fn running(&mut self) -> Option<Running> {
        self.revision += 1;
        let turn = self.turns.front()?;
        let end = match (turn.left, u128::from(self.contention.progress(self.beside))) {
            (0, _) => Some(self.counted),
            (_, 0) => None,
            (left, progress) => {
                let more = u64::try_from(left.div_ceil(progress)).unwrap_or(u64::MAX);
                Some(self.counted.saturating_add(more))
            }
        };
        Some(Running { task: turn.task, begun: turn.begun, end, revision: self.revision })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(contention: f64) -> Compute {
        Compute::new(Contention::from_fraction(contention).expect("a fraction"))
    }

    fn end(running: Option<Running>) -> Option<u64> {
        running.expect("a kernel runs").end
    }

    #[test]
    fn a_collective_delays_a_kernel_by_its_part_of_its_own_time() {
        for (contention, delay) in [(0.0, 0), (0.25, 2), (0.5, 4)] {
            let mut compute = engine(contention);
            assert_eq!(end(compute.push(1, 12, 100)), Some(112));
            assert!(compute.push(2, 5, 101).is_none(), "waits for its turn");
            compute.set_beside(1, 103);
            let ends = end(compute.set_beside(0, 111));
            assert_eq!(ends, Some(112 + delay), "contention {contention}");
            let (delayed, next) = compute.pop(112 + delay);
            assert_eq!((delayed, end(next)), (delay, Some(117 + delay)));
        }
    }

    #[test]
    fn a_kernel_stands_still_where_nothing_is_left_for_it() {
        let mut compute = engine(1.0);
        compute.set_beside(1, 0);
        assert_eq!(end(compute.push(1, 12, 100)), None);
        assert_eq!(end(compute.set_beside(2, 150)), None);
        assert_eq!(end(compute.set_beside(0, 200)), Some(212));
        assert_eq!(compute.pop(212), (100, None));
    }

    #[test]
    fn only_the_last_end_is_expected() {
        let mut compute = engine(0.5);
        let first = compute.push(1, 12, 0).expect("runs");
        let later = compute.set_beside(1, 4).expect("runs");
        assert_eq!((first.end, later.end), (Some(12), Some(4 + 16)));
        assert!(compute.expects(later.revision) && !compute.expects(first.revision));
    }

    #[test]
    fn a_kernel_ends_at_a_whole_nanosecond() {
        let mut compute = engine(0.3);
        compute.set_beside(1, 0);
        // 10 / 0.7 are 14.29.
        assert_eq!(end(compute.push(1, 10, 0)), Some(15));
        assert_eq!(compute.pop(15), (5, None));
    }
}
