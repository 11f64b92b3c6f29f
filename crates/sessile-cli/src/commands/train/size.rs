//! Refuses models that cannot fit into this machine's memory, before anything is allocated.

use std::fs;

use sessile_model::config::{Mode, TrainConfig, VOCAB};

use crate::failure::Failure;

/// Bytes of one parameter on each rank that holds it: FP32 master, gradient and two moments.
const BYTES_PER_PARAMETER: u128 = 16;

/// Compares the least that a run needs with what the machine has, where that is known.
pub(super) fn check(config: &TrainConfig) -> Result<(), Failure> {
    let Some(memory) = machine_bytes() else { return Ok(()) };
    let needed = needed_bytes(config);
    if needed <= u128::from(memory) {
        return Ok(());
    }
    let gib = |bytes: u128| bytes.div_ceil(1 << 30);
    Err(Failure::Input(format!(
        "--layers {} --hidden {} --ffn {} --ranks {} --gtp {} needs at least {} GiB and this machine has {} GiB: \
         lower --layers, --hidden or --ffn",
        config.layers,
        config.hidden,
        config.ffn,
        config.ranks,
        config.gtp,
        gib(needed),
        gib(memory.into())
    )))
}

/// Optimizer state of all ranks, for each execution that is made.
fn needed_bytes(config: &TrainConfig) -> u128 {
    let (hidden, ffn) = (u128::from(config.hidden), u128::from(config.ffn));
    let layer = 4 * hidden * hidden + 2 * hidden * ffn;
    let parameters = u128::from(config.layers) * layer + 2 * u128::from(VOCAB) * hidden;
    let replicas = u128::from(config.ranks / config.gtp.max(1));
    let executions = if config.mode == Mode::Both { 2 } else { 1 };
    parameters * replicas * executions * BYTES_PER_PARAMETER
}

/// This machine's memory, where the system tells.
fn machine_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_fits_and_the_largest_of_everything_does_not() {
        assert!(check(&TrainConfig::default()).is_ok());
        let config = TrainConfig { layers: 256, hidden: 8192, ffn: 65536, ..TrainConfig::default() };
        assert!(needed_bytes(&config) > 1 << 40);
    }
}
