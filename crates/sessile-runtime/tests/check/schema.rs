//! The published schema and the reader agree.

use serde_json::{Value, json};
use sessile_runtime::log::{LOG_SCHEMA, Work, read_log, write_log};

use crate::build::{Rank, job, kernel, node, read, update, write};

fn sample() -> Value {
    let mut rank = Rank::new(0, 2);
    let graph = rank.graph(
        "g",
        vec![
            kernel("op", &[read((0, 0), (0, 8)), write((0, 1), (0, 8)), update((0, 2), (0, 8))], &[]),
            node(Work::Collective { comm: 0, kind: "all_gather".into() }, "", &[], &[0]),
            node(Work::Record(1), "", &[], &[1]),
            node(Work::Wait(1), "", &[], &[1]),
            node(Work::Empty, "", &[], &[2, 3]),
        ],
    );
    rank.launch(graph, 0);
    rank.record(1, 2);
    rank.host(0, &[read((0, 0), (0, 8))]);
    rank.exchange();
    let mut bytes = Vec::new();
    write_log(&job(vec![rank]), &mut bytes).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

#[test]
fn what_is_written_fits_the_schema_and_what_is_spoilt_fits_neither() {
    let schema = jsonschema::validator_for(&serde_json::from_str(LOG_SCHEMA).unwrap()).unwrap();
    let good = sample();
    assert!(
        schema.is_valid(&good),
        "{:?}",
        schema.iter_errors(&good).map(|e| e.to_string()).collect::<Vec<_>>()
    );
    for (pointer, bad) in [
        ("/schema", json!("sessile.plan")),
        ("/version", json!(2)),
        ("/ranks", json!({})),
        ("/ranks/0/rank", json!(-1)),
        ("/ranks/0/rank", json!(1.5)),
        ("/ranks/0/streams/0", json!(7)),
        ("/ranks/0/memories/0/arena", json!("yes")),
        ("/ranks/0/graphs/0/nodes/0/work", json!("op")),
        ("/ranks/0/graphs/0/nodes/0/work", json!({"op": "a", "wait": 1})),
        ("/ranks/0/graphs/0/nodes/0/accesses/0/mode", json!("readwrite")),
        ("/ranks/0/graphs/0/nodes/0/accesses/0/start", json!(null)),
        ("/ranks/0/graphs/0/nodes/0/dependencies", json!(["0"])),
        ("/ranks/0/entries/0", json!({"sleep": {}})),
        ("/ranks/0/entries/0/launch", json!({"ticket": 1, "stream": 0, "graph": 0, "extra": 1})),
    ] {
        let mut spoilt = good.clone();
        *spoilt.pointer_mut(pointer).unwrap() = bad.clone();
        assert!(!schema.is_valid(&spoilt), "{pointer}: {bad} fits the schema");
        assert!(read_log(spoilt.to_string().as_bytes()).is_err(), "{pointer}: {bad} is read");
    }
}
