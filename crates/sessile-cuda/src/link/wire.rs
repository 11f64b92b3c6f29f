//! Frames between a rank and the hub, and how both prove that they know the job's secret.
//!
//! A frame is its length (32 bits, little-endian), a tag, and fields in order. Nothing longer than [`MAX_FRAME`] is
//! sent or accepted, so a foreign peer can't make a rank allocate what it likes.
//!
//! ```text
//!  hub    → rank   magic, nonce_h
//!  rank   → hub    rank, world, nonce_r, HMAC(secret, "rank" nonce_h nonce_r rank world)
//!  hub    → rank   HMAC(secret, "hub" nonce_r nonce_h)
//! ```

use std::io::{Error, ErrorKind, Read, Result, Write};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Longest frame, in bytes.
pub(crate) const MAX_FRAME: usize = 64 << 20;
const MAGIC: [u8; 8] = *b"sessile2";

/// What a rank asks of the hub. `ask` numbers the requests of a rank; the answer carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// To make, with the others, the group of `ranks` named `name`.
    Join { ask: u64, millis: u64, name: String, ranks: Vec<u32> },
    /// To give `payload` to the group's next all-gather. What is longer than a frame stays away; `bytes` is its length.
    Gather { ask: u64, millis: u64, group: u64, bytes: u64, payload: Vec<u8> },
    /// To tell the group that this rank gives it up: why, or nothing if it was asked to.
    Abort { group: u64, why: String },
    /// To leave for good, once all others do.
    Leave { ask: u64 },
    /// To tell the others why this rank leaves at once.
    Fail { ask: u64, why: String },
}

/// What the hub tells a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The first word: the rank is taken in.
    Welcome,
    /// The only word: another process is, or was, this rank.
    Taken,
    /// The group is complete; its number in the job.
    Joined { ask: u64, group: u64 },
    /// The name belongs to a group of other ranks.
    Refused { ask: u64 },
    /// What the members gave, in group order.
    Gathered { ask: u64, payloads: Vec<Vec<u8>> },
    /// What the members gave, this many bytes in all, is longer than a frame.
    TooLong { ask: u64, bytes: u64 },
    /// A member did not come in time.
    Late { ask: u64, rank: u32 },
    /// A member has gone, or given the group up.
    Gone { ask: u64, rank: u32 },
    /// All have left.
    Left { ask: u64 },
    /// News: a rank's connection broke.
    Lost { rank: u32 },
    /// News, ahead of the loss: why a rank leaves.
    Failed { rank: u32, why: String },
    /// News: a rank has left in order.
    Leaves { rank: u32 },
    /// News: a member gave a group up, and why.
    Aborted { group: u64, rank: u32, why: String },
}

/// Builds a frame.
struct Writer(Vec<u8>);

impl Writer {
    fn new(tag: u8) -> Self {
        Writer(vec![tag])
    }

    fn number(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend((bytes.len() as u64).to_le_bytes());
        self.0.extend(bytes);
        self
    }

    fn ranks(self, ranks: &[u32]) -> Self {
        let start = self.number(ranks.len() as u64);
        ranks.iter().fold(start, |frame, rank| frame.number(u64::from(*rank)))
    }
}

/// Takes a frame apart. Every length is checked against what is left.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(|| bad("a frame ends too soon"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u64> {
        let bytes = self.take(8)?;
        Ok(u64::from_le_bytes(bytes.try_into().map_err(|_| bad("a number"))?))
    }

    fn rank(&mut self) -> Result<u32> {
        u32::try_from(self.number()?).map_err(|_| bad("a rank beyond 2^32"))
    }

    fn bytes(&mut self) -> Result<Vec<u8>> {
        let count = usize::try_from(self.number()?).map_err(|_| bad("a length"))?;
        self.take(count).map(<[u8]>::to_vec)
    }

    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let count = self.number()?;
        // Each item takes eight bytes or more.
        if count > self.0.len() as u64 / 8 {
            return Err(bad("a list longer than its frame"));
        }
        (0..count).map(|_| item(self)).collect()
    }

    fn end<T>(self, value: T) -> Result<T> {
        if self.0.is_empty() { Ok(value) } else { Err(bad("a frame has bytes left over")) }
    }
}

fn text(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|_| bad("words that are no text"))
}

