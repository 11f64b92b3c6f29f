//! Refuses runs that cannot fit into this machine's memory, before anything is allocated.

use std::fs;

use sessile_model::config::{Mode, TrainConfig, VOCAB};

use crate::failure::Failure;

/// Bytes of one parameter on each rank that holds it: FP32 master, gradient and two moments.
const BYTES_PER_PARAMETER: u128 = 16;
/// Bytes of event log and spans that a rank leaves for each layer of a step, somewhat less than was measured.
const LOG_BYTES_PER_LAYER: u128 = 20 << 10;
/// The same for a job of one rank, whose collectives have no peers.
const LOG_BYTES_PER_LAYER_ALONE: u128 = 4 << 10;

/// What takes memory, how much at least, and what to lower.
type Need = (&'static str, u128, String);

/// Compares the least that a run needs with what the machine has free, where that is known.
pub(super) fn check(config: &TrainConfig) -> Result<(), Failure> {
    available_bytes().map_or(Ok(()), |available| fits(config, available.into()))
}

fn fits(config: &TrainConfig, available: u128) -> Result<(), Failure> {
    let needs = needs(config);
    let total: u128 = needs.iter().map(|(_, bytes, _)| bytes).sum();
    let largest = needs.into_iter().max_by_key(|(_, bytes, _)| *bytes);
    let Some((what, most, lower)) = largest.filter(|_| total > available) else { return Ok(()) };
    let gib = |bytes: u128| bytes.div_ceil(1 << 30);
    Err(Failure::Input(format!(
        "the run needs about {} GiB and this machine has {} GiB free: {what} alone need {} GiB; lower {lower}",
        gib(total),
        available >> 30,
        gib(most)
    )))
}

/// The executions are made one after the other, so one's memory is all that is needed at once.
fn needs(config: &TrainConfig) -> [Need; 3] {
    let TrainConfig { layers, hidden, ffn, ranks, gtp, batch, seq, steps, .. } = config;
    [
        (
            "weights and optimizer state",
            state_bytes(config),
            format!("--layers {layers}, --hidden {hidden}, --ffn {ffn} or --ranks {ranks} (--gtp {gtp})"),
        ),
        (
            "activations and logits",
            activation_bytes(config),
            format!(
                "--batch {batch}, --seq {seq}, --microbatches-in-flight {} or --layers {layers}",
                config.microbatches_in_flight
            ),
        ),
        (
            "events of all steps, which the checker needs together,",
            log_bytes(config),
            format!("--steps {steps}, or use --mode eager"),
        ),
    ]
}

fn state_bytes(config: &TrainConfig) -> u128 {
    let (hidden, ffn) = (u128::from(config.hidden), u128::from(config.ffn));
    let layer = 4 * hidden * hidden + 2 * hidden * ffn;
    let parameters = u128::from(config.layers) * layer + 2 * u128::from(VOCAB) * hidden;
    parameters * u128::from(config.ranks / config.gtp.max(1)) * BYTES_PER_PARAMETER
}

fn activation_bytes(config: &TrainConfig) -> u128 {
    let (hidden, ffn) = (u128::from(config.hidden), u128::from(config.ffn));
    // Of each layer, for a token: two FP32 residuals, two norms, queries, keys, values and their result, both sides
    // of the MLP's activation.
    let layer = 8 * hidden + 4 * hidden + 8 * hidden + 4 * ffn;
    // Scratch, FP32 logits and BF16 gradients of them.
    let rest = 14 * hidden + 4 * ffn.max(3 * hidden) + 6 * u128::from(VOCAB);
    let tokens = u128::from(config.seq) * u128::from(config.batch);
    let slots = u128::from(config.ranks) * u128::from(config.microbatches_in_flight);
    tokens * slots * (u128::from(config.layers) * layer + rest)
}

fn log_bytes(config: &TrainConfig) -> u128 {
    if config.mode == Mode::Eager {
        return 0;
    }
    let layers = u128::from(config.layers) * u128::from(config.microbatches) + 1;
    let bytes = if config.ranks == 1 { LOG_BYTES_PER_LAYER_ALONE } else { LOG_BYTES_PER_LAYER };
    u128::from(config.steps) * u128::from(config.ranks) * layers * bytes
}

/// This machine's free memory, where the system tells.
fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_what_to_lower() {
        let default = TrainConfig::default;
        let fits = |config: &TrainConfig| fits(config, 8 << 30);
        assert!(fits(&default()).is_ok());
        let cases = [
            (TrainConfig { layers: 256, hidden: 8192, ffn: 65536, ..default() }, "lower --layers 256"),
            (TrainConfig { seq: 8192, batch: 64, ..default() }, "lower --batch 64"),
            (
                TrainConfig { seq: 8192, microbatches: 16, microbatches_in_flight: 16, ..default() },
                "--microbatches-in-flight 16",
            ),
            (TrainConfig { steps: 1_000_000, ..default() }, "lower --steps 1000000"),
        ];
        for (config, words) in cases {
            let error = fits(&config).unwrap_err().to_string();
            assert!(error.contains(words), "{words}: {error}");
        }
        assert!(fits(&TrainConfig { steps: 1_000_000, mode: Mode::Eager, ..default() }).is_ok());
    }
}
