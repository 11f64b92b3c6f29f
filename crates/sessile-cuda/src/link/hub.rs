//! The hub: where hosts meet. It runs in rank 0's process, on threads of its own.
//!
//! One thread accepts and checks proofs, one thread for each rank reads, and one thread owns all that is known. Nothing
//! waits for a rank but by name and with a deadline.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::wire::{Frame, Reply, Request, fit, greet};

/// What the reading threads tell the owning one.
enum News {
    /// A rank that has proved itself; what is told back is whether it is taken in.
    Came(u32, TcpStream, Sender<bool>),
    Asked(u32, Request),
    Went(u32),
}

/// Longest time for a proof, and for a write to a rank that does not read.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections beyond the ranks' own that may be proving themselves at once; more wait to be accepted.
const STRANGERS: usize = 64;

/// Starts the hub for `world` ranks; it ends when all have gone.
pub(crate) fn start(listener: TcpListener, secret: Vec<u8>, world: u32) -> std::io::Result<()> {
    let (sender, receiver) = channel();
    thread::Builder::new().name("sessile-hub".to_owned()).spawn(move || Hub::new(world).run(&receiver))?;
    thread::Builder::new()
        .name("sessile-hub-accept".to_owned())
        .spawn(move || accept(&listener, &secret, world, &sender))?;
    Ok(())
}

fn accept(listener: &TcpListener, secret: &[u8], world: u32, hub: &Sender<News>) {
    if listener.set_nonblocking(true).is_err() {
        return;
    }
    let (came, arrivals) = channel::<()>();
    let proving = Arc::new(());
    let most = STRANGERS.saturating_add(world as usize);
    let mut present = 0;
    while present < world {
        present += u32::try_from(arrivals.try_iter().count()).unwrap_or(0);
        let accepted = if Arc::strong_count(&proving) > most {
            Err(ErrorKind::WouldBlock.into())
        } else {
            listener.accept()
        };
        match accepted {
            Ok((stream, _)) => {
                let (secret, hub, came) = (secret.to_vec(), hub.clone(), came.clone());
                let proof = proving.clone();
                let _ = thread::Builder::new().name("sessile-hub-rank".to_owned()).spawn(move || {
                    serve(stream, &secret, world, &hub, &came, proof);
                });
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(2)),
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
        // The owning thread has ended: all who came have gone.
        if hub.send(News::Went(u32::MAX)).is_err() {
            return;
        }
    }
}

fn serve(
    stream: TcpStream,
    secret: &[u8],
    world: u32,
    hub: &Sender<News>,
    came: &Sender<()>,
    proving: Arc<()>,
) {
    let patient = |stream: &TcpStream| {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_read_timeout(Some(PATIENCE))
    };
    if patient(&stream).is_err() {
        return;
    }
    let Ok(rank) = greet(&stream, secret, world) else { return };
    drop(proving);
    let (Ok(()), Ok(writer)) = (stream.set_read_timeout(None), stream.try_clone()) else { return };
    let (taken, answer) = channel();
    let _ = hub.send(News::Came(rank, writer, taken));
    // The end of one that is not taken in is not the end of the rank.
    if answer.recv() != Ok(true) {
        return;
    }
    let _ = came.send(());
    while let Ok(request) = Request::receive(&stream) {
        let _ = hub.send(News::Asked(rank, request));
    }
    let _ = hub.send(News::Went(rank));
}

/// Where a rank stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Expected,
    Here,
    /// Left in order.
    Left,
    Lost,
}

/// A rank that waits for an answer.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    rank: u32,
    ask: u64,
    until: Instant,
}

struct Group {
    name: String,
    ranks: Vec<u32>,
    /// Members that have asked for it; who waits for it.
    present: Vec<bool>,
    joining: Vec<Waiting>,
    refused: bool,
    aborted: Option<u32>,
    /// Number of each member's next all-gather.
    next: Vec<u64>,
    rounds: HashMap<u64, Round>,
}

struct Round {
    /// Bytes of what was given so far, also of what stayed away.
    lengths: Vec<u64>,
    payloads: Vec<Option<Vec<u8>>>,
    waiting: Vec<Waiting>,
}

/// The groups made under one name.
struct Name {
    ranks: Vec<u32>,
    /// How often each member has asked.
    asked: Vec<u64>,
    /// Groups that wait for members, by how often they were asked for.
    forming: HashMap<u64, u64>,
}

