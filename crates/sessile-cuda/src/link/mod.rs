//! A rank's connection to the others, between hosts: making groups, all-gathers of bytes, news of who has gone.
//!
//! Rank 0 runs the hub at the job's address; every rank, rank 0 too, connects to it and proves that it knows the job's
//! secret. A job of one rank has no connection at all.

mod hub;
mod wire;

use std::collections::{BTreeSet, HashMap};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sessile_hal::DeviceError;

pub(crate) use self::wire::random;
use self::wire::{Frame, MAX_FRAME, Reply, Request, fit, introduce};
use crate::job::Job;

/// Characters of a reason that are passed on.
const MOST_WORDS: usize = 2000;

/// How long news may be on the way, from a rank that has failed to the others.
const NEWS: Duration = Duration::from_secs(1);

/// How an ask ended.
pub(crate) enum Answer {
    Joined(u64),
    Refused,
    Gathered(Vec<Vec<u8>>),
    /// The members' messages have this many bytes in all, which is too much.
    TooLong(u64),
    Late(u32),
    Gone(u32),
    Left,
}

/// A group that was joined.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group<'a> {
    /// Its number in the job.
    pub(crate) id: u64,
    pub(crate) name: &'a str,
    pub(crate) ranks: &'a [u32],
}

/// A rank's connection. Shared by the device and its communicators.
pub(crate) struct Link {
    rank: u32,
    /// None in a job of one rank.
    wire: Option<Wire>,
    state: Arc<State>,
}

struct Wire {
    writer: Mutex<TcpStream>,
}

#[derive(Default)]
struct State {
    known: Mutex<Known>,
    news: Condvar,
}

