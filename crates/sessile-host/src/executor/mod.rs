//! Who runs ready tasks: worker threads, one deterministic scheduler, or the virtual clock.

mod compute;
pub(crate) mod scheduled;
pub(crate) mod simulated;
pub(crate) mod threads;

/// How a world runs its tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Really asynchronous, on this many threads (at least one). Orders and times are those of the machine.
    Threads {
        /// Number of threads.
        workers: usize,
    },
    /// One task at a time, only while every rank's host is blocked or gone. The order, and the clock, which counts
    /// tasks, are a function of the programs, the seed and `order`.
    ///
    /// Needs [`World::run`](crate::World::run), or a single thread that speaks for all ranks.
    Scheduled {
        /// Decides where `order` leaves a choice.
        seed: u64,
        /// Which legal order.
        order: Order,
    },
    /// One task at a time, in the order and at the times of [`WorldOptions::costs`](crate::WorldOptions). Times are virtual
    /// nanoseconds, the same for the same programs.
    ///
    /// Needs [`World::run`](crate::World::run), or a single thread that speaks for all ranks.
    Virtual,
}

impl Mode {
    /// Whether tasks run on the threads of blocked hosts, one at a time.
    pub(crate) fn is_stepped(self) -> bool {
        !matches!(self, Mode::Threads { .. })
    }
}

/// Runs tasks until some host can go on or none ever will. Call it only while every host is blocked, in a mode that
/// [is stepped](Mode::is_stepped).
pub(crate) fn step(engine: &mut crate::engine::Engine) {
    match engine.timeline {
        Some(_) => simulated::run(engine),
        None => scheduled::run(engine),
    }
}

/// Which of the legal orders the scheduler takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Any, by the seed.
    Random,
    /// Writers as early and readers as late as possible: a missing edge from a reader to a later writer shows as
    /// a wrong value.
    WritersEarly,
    /// Readers as early and writers as late as possible: a missing edge from a writer to a later reader shows as a
    /// wrong value.
    ReadersEarly,
}
