//! What the device contract promises, as tests that every device runs.
//!
//! Each function of [`suite`] is one promise of `sessile_hal`. A device says how to run a program on every rank
//! ([`Worlds`]) and makes a test of each with [`promises!`].
#![forbid(unsafe_code)]

pub mod kernels;
pub mod suite;
mod support;

pub use support::*;

use sessile_hal::Device;

/// A way to run one program a rank.
pub trait Worlds {
    /// The device under test.
    type Device: Device;

    /// Runs the program on every rank; panics if it does.
    fn run(&self, ranks: u32, program: impl Fn(Self::Device) + Sync);
}

/// One test for each promise. `$worlds` makes a [`Worlds`], or `None` if the test can't run here (it has said why).
#[macro_export]
macro_rules! promises {
    ($worlds:expr) => {
        $crate::promises! { @each $worlds;
            ranks_know_their_place: 3,
            allocations_have_identity_and_alignment: 1,
            tickets_count_every_enqueue_from_one: 1,
            a_stream_runs_in_order: 1,
            a_wait_observes_the_latest_record_before_it: 1,
            write_and_read_wait_for_their_stream: 1,
            a_captured_graph_runs_only_when_launched: 1,
            capture_keeps_order_and_edges: 1,
            a_launch_occupies_its_stream: 1,
            launches_of_one_graph_never_overlap: 1,
            external_waits_observe_the_record_before_their_launch: 1,
            work_in_flight_and_graphs_keep_what_they_touch: 2,
            collectives_run_in_order_across_streams_and_graphs: 2,
            sums_in_windows_are_added_or_stored: 2,
            windows_need_their_domain_and_equal_sizes: 2,
            operands_that_do_not_fit_are_refused: 1,
            bad_groups_are_refused: 3,
        }
    };
    (@each $worlds:expr; $($name:ident: $ranks:expr),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                if let Some(worlds) = $worlds(stringify!($name), $ranks) {
                    $crate::suite::$name(&worlds);
                }
            }
        )*
    };
}
