//! Worker threads.

use crate::sync::{Arc, lock, wait};
use crate::world::Core;

/// Takes ready tasks until the world shuts down.
pub(crate) fn work(core: &Arc<Core>) {
    let mut engine = lock(&core.engine);
    loop {
        if engine.shutdown {
            return;
        }
        // A task whose bytes are in use (the program has a race) waits its turn; the next one goes ahead.
        let job = (0..engine.ready.len()).find_map(|index| engine.claim(index));
        let Some(job) = job else {
            engine = wait(&core.work, engine);
            continue;
        };
        engine.running += 1;
        drop(engine);
        let (tasks, result) = job.run(true);
        engine = lock(&core.engine);
        engine.running -= 1;
        engine.complete(&tasks, result);
        engine.settle();
        // This worker takes one itself. One that waited for these bytes may go too.
        engine.fresh = engine.ready.len().saturating_sub(1);
        core.poke(&mut engine);
        core.advance(&mut engine);
        if engine.ready.is_empty() && engine.running == 0 {
            core.idle.notify_all();
        }
    }
}
