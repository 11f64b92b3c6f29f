//! The kernels' numbers, held against definitions.

use sessile_conformance::kernels;

use crate::worlds::{Threads, can_run};

macro_rules! definitions {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            fn $name() {
                if can_run(stringify!($name), 1) {
                    kernels::$name(&Threads::new());
                }
            }
        )*
    };
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
