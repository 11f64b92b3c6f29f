//! The protocols of the one-shot reduce-scatter in every interleaving: the steps of `super`, with several blocks a rank.

use std::collections::HashSet;

/// Where a block is in its launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
    /// The producer has written the input of the next round; the block has not begun.
    Begin,
    /// S towards rank n, the place's packet; then s of rank n: its packets are there, its places are left empty.
    Send(u8, u8),
    Receive(u8),
    Empty(u8),
    /// W towards rank n, by the first block.
    TellWritten(u8),
    /// w for rank n.
    AwaitWritten(u8),
    /// B of rank n's input.
    Read(u8),
    /// C.
    Count,
    /// R towards rank n and r for rank n, by the block that counted last.
    TellRead(u8),
    AwaitRead(u8),
    End,
}

/// A rank. Words hold round numbers as the kernel's do: 32 bits that wrap.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Rank {
    at: Vec<At>,
    round: u32,
    /// Rounds that are over.
    over: u32,
    /// Round of what is in the input.
    input: u32,
    left: u8,
    /// By rank.
    written: Vec<u32>,
    read: Vec<u32>,
    /// By half, then by rank and place: the round whose packet is there, which no packet says.
    boxes: [Vec<Option<u32>>; 2],
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Fine {
        states: usize,
    },
    /// A rank used another round's input.
    WrongInput,
    /// A packet came where one was that nobody had taken.
    Overwritten,
    /// Nobody can go on, and somebody is not done.
    Stuck,
}

/// How a round goes, by its place among all: packets in so many places of the mailbox, or by reading if 0.
type Kind = fn(u32) -> u8;

struct Protocol {
    ranks: u8,
    blocks: u8,
    rounds: u32,
    first: u32,
    kind: Kind,
    exit: bool,
    /// Whether mailboxes take turns, and are left empty.
    turns: bool,
    empties: bool,
    /// A rank that never starts.
    dead: Option<u8>,
}

const PULL: Protocol = Protocol {
    ranks: 2,
    blocks: 1,
    rounds: 4,
    first: 0,
    kind: |_| 0,
    exit: true,
    turns: true,
    empties: true,
    dead: None,
};
/// Places of a mailbox for each rank.
const PLACES: u8 = 2;

impl Protocol {
    /// Explores every interleaving of the blocks' steps.
    fn explore(&self) -> Verdict {
        let n = self.ranks as usize;
        let rank = Rank {
            at: vec![At::Begin; self.blocks as usize],
            round: self.first.wrapping_add(1),
            over: 0,
            input: self.first.wrapping_add(1),
            left: 0,
            written: vec![self.first; n],
            read: vec![self.first; n],
            boxes: [vec![None; n * PLACES as usize], vec![None; n * PLACES as usize]],
        };
        let start = vec![rank; n];
        let (mut seen, mut open) = (HashSet::from([start.clone()]), vec![start]);
        while let Some(world) = open.pop() {
            let mut moved = false;
            for rank in 0..self.ranks {
                for block in 0..self.blocks {
                    match self.step(&world, rank, block) {
                        Err(verdict) => return verdict,
                        Ok(None) => {}
                        Ok(Some(next)) => {
                            moved = true;
                            if seen.insert(next.clone()) {
                                open.push(next);
                            }
                        }
                    }
                }
            }
            if !moved && world.iter().any(|rank| rank.over < self.rounds) {
                return Verdict::Stuck;
            }
        }
        Verdict::Fine { states: seen.len() }
    }