fn bad(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

/// Something that travels as a frame.
pub(crate) trait Frame: Sized {
    fn encode(&self) -> Vec<u8>;
    fn decode(frame: &[u8]) -> Result<Self>;

    /// Sends it.
    fn send(&self, mut to: impl Write) -> Result<()> {
        let frame = self.encode();
        let length = u32::try_from(frame.len()).ok().filter(|_| frame.len() <= MAX_FRAME);
        let length = length.ok_or_else(|| bad("a message longer than 64 MiB"))?;
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(frame);
        to.write_all(&bytes)
    }

    /// Waits for the next one.
    fn receive(mut from: impl Read) -> Result<Self> {
        let mut length = [0; 4];
        from.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_FRAME {
            return Err(bad("a message longer than 64 MiB"));
        }
        // Grows with what arrives, not with what was announced.
        let mut frame = Vec::new();
        from.take(length as u64).read_to_end(&mut frame)?;
        if frame.len() < length {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Self::decode(&frame)
    }
}

impl Frame for Request {
    fn encode(&self) -> Vec<u8> {
        match self {
            Request::Join { ask, millis, name, ranks } => {
                Writer::new(1).number(*ask).number(*millis).bytes(name.as_bytes()).ranks(ranks).0
            }
            Request::Gather { ask, millis, group, bytes, payload } => {
                Writer::new(2).number(*ask).number(*millis).number(*group).number(*bytes).bytes(payload).0
            }
            Request::Abort { group, why } => Writer::new(3).number(*group).bytes(why.as_bytes()).0,
            Request::Leave { ask } => Writer::new(4).number(*ask).0,
            Request::Fail { ask, why } => Writer::new(5).number(*ask).bytes(why.as_bytes()).0,
        }
    }

    fn decode(frame: &[u8]) -> Result<Self> {
        let mut r = Reader(frame);
        let request = match r.take(1)?[0] {
            1 => Request::Join {
                ask: r.number()?,
                millis: r.number()?,
                name: text(r.bytes()?)?,
                ranks: r.list(Reader::rank)?,
            },
            2 => Request::Gather {
                ask: r.number()?,
                millis: r.number()?,
                group: r.number()?,
                bytes: r.number()?,
                payload: r.bytes()?,
            },
            3 => Request::Abort { group: r.number()?, why: text(r.bytes()?)? },
            4 => Request::Leave { ask: r.number()? },
            5 => Request::Fail { ask: r.number()?, why: text(r.bytes()?)? },
            _ => return Err(bad("an unknown request")),
        };
        r.end(request)
    }
}

impl Frame for Reply {
    fn encode(&self) -> Vec<u8> {
        let pair = |tag, a: u64, b: u64| Writer::new(tag).number(a).number(b).0;
        match self {
            Reply::Joined { ask, group } => pair(1, *ask, *group),
            Reply::Refused { ask } => Writer::new(2).number(*ask).0,
            Reply::Gathered { ask, payloads } => {
                let start = Writer::new(3).number(*ask).number(payloads.len() as u64);
                payloads.iter().fold(start, |frame, payload| frame.bytes(payload)).0
            }
            Reply::Welcome => Writer::new(11).0,
            Reply::Taken => Writer::new(12).0,
            Reply::TooLong { ask, bytes } => pair(13, *ask, *bytes),
            Reply::Late { ask, rank } => pair(4, *ask, u64::from(*rank)),
            Reply::Gone { ask, rank } => pair(5, *ask, u64::from(*rank)),
            Reply::Left { ask } => Writer::new(6).number(*ask).0,
            Reply::Lost { rank } => Writer::new(7).number(u64::from(*rank)).0,
            Reply::Leaves { rank } => Writer::new(8).number(u64::from(*rank)).0,
            Reply::Failed { rank, why } => Writer::new(10).number(u64::from(*rank)).bytes(why.as_bytes()).0,
            Reply::Aborted { group, rank, why } => {
                Writer::new(9).number(*group).number(u64::from(*rank)).bytes(why.as_bytes()).0
            }
        }
    }

    fn decode(frame: &[u8]) -> Result<Self> {
        let mut r = Reader(frame);
        let reply = match r.take(1)?[0] {
            1 => Reply::Joined { ask: r.number()?, group: r.number()? },
            2 => Reply::Refused { ask: r.number()? },
            3 => Reply::Gathered { ask: r.number()?, payloads: r.list(Reader::bytes)? },
            4 => Reply::Late { ask: r.number()?, rank: r.rank()? },
            5 => Reply::Gone { ask: r.number()?, rank: r.rank()? },
            6 => Reply::Left { ask: r.number()? },
            7 => Reply::Lost { rank: r.rank()? },
            8 => Reply::Leaves { rank: r.rank()? },
            9 => Reply::Aborted { group: r.number()?, rank: r.rank()?, why: text(r.bytes()?)? },
            10 => Reply::Failed { rank: r.rank()?, why: text(r.bytes()?)? },
            11 => Reply::Welcome,
            12 => Reply::Taken,
            13 => Reply::TooLong { ask: r.number()?, bytes: r.number()? },
            _ => return Err(bad("an unknown reply")),
        };
        r.end(reply)
    }
}

/// Whether messages of these lengths fit into a frame, with what it begins with.
pub(crate) fn fit(lengths: impl Iterator<Item = u64>) -> bool {
    let head = 64;
    lengths.fold(head, |sum: u64, length| sum.saturating_add(length.saturating_add(8))) <= MAX_FRAME as u64
}

/// Random bytes of the system.
pub(crate) fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

fn mac(secret: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac
}

/// The hub's side of the proof: which rank came.
pub(crate) fn greet(mut peer: impl Read + Write, secret: &[u8], world: u32) -> Result<u32> {
    let nonce = random()?;
    peer.write_all(&[&MAGIC[..], &nonce].concat())?;
    let mut answer = [0; 72];
    peer.read_exact(&mut answer)?;
    let (place, rest) = answer.split_at(8);
    let (theirs, proof) = rest.split_at(32);
    mac(secret, &[b"rank", &nonce, theirs, place]).verify_slice(proof).map_err(|_| bad("a wrong proof"))?;
    let number = |at: usize| u32::from_le_bytes([place[at], place[at + 1], place[at + 2], place[at + 3]]);
    if number(4) != world || number(0) >= world {
        return Err(bad("another world"));
    }
    peer.write_all(&mac(secret, &[b"hub", theirs, &nonce]).finalize().into_bytes())?;
    Ok(number(0))
}

/// A rank's side of the proof.
pub(crate) fn introduce(mut hub: impl Read + Write, secret: &[u8], rank: u32, world: u32) -> Result<()> {
    let mut hello = [0; 40];
    hub.read_exact(&mut hello)?;
    let (magic, theirs) = hello.split_at(8);
    if magic != MAGIC {
        return Err(bad("something else listens there"));
    }
    let nonce = random()?;
    let place = [rank.to_le_bytes(), world.to_le_bytes()].concat();
    let proof = mac(secret, &[b"rank", theirs, &nonce, &place]).finalize().into_bytes();
    hub.write_all(&[&place[..], &nonce, &proof].concat())?;
    let mut answer = [0; 32];
    hub.read_exact(&mut answer)?;
    mac(secret, &[b"hub", &nonce, theirs]).verify_slice(&answer).map_err(|_| bad("a wrong proof"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests() -> Vec<Request> {
        vec![
            Request::Join { ask: 1, millis: 2, name: "a".to_owned(), ranks: vec![3, 0] },
            Request::Gather { ask: u64::MAX, millis: 0, group: 7, bytes: 3, payload: vec![1, 2, 3] },
            Request::Abort { group: 9, why: "no memory".to_owned() },
            Request::Leave { ask: 4 },
            Request::Fail { ask: 5, why: "no memory".to_owned() },
        ]
    }

    fn replies() -> Vec<Reply> {
        vec![
            Reply::Joined { ask: 1, group: 2 },
            Reply::Refused { ask: 3 },
            Reply::Gathered { ask: 4, payloads: vec![vec![], vec![5]] },
            Reply::Welcome,
            Reply::Taken,
            Reply::TooLong { ask: 5, bytes: 1 << 40 },
            Reply::Late { ask: 5, rank: 6 },
            Reply::Gone { ask: 5, rank: 6 },
            Reply::Left { ask: 7 },
            Reply::Lost { rank: 8 },
            Reply::Leaves { rank: 8 },
            Reply::Failed { rank: 2, why: "no memory".to_owned() },
            Reply::Aborted { group: 9, rank: 1, why: String::new() },
        ]
    }

    #[test]
    fn frames_come_back_as_they_went() {
        let mut wire = Vec::new();
        requests().iter().for_each(|request| request.send(&mut wire).expect("sends"));
        let mut wire = &wire[..];
        for request in requests() {
            assert_eq!(Request::receive(&mut wire).expect("arrives"), request);
        }
        for reply in replies() {
            assert_eq!(Reply::decode(&reply.encode()).expect("decodes"), reply);
        }
    }

    #[test]
    fn cut_grown_and_changed_frames_are_errors_and_never_panics() {
        for frame in requests().iter().map(Frame::encode) {
            for cut in 0..frame.len() {
                assert!(Request::decode(&frame[..cut]).is_err());
            }
            assert!(Request::decode(&[&frame[..], &[0]].concat()).is_err());
            for at in 0..frame.len() {
                for bit in 0..8 {
                    let mut frame = frame.clone();
                    frame[at] ^= 1 << bit;
                    let _ = Request::decode(&frame);
                    let _ = Reply::decode(&frame);
                }
            }
        }
        let announced = u32::MAX.to_le_bytes();
        assert!(Request::receive(&announced[..]).is_err(), "longer than a frame may be");
    }

    #[test]
    fn only_who_knows_the_secret_is_let_in() {
        use std::os::unix::net::UnixStream;
        for (ours, theirs, world, fits) in
            [("s", "s", 4, true), ("s", "t", 4, false), ("s", "", 4, false), ("s", "s", 5, false)]
        {
            let (hub, rank) = UnixStream::pair().expect("pair");
            let result = std::thread::scope(|scope| {
                let rank = scope.spawn(move || introduce(&rank, theirs.as_bytes(), 3, world).is_ok());
                let greeted = greet(&hub, ours.as_bytes(), 4);
                drop(hub);
                (greeted.ok(), rank.join().expect("no panic"))
            });
            assert_eq!(result, if fits { (Some(3), true) } else { (None, false) });
        }
    }
}
