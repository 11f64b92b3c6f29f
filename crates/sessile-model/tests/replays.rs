//! Ten thousand replays: addresses, arena bytes and host memory stay flat. A process of its own, since other tests
//! would move its memory.
#![forbid(unsafe_code)]

use sessile_hal::Device;
use sessile_host::World;
use sessile_model::{Execution, TrainConfig, Trainer, world_options};
use sessile_runtime::RuntimeError;

const TEXT: &[u8] = include_bytes!("../src/lib.rs");

/// Replays of one rank at least.
const REPLAYS: u64 = 10_000;

/// Memory that is ours, in KiB, where the system tells.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("RssAnon:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[expect(clippy::print_stderr, reason = "a figure for people, and the reason where one is missing")]
#[test]
fn ten_thousand_replays_leave_addresses_arena_bytes_and_host_memory_flat() {
    let config = TrainConfig {
        ranks: 2,
        gtp: 2,
        layers: 1,
        hidden: 16,
        ffn: 16,
        heads: 2,
        seq: vec![4],
        batch: 1,
        steps: 2,
        ..TrainConfig::default()
    };
    config.check().expect("a small model");
    let mut options = world_options(&config);
    options.record_spans = false;
    let world = World::new(options);
    let ended = world.run(|device| -> Result<_, RuntimeError> {
        let rank = device.rank();
        let mut trainer = Trainer::new(&config, device, TEXT, true)?;
        trainer.train_step(Execution::Discover)?;
        trainer.seal()?;
        trainer.capture_all()?;
        let mut early = None;
        let mut steps = 0_u32;
        loop {
            trainer.train_step(Execution::Replay)?;
            steps += 1;
            let runtime = trainer.gtp().runtime_ref();
            let replays = runtime.counters().replays;
            let now = (runtime.arena_addresses(), world.live_bytes(rank), runtime.eager_bytes());
            // Caches and pools have filled by a tenth of the way.
            if replays >= REPLAYS / 10 && early.is_none() {
                early = Some((now.clone(), resident()));
            }
            if replays >= REPLAYS {
                return Ok((early, now, resident(), replays, runtime.counters().order_deviations, steps));
            }
        }
    });
    for result in ended {
        let (early, late, resident, replays, deviations, steps) = result.expect("every step ends");
        let (early, resident_early) = early.expect("noted on the way");
        assert_eq!(early, late, "addresses, bytes that live, bytes of eager pools");
        assert_eq!(deviations, 0);
        eprintln!("{replays} replays in {steps} steps, {resident_early:?} then {resident:?} KiB resident");
        match (resident_early, resident) {
            // Allocators move by pages; a leak of 64 bytes a replay would be 560 KiB.
            (Some(early), Some(late)) => assert!(late <= early + 512, "{early} KiB grew to {late} KiB"),
            _ => eprintln!("host memory not compared: this system has no /proc/self/status"),
        }
    }
}
