//! Refuses runs that cannot fit into this machine's memory, before anything is allocated.

use std::fs;

use sessile_cuda::kernel::MOST_HEAD_DIM;
use sessile_model::{
    ReduceScatter, Repeat, Wanted,
    config::{Mode, TrainConfig, VOCAB},
};

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

/// The event log of all ranks, which rank 0 of a job on GPUs gathers into its machine's memory.
pub(super) fn check_log(config: &TrainConfig) -> Result<(), Failure> {
    available_bytes().map_or(Ok(()), |available| log_fits(config, available.into()))
}

fn log_fits(config: &TrainConfig, available: u128) -> Result<(), Failure> {
    let [.., log] = needs(config);
    enough(&[log], available, "this machine")
}

/// What kernels of GPUs can't do.
pub(super) fn check_shapes(config: &TrainConfig) -> Result<(), Failure> {
    let TrainConfig { hidden, heads, .. } = config;
    if hidden / heads > MOST_HEAD_DIM {
        return Err(Failure::Input(format!(
            "--heads {heads}: a head of --hidden {hidden} has {} columns, and attention on GPUs has at most {MOST_HEAD_DIM}; use \
             --heads {} or more",
            hidden / heads,
            hidden.div_ceil(MOST_HEAD_DIM)
        )));
    }
    Ok(())
}

/// The same for one rank's GPU; its share of what the host would hold for all.
pub(super) fn check_gpu(config: &TrainConfig, free: u64) -> Result<(), Failure> {
    let [state, buffers, activations, _] = needs(config);
    let needs = [state, buffers, activations]
        .map(|(what, bytes, lower)| (what, bytes / u128::from(config.ranks), lower));
    enough(&needs, free.into(), "the GPU")
}

fn fits(config: &TrainConfig, available: u128) -> Result<(), Failure> {
    enough(&needs(config), available, "this machine")
}

fn enough(needs: &[Need], available: u128, whose: &str) -> Result<(), Failure> {
    let total: u128 = needs.iter().map(|(_, bytes, _)| bytes).sum();
    let largest = needs.iter().max_by_key(|(_, bytes, _)| *bytes);
    let Some((what, most, lower)) = largest.filter(|_| total > available) else { return Ok(()) };
    let gib = |bytes: u128| bytes.div_ceil(1 << 30);
    Err(Failure::Input(format!(
        "the run needs about {} GiB and {whose} has {} GiB free: {what} alone need {} GiB; lower {lower}",
        gib(total),
        available >> 30,
        gib(*most)
    )))
}

