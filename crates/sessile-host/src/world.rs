//! A world: all ranks of a job in this process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use crate::cost::CostModel;
use crate::device::HostDevice;
use crate::engine::{Clock, Engine};
use crate::executor::{self, Mode, Order, scheduled, threads};
use crate::memory::Account;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, lock, thread, wait};

/// Whether memory holds anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Data {
    /// It does.
    #[default]
    Real,
    /// Allocations have addresses and sizes and no bytes; kernels and collectives move nothing; reads give zeros. For the
    /// virtual clock: a job's size costs no memory.
    ShapeOnly,
    /// As [`Data::ShapeOnly`], and rank 0 alone runs: it stands for all, which must do the same work on the same shapes.
    /// Groups have all their members; one that is not rank 0 gives in an exchange what rank 0 gives and comes to a
    /// collective when rank 0 does.
    Folded,
}

/// What a world is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorldOptions {
    /// Number of ranks.
    pub ranks: u32,
    /// How tasks run.
    pub mode: Mode,
    /// What work costs under [`Mode::Virtual`].
    pub costs: CostModel,
    /// Whether memory holds anything.
    pub data: Data,
    /// How long a named wait may take.
    pub deadline: Duration,
    /// Bytes that each rank may allocate; `None`: as many as there are.
    pub memory_limit: Option<u64>,
    /// Whether [`take_spans`](sessile_hal::Device::take_spans) has something to give. Spans pile up until they are
    /// taken.
    pub record_spans: bool,
    /// Breaks the device, for tests that show what it guards against: a collective that reads peers' memory ends on a
    /// rank when that rank has read, not when all have.
    pub omit_exit_meeting: bool,
}

impl Default for WorldOptions {
    /// One rank, two workers, real data, a deadline of a minute, no limit, spans on.
    fn default() -> Self {
        WorldOptions {
            ranks: 1,
            mode: Mode::Threads { workers: 2 },
            costs: CostModel::default(),
            data: Data::Real,
            deadline: Duration::from_secs(60),
            memory_limit: None,
            record_spans: true,
            omit_exit_meeting: false,
        }
    }
}

impl WorldOptions {
    /// The defaults with this many ranks and workers.
    pub fn threads(ranks: u32, workers: usize) -> Self {
        WorldOptions { ranks, mode: Mode::Threads { workers }, ..WorldOptions::default() }
    }

    /// The defaults with this many ranks and the seeded scheduler.
    pub fn scheduled(ranks: u32, seed: u64, order: Order) -> Self {
        WorldOptions { ranks, mode: Mode::Scheduled { seed, order }, ..WorldOptions::default() }
    }

    /// The defaults with this many ranks, on the virtual clock.
    pub fn simulated(ranks: u32, costs: CostModel, data: Data) -> Self {
        WorldOptions { ranks, mode: Mode::Virtual, costs, data, ..WorldOptions::default() }
    }

    /// Ranks that run a program of their own.
    fn running(&self) -> u32 {
        if self.data == Data::Folded { self.ranks.min(1) } else { self.ranks }
    }
}

/// Why a rank's program gave no result.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RankFailure<E> {
    /// It panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: u32,
        /// What the panic said.
        message: String,
    },
    /// It returned an error.
    #[error("{}{error}", name(*rank, error))]
    Failed {
        /// The rank.
        rank: u32,
        /// The error.
        error: E,
    },
}

/// The rank before an error that does not begin with it.
fn name<E: std::fmt::Display>(rank: u32, error: &E) -> String {
    let name = format!("rank {rank}: ");
    if error.to_string().starts_with(&name) { String::new() } else { name }
}

/// What the workers and all handles share.
pub(crate) struct Core {
    pub(crate) id: u64,
    pub(crate) options: WorldOptions,
    pub(crate) engine: Mutex<Engine>,
    /// Workers wait here for ready tasks.
    pub(crate) work: Condvar,
    /// Blocked hosts, by rank.
    pub(crate) hosts: Arc<Vec<Condvar>>,
    /// [`World::run`] waits here for the last task.
    pub(crate) idle: Condvar,
    pub(crate) accounts: Vec<Arc<Account>>,
}

impl Core {
    /// Wakes workers for what became ready.
    pub(crate) fn poke(&self, engine: &mut Engine) {
        for _ in 0..std::mem::take(&mut engine.fresh) {
            self.work.notify_one();
        }
    }

    /// See [`sessile_hal::Comm::abort`].
    pub(crate) fn abort(&self, group: &Arc<crate::comm::Group>, by: u32) {
        let mut engine = lock(&self.engine);
        engine.abort(group, by);
        engine.settle();
        self.poke(&mut engine);
        self.advance(&mut engine);
    }

    /// Waits until nothing can run any more, and gives up what never will. Only while no program runs.
    fn drain(&self) {
        let mut engine = lock(&self.engine);
        if self.options.mode.is_stepped() {
            executor::step(&mut engine);
        } else {
            while !engine.ready.is_empty() || engine.running > 0 {
                engine = wait(&self.idle, engine);
            }
        }
        let stuck = engine.give_up();
        drop(engine);
        drop(stuck);
    }
}

/// Keeps the workers going; the last handle stops them.
pub(crate) struct Handle {
    pub(crate) core: Arc<Core>,
    workers: Vec<thread::JoinHandle<()>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        let (tasks, captures) = {
            let mut engine = lock(&self.core.engine);
            engine.shutdown = true;
            engine.ready.clear();
            let captures: Vec<_> = engine.ranks.iter_mut().map(|rank| rank.capture.take()).collect();
            (std::mem::take(&mut engine.tasks), captures)
        };
        drop((tasks, captures));
        self.core.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker can't have panicked (kernels are caught), and a destructor has nobody to tell.
            let _ = worker.join();
        }
    }
}

