//! What collectives take from kernels that run beside them.

use std::fmt;

/// The part of a collective's time by which it delays kernels of its ranks that run beside it: 0 costs them nothing, with
/// 1 they stand still meanwhile, so that running beside gains nothing. Kept in millionths: times on the virtual clock are
/// whole numbers, the same on every machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contention(u32);

impl Contention {
    /// Collectives take nothing from kernels.
    pub const NONE: Contention = Contention(0);
    /// A kernel's progress in a nanosecond without contention.
    pub(crate) const WHOLE: u64 = 1_000_000;

    /// A fraction from 0 to 1, rounded to millionths. `None` for any other number.
    pub fn from_fraction(fraction: f64) -> Option<Self> {
        let within = (0.0..=1.0).contains(&fraction);
        within.then(|| Contention((fraction * Self::WHOLE as f64).round() as u32))
    }

    /// As a fraction.
    pub fn fraction(self) -> f64 {
        f64::from(self.0) / Self::WHOLE as f64
    }

    /// A kernel's progress in a nanosecond, in millionths of one, beside so many collectives.
    pub(crate) fn progress(self, collectives: u64) -> u64 {
        Self::WHOLE.saturating_sub(collectives.saturating_mul(self.0.into()))
    }
}

impl fmt::Display for Contention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fraction().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fractions_from_0_to_1_are_contention() {
        for wrong in [-0.1, 1.000_001, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert_eq!(Contention::from_fraction(wrong), None, "{wrong}");
        }
        for right in [0.0, 0.35, 1.0] {
            let contention = Contention::from_fraction(right).expect("a fraction");
            assert_eq!((contention.fraction(), contention.to_string()), (right, right.to_string()));
        }
    }

    #[test]
    fn each_collective_takes_its_part_until_nothing_is_left() {
        let progress = |fraction| {
            let contention = Contention::from_fraction(fraction).expect("a fraction");
            [0, 1, 2, 3].map(|collectives| contention.progress(collectives))
        };
        assert_eq!(progress(0.0), [1_000_000; 4]);
        assert_eq!(progress(0.4), [1_000_000, 600_000, 200_000, 0]);
        assert_eq!(progress(1.0), [1_000_000, 0, 0, 0]);
    }
}
