//! Plans every model of the catalog in every variant: bytes, bound, alternating arenas, time.
//!
//! `cargo run --release -p sessile-plan --example survey [WORD...]` prints the rows that contain every word, and sums
//! over them. `repeat=N` among the words makes every model N times as deep.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "an example prints")]

use std::time::Instant;

use sessile_plan::{
    DType, PlanOptions, StepCut, Trace, baseline_bytes,
    models::{KindSet, Kinds, Scope, TraceOptions, model, model_trace},
    plan,
};

fn main() {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let mut repeat = 1;
    words.retain(|word| match word.strip_prefix("repeat=").and_then(|times| times.parse().ok()) {
        Some(times) => {
            repeat = times;
            false
        }
        None => true,
    });
    let mut sums = Sums::default();
    println!("MiB: model, requests, then for each depth: bytes, bound, % above it, generations:depth, ms");
    for (name, trace) in rows(repeat, &words) {
        let generations = baseline_bytes(&trace, StepCut::Barrier).generations;
        let mut line = format!("{name:<52} {:>9}", trace.requests().count());
        for depth in 1..=3 {
            let begun = Instant::now();
            let made = match plan(&trace, &PlanOptions { depth, ..PlanOptions::default() }) {
                Ok(made) => made,
                Err(error) => return eprintln!("{name}: {error}"),
            };
            let milliseconds = begun.elapsed().as_secs_f64() * 1e3;
            let (bytes, bound) = (made.bytes(), made.lower_bound_bytes());
            let gap = 100.0 * (bytes as f64 / bound as f64 - 1.0);
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            let at = depth as usize - 1;
            line += &format!(
                "  {depth}: {:.1} {:.1} {gap:.2} {:.1} {milliseconds:.1}",
                mib(bytes),
                mib(bound),
                mib(generations[at])
            );
            sums.add(at, bytes, bound, generations[at], milliseconds);
        }
        println!("{line}");
    }
    sums.print();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    println!("peak memory of the process: {}", peak.unwrap_or("unknown").trim());
}

/// The rows whose names hold all words.
fn rows(times: u64, words: &[String]) -> Vec<(String, Trace)> {
    let mut models: Vec<_> = [("nemotron4-340b", 0), ("nemotron4-quarter", 0), ("hybrid-mamba-moe", 0)]
        .into_iter()
        .chain([("dsv3", 0), ("dsv3", 1), ("dsv3", 2)])
        .filter_map(|(name, mtp)| model(name, mtp, false).ok())
        .collect();
    models.extend((0..=2).filter_map(|mtp| model("dsv3", mtp, true).ok()));
    for block in models.iter_mut().flat_map(|model| &mut model.blocks) {
        block.repeat *= times;
    }
    let mut rows = Vec::new();
    for model in &models {
        for scope in [Scope::Module, Scope::Layer] {
            for (wgrad_dtype, kinds) in [
                (DType::Bf16, Kinds::Plain),
                (DType::Bf16, Kinds::Fp32),
                (DType::Bf16, Kinds::Registered),
                (DType::F32, Kinds::Plain),
                (DType::F32, Kinds::Registered),
            ] {
                for set in [KindSet::Upstream, KindSet::Own] {
                    if kinds == Kinds::Plain && set == KindSet::Own {
                        continue;
                    }
                    let options = TraceOptions { scope, wgrad_dtype, kinds, set, gathered: false };
                    let name = format!("{} {scope:?} {wgrad_dtype} {kinds:?} {set:?}", model.name);
                    if words.iter().all(|word| name.contains(word.as_str())) {
                        rows.push((name, model_trace(model, &options)));
                    }
                }
            }
        }
    }
    rows
}

#[derive(Default)]
struct Sums {
    rows: u32,
    at_bound: [u32; 3],
    worst: [f64; 3],
    logs: [f64; 3],
    slowest: [f64; 3],
    worse: [u32; 3],
}

impl Sums {
    fn add(&mut self, at: usize, bytes: u64, bound: u64, generations: u64, milliseconds: f64) {
        self.rows += u32::from(at == 0);
        self.at_bound[at] += u32::from(bytes == bound);
        self.worst[at] = self.worst[at].max(100.0 * (bytes as f64 / bound as f64 - 1.0));
        self.logs[at] += (generations as f64 / bytes as f64).ln();
        self.slowest[at] = self.slowest[at].max(milliseconds);
        self.worse[at] += u32::from(bytes > generations);
    }

    fn print(&self) {
        for at in 0..3 {
            println!(
                "depth {}: {} of {} at the bound, worst {:.2} % above; generations/ours {:.3} (geometric mean); \
                 {} worse than generations; slowest {:.1} ms",
                at + 1,
                self.at_bound[at],
                self.rows,
                self.worst[at],
                (self.logs[at] / f64::from(self.rows.max(1))).exp(),
                self.worse[at],
                self.slowest[at]
            );
        }
    }
}
