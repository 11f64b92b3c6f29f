//! What all handles of one rank's device share, and how it waits.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use sessile_hal::{DeviceError, Ticket};

use crate::capture::Capture;
use crate::comm::CommCell;
use crate::context::{As, Context, RawEvent, RawStream};
use crate::device::DeviceOptions;
use crate::graveyard::Graveyard;
use crate::kernel::{Modules, Products};
use crate::link::Link;
use crate::nccl::RawComm;
use crate::physical::{HostWords, Pool};
use crate::spans::Spans;
use crate::stream::StreamCell;

/// One rank's device. Low-level objects hold the context, not this.
pub(crate) struct Core {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) options: DeviceOptions,
    pub(crate) modules: Modules,
    pub(crate) products: Products,
    pub(crate) pool: Arc<Pool>,
    /// Word 0: what a kernel found wrong, 0 if nothing. Word 1: the value.
    pub(crate) fault: HostWords,
    pub(crate) spans: Option<Spans>,
    pub(crate) link: Link,
    pub(crate) graveyard: Graveyard,
    pub(crate) state: Mutex<State>,
    /// Whether this rank has told the others that it can't go on.
    pub(crate) given_up: AtomicBool,
    untold: Mutex<Vec<DeviceError>>,
    /// Apart from the state, whose lock a call of NCCL may hold while it waits for a peer.
    registry: Mutex<Registry>,
    launches: AtomicU64,
    pub(crate) context: Arc<Context>,
}

/// What changes with calls.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) tickets: u64,
    pub(crate) streams: u32,
    pub(crate) events: u64,
    pub(crate) memories: u64,
    pub(crate) graphs: u32,
    pub(crate) capture: Option<Capture>,
    /// Streams that exist or wait in the graveyard.
    raw_streams: Vec<Weak<RawStream>>,
    /// What eager launches on a stream use for intermediate results: address and bytes, by stream.
    pub(crate) scratch: HashMap<u32, (crate::physical::Block, u64)>,
}

/// Communicators.
#[derive(Default)]
struct Registry {
    comms: Vec<Weak<CommCell>>,
    /// NCCL's part of those that exist or wait in the graveyard.
    raw: Vec<Weak<RawComm>>,
}

impl State {
    pub(crate) fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }
}

/// The users' side of a core: the last one to go ends the device.
pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
}

/// What a device is built of.
pub(crate) struct Parts {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) options: DeviceOptions,
    pub(crate) context: Arc<Context>,
    pub(crate) link: Link,
}

/// What a core makes on its GPU.
struct Made {
    modules: Modules,
    products: Products,
    fault: HostWords,
    spans: Option<Spans>,
    pool: Arc<Pool>,
}

impl Made {
    fn new(context: &Arc<Context>, options: &DeviceOptions) -> Result<Self, DeviceError> {
        let pool = Pool::new(context)?;
        Ok(Made {
            modules: Modules::load(context)?,
            products: Products::new(context)?,
            fault: HostWords::new(context, 2)?,
            spans: if options.spans { Some(Spans::new(&pool)?) } else { None },
            pool,
        })
    }
}

impl Core {
    pub(crate) fn new(parts: Parts) -> Result<Arc<Self>, DeviceError> {
        let Parts { rank, world, options, context, link } = parts;
        let made = Made::new(&context, &options).inspect_err(|error| link.fail(&error.to_string()))?;
        let core = Arc::new(Core {
            rank,
            world,
            modules: made.modules,
            products: made.products,
            fault: made.fault,
            spans: made.spans,
            pool: made.pool,
            link,
            graveyard: Graveyard::default(),
            state: Mutex::new(State::default()),
            given_up: AtomicBool::new(false),
            untold: Mutex::new(Vec::new()),
            registry: Mutex::default(),
            launches: AtomicU64::new(0),
            options,
            context,
        });
        if world > 1 {
            core.watch()?;
        }
        Ok(core)
    }

