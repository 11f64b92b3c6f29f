//! The tables of a simulation.

use super::document::{Document, Phase, Simulation};
use crate::{
    failure::Failure,
    ui::{Lines, clean, count, ratio, some, table},
};

/// Prints what was simulated, where the time went, what the buffers take, and what was left out.
pub(super) fn print(document: &Document, quiet: bool) -> Result<(), Failure> {
    let mut lines = Lines::new(quiet);
    let Some(first) = document.runs.first() else { return Ok(()) };
    lines.line(format_args!(
        "{}, {} scope: {} of {}, plan {}",
        clean(&document.model),
        match document.scope {
            sessile_model::config::GraphScope::Module => "module",
            sessile_model::config::GraphScope::Layer => "layer",
        },
        some(first.requests, "request"),
        some(first.runners, "runner"),
        &first.plan_digest[..16.min(first.plan_digest.len())],
    ))?;
    lines.line(format_args!(
        "{}; {}",
        some(first.ranks.into(), "rank"),
        match first.ran {
            1 if first.ranks > 1 => "one stands for all".to_owned(),
            ran => format!("{} ran", some(ran.into(), "rank")),
        }
    ))?;
    for group in &document.groups {
        lines.line(format_args!(
            "group {}: {} ranks, {} apart, {} ({}), links of {}",
            clean(&group.name),
            group.size,
            group.stride,
            group.kind,
            group.why,
            if group.in_node { "a node" } else { "the network" }
        ))?;
    }
    lines.line("")?;
    lines.line(times(first))?;
    lines.line("")?;
    lines.line(memory(first))?;
    if let Some(auto) = &document.auto {
        lines.line("")?;
        lines.line(auto.table("backward"))?;
    }
    if document.runs.len() > 1 {
        lines.line("")?;
        lines.line(scaling(&document.runs))?;
    }
    lines.line("")?;
    let device = &document.device;
    lines.line(format_args!(
        "assumed: {} TFLOP/s, memory {} GB/s, links {} GB/s in a node of {} ranks and {} GB/s between nodes, {} us a \
         collective and {} us a hop between replicas, {} us a kernel, {} us an enqueue, {} us a graph, contention {}",
        device.gemm_tflops,
        device.memory_gbs,
        device.node_gbs,
        device.gpus_per_node,
        device.network_gbs,
        device.latency_us,
        device.hop_us,
        device.kernel_us,
        device.launch_us,
        device.graph_launch_us,
        device.contention
    ))?;
    lines.line("left out:")?;
    for what in &document.leaves_out {
        lines.line(format_args!("- {what}"))?;
    }
    Ok(())
}

fn milliseconds(ns: u64) -> String {
    format!("{:.3}", ns as f64 / 1e6)
}

fn percent(fraction: f64) -> String {
    format!("{:.2}", 100.0 * fraction)
}

fn times(run: &Simulation) -> String {
    let row = |name: &str, phase: &Phase| {
        vec![
            name.to_owned(),
            milliseconds(phase.total_ns),
            milliseconds(phase.compute_ns),
            milliseconds(phase.communication_ns),
            milliseconds(phase.exposed_ns),
            milliseconds(phase.idle_ns),
            percent(phase.exposed_fraction),
        ]
    };
    let rows = vec![
        row("backward", &run.backward),
        row("sums over replicas", &run.sync),
        row("optimizer", &run.optimizer),
    ];
    let head = ["phase", "ms", "kernels", "collectives", "exposed", "idle", "exposed %"];
    table(&head, 1, rows)
}

fn memory(run: &Simulation) -> String {
    let mut rows = Vec::new();
    for domain in &run.domains {
        let bound = count(domain.lower_bound_bytes);
        rows.push(vec![format!("arena {}", domain.name), count(domain.bytes), String::new(), bound]);
    }
    let mut row = |name: &str, bytes: Option<u64>| {
        let shown = bytes.map_or_else(|| "cannot capture".to_owned(), count);
        let to = bytes.map_or_else(String::new, |bytes| ratio(bytes, run.bytes));
        rows.push(vec![name.to_owned(), shown, to, String::new()]);
    };
    row("all arenas", Some(run.bytes));
    row("generations:1", Some(run.baselines.generations1));
    row("generations:2", Some(run.baselines.generations2));
    row("generations:3", Some(run.baselines.generations3));
    row("ring:2", run.baselines.ring2);
    row("per-request", Some(run.baselines.per_request));
    row("weights, gradients, optimizer, scratch", Some(run.persistent_bytes));
    table(&["memory of rank 0", "bytes", "to arenas", "lower bound"], 1, rows)
}

fn scaling(runs: &[Simulation]) -> String {
    let row = |run: &Simulation| {
        vec![
            count(run.ranks),
            milliseconds(run.backward.total_ns),
            milliseconds(run.sync.total_ns),
            milliseconds(run.optimizer.total_ns),
            milliseconds(run.step_ns),
            percent(run.weak_scaling),
        ]
    };
    let head = ["ranks", "backward ms", "sums ms", "optimizer ms", "step ms", "weak scaling %"];
    table(&head, 0, runs.iter().map(row).collect())
}