/// The executions are made one after the other, so one's memory is all that is needed at once.
fn needs(config: &TrainConfig) -> [Need; 4] {
    let TrainConfig { layers, hidden, ffn, ranks, gtp, batch, steps, experts, .. } = config;
    let seq = config.longest();
    let parameters = Parameters::of(config);
    let widths = format!("--layers {layers}, --hidden {hidden}, --ffn {ffn}");
    let widths = if *experts > 0 { format!("{widths}, --experts {experts}") } else { widths };
    [
        (
            "weights and optimizer state",
            parameters.state_bytes(config),
            format!("{widths} or --ranks {ranks} (--gtp {gtp})"),
        ),
        (
            "buffers of collectives",
            parameters.buffer_bytes(config),
            format!("--hidden {hidden}, --ffn {ffn} or --ranks {ranks}"),
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

/// Layers with a mixture of experts.
fn moe_layers(config: &TrainConfig) -> u128 {
    (0..config.layers).filter(|&layer| config.is_moe(layer)).count() as u128
}

/// Numbers of parameters of the whole model.
struct Parameters {
    dense: u128,
    experts: u128,
    /// Of them used more than once by a backward.
    repeated: u128,
    /// Of the largest weight, all its experts together.
    largest: u128,
}

impl Parameters {
    fn of(config: &TrainConfig) -> Parameters {
        let (hidden, ffn) = (u128::from(config.hidden), u128::from(config.ffn));
        let (layers, moe) = (u128::from(config.layers), moe_layers(config));
        let experts = u128::from(config.experts);
        let (attention, mlp, table) = (4 * hidden * hidden, 2 * hidden * ffn, u128::from(VOCAB) * hidden);
        let (mtp, uses) = (u128::from(config.mtp.min(1)), u128::from(config.mtp.min(2)));
        Parameters {
            dense: (layers + mtp) * attention
                + (layers - moe + mtp) * mlp
                + moe * experts * hidden
                + 2 * table,
            experts: moe * experts * mlp,
            repeated: mtp * table + (uses / 2) * (attention + mlp),
            largest: (3 * hidden * hidden).max(table).max(hidden * ffn * if moe > 0 { experts } else { 1 }),
        }
    }

    /// Masters, moments and gradients of all ranks, and local sums of repeated weights.
    fn state_bytes(&self, config: &TrainConfig) -> u128 {
        let replicas = |group: u32| u128::from(config.ranks / group.max(1));
        let held =
            self.dense * replicas(config.gtp) + self.experts * replicas(config.egtp.unwrap_or(config.gtp));
        let sums = match config.repeat {
            Repeat::ReduceOnce => 4 * self.repeated * u128::from(config.ranks),
            Repeat::Distinct | Repeat::Drain => 0,
        };
        held * BYTES_PER_PARAMETER + sums
    }

    /// What one weight needs at least: gathered in BF16, its gradient on the wire, and what an all-to-all brings.
    fn buffer_bytes(&self, config: &TrainConfig) -> u128 {
        let wire = u128::from(config.wgrad_dtype.size());
        let kinds = [config.reduce_scatter, config.expert_reduce_scatter.unwrap_or(config.reduce_scatter)];
        let scratch = if kinds.contains(&Wanted::Exactly(ReduceScatter::Fp32A2a)) { wire } else { 0 };
        // Eager pools stay when graphs have arenas.
        let executions = if config.mode == Mode::Eager { 1 } else { 2 };
        executions * self.largest * (2 + wire + scratch) * u128::from(config.ranks)
    }
}

fn activation_bytes(config: &TrainConfig) -> u128 {
    let (hidden, ffn, experts) =
        (u128::from(config.hidden), u128::from(config.ffn), u128::from(config.experts));
    let (moe, mtp) = (moe_layers(config), u128::from(config.mtp));
    let layers = u128::from(config.layers) + mtp;
    // Of each layer, for a token: two FP32 residuals, two norms, queries, keys, values and their result.
    let layer = 8 * hidden + 4 * hidden + 8 * hidden;
    // Both sides of the MLP's activation; with experts each has its own, and what it gives.
    let mlps = (layers - moe) * 4 * ffn + moe * experts * (4 * ffn + 2 * hidden + 8);
    let moe_scratch = if moe > 0 { experts * (4 * ffn + 2 * hidden + 6) + 4 * hidden } else { 0 };
    // Scratch, FP32 logits; of each prediction its norm and the BF16 gradient of its logits.
    let rest = 8 * hidden + 4 * ffn.max(3 * hidden) + 4 * u128::from(VOCAB) + moe_scratch;
    let predictions = (1 + mtp) * (6 * hidden + 2 * u128::from(VOCAB));
    let tokens = u128::from(config.longest()) * u128::from(config.batch);
    let slots = u128::from(config.ranks) * u128::from(config.microbatches_in_flight);
    tokens * slots * (layers * layer + mlps + rest + predictions)
}

fn log_bytes(config: &TrainConfig) -> u128 {
    if config.mode == Mode::Eager {
        return 0;
    }
    let layers = u128::from(config.layers + config.mtp) * u128::from(config.microbatches) + 1;
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
    fn an_event_log_that_does_not_fit_is_refused_whatever_gpus_have() {
        let shape = |steps, mode| TrainConfig { steps, mode, ..TrainConfig::default() };
        assert!(log_fits(&shape(1000, Mode::Both), 8 << 30).is_ok());
        let error = log_fits(&shape(1_000_000, Mode::Both), 8 << 30).unwrap_err().to_string();
        assert!(error.ends_with("lower --steps 1000000, or use --mode eager"), "{error}");
        assert!(log_fits(&shape(1_000_000, Mode::Eager), 8 << 30).is_ok());
    }

    #[test]
    fn heads_that_are_too_wide_for_gpus_are_refused_with_how_many_would_do() {
        let shape = |hidden, heads| TrainConfig { hidden, heads, ..TrainConfig::default() };
        assert!(check_shapes(&shape(1024, 8)).is_ok());
        let error = check_shapes(&shape(2048, 8)).unwrap_err().to_string();
        assert!(error.contains("has 256 columns") && error.ends_with("use --heads 16 or more"), "{error}");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_to_lower() {
        let default = TrainConfig::default;
        let fits = |config: &TrainConfig| fits(config, 8 << 30);
        assert!(fits(&default()).is_ok());
        let cases = [
            (TrainConfig { layers: 256, hidden: 8192, ffn: 65536, ..default() }, "lower --layers 256"),
            (TrainConfig { seq: vec![8192], batch: 64, ..default() }, "lower --batch 64"),
            (
                TrainConfig { seq: vec![8192], microbatches: 16, microbatches_in_flight: 16, ..default() },
                "--microbatches-in-flight 16",
            ),
            (TrainConfig { experts: 128, ffn: 4096, hidden: 1024, ..default() }, "--experts 128"),
            (
                TrainConfig {
                    mtp: 2,
                    repeat: Repeat::ReduceOnce,
                    hidden: 8192,
                    ranks: 64,
                    gtp: 64,
                    ..default()
                },
                "--hidden 8192",
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