    /// One step of a block; `None` if it waits.
    fn step(&self, world: &[Rank], rank: u8, block: u8) -> Result<Option<Vec<Rank>>, Verdict> {
        let (me, b) = (rank as usize, block as usize);
        if self.dead == Some(rank) || world[me].over == self.rounds {
            return Ok(None);
        }
        let mut next = world.to_vec();
        let round = world[me].round;
        let places = (self.kind)(world[me].over);
        let after =
            |n: u8, again: fn(u8) -> At, then: At| if n + 1 < self.ranks { again(n + 1) } else { then };
        let reached = |word: u32| word.wrapping_sub(round).cast_signed() >= 0;
        let half = if self.turns { (round & 1) as usize } else { 0 };
        let slot = |from: usize, place: u8| from * PLACES as usize + place as usize;
        next[me].at[b] = match world[me].at[b] {
            At::Begin => match (places, block) {
                (0, 0) => At::TellWritten(0),
                (0, _) => At::AwaitWritten(0),
                (_, 0) => At::Send(0, 0),
                _ => At::End,
            },
            At::Send(n, place) => {
                if next[n as usize].boxes[half][slot(me, place)].replace(round).is_some() {
                    return Err(Verdict::Overwritten);
                }
                if place + 1 < places {
                    At::Send(n, place + 1)
                } else {
                    after(n, |n| At::Send(n, 0), At::Receive(0))
                }
            }
            At::Receive(n) => {
                for place in 0..places {
                    match world[me].boxes[half][slot(n as usize, place)] {
                        None => return Ok(None),
                        Some(found) if found != round => return Err(Verdict::WrongInput),
                        Some(_) => {}
                    }
                }
                At::Empty(n)
            }
            At::Empty(n) => {
                for place in 0..if self.empties { places } else { 0 } {
                    next[me].boxes[half][slot(n as usize, place)] = None;
                }
                after(n, At::Receive, At::End)
            }
            At::TellWritten(n) => {
                next[n as usize].written[me] = round;
                after(n, At::TellWritten, At::AwaitWritten(0))
            }
            At::AwaitWritten(n) if reached(world[me].written[n as usize]) => {
                after(n, At::AwaitWritten, At::Read(0))
            }
            At::Read(n) => {
                if world[n as usize].input != round {
                    return Err(Verdict::WrongInput);
                }
                after(n, At::Read, At::Count)
            }
            At::Count => {
                next[me].left += 1;
                if next[me].left == self.blocks {
                    next[me].left = 0;
                    At::TellRead(0)
                } else {
                    At::End
                }
            }
            At::TellRead(n) => {
                next[n as usize].read[me] = round;
                after(n, At::TellRead, if self.exit { At::AwaitRead(0) } else { At::End })
            }
            At::AwaitRead(n) if reached(world[me].read[n as usize]) => after(n, At::AwaitRead, At::End),
            At::AwaitWritten(_) | At::AwaitRead(_) | At::End => return Ok(None),
        };
        let rank = &mut next[me];
        if rank.at.iter().all(|at| *at == At::End) {
            rank.over += 1;
            rank.round = round.wrapping_add(1);
            rank.input = rank.round;
            rank.at.fill(At::Begin);
        }
        Ok(Some(next))
    }
}

fn assert_fine(protocol: &Protocol) {
    let verdict = protocol.explore();
    let fine = matches!(verdict, Verdict::Fine { states } if states > 100);
    assert!(fine, "{} ranks from {}: {verdict:?}", protocol.ranks, protocol.first);
}

const FIRSTS: [u32; 3] = [0, u32::MAX - 1, i32::MAX.cast_unsigned() - 1];

#[test]
fn every_interleaving_reads_the_right_round_also_over_the_wrap() {
    for (ranks, blocks, rounds) in [(2, 1, 4), (2, 2, 3), (3, 1, 2)] {
        for first in FIRSTS {
            assert_fine(&Protocol { ranks, blocks, rounds, first, ..PULL });
        }
    }
}

#[test]
fn packets_are_those_of_the_round_also_between_rounds_of_reading() {
    for kind in [|_| 1, |round| (round % 2) as u8, |round| [2, 1, 0, 1, 0][round as usize % 5]] as [Kind; 3] {
        for (ranks, rounds) in [(2, 6), (3, 2)] {
            for first in FIRSTS {
                assert_fine(&Protocol { ranks, rounds, first, kind, ..PULL });
            }
        }
    }
}

#[test]
fn packets_meet_those_of_other_rounds_if_mailboxes_take_no_turns_or_are_left_full() {
    for ranks in [2, 3] {
        let push = Protocol { ranks, rounds: 3, kind: |_| 1, ..PULL };
        assert_fine(&push);
        assert_eq!(Protocol { turns: false, ..push }.explore(), Verdict::Overwritten, "{ranks} ranks");
        let left_full = Protocol { empties: false, ..push }.explore();
        assert!(
            matches!(left_full, Verdict::Overwritten | Verdict::WrongInput),
            "{ranks} ranks: {left_full:?}"
        );
    }
}

#[test]
fn without_the_exit_wait_a_slow_peer_reads_what_was_written_for_the_next_round() {
    for ranks in [2, 3] {
        let protocol = Protocol { ranks, rounds: 2, exit: false, ..PULL };
        assert_eq!(protocol.explore(), Verdict::WrongInput);
    }
}

#[test]
fn a_dead_peer_leaves_the_others_waiting_so_the_kernel_needs_its_patience() {
    for ranks in [2, 3] {
        for kind in [|_| 0, |_| 1] as [Kind; 2] {
            let protocol = Protocol { ranks, rounds: 1, dead: Some(ranks - 1), kind, ..PULL };
            assert_eq!(protocol.explore(), Verdict::Stuck);
        }
    }
}
