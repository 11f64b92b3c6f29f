//! What needs a process of its own: NCCL with other settings, PyTorch.

use std::process::{Command, Stdio};

use super::measure::Row;
use crate::{args::ReduceScatterArgs, commands::launch::LAUNCHER, failure::Failure};

/// What frameworks run, as a program for Python.
const TORCH: &str = include_str!("../../../../../../examples/torch/reduce_scatter.py");

fn sizes(args: &ReduceScatterArgs) -> String {
    let sizes: Vec<String> = args.sizes.iter().map(u64::to_string).collect();
    sizes.join(",")
}

/// NCCL's symmetric kernel on so many blocks, which it reads from the environment once a process.
///
/// # Errors
/// That the process failed.
pub(super) fn tuned(args: &ReduceScatterArgs, blocks: u32) -> Result<Vec<Row>, Failure> {
    let failed = |why: String| Failure::Run(format!("NCCL_SYM_CTAS={blocks}: {why}"));
    let program = std::env::current_exe().map_err(|error| failed(error.to_string()))?;
    let output = Command::new(program)
        .args(["bench", "reduce-scatter", "--part", "--sizes", &sizes(args)])
        .args(["--rounds", &args.rounds.to_string()])
        .args(["--ranks", &args.ranks.to_string(), "--gtp", &args.group().to_string()])
        .env("NCCL_SYM_CTAS", blocks.to_string())
        .env(LAUNCHER, std::process::id().to_string())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(output.status.to_string()));
    }
    let mut rows: Vec<Row> =
        serde_json::from_slice(&output.stdout).map_err(|error| failed(error.to_string()))?;
    for row in &mut rows {
        row.variant = row.variant.replacen("symmetric", &format!("symmetric, {blocks} CTAs"), 1);
    }
    Ok(rows)
}

/// PyTorch's multiplication, NCCL and PyTorch's addition, with NCCL at its defaults and on 64 blocks; or why not.
pub(super) fn torch(args: &ReduceScatterArgs) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for (blocks, suffix) in [(None, ""), (Some("64"), ", 64 CTAs")] {
        let mut command = Command::new(&args.python);
        command
            .args(["-c", TORCH, &sizes(args), &args.rounds.to_string(), suffix])
            .args([args.ranks.to_string(), args.group().to_string()])
            .stderr(Stdio::inherit());
        if let Some(blocks) = blocks {
            command.env("NCCL_SYM_CTAS", blocks);
        }
        let output = command.output().map_err(|error| format!("{}: {error}", args.python.display()))?;
        if !output.status.success() {
            return Err(format!("{}: {} (is PyTorch there?)", args.python.display(), output.status));
        }
        let some: Vec<Row> = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
        rows.extend(some);
    }
    Ok(rows)
}
