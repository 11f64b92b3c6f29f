//! What was dropped and may still be in use: kept until all work that was enqueued before the drop has ended.
//!
//! During a capture nothing is destroyed: freeing memory, destroying a graph or giving a window back would break the
//! capture, the last of these silently.
//!
//! ```text
//!  bury ──▶ fresh ──(no capture: an event on every stream)──▶ epoch ──(all its events done)──▶ destroyed
//! ```

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use crate::context::{As, Context, RawEvent, RawStream};

/// Something that destroys itself when dropped.
pub(crate) trait Remains: Send {}
impl<T: Send> Remains for T {}

/// What was dropped, oldest first.
#[derive(Default)]
pub(crate) struct Graveyard {
    rows: Mutex<Rows>,
}

#[derive(Default)]
struct Rows {
    fresh: Vec<Box<dyn Remains>>,
    epochs: VecDeque<Epoch>,
}

struct Epoch {
    /// One on each stream, recorded after everything that might use what is buried here.
    events: Vec<RawEvent>,
    buried: Vec<Box<dyn Remains>>,
}

impl Graveyard {
    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what was dropped; makes no call of the driver.
    pub(crate) fn bury(&self, remains: Box<dyn Remains>) {
        self.rows().fresh.push(remains);
    }

    /// Whether nothing is left.
    pub(crate) fn is_empty(&self) -> bool {
        let rows = self.rows();
        rows.fresh.is_empty() && rows.epochs.is_empty()
    }

    /// Destroys what no work uses any more. No capture may be going on.
    pub(crate) fn reap(&self, context: &std::sync::Arc<Context>, streams: &[Weak<RawStream>]) {
        let mut dead = Vec::new();
        {
            let mut rows = self.rows();
            if rows.fresh.is_empty() && rows.epochs.is_empty() {
                return;
            }
            let Ok(_entered) = context.enter() else { return };
            if !rows.fresh.is_empty() {
                let streams = streams.iter().filter_map(Weak::upgrade);
                let marked: Result<Vec<_>, _> = streams
                    .map(|stream| {
                        let event = RawEvent::new(context)?;
                        stream.record(&event, As::Plain)?;
                        Ok::<_, sessile_hal::DeviceError>(event)
                    })
                    .collect();
                // A stream that can't be marked: keep everything, and try again later.
                if let Ok(events) = marked {
                    let buried = std::mem::take(&mut rows.fresh);
                    rows.epochs.push_back(Epoch { events, buried });
                }
            }
            while let Some(epoch) = rows.epochs.front() {
                if !epoch.events.iter().all(|event| event.is_done().unwrap_or(false)) {
                    break;
                }
                dead.extend(rows.epochs.pop_front());
            }
        }
        // Outside the lock: what dies may bury more. In the order in which it was buried.
        dead.into_iter().flat_map(|epoch| epoch.buried).for_each(drop);
    }

    /// Gives everything up without destroying it: work hangs, and a destructor might wait for it.
    pub(crate) fn abandon(&self) {
        let rows = std::mem::take(&mut *self.rows());
        std::mem::forget(rows);
    }
}