/// All ranks of a job. Clones share it; device handles keep it going.
#[derive(Clone)]
pub struct World {
    handle: Arc<Handle>,
}

impl World {
    /// Makes a world and starts its workers.
    pub fn new(options: WorldOptions) -> Self {
        static WORLDS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let ranks = options.running() as usize;
        let hosts: Arc<Vec<Condvar>> = Arc::new((0..ranks).map(|_| Condvar::new()).collect());
        let (workers, clock, policy) = match options.mode {
            Mode::Threads { workers } => {
                (workers.max(1), Clock::Wall(Instant::now()), scheduled::Policy::new(Order::Random, 0))
            }
            Mode::Scheduled { seed, order } => (0, Clock::Steps(0), scheduled::Policy::new(order, seed)),
            Mode::Virtual => (0, Clock::Virtual(0), scheduled::Policy::new(Order::Random, 0)),
        };
        let engine = Engine::new(ranks, hosts.clone(), clock, policy, &options);
        let core = Arc::new(Core {
            id: WORLDS.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
            engine: Mutex::new(engine),
            work: Condvar::new(),
            hosts,
            idle: Condvar::new(),
            accounts: (0..options.running())
                .map(|rank| Arc::new(Account::new(rank, options.memory_limit)))
                .collect(),
            options,
        });
        let start = |_| {
            let core = core.clone();
            thread::spawn(move || threads::work(&core))
        };
        let workers = (0..workers).map(start).collect();
        World { handle: Arc::new(Handle { core, workers }) }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.handle.core.options.ranks
    }

    /// Number of ranks that run a program: all, or one that stands for all ([`Data::Folded`]).
    pub fn running(&self) -> u32 {
        self.handle.core.options.running()
    }

    /// The device of a rank.
    ///
    /// # Panics
    /// If there is no such rank, or another stands for it.
    pub fn device(&self, rank: u32) -> HostDevice {
        assert!(rank < self.running(), "rank {rank} of a world where {} run", self.running());
        HostDevice::new(self.handle.clone(), rank)
    }

    /// Runs one program a rank that [runs](World::running), each on a thread of its own, and returns their results by rank when all have ended
    /// and so has all work they enqueued.
    ///
    /// A rank whose program ends, fails or panics is gone: peers that wait for it get
    /// [`PeerLost`](sessile_hal::DeviceError::PeerLost). It is back when `run` is called again.
    pub fn run<T, E, F>(&self, program: F) -> Vec<Result<T, RankFailure<E>>>
    where
        T: Send,
        E: Send,
        F: Fn(HostDevice) -> Result<T, E> + Sync,
    {
        let core = &self.handle.core;
        {
            let mut engine = lock(&core.engine);
            (0..self.running()).for_each(|rank| engine.attach(rank));
        }
        let program = &program;
        let results = thread::scope(|scope| {
            let threads: Vec<_> = (0..self.running())
                .map(|rank| {
                    let device = self.device(rank);
                    scope.spawn(move || {
                        let _leave = Leave { core, rank };
                        match catch_unwind(AssertUnwindSafe(|| program(device))) {
                            Ok(result) => result.map_err(|error| RankFailure::Failed { rank, error }),
                            Err(panic) => {
                                Err(RankFailure::Panicked { rank, message: panic_message(panic.as_ref()) })
                            }
                        }
                    })
                })
                .collect();
            let join = |(rank, thread): (u32, thread::ScopedJoinHandle<'_, _>)| {
                thread.join().unwrap_or_else(|panic| {
                    Err(RankFailure::Panicked { rank, message: panic_message(panic.as_ref()) })
                })
            };
            (0..).zip(threads).map(join).collect()
        });
        core.drain();
        results
    }

    /// Bytes that a rank has allocated now.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn live_bytes(&self, rank: u32) -> u64 {
        self.account(rank).live()
    }

    /// The most bytes that a rank had allocated at once.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn peak_bytes(&self, rank: u32) -> u64 {
        self.account(rank).peak()
    }

    /// Lets a rank's `nth` allocation from now (from 1) fail. For tests.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn fail_allocation(&self, rank: u32, nth: u64) {
        self.account(rank).fail_allocation(nth);
    }

    /// Whether spans are recorded from now on.
    pub fn record_spans(&self, on: bool) {
        self.engine().record_spans = on;
    }

    /// Nanoseconds by which collectives delayed the kernels of a rank, on the virtual clock, while spans were recorded and
    /// since the last call. See [`Contention`](crate::Contention).
    ///
    /// # Panics
    /// If there is no such rank, or another stands for it.
    pub fn take_delay_ns(&self, rank: u32) -> u64 {
        std::mem::take(&mut self.engine().ranks[rank as usize].delay_ns)
    }

    fn account(&self, rank: u32) -> &Account {
        &self.handle.core.accounts[rank as usize]
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        lock(&self.handle.core.engine)
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "world of {} ranks, {:?}", self.ranks(), self.handle.core.options.mode)
    }
}

/// Marks a rank as gone when its thread ends, however it ends.
struct Leave<'a> {
    core: &'a Core,
    rank: u32,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let mut engine = lock(&self.core.engine);
        engine.leave(self.rank);
        self.core.poke(&mut engine);
        self.core.advance(&mut engine);
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "(no message)".to_owned())
}
