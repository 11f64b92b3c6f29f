//! How long planning takes: models of the catalog, and thousands of requests of sizes without a pattern.
//!
//! `cargo bench -p sessile-plan`

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sessile_plan::{
    PlanOptions, Trace,
    models::{Block, Model, Module, TraceOptions, Weight, model, model_trace},
    plan, validate,
};

/// Backwards of five weights each, of sizes that vary without a pattern: ten requests a runner.
fn varied(runners: u64) -> Trace {
    let size = |at: u64| (at.wrapping_mul(2_654_435_761) >> 20 & 63) + 1;
    let weight = |at: u64| Weight {
        name: format!("w{at}"),
        rows: 256 * size(at),
        cols: 256,
        group: "dense".into(),
        experts: None,
        uses: 1,
        wgrad_dtype: None,
    };
    let block = |r: u64| {
        let weights = (5 * r..5 * r + 5).map(weight).collect();
        Block { name: format!("r{r}"), repeat: 1, modules: vec![Module { name: "m".into(), weights }] }
    };
    let blocks = (0..runners).map(block).collect();
    let model = Model { name: "varied".into(), groups: [("dense".into(), 16)].into(), blocks };
    model_trace(&model, &TraceOptions::default())
}

fn planning(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    group.sample_size(10);
    for runners in [1000, 10_000] {
        let trace = varied(runners);
        let requests = trace.requests().count() as u64;
        group.throughput(Throughput::Elements(requests));
        for depth in 1..=3 {
            let options = PlanOptions { depth, ..PlanOptions::default() };
            group.bench_with_input(
                BenchmarkId::new(format!("{requests} requests"), format!("depth {depth}")),
                &trace,
                |bencher, trace| bencher.iter(|| plan(trace, &options)),
            );
        }
    }
    for name in ["nemotron4-340b", "hybrid-mamba-moe", "dsv3"] {
        let Ok(model) = model(name, 0, false) else { continue };
        let trace = model_trace(&model, &TraceOptions::default());
        group.throughput(Throughput::Elements(trace.requests().count() as u64));
        group.bench_function(name, |bencher| bencher.iter(|| plan(&trace, &PlanOptions::default())));
    }
    group.finish();
}

fn validation(criterion: &mut Criterion) {
    let trace = varied(1000);
    let Ok(made) = plan(&trace, &PlanOptions::default()) else { return };
    let mut group = criterion.benchmark_group("validate");
    group.sample_size(10);
    group.bench_function("10000 requests, depth 2", |bencher| bencher.iter(|| validate(&trace, &made)));
    group.finish();
}

criterion_group!(benches, planning, validation);
criterion_main!(benches);
