//! Who runs ready tasks: worker threads, or one deterministic scheduler.

pub(crate) mod scheduled;
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
