//! The contract's promises, on the host device in every mode.

use sessile_host::{HostDevice, World};

use crate::conformance::{self, Worlds};
use crate::support::all_modes;

struct EveryMode;

impl Worlds for EveryMode {
    type Device = HostDevice;

    fn run(&self, ranks: u32, program: impl Fn(HostDevice) + Sync) {
        for options in all_modes(ranks) {
            let world = World::new(options.clone());
            let results = world.run(|device| {
                program(device);
                Ok::<(), ()>(())
            });
            for result in results {
                if let Err(why) = result {
                    panic!("{options:?}: {why:?}");
                }
            }
            for rank in 0..ranks {
                assert_eq!(world.live_bytes(rank), 0, "{options:?}: everything was dropped");
            }
        }
    }
}

macro_rules! promises {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                conformance::$name(&EveryMode);
            }
        )*
    };
}

promises! {
    ranks_know_their_place,
    allocations_have_identity_and_alignment,
    tickets_count_every_enqueue_from_one,
    a_stream_runs_in_order,
    a_wait_observes_the_latest_record_before_it,
    write_and_read_wait_for_their_stream,
    a_captured_graph_runs_only_when_launched,
    capture_keeps_order_and_edges,
    a_launch_occupies_its_stream,
    launches_of_one_graph_never_overlap,
    external_waits_observe_the_record_before_their_launch,
    work_in_flight_and_graphs_keep_what_they_touch,
    collectives_run_in_order_across_streams_and_graphs,
    windows_need_their_domain_and_equal_sizes,
    operands_that_do_not_fit_are_refused,
    bad_groups_are_refused,
}