struct Hub {
    places: Vec<Place>,
    writers: Vec<Option<TcpStream>>,
    names: HashMap<String, Name>,
    groups: HashMap<u64, Group>,
    next_group: u64,
    leaving: Vec<Option<u64>>,
    /// What ranks that could not go on have said.
    failed: Vec<(u32, String)>,
    /// Those of them that have no answer yet, with their asks.
    failing: Vec<(u32, u64)>,
}

impl Hub {
    fn new(world: u32) -> Self {
        let world = world as usize;
        Hub {
            places: vec![Place::Expected; world],
            writers: (0..world).map(|_| None).collect(),
            names: HashMap::new(),
            groups: HashMap::new(),
            next_group: 0,
            leaving: vec![None; world],
            failed: Vec::new(),
            failing: Vec::new(),
        }
    }

    fn run(mut self, news: &Receiver<News>) {
        let born = Instant::now();
        loop {
            match news.recv_timeout(Duration::from_millis(50)) {
                Ok(News::Came(rank, writer, taken)) => {
                    let _ = taken.send(self.came(rank, writer));
                }
                Ok(News::Asked(rank, request)) => self.asked(rank, request),
                Ok(News::Went(rank)) => self.went(rank),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.expire(Instant::now());
            let gone = |place: &Place| matches!(place, Place::Left | Place::Lost);
            let nobody = self.writers.iter().all(Option::is_none);
            if self.places.iter().all(gone) && nobody
                || nobody && self.places.iter().any(gone) && born.elapsed() > 60 * PATIENCE
            {
                return;
            }
        }
    }

    fn tell(&mut self, rank: u32, reply: &Reply) {
        let writer = &mut self.writers[rank as usize];
        if writer.as_ref().is_some_and(|to| reply.send(to).is_err()) {
            // Its reading thread will see the end and say so.
            if let Some(writer) = writer.take() {
                let _ = writer.shutdown(std::net::Shutdown::Both);
            }
        }
    }

    fn tell_all(&mut self, reply: &Reply) {
        for rank in 0..self.places.len() {
            self.tell(u32::try_from(rank).unwrap_or(u32::MAX), reply);
        }
    }

    /// Whether it is taken in: a second one under the same number is not.
    fn came(&mut self, rank: u32, writer: TcpStream) -> bool {
        if self.places[rank as usize] != Place::Expected {
            let _ = Reply::Taken.send(&writer);
            let _ = writer.shutdown(std::net::Shutdown::Both);
            return false;
        }
        self.places[rank as usize] = Place::Here;
        self.writers[rank as usize] = Some(writer);
        self.tell(rank, &Reply::Welcome);
        for (failed, why) in self.failed.clone() {
            self.tell(rank, &Reply::Failed { rank: failed, why });
        }
        for lost in 0..self.places.len() {
            if self.places[lost] == Place::Lost {
                self.tell(rank, &Reply::Lost { rank: u32::try_from(lost).unwrap_or(u32::MAX) });
            }
        }
        self.told_all();
        true
    }

    fn went(&mut self, rank: u32) {
        let Some(place) = self.places.get_mut(rank as usize) else { return };
        self.writers[rank as usize] = None;
        if *place == Place::Here {
            *place = Place::Lost;
            self.tell_all(&Reply::Lost { rank });
        }
        self.without(rank);
        self.all_left();
    }

    /// A rank will not come any more: who waits for it need not wait longer.
    fn without(&mut self, rank: u32) {
        let mut told = Vec::new();
        for group in self.groups.values_mut() {
            let Some(member) = group.ranks.iter().position(|r| *r == rank) else { continue };
            if !group.present[member] {
                told.append(&mut group.joining);
            }
            for round in group.rounds.values_mut().filter(|round| round.payloads[member].is_none()) {
                told.append(&mut round.waiting);
            }
        }
        for waiting in told {
            self.tell(waiting.rank, &Reply::Gone { ask: waiting.ask, rank });
        }
    }

    fn asked(&mut self, rank: u32, request: Request) {
        if self.places[rank as usize] != Place::Here {
            return self.refuse_gone(rank, &request);
        }
        let until = |millis: u64| Instant::now() + Duration::from_millis(millis.min(7 * 24 * 3_600_000));
        match request {
            Request::Join { ask, millis, name, ranks } => {
                self.join(Waiting { rank, ask, until: until(millis) }, name, ranks);
            }
            Request::Gather { ask, millis, group, bytes, payload } => {
                self.gather(Waiting { rank, ask, until: until(millis) }, group, bytes, payload);
            }
            Request::Abort { group, why } => self.abort(rank, group, &why),
            Request::Fail { ask, why } => {
                self.places[rank as usize] = Place::Lost;
                for other in (0..self.places.len()).filter_map(|other| u32::try_from(other).ok()) {
                    if other != rank {
                        self.tell(other, &Reply::Failed { rank, why: why.clone() });
                        self.tell(other, &Reply::Lost { rank });
                    }
                }
                self.failed.push((rank, why));
                self.without(rank);
                self.failing.push((rank, ask));
                self.told_all();
                self.all_left();
            }
            Request::Leave { ask } => {
                self.places[rank as usize] = Place::Left;
                self.leaving[rank as usize] = Some(ask);
                self.tell_all(&Reply::Leaves { rank });
                self.without(rank);
                self.all_left();
            }
        }
    }

    /// A rank that has left or failed asks for something more: nothing is done for it, and it does not wait.
    fn refuse_gone(&mut self, rank: u32, request: &Request) {
        match *request {
            Request::Join { ask, .. } | Request::Gather { ask, .. } => {
                self.tell(rank, &Reply::Gone { ask, rank });
            }
            Request::Fail { ask, .. } | Request::Leave { ask } => self.tell(rank, &Reply::Left { ask }),
            Request::Abort { .. } => {}
        }
    }

    /// Answers ranks that fail. Rank 0, with whose process the hub ends, once all who still come were told why.
    fn told_all(&mut self) {
        let all_came = !self.places.contains(&Place::Expected);
        let told: Vec<(u32, u64)> = self.failing.extract_if(.., |(rank, _)| *rank != 0 || all_came).collect();
        for (rank, ask) in told {
            self.tell(rank, &Reply::Left { ask });
            self.tell(rank, &Reply::Lost { rank });
        }
    }

    fn all_left(&mut self) {
        if self.places.iter().any(|place| matches!(place, Place::Expected | Place::Here)) {
            return;
        }
        for rank in 0..self.places.len() {
            if let Some(ask) = self.leaving[rank].take() {
                self.tell(u32::try_from(rank).unwrap_or(u32::MAX), &Reply::Left { ask });
            }
        }
    }

    fn join(&mut self, waiting: Waiting, name: String, ranks: Vec<u32>) {
        let rank = waiting.rank;
        let entry = self.names.entry(name.clone()).or_insert_with(|| Name {
            asked: vec![0; ranks.len()],
            ranks: ranks.clone(),
            forming: HashMap::new(),
        });
        let member = ranks.iter().position(|r| *r == rank);
        let (Some(member), true) = (member, entry.ranks == ranks) else {
            return self.refuse(waiting, &name);
        };
        let instance = entry.asked[member];
        entry.asked[member] += 1;
        let number = *entry.forming.entry(instance).or_insert_with(|| {
            self.next_group += 1;
            self.next_group
        });
        let size = ranks.len();
        let group = self.groups.entry(number).or_insert_with(|| Group {
            name,
            ranks,
            present: vec![false; size],
            joining: Vec::new(),
            refused: false,
            aborted: None,
            next: vec![0; size],
            rounds: HashMap::new(),
        });
        group.present[member] = true;
        group.joining.push(waiting);
        if group.refused {
            for waiting in std::mem::take(&mut group.joining) {
                self.tell(waiting.rank, &Reply::Refused { ask: waiting.ask });
            }
        } else if group.present.iter().all(|present| *present) {
            entry.forming.remove(&instance);
            for waiting in std::mem::take(&mut group.joining) {
                self.tell(waiting.rank, &Reply::Joined { ask: waiting.ask, group: number });
            }
        } else {
            self.whom_it_lacks(number);
        }
    }

    /// If a group that forms lacks somebody who has gone, it will never be complete.
    fn whom_it_lacks(&mut self, number: u64) {
        let Some(group) = self.groups.get(&number) else { return };
        let absent = group.ranks.iter().zip(&group.present).filter(|(_, present)| !**present);
        let gone = absent.map(|(rank, _)| *rank).find(|rank| self.has_gone(*rank));
        if let Some(rank) = gone {
            self.without(rank);
        }
    }

    fn has_gone(&self, rank: u32) -> bool {
        self.places.get(rank as usize).is_none_or(|place| matches!(place, Place::Left | Place::Lost))
    }

    /// `waiting.rank` asked for other ranks under `name`: the members that wait for it there need not wait longer.
    fn refuse(&mut self, waiting: Waiting, name: &str) {
        self.tell(waiting.rank, &Reply::Refused { ask: waiting.ask });
        let forming: Vec<u64> =
            self.names.get(name).map(|entry| entry.forming.values().copied().collect()).unwrap_or_default();
        for number in forming {
            let Some(group) = self.groups.get_mut(&number) else { continue };
            let member = group.ranks.iter().position(|r| *r == waiting.rank);
            if member.is_some_and(|member| !group.present[member]) {
                group.refused = true;
                for waiting in std::mem::take(&mut group.joining) {
                    self.tell(waiting.rank, &Reply::Refused { ask: waiting.ask });
                }
            }
        }
    }

    fn gather(&mut self, waiting: Waiting, number: u64, bytes: u64, payload: Vec<u8>) {
        let rank = waiting.rank;
        let member = self.groups.get(&number).and_then(|group| group.ranks.iter().position(|r| *r == rank));
        let (Some(group), Some(member)) = (self.groups.get_mut(&number), member) else {
            return self.tell(rank, &Reply::Refused { ask: waiting.ask });
        };
        if let Some(by) = group.aborted {
            return self.tell(rank, &Reply::Gone { ask: waiting.ask, rank: by });
        }
        let size = group.ranks.len();
        let at = group.next[member];
        group.next[member] += 1;
        let round = group.rounds.entry(at).or_insert_with(|| Round {
            lengths: Vec::new(),
            payloads: vec![None; size],
            waiting: Vec::new(),
        });
        round.lengths.push(bytes.max(payload.len() as u64));
        round.payloads[member] = Some(payload);
        round.waiting.push(waiting);
        let lacks: Vec<u32> = group
            .ranks
            .iter()
            .zip(&round.payloads)
            .filter(|(_, given)| given.is_none())
            .map(|(r, _)| *r)
            .collect();
        if lacks.is_empty() {
            let Some(round) = group.rounds.remove(&at) else { return };
            if !fit(round.lengths.iter().copied()) {
                let bytes = round.lengths.into_iter().fold(0, u64::saturating_add);
                for waiting in round.waiting {
                    self.tell(waiting.rank, &Reply::TooLong { ask: waiting.ask, bytes });
                }
                return;
            }
            let payloads: Vec<Vec<u8>> = round.payloads.into_iter().flatten().collect();
            for waiting in round.waiting {
                self.tell(waiting.rank, &Reply::Gathered { ask: waiting.ask, payloads: payloads.clone() });
            }
        } else if let Some(gone) = lacks.into_iter().find(|rank| self.has_gone(*rank)) {
            self.without(gone);
        }
    }

    fn abort(&mut self, rank: u32, number: u64, why: &str) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        if !group.ranks.contains(&rank) || group.aborted.is_some() {
            return;
        }
        group.aborted = Some(rank);
        let members = group.ranks.clone();
        let told: Vec<Waiting> = group.rounds.drain().flat_map(|(_, round)| round.waiting).collect();
        // First why, then that there is nothing to wait for.
        for member in members {
            self.tell(member, &Reply::Aborted { group: number, rank, why: why.to_owned() });
        }
        for waiting in told {
            self.tell(waiting.rank, &Reply::Gone { ask: waiting.ask, rank });
        }
    }

