//! Weight gradients of real models: the baselines' published figures, and what sessile makes of the same traces.

use sessile_plan::{
    PlanOptions, PointKind, Request, Role, Runner, StepCut, Strategy, Trace, baseline_bytes, plan, validate,
};

use crate::support::{CUTS, options, point, request, trace};

/// One weight of a layer: rows and columns of its gradient on one rank, before sharding.
type Weight = (&'static str, u64, u64);

/// Nemotron-4 at a quarter of its size, tensor-parallel 4: hidden 9216, ffn 36864, 48 heads.
const QUARTER: [&[Weight]; 2] =
    [&[("fc2", 9216, 9216), ("fc1", 9216, 9216)], &[("proj", 9216, 2304), ("qkv", 3072, 9216)]];
const LAYERS: u64 = 96;
const SHARDS: u64 = 16;

/// Input and output of one weight's reduce-scatter.
fn reduce_scatter(id: u32, name: &str, (rows, cols): (u64, u64)) -> [Request; 2] {
    let padded = rows.next_multiple_of(16 * SHARDS);
    [(Role::WgradInput, padded), (Role::RsOutput, padded / SHARDS)].map(|(role, rows_here)| {
        let number = u32::from(role == Role::RsOutput);
        let mut made = request(id + number, 1);
        made.spec.weight = name.into();
        made.spec.role = role;
        made.spec.shape = vec![rows_here, cols];
        made.spec.unsharded_shape = vec![rows, cols];
        made.spec.group = Some("dense".into());
        made
    })
}

/// One backward over the weights given, as the framework records it: weight i's reduce-scatter runs beside weight
/// i + 1's gradient, and is waited for after it; the last one outlives the completion point.
fn backward(name: String, weights: &[Weight], id: &mut u32) -> Runner {
    let mut requests = Vec::new();
    let mut points = Vec::new();
    for (at, &(weight, rows, cols)) in weights.iter().enumerate() {
        let [input, output] = reduce_scatter(*id, &format!("{name}.{weight}"), (rows, cols));
        *id += 2;
        let event = 2 * at as u32;
        if at > 0 {
            add(&mut points, event - 1, *id - 3);
        }
        points.push(point(0, PointKind::Acquire(input.id)));
        points.push(point(0, PointKind::Work));
        points.push(point(0, PointKind::Record(event)));
        points.push(point(1, PointKind::Wait(event)));
        points.push(point(1, PointKind::Acquire(output.id)));
        points.push(point(1, PointKind::Collective("dense".into())));
        points.push(point(1, PointKind::Release(input.id)));
        points.push(point(1, PointKind::Record(event + 1)));
        requests.extend([input, output]);
    }
    points.push(point(0, PointKind::Complete));
    add(&mut points, 2 * weights.len() as u32 - 1, *id - 1);
    Runner { name, requests, points }
}

/// The addition of a reduce-scatter's output, once its event is there.
fn add(points: &mut Vec<sessile_plan::Point>, event: u32, output: u32) {
    points.push(point(0, PointKind::Wait(event)));
    points.push(point(0, PointKind::Work));
    points.push(point(0, PointKind::Release(sessile_plan::RequestId(output))));
}

/// A runner for each layer, or for each module of each layer.
pub(crate) fn quarter(by_layer: bool) -> Trace {
    let mut id = 0;
    let mut runners = Vec::new();
    for layer in (0..LAYERS).rev() {
        if by_layer {
            runners.push(backward(format!("layer{layer}"), &QUARTER.concat(), &mut id));
        } else {
            for (module, weights) in ["mlp", "attention"].iter().zip(QUARTER) {
                runners.push(backward(format!("layer{layer}.{module}"), weights, &mut id));
            }
        }
    }
    let launches = (0..runners.len() as u32).collect();
    trace(runners, launches)
}

/// GiB with two decimals, as the figures are published.
fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

#[test]
fn the_published_figures_of_nemotron4_quarter_by_layer() {
    let bytes = baseline_bytes(&quarter(true), StepCut::Barrier);
    assert_eq!(bytes.generations.map(gib), ["0.43", "0.87", "1.30"]);
    assert_eq!(format!("{:.1}", bytes.per_request as f64 / f64::from(1 << 30)), "41.7");
}

#[test]
fn the_published_figures_of_nemotron4_quarter_by_module() {
    let bytes = baseline_bytes(&quarter(false), StepCut::Barrier);
    assert_eq!(bytes.generations.map(gib), ["0.34", "0.43", "1.01"]);
    assert_eq!(format!("{:.1}", bytes.per_request as f64 / f64::from(1 << 30)), "41.7");
}

#[test]
fn a_ring_of_two_holds_two_inputs_of_each_shape() {
    let mut inputs = quarter(false);
    for runner in &mut inputs.runners {
        runner.requests.retain(|request| request.spec.role == Role::WgradInput);
        runner.points.clear();
    }
    assert_eq!(baseline_bytes(&inputs, StepCut::Barrier).ring2.map(gib).as_deref(), Some("0.50"));
}

#[test]
fn sessile_plans_the_model_at_its_bound_under_both_cuts() {
    for by_layer in [true, false] {
        let given = quarter(by_layer);
        for cut in CUTS {
            for depth in 1..=2 {
                let made = plan(&given, &options(Strategy::Sessile, depth, cut)).unwrap();
                assert_eq!(
                    made.bytes(),
                    made.lower_bound_bytes(),
                    "depth {depth} {cut:?} by layer {by_layer}"
                );
                assert_eq!(validate(&given, &made), []);
                let alternating = baseline_bytes(&given, cut).generations[depth as usize - 1];
                assert!(made.bytes() <= alternating);
            }
        }
    }
}

/// At depth 2 a launch waits for the last addition of the launch before the previous one. That launch's last
/// reduce-scatter ended before: the previous launch's first one came after it, and was waited for before completion.
#[test]
fn one_fence_a_launch_is_enough_for_the_model() {
    let made = plan(&quarter(true), &PlanOptions::default()).unwrap();
    assert_eq!(made.fences.len() as u64, LAYERS - 2);
    let last_of_its_runner = |id: u32| id % 8 == 7;
    assert!(made.fences.iter().all(|fence| last_of_its_runner(fence.release.0)), "{:?}", made.fences);
}
