//! What figures of two H200s lead to expect of a larger group. Computed; no GPU is asked.
//!
//! A rank of `G` receives `(G-1)/G` of the gradient: as much as one of two does of a gradient `2(G-1)/G` as large. Links to
//! a switch are as wide for many peers as for one, so the time is that one, between measured sizes on a straight line.
//! Three things depend on `G` besides: a ring has `G-2` more steps, the peer copy `G-2` more copies, and what is added
//! after NCCL is a smaller share of what is received.

use super::{document::received, sizes};
use crate::{
    args::ReduceScatterArgs,
    failure::Failure,
    ui::{Lines, table},
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// A measurement of two ranks, as in docs/PERFORMANCE.md: bytes of the gradient, microseconds.
type Curve = [(u64, f64)];

const ONE_SHOT: &Curve = &[
    (64 * KIB, 2.96),
    (256 * KIB, 3.13),
    (MIB, 4.72),
    (2 * MIB, 6.48),
    (4 * MIB, 11.51),
    (8 * MIB, 19.83),
    (16 * MIB, 32.54),
    (64 * MIB, 108.9),
    (256 * MIB, 417.9),
    (1024 * MIB, 1611.0),
];
/// The best of 16, 32 and 64 blocks (`NCCL_SYM_CTAS`).
const TUNED: &Curve = &[
    (64 * KIB, 6.15),
    (256 * KIB, 7.91),
    (MIB, 10.51),
    (4 * MIB, 17.28),
    (16 * MIB, 45.24),
    (64 * MIB, 160.5),
    (256 * MIB, 618.7),
    (1024 * MIB, 2416.0),
];
const SYMMETRIC: &Curve = &[
    (64 * KIB, 6.54),
    (256 * KIB, 8.71),
    (MIB, 16.09),
    (4 * MIB, 28.97),
    (16 * MIB, 75.4),
    (64 * MIB, 266.9),
    (256 * MIB, 992.7),
    (1024 * MIB, 3872.0),
];
const RING: &Curve = &[
    (64 * KIB, 8.27),
    (256 * KIB, 8.54),
    (MIB, 13.74),
    (4 * MIB, 28.0),
    (16 * MIB, 65.17),
    (64 * MIB, 215.5),
    (256 * MIB, 793.4),
    (1024 * MIB, 2835.0),
];
const PEER_COPY: &Curve = &[
    (64 * KIB, 3.08),
    (256 * KIB, 3.59),
    (MIB, 5.01),
    (4 * MIB, 9.57),
    (16 * MIB, 27.01),
    (64 * MIB, 95.45),
    (256 * MIB, 372.1),
    (1024 * MIB, 1450.0),
];

/// Assumed: what a further step of a ring takes.
const STEP_US: f64 = 1.9;
/// What a copy takes besides its bytes, from the two smallest that were measured.
const COPY_US: f64 = 2.9;
/// Bytes a microsecond that the addition after NCCL reads and writes, as measured.
const MEMORY: f64 = 3.3e6;

/// On a line between the measurements beside `bytes`, or through the outermost two.
fn measured(curve: &Curve, bytes: f64) -> f64 {
    let after = curve.partition_point(|(at, _)| (*at as f64) < bytes).clamp(1, curve.len() - 1);
    let ((x0, y0), (x1, y1)) = (curve[after - 1], curve[after]);
    y0 + (y1 - y0) * (bytes - x0 as f64) / (x1 - x0) as f64
}

struct Expected {
    name: &'static str,
    curve: &'static Curve,
    /// For each rank beyond two.
    more_us: f64,
    /// Whether an addition follows.
    add: bool,
}

const EXPECTED: [Expected; 5] = [
    Expected { name: "one_shot", curve: ONE_SHOT, more_us: 0.0, add: false },
    Expected { name: "symmetric, tuned + add", curve: TUNED, more_us: 0.0, add: true },
    Expected { name: "symmetric + add", curve: SYMMETRIC, more_us: 0.0, add: true },
    Expected { name: "ring + add", curve: RING, more_us: STEP_US, add: true },
    Expected { name: "peer copy", curve: PEER_COPY, more_us: COPY_US, add: false },
];

impl Expected {
    fn micros(&self, group: u32, bytes: u64) -> f64 {
        let received = received(bytes, group);
        // BF16 read, FP32 read and written, for each of a rank's elements.
        let added = |share: f64| share / 2.0 * 10.0 / MEMORY;
        let less = if self.add { added(received) - added(bytes as f64 / f64::from(group)) } else { 0.0 };
        measured(self.curve, 2.0 * received) + self.more_us * f64::from(group - 2) - less
    }
}

/// Prints the table.
pub(super) fn tell(args: &ReduceScatterArgs, lines: &mut Lines) -> Result<(), Failure> {
    let group = args.group();
    let row = |name: &str, of: &dyn Fn(u64) -> String| {
        std::iter::once(name.to_owned()).chain(args.sizes.iter().map(|bytes| of(*bytes))).collect::<Vec<_>>()
    };
    let mut rows: Vec<Vec<String>> = EXPECTED
        .iter()
        .map(|expected| row(expected.name, &|bytes| format!("{:.1}", expected.micros(group, bytes))))
        .collect();
    let [ours, others @ ..] = &EXPECTED;
    rows.extend(others.iter().map(|other| {
        row(&format!("{}, to one_shot", other.name), &|bytes| {
            format!("{:.2}", other.micros(group, bytes) / ours.micros(group, bytes))
        })
    }));
    let head = sizes(&format!("expected us a call, group of {group}"), args);
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    lines.line("computed from figures of two H200s, not measured: see docs/PERFORMANCE.md")?;
    lines.line(table(&head, 1, rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_are_as_measured_and_sizes_between_lie_between() {
        for expected in &EXPECTED {
            for (bytes, us) in expected.curve {
                assert!((expected.micros(2, *bytes) - us).abs() < 1e-9, "{} {bytes}", expected.name);
            }
            let between = expected.micros(2, 32 * MIB);
            assert!(between > expected.micros(2, 16 * MIB) && between < expected.micros(2, 64 * MIB));
        }
    }

    #[test]
    fn larger_groups_take_what_they_receive_and_their_steps() {
        let [one_shot, _, symmetric, ring, copy] = &EXPECTED;
        // 8 ranks receive 7/8 of 64 MiB, as 2 ranks of 112 MiB: a quarter of the way from 64 to 256 MiB.
        assert!((one_shot.micros(8, 64 * MIB) - (108.9 + 0.25 * 309.0)).abs() < 1e-9);
        let add = 10.0 / 2.0 * (56 * MIB - 8 * MIB) as f64 / 3.3e6;
        assert!((symmetric.micros(8, 64 * MIB) - (266.9 + 0.25 * 725.8 - add)).abs() < 1e-9);
        assert!((ring.micros(8, 64 * MIB) - (215.5 + 0.25 * 577.9 + 6.0 * 1.9 - add)).abs() < 1e-9);
        assert!((copy.micros(4, MIB) - (measured(PEER_COPY, 1.5 * MIB as f64) + 5.8)).abs() < 1e-9);
    }
}
