//! The contract's promises, on the CUDA device.

use crate::worlds::{Threads, can_run};

/// Promises about collectives between ranks: NCCL needs a GPU for each.
const COLLECTIVES: [&str; 3] = [
    "work_in_flight_and_graphs_keep_what_they_touch",
    "collectives_run_in_order_across_streams_and_graphs",
    "bad_groups_are_refused",
];

fn worlds(name: &str, ranks: u32) -> Option<Threads> {
    let needed = if COLLECTIVES.contains(&name) { ranks } else { 1 };
    let mut worlds = Threads::new();
    // Only where it is asked for: the kernels that take spans are nodes of their own.
    worlds.options.spans = name == "launches_of_one_graph_never_overlap";
    can_run(name, needed).then_some(worlds)
}

sessile_conformance::promises!(worlds);