    /// Answers those whose time is over. Who no longer waits for a group is no part of it: it may ask again, and who comes
    /// later waits for it.
    fn expire(&mut self, now: Instant) {
        let mut told = Vec::new();
        let mut left = Vec::new();
        for group in self.groups.values_mut() {
            let missing = |have: &mut dyn Iterator<Item = bool>| {
                group.ranks.iter().zip(have).find(|(_, have)| !have).map_or(0, |(rank, _)| *rank)
            };
            let rank = missing(&mut group.present.iter().copied());
            for waiting in group.joining.extract_if(.., |waiting| waiting.until <= now) {
                if let Some(member) = group.ranks.iter().position(|rank| *rank == waiting.rank) {
                    group.present[member] = false;
                    left.push((group.name.clone(), member));
                }
                told.push((waiting, rank));
            }
            for round in group.rounds.values_mut() {
                let rank = missing(&mut round.payloads.iter().map(Option::is_some));
                told.extend(round.waiting.extract_if(.., |waiting| waiting.until <= now).map(|w| (w, rank)));
            }
        }
        for (name, member) in left {
            let asked = self.names.get_mut(&name).and_then(|name| name.asked.get_mut(member));
            asked.into_iter().for_each(|asked| *asked = asked.saturating_sub(1));
        }
        for (waiting, rank) in told {
            self.tell(waiting.rank, &Reply::Late { ask: waiting.ask, rank });
        }
    }
}
