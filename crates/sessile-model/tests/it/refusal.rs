//! Gradients that are not whole are not used.

use std::time::Duration;

use sessile_gtp::{ReduceScatter, Wanted};
use sessile_hal::{Comm, Device, DeviceError};
use sessile_host::{HostDevice, World, WorldOptions};
use sessile_model::{Execution, TrainConfig, Trainer, world_options};
use sessile_runtime::RuntimeError;

use crate::support::{TEXT, tiny};

fn weights(trainer: &Trainer<'_, HostDevice>) -> Vec<Vec<u8>> {
    let runtime = trainer.gtp().runtime_ref();
    let parts = trainer.gtp().weights().iter().flat_map(|weight| &weight.parts);
    parts.map(|part| runtime.device().read(runtime.main(), &part.value).expect("reads")).collect()
}

#[test]
fn the_optimizer_refuses_gradients_of_a_group_that_failed_also_after_the_failure_was_told() {
    for kind in ReduceScatter::ALL {
        let config = TrainConfig { reduce_scatter: Wanted::Exactly(kind), schedule_seed: None, ..tiny() };
        let options = WorldOptions { deadline: Duration::from_secs(20), ..world_options(&config) };
        let ranks = World::new(options).run(|device| {
            let mut trainer = Trainer::new(&config, device.clone(), TEXT, false).expect("trainer");
            trainer.train_step(Execution::Eager).expect("a step");
            let before = weights(&trainer);
            trainer.begin_step().expect("begins");
            trainer.run_microbatches(Execution::Eager).expect("runs");
            let runtime = trainer.gtp().runtime_ref();
            let group = runtime.group(&trainer.gtp().groups()[0].name).expect("group").clone();
            device.wait_stream(runtime.main()).expect("ends");
            runtime.world().exchange(&[]).expect("all have come so far");
            if group.rank() == 0 {
                group.abort();
            }
            runtime.world().exchange(&[]).expect("given up");
            // Told once, here or while it is refused.
            let _ = device.wait_stream(runtime.main());
            for _ in 0..2 {
                let refused = trainer.finish_step();
                let named = matches!(&refused, Err(RuntimeError::Device(DeviceError::Aborted { .. })));
                assert!(named, "{kind}: {refused:?}");
                assert_eq!(weights(&trainer), before, "{kind}: nothing was stepped");
            }
            Ok::<_, RuntimeError>(())
        });
        ranks.into_iter().for_each(|rank| rank.expect("refuses and goes on"));
    }
}
