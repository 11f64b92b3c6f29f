//! Who may still matter to the bytes of one allocation.

use std::collections::BTreeMap;

/// An access that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// Chain of its operation.
    pub(super) chain: u32,
    /// Number of its operation in the chain.
    pub(super) number: u32,
    /// The point that made it.
    pub(super) point: u32,
    /// Place among the accesses of the point.
    pub(super) access: u32,
    /// Whether bytes changed.
    pub(super) writes: bool,
    /// What a write leaves behind.
    pub(super) leaves: Leaves,
}

/// What a write leaves behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaves {
    /// Data.
    Data,
    /// Zeros.
    Zeros,
    /// Nothing that may be read: the bytes are new.
    Nothing,
}

impl Mark {
    /// Whether the mark's operation ended before one of `chain` that starts at `clock`.
    fn precedes(&self, chain: u32, clock: &[u32]) -> bool {
        self.chain == chain || clock[self.chain as usize] >= self.number
    }
}

#[derive(Clone, Debug)]
struct Segment {
    end: u64,
    marks: Vec<Mark>,
}

/// Marks by byte: disjoint segments, each with the marks that all its bytes have.
#[derive(Debug, Default)]
pub(super) struct Bytes {
    segments: BTreeMap<u64, Segment>,
}

impl Bytes {
    /// The pieces of `[start, end)` whose last writes `ask` picks out. Bytes without any write are not asked about.
    pub(super) fn written(
        &self,
        (start, end): (u64, u64),
        ask: impl Fn(&Mark) -> bool,
    ) -> Vec<((u64, u64), Mark)> {
        let first = self.segments.range(..=start).next_back().map_or(start, |(&at, _)| at);
        let mut found: Vec<((u64, u64), Mark)> = Vec::new();
        for (&at, segment) in self.segments.range(first..end.max(first)) {
            let (from, to) = (at.max(start), segment.end.min(end));
            // Of several last writes, which race, the one that left data decides.
            let writes = segment.marks.iter().filter(|mark| mark.writes);
            let Some(last) = writes.max_by_key(|mark| mark.leaves == Leaves::Data) else { continue };
            if from >= to || !ask(last) {
                continue;
            }
            match found.last_mut() {
                Some((range, mark)) if range.1 == from && mark == last => range.1 = to,
                _ => found.push(((from, to), *last)),
            }
        }
        found
    }

    /// Adds an access of `[start, end)` by an operation that starts at `clock`. Earlier accesses that conflict with
    /// it and do not precede it are added to `races`, each once.
    pub(super) fn access(
        &mut self,
        (start, end): (u64, u64),
        mark: Mark,
        clock: &[u32],
        races: &mut Vec<Mark>,
    ) {
        if start >= end {
            return;
        }
        self.split(start);
        self.split(end);
        let mut clean = true;
        let mut covered = start;
        let mut gaps = Vec::new();
        let mut segments = 0_usize;
        for (&at, segment) in self.segments.range_mut(start..end) {
            if covered < at {
                gaps.push((covered, at));
            }
            covered = segment.end;
            segments += 1;
            for earlier in &segment.marks {
                let conflict = earlier.writes || mark.writes;
                if conflict && !earlier.precedes(mark.chain, clock) && !races.contains(earlier) {
                    races.push(*earlier);
                }
            }
            if mark.writes {
                segment.marks.retain(|earlier| !earlier.precedes(mark.chain, clock));
                clean &= segment.marks.is_empty();
                segment.marks.push(mark);
            } else {
                match segment.marks.iter_mut().find(|m| m.chain == mark.chain && !m.writes) {
                    Some(earlier) => *earlier = mark,
                    None => segment.marks.push(mark),
                }
            }
        }
        if covered < end {
            gaps.push((covered, end));
        }
        if mark.writes && clean && segments + gaps.len() > 1 {
            self.fuse(start, end, mark);
            return;
        }
        for (start, end) in gaps {
            self.segments.insert(start, Segment { end, marks: vec![mark] });
        }
    }

    /// Makes `at` a border of segments.
    fn split(&mut self, at: u64) {
        let Some((_, segment)) = self.segments.range_mut(..at).next_back() else { return };
        if segment.end > at {
            let tail = segment.clone();
            segment.end = at;
            self.segments.insert(at, tail);
        }
    }

    /// Replaces all segments of a range by one: after a write that all else precedes.
    fn fuse(&mut self, start: u64, end: u64, mark: Mark) {
        let inside: Vec<u64> = self.segments.range(start..end).map(|(&at, _)| at).collect();
        for at in inside {
            self.segments.remove(&at);
        }
        self.segments.insert(start, Segment { end, marks: vec![mark] });
    }
}
