//! The contract's promises, on the host device in every mode.

use sessile_conformance::Worlds;
use sessile_host::{HostDevice, World, WorldOptions};

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

sessile_conformance::promises!(|_: &str, _: u32| Some(EveryMode));

macro_rules! definitions {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                sessile_conformance::kernels::$name(&OneThread);
            }
        )*
    };
}

/// One worker thread: numbers do not depend on the mode.
struct OneThread;

impl Worlds for OneThread {
    type Device = HostDevice;

    fn run(&self, ranks: u32, program: impl Fn(HostDevice) + Sync) {
        let world = World::new(WorldOptions::threads(ranks, 1));
        let results = world.run(|device| {
            program(device);
            Ok::<(), ()>(())
        });
        for result in results {
            result.unwrap_or_else(|why| panic!("{why:?}"));
        }
    }
}

definitions! {
    elementwise_kernels_give_the_pinned_bits,
    sums_of_parts_run_in_order,
    matrix_products_match_their_definition,
    norms_losses_and_activations_match_their_definitions,
    attention_and_its_gradient_match_their_definition,
    embeddings_gather_and_sum_in_order,
    experts_are_routed_and_combined,
    ids_out_of_range_are_told_at_the_next_wait,
}