    /// Looks for news on a thread of its own: the rank's own thread may be inside a call of NCCL that waits for a peer
    /// which has gone, and only giving the communicator up brings it back.
    fn watch(self: &Arc<Self>) -> Result<(), DeviceError> {
        let core = Arc::downgrade(self);
        let watch = move || {
            while let Some(core) = core.upgrade() {
                if let Ok(_entered) = core.context.enter() {
                    core.news();
                }
                drop(core);
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        let spawned = std::thread::Builder::new().name("sessile-watch".to_owned()).spawn(watch);
        spawned.map(drop).map_err(|error| DeviceError::Rendezvous {
            rank: self.rank,
            address: "a thread of its own".to_owned(),
            why: error.to_string(),
        })
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_stream(&self, stream: &Arc<RawStream>) {
        let mut state = self.state();
        state.raw_streams.retain(|stream| stream.strong_count() > 0);
        state.raw_streams.push(Arc::downgrade(stream));
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add_comm(&self, comm: &Arc<CommCell>) {
        let mut registry = self.registry();
        registry.comms.retain(|comm| comm.strong_count() > 0);
        registry.comms.push(Arc::downgrade(comm));
        registry.raw.retain(|comm| comm.strong_count() > 0);
        registry.raw.extend(comm.nccl.as_ref().map(Arc::downgrade));
    }

    /// Destroys what was dropped and is no longer in use; does nothing during a capture.
    pub(crate) fn reap(&self) {
        let streams = {
            let state = self.state();
            if state.capture.is_some() || self.graveyard.is_empty() {
                return;
            }
            state.raw_streams.clone()
        };
        self.graveyard.reap(&self.context, &streams);
    }

    /// Reaps now and then, where calls are frequent.
    pub(crate) fn reap_sometimes(&self) {
        if self.launches.fetch_add(1, Ordering::Relaxed).is_multiple_of(64) {
            self.reap();
        }
    }

    /// Reaps until nothing is left or the time is over.
    pub(crate) fn reap_all(&self, within: Duration) -> bool {
        let until = Instant::now() + within;
        loop {
            self.reap();
            if self.graveyard.is_empty() {
                return true;
            }
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// A driver's lack of memory as an error that says for what; another error as it is.
    pub(crate) fn no_memory(&self, error: DeviceError, label: &str, requested: u64) -> DeviceError {
        if !crate::error::is_full(&error) {
            return error;
        }
        let free = self.context.memory().map_or(0, |(free, _)| free);
        DeviceError::OutOfMemory { rank: self.rank, label: label.to_owned(), requested, free }
    }

    /// Something that the next named wait reports.
    pub(crate) fn tell_later(&self, error: DeviceError) {
        self.untold.lock().unwrap_or_else(PoisonError::into_inner).push(error);
    }

    /// What has not been reported yet.
    fn told(&self) -> Result<(), DeviceError> {
        let code = self.fault.get(0);
        if code != 0 {
            let value = self.fault.get(1);
            self.fault.set(0, 0);
            let (kernel, what) = if code == 2 { ("cross_entropy", "targets") } else { ("embedding", "ids") };
            self.tell_later(DeviceError::Operands {
                kernel,
                expected: format!("{what} in range, not {value}"),
                given: Vec::new(),
            });
        }
        let mut untold = self.untold.lock().unwrap_or_else(PoisonError::into_inner);
        // The first is the cause; what followed from it is dropped.
        let first = untold.drain(..).next();
        first.map_or(Ok(()), Err)
    }

    /// Waits until the work before the record of `end` has ended, with news of peers and the deadline in between; then
    /// reports what came up.
    pub(crate) fn wait_for(&self, stream: &StreamCell) -> Result<(), DeviceError> {
        {
            let _entered = self.context.enter()?;
            stream.raw.record(&stream.end, As::Plain)?;
        }
        self.wait_event(&stream.end, &stream.label)?;
        self.reap();
        self.told()
    }

    fn wait_event(&self, end: &RawEvent, label: &str) -> Result<(), DeviceError> {
        let _entered = self.context.enter()?;
        let begin = Instant::now();
        let mut news = begin;
        let mut given_up: Option<Instant> = None;
        loop {
            if end.is_done()? {
                self.news();
                return Ok(());
            }
            let now = Instant::now();
            if now - news >= Duration::from_millis(2) {
                news = now;
                self.news();
            }
            let failed = !self.untold.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
            if failed && given_up.is_none() {
                given_up = Some(now);
            }
            // Kernels of a communicator that was given up end soon; if they do not, the error says more than a hang.
            if given_up.is_some_and(|since| now - since > Duration::from_secs(10)) {
                return self.told();
            }
            if now - begin > self.options.deadline {
                return Err(self.late(label));
            }
            let waited = now - begin;
            if waited > Duration::from_millis(5) {
                std::thread::sleep(Duration::from_micros(200));
            } else if waited > Duration::from_micros(200) {
                std::thread::sleep(Duration::from_micros(20));
            } else {
                std::hint::spin_loop();
            }
        }
    }

    fn late(&self, label: &str) -> DeviceError {
        let after = self.options.deadline;
        let pending = self.comms().into_iter().find(|comm| !comm.is_idle() && comm.ranks.len() > 1);
        match pending {
            Some(comm) => {
                let missing = comm.ranks.iter().copied().find(|rank| *rank != self.rank).unwrap_or(self.rank);
                let what = format!("a collective of group `{}`, on stream `{label}`", comm.name);
                DeviceError::PeerTimeout { rank: self.rank, missing, what, after }
            }
            None => DeviceError::Stalled { rank: self.rank, what: format!("stream `{label}` for {after:?}") },
        }
    }

    pub(crate) fn comms(&self) -> Vec<Arc<CommCell>> {
        self.registry().comms.iter().filter_map(Weak::upgrade).collect()
    }

    /// Looks at what happened to peers and communicators.
    pub(crate) fn news(&self) {
        for comm in self.comms() {
            if comm.usable().is_err() {
                continue;
            }
            let late = comm.signals.as_ref().and_then(|signals| signals.gave_up());
            let error = if let Some((member, round, reading)) = late {
                let what = format!(
                    "round {round} of the one-shot reduce-scatters of group `{}`, which it has not {}",
                    comm.name,
                    if reading { "read" } else { "written" }
                );
                let missing = comm.ranks.get(member as usize).copied().unwrap_or(u32::MAX);
                Some(DeviceError::PeerTimeout {
                    rank: self.rank,
                    missing,
                    what,
                    after: self.options.deadline,
                })
            } else if let Some(error) = self.link.given_up(comm.group()) {
                Some(error)
            } else if let Some(peer) = self.link.lost(&comm.ranks)
                && !comm.is_idle()
            {
                Some(self.lost(&comm, peer))
            } else if let Some(peer) = self.link.left(&comm.ranks)
                && !comm.is_idle()
                && comm.waits_too_long()
            {
                Some(self.lost(&comm, peer))
            } else {
                comm.nccl.as_ref().and_then(|nccl| nccl.async_error().err())
            };
            if let Some(error) = error
                && comm.fail(error.clone())
            {
                self.tell_later(error);
            }
        }
    }

    fn lost(&self, comm: &CommCell, peer: u32) -> DeviceError {
        self.link.gone(peer, || format!("a collective of group `{}`", comm.name))
    }
}

impl CommCell {
    /// Whether all collectives enqueued so far have ended, and no call of NCCL goes on.
    pub(crate) fn is_idle(&self) -> bool {
        !self.in_call.load(Ordering::SeqCst)
            && self.tail.as_ref().is_none_or(|tail| tail.is_done().unwrap_or(true))
    }

    /// Whether a member that has left has been waited for so long that it will not come.
    fn waits_too_long(&self) -> bool {
        let mut since = self.waits_for_left.lock().unwrap_or_else(PoisonError::into_inner);
        since.get_or_insert_with(Instant::now).elapsed() > Duration::from_secs(5)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let core = &self.core;
        let capture = core.state().capture.take();
        if let Some(capture) = capture {
            if let Ok(_entered) = core.context.enter() {
                drop(capture.origin.0.raw.end_capture());
            }
            drop(capture);
        }
        core.state().scratch.drain().for_each(|(_, block)| core.graveyard.bury(Box::new(block)));
        // All communicators are buried. After a failure peers may never come: end their kernels, and leave without
        // waiting, so that peers learn of the loss.
        let fails = std::thread::panicking() || core.given_up.load(Ordering::SeqCst);
        let within = if fails { Duration::from_secs(2) } else { core.options.deadline };
        if fails {
            let comms: Vec<_> = core.registry().raw.iter().filter_map(Weak::upgrade).collect();
            let abort = move || comms.iter().for_each(|comm| comm.abort());
            let _ = crate::nccl::within(Duration::from_secs(5), || false, abort);
        }
        if !core.reap_all(within) {
            core.graveyard.abandon();
        }
        if !fails {
            core.link.leave(core.options.deadline);
        }
    }
}
