//! The example of a user's own role.

#[path = "../../examples/own_role.rs"]
mod example;

#[test]
fn a_role_of_ones_own_is_planned_captured_and_replayed() {
    let (x, requests) = example::run().expect("it runs");
    assert_eq!(x, [16.0; 4], "1, times 4 in the discovery, times 4 in the replay");
    assert_eq!(requests, ["layer0 activation_checkpoint f32[4] in default"]);
}
