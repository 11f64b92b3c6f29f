//! `bench graphs`: what it predicts from what it measured. Times differ from run to run, so sizes are far to either side.

use serde_json::Value;

use crate::{sandbox::Sandbox, schema::validate};

/// The document of one stack, and what was printed.
fn bench(options: &str) -> (Value, String) {
    let sandbox = Sandbox::new();
    let line = format!("bench graphs --steps 2 --rounds 3 --reduce-scatter fp32_a2a --json b.json {options}");
    let text = sandbox.run(&line).good();
    let document = sandbox.read("b.json");
    validate(&document, "bench-graphs.schema.json");
    (serde_json::from_str(&document).unwrap(), text)
}

fn row<'a>(document: &'a Value, variant: &str) -> &'a Value {
    let mut rows = document["stacks"][0]["variants"].as_array().unwrap().iter();
    rows.find(|row| row["variant"] == variant).unwrap()
}

/// The arithmetic of the model, once more, on the numbers in the document.
#[test]
fn predictions_follow_from_what_was_measured_and_contention() {
    for contention in [0.0, 0.5, 1.0] {
        let (document, _) = bench(&format!("--layers 4 --hidden 64 --tokens 64 --contention {contention}"));
        assert_eq!(document["contention"], contention);
        let layer = |variant| row(&document, variant)["step_ns"].as_f64().unwrap() / 4.0;
        let (compute, reduce, without) = (layer("compute"), layer("reduce"), 4.0 * layer("no_reduce"));
        let beside = (contention * reduce).max(reduce - compute);
        for (variant, exposed) in [("depth_1", 4.0 * reduce), ("depth_2", 3.0 * beside + reduce)] {
            let predicted = &row(&document, variant)["predicted"];
            let fraction = predicted["exposed_reduce_fraction"].as_f64().unwrap();
            assert!((fraction - exposed / (without + exposed)).abs() < 1e-9, "{variant}: {predicted}");
            assert_eq!(predicted["fits"], fraction <= 0.05, "{variant}: {predicted}");
        }
        for variant in ["eager", "serial", "depth_2_borders", "no_reduce", "compute", "reduce"] {
            assert!(row(&document, variant)["predicted"].is_null(), "{variant}");
        }
    }
}

#[test]
fn small_gradients_behind_much_compute_fit_and_bare_ones_do_not() {
    let (much, text) = bench("--layers 8 --hidden 8 --tokens 65536 --contention 0");
    assert_eq!(row(&much, "depth_2")["predicted"]["fits"], true, "{text}");
    assert!(text.lines().any(|line| line.contains(" depth_2 ") && line.contains(" yes ")), "{text}");
    let (bare, text) = bench("--layers 8 --hidden 8 --tokens 1");
    assert_eq!(row(&bare, "depth_1")["predicted"]["fits"], false, "{text}");
    assert!(text.lines().any(|line| line.contains(" depth_1 ") && line.contains(" no ")), "{text}");
    assert!(text.contains("with contention 0.5; fits: at most 5 % are exposed"), "{text}");
}

#[test]
fn reduce_scatters_alone_have_neither_gradients_nor_compute() {
    let (document, _) = bench("--layers 4 --hidden 64 --tokens 8");
    let reduce = row(&document, "reduce");
    assert!(reduce["step_ns"].as_u64().unwrap() > 0);
    assert_eq!(reduce["digest"], "");
    assert!(reduce["exposed_fraction"].is_null() && reduce["exposed_reduce_fraction"].is_null());
    assert_eq!(document["stacks"][0]["equal_bits"], true);
}