#[derive(Default)]
struct Known {
    asks: u64,
    answers: HashMap<u64, Answer>,
    /// Ranks whose connection broke, in the order of the news.
    lost: Vec<u32>,
    left: BTreeSet<u32>,
    /// What ranks that could not go on have said.
    failed: HashMap<u32, String>,
    /// Who gave a group up, and why.
    aborted: HashMap<u64, (u32, String)>,
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refused(job: &Job, why: impl ToString) -> DeviceError {
    DeviceError::Rendezvous {
        rank: job.rank,
        address: format!("{}:{}", job.address, job.port),
        why: why.to_string(),
    }
}

impl Link {
    /// Connects this rank; rank 0 starts the hub first.
    pub(crate) fn connect(job: &Job, deadline: Duration) -> Result<Self, DeviceError> {
        let state = Arc::<State>::default();
        if job.world == 1 {
            return Ok(Link { rank: job.rank, wire: None, state });
        }
        let until = Instant::now() + deadline;
        let addresses: Vec<SocketAddr> = (job.address.as_str(), job.port)
            .to_socket_addrs()
            .map_err(|error| refused(job, error))?
            .collect();
        if job.rank == 0 {
            let listener = TcpListener::bind(&addresses[..]).map_err(|error| refused(job, error))?;
            hub::start(listener, job.secret.clone(), job.world).map_err(|error| refused(job, error))?;
        }
        let stream = loop {
            match dial(&addresses) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > until => return Err(refused(job, error)),
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
        stream.set_read_timeout(Some(left)).map_err(|error| refused(job, error))?;
        introduce(&stream, &job.secret, job.rank, job.world).map_err(|error| {
            refused(job, format!("{error}: is the secret the same on every rank, and the number of ranks?"))
        })?;
        match Reply::receive(&stream).map_err(|error| refused(job, error))? {
            Reply::Welcome => {}
            _ => {
                let rank = job.rank;
                return Err(refused(
                    job,
                    format!(
                        "another process is, or was, rank {rank} of this job: give each a RANK of its own"
                    ),
                ));
            }
        }
        stream.set_read_timeout(None).map_err(|error| refused(job, error))?;
        let reader = stream.try_clone().map_err(|error| refused(job, error))?;
        let told = state.clone();
        std::thread::Builder::new()
            .name("sessile-link".to_owned())
            .spawn(move || listen(&reader, &told))
            .map_err(|error| refused(job, error))?;
        Ok(Link { rank: job.rank, wire: Some(Wire { writer: Mutex::new(stream) }), state })
    }

    /// This rank.
    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    fn ask(&self, until: Duration, request: impl FnOnce(u64) -> Request) -> Answer {
        let Some(wire) = &self.wire else { return Answer::Left };
        let mut known = self.state.lock();
        known.asks += 1;
        let ask = known.asks;
        drop(known);
        if wire.send(&request(ask)).is_err() {
            return Answer::Gone(0);
        }
        // The hub answers in time; if it does not, rank 0 is stuck.
        let last = Instant::now() + until + Duration::from_secs(5);
        let mut known = self.state.lock();
        loop {
            if let Some(answer) = known.answers.remove(&ask) {
                return answer;
            }
            if known.lost.contains(&0) {
                return Answer::Gone(0);
            }
            let now = Instant::now();
            if now >= last {
                return Answer::Late(0);
            }
            known = self.state.news.wait_timeout(known, last - now).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Makes the group with its other members; its number in the job.
    pub(crate) fn join(&self, name: &str, ranks: &[u32], deadline: Duration) -> Answer {
        if self.wire.is_none() {
            let mut known = self.state.lock();
            known.asks += 1;
            return Answer::Joined(known.asks);
        }
        let (name, ranks) = (name.to_owned(), ranks.to_vec());
        self.ask(deadline, |ask| Request::Join { ask, millis: millis(deadline), name, ranks })
    }

    /// All-gathers bytes in a group.
    pub(crate) fn gather(&self, group: u64, payload: &[u8], deadline: Duration) -> Answer {
        if self.wire.is_none() {
            return Answer::Gathered(vec![payload.to_vec()]);
        }
        let bytes = payload.len() as u64;
        // What can't be sent is counted all the same: the others wait for it, too.
        let payload = if fit(std::iter::once(bytes)) { payload.to_vec() } else { Vec::new() };
        self.ask(deadline, |ask| Request::Gather { ask, millis: millis(deadline), group, bytes, payload })
    }

    /// All-gathers bytes in a group, or says why not.
    pub(crate) fn exchange(
        &self,
        group: Group<'_>,
        payload: &[u8],
        deadline: Duration,
    ) -> Result<Vec<Vec<u8>>, DeviceError> {
        match self.gather(group.id, payload, deadline) {
            Answer::Gathered(payloads) => Ok(payloads),
            Answer::TooLong(bytes) => Err(DeviceError::ExchangeTooLong {
                rank: self.rank,
                group: group.name.to_owned(),
                bytes,
                most: MAX_FRAME as u64,
            }),
            other => Err(self.given_up(group).unwrap_or_else(|| {
                self.unanswered(other, format!("an exchange of group `{}`", group.name), deadline)
            })),
        }
    }

    /// The error of an ask that ended without what was asked for.
    pub(crate) fn unanswered(&self, answer: Answer, what: String, after: Duration) -> DeviceError {
        match answer {
            Answer::Late(missing) => DeviceError::PeerTimeout { rank: self.rank, missing, what, after },
            Answer::Gone(peer) => self.gone(peer, || what),
            _ => self.gone(0, || what),
        }
    }

    /// Tells the group's members that this rank gives it up, and why if it was not asked to: none of them waits for it in
    /// this group any more.
    pub(crate) fn abort(&self, group: u64, why: &str) {
        let why: String = why.chars().take(MOST_WORDS).collect();
        self.state.lock().aborted.entry(group).or_insert((self.rank, why.clone()));
        if let Some(wire) = &self.wire {
            let _ = wire.send(&Request::Abort { group, why });
        }
    }

    /// The error of a group that somebody gave up.
    pub(crate) fn given_up(&self, group: Group<'_>) -> Option<DeviceError> {
        let (rank, name) = (self.rank, group.name.to_owned());
        let (by, why) = self.state.lock().aborted.get(&group.id).cloned()?;
        Some(match why.is_empty() {
            true => DeviceError::Aborted { rank, group: name, by },
            false => DeviceError::PeerFailed { rank, peer: by, why },
        })
    }

    /// Whether a member has gone, or somebody gave the group up.
    pub(crate) fn is_hopeless(&self, group: Group<'_>) -> bool {
        self.lost(group.ranks).is_some() || self.state.lock().aborted.contains_key(&group.id)
    }

    /// The first of `ranks` whose connection broke.
    pub(crate) fn lost(&self, ranks: &[u32]) -> Option<u32> {
        self.state.lock().lost.iter().copied().find(|rank| ranks.contains(rank))
    }

    /// The first of `ranks` that has left.
    pub(crate) fn left(&self, ranks: &[u32]) -> Option<u32> {
        self.state.lock().left.iter().copied().find(|rank| ranks.contains(rank))
    }

    /// Tells the others why this rank can't go on; none of them waits for it any more. Rank 0, whose process is asked, stays
    /// a few seconds for those who have not come yet.
    pub(crate) fn fail(&self, why: &str) {
        let why = why.chars().take(MOST_WORDS).collect();
        let _ = self.ask(Duration::from_secs(2), |ask| Request::Fail { ask, why });
    }

    /// Why a group is hopeless, if it is: why one of its members gave it up, or which of them has gone.
    pub(crate) fn cause(&self, group: Group<'_>, what: impl FnOnce() -> String) -> Option<DeviceError> {
        self.given_up(group).or_else(|| self.lost(group.ranks).map(|peer| self.gone(peer, what)))
    }

    /// The cause of something that a member's end or error has caused, so that news of it may be on the way; `None` if none
    /// comes.
    pub(crate) fn cause_soon(&self, group: Group<'_>, what: impl Fn() -> String) -> Option<DeviceError> {
        let until = Instant::now() + NEWS;
        loop {
            let cause = self.cause(group, &what);
            if cause.is_some() || Instant::now() > until {
                return cause;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// That `peer` has gone: why, if it said so, or else in the middle of what.
    pub(crate) fn gone(&self, peer: u32, what: impl FnOnce() -> String) -> DeviceError {
        let rank = self.rank;
        match self.state.lock().failed.get(&peer).cloned() {
            Some(why) => DeviceError::PeerFailed { rank, peer, why },
            None => DeviceError::PeerLost { rank, peer, what: what() },
        }
    }

    /// What a wait for a group's members ended with that was given up: the cause, or else a member that has not come.
    pub(crate) fn absent(&self, group: Group<'_>, what: String, after: Duration) -> DeviceError {
        self.cause(group, || what.clone()).unwrap_or_else(|| {
            let missing = group.ranks.iter().copied().find(|rank| *rank != self.rank).unwrap_or(0);
            DeviceError::PeerTimeout { rank: self.rank, missing, what, after }
        })
    }

    /// Leaves in order: returns when all others have left too, or after `deadline`.
    pub(crate) fn leave(&self, deadline: Duration) {
        let _ = self.ask(deadline, |ask| Request::Leave { ask });
    }
}

impl Wire {
    fn send(&self, request: &Request) -> std::io::Result<()> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        request.send(&*writer)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(wire) = &self.wire {
            let writer = wire.writer.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = writer.shutdown(Shutdown::Both);
        }
    }
}

fn millis(deadline: Duration) -> u64 {
    u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX)
}

fn dial(addresses: &[SocketAddr]) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpStream::connect_timeout(address, Duration::from_secs(5)) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_write_timeout(Some(Duration::from_secs(30)))?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Takes in what the hub says, until it is gone.
fn listen(reader: &TcpStream, state: &State) {
    while let Ok(reply) = Reply::receive(reader) {
        let mut known = state.lock();
        let (ask, answer) = match reply {
            Reply::Joined { ask, group } => (ask, Answer::Joined(group)),
            Reply::Refused { ask } => (ask, Answer::Refused),
            Reply::Gathered { ask, payloads } => (ask, Answer::Gathered(payloads)),
            Reply::TooLong { ask, bytes } => (ask, Answer::TooLong(bytes)),
            Reply::Late { ask, rank } => (ask, Answer::Late(rank)),
            Reply::Gone { ask, rank } => (ask, Answer::Gone(rank)),
            Reply::Left { ask } => (ask, Answer::Left),
            Reply::Welcome | Reply::Taken => continue,
            Reply::Lost { rank } => {
                known.lost.push(rank);
                state.news.notify_all();
                continue;
            }
            Reply::Failed { rank, why } => {
                known.failed.entry(rank).or_insert(why);
                continue;
            }
            Reply::Leaves { rank } => {
                known.left.insert(rank);
                continue;
            }
            Reply::Aborted { group, rank, why } => {
                known.aborted.entry(group).or_insert((rank, why));
                continue;
            }
        };
        known.answers.insert(ask, answer);
        state.news.notify_all();
    }
    let mut known = state.lock();
    if !known.left.contains(&0) {
        known.lost.push(0);
    }
    state.news.notify_all();
}

#[cfg(test)]
mod tests;
