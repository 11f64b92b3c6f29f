//! What the cost model says of the reduce-scatters of the stack, from times that were measured without overlap.
//!
//! ```text
//!  depth 1   │ C │ R │ C │ R │ C │ R │        exposed: layers · R
//!
//!  depth 2   │ C │ C + c·R │ C + c·R │        exposed: (layers - 1) · c·R + R
//!                │ R │     │ R │     │ R │
//! ```
//!
//! C is the compute of a layer, R its reduce-scatter, c their [`Contention`]. Where a reduce-scatter outlasts the compute
//! beside it, the next one waits for it, and R - C takes the place of c·R. It is the model of the virtual clock for a stack
//! of equal layers; a test compares them.

use serde::Serialize;
use sessile_host::Contention;

/// The most of a step that may be exposed where a depth is said to fit.
pub const FITS: f64 = 0.05;

/// Times of a step without overlap, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Apart {
    /// Layers of the stack.
    pub layers: u32,
    /// Without any collective.
    pub compute_ns: u64,
    /// Without reduce-scatters: their exposed time is added to it.
    pub no_reduce_ns: u64,
    /// Reduce-scatters alone.
    pub reduce_ns: u64,
}

/// What the model says of one depth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Exposed time of reduce-scatters, as a fraction of the step.
    pub exposed_reduce_fraction: f64,
    /// Whether that is at most [`FITS`].
    pub fits: bool,
}

impl Apart {
    /// Exposed time of a step's reduce-scatters, in nanoseconds: where each ends before the next layer starts, or where it may
    /// run on into the next layer.
    pub fn exposed_ns(&self, overlapped: bool, contention: Contention) -> f64 {
        let (layers, total) = (f64::from(self.layers.max(1)), self.reduce_ns as f64);
        let (compute, reduce) = (self.compute_ns as f64 / layers, total / layers);
        match overlapped {
            false => total,
            true => (layers - 1.0) * (contention.fraction() * reduce).max(reduce - compute) + reduce,
        }
    }

    /// Whether reduce-scatters fit.
    pub fn predict(&self, overlapped: bool, contention: Contention) -> Prediction {
        let exposed = self.exposed_ns(overlapped, contention);
        let exposed_reduce_fraction = exposed / (self.no_reduce_ns as f64 + exposed).max(1.0);
        Prediction { exposed_reduce_fraction, fits: exposed_reduce_fraction <= FITS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contention(fraction: f64) -> Contention {
        Contention::from_fraction(fraction).expect("a fraction")
    }

    /// Five layers of 100 ns, 10 of them gathers.
    fn apart(reduce: u64) -> Apart {
        Apart { layers: 5, compute_ns: 450, no_reduce_ns: 500, reduce_ns: 5 * reduce }
    }

    #[test]
    fn exposed_time_is_that_of_the_diagram() {
        let exposed =
            |reduce, overlapped, fraction| apart(reduce).exposed_ns(overlapped, contention(fraction));
        assert_eq!(exposed(20, false, 0.5), 100.0);
        assert_eq!(exposed(20, true, 0.0), 20.0);
        assert_eq!(exposed(20, true, 0.5), 4.0 * 10.0 + 20.0);
        assert_eq!(exposed(20, true, 1.0), 100.0);
        // Longer than the compute beside it: 120 - 90 are left over, 0.25 of 120 are as much.
        assert_eq!(exposed(120, true, 0.0), 4.0 * 30.0 + 120.0);
        assert_eq!(exposed(120, true, 0.25), 4.0 * 30.0 + 120.0);
        assert_eq!(exposed(120, true, 0.5), 4.0 * 60.0 + 120.0);
    }

    #[test]
    fn what_is_at_most_5_percent_of_the_step_fits() {
        let predict = |reduce, overlapped, fraction| apart(reduce).predict(overlapped, contention(fraction));
        let fits = |exposed_reduce_fraction| Prediction { exposed_reduce_fraction, fits: true };
        let not = |exposed_reduce_fraction| Prediction { exposed_reduce_fraction, fits: false };
        assert_eq!(predict(20, false, 0.5), not(100.0 / 600.0));
        assert_eq!(predict(20, true, 0.5), not(60.0 / 560.0));
        assert_eq!(predict(20, true, 0.0), fits(20.0 / 520.0));
        assert_eq!(predict(5, false, 0.0), fits(25.0 / 525.0));
        // 500 / 9500 is 1 / 19.
        let edge = |reduce_ns| Apart { layers: 1, compute_ns: 0, no_reduce_ns: 9500, reduce_ns };
        assert!(edge(500).predict(true, Contention::NONE).fits);
        assert!(!edge(501).predict(true, Contention::NONE).fits);
    }

    #[test]
    fn a_stack_that_took_no_time_is_not_divided_by() {
        let nothing = Apart { layers: 0, compute_ns: 0, no_reduce_ns: 0, reduce_ns: 0 };
        let none = Prediction { exposed_reduce_fraction: 0.0, fits: true };
        assert_eq!(nothing.predict(true, Contention::NONE), none);
    }
}
