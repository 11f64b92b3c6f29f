//! What collectives compute.

use std::borrow::Cow;

use half::bf16;
use sessile_hal::{Beta, ByteRange, Collective, DeviceError, Transfer, View};
use sessile_plan::DType;

use crate::comm::Group;
use crate::memory::{HostMemory, Lease, Slot};
use crate::sync::Arc;

/// One rank's part of a batch of collectives.
pub(crate) struct Call {
    /// The group's name and size, and this rank's position in it.
    pub(crate) group: Arc<str>,
    pub(crate) size: u64,
    member: u64,
    pub(crate) kind: Collective,
    pub(crate) transfers: Vec<Transfer<HostMemory>>,
}

/// What must be equal on all ranks.
#[derive(Clone, PartialEq)]
pub(crate) struct Signature {
    kind: Collective,
    transfers: Vec<Shape>,
}

#[derive(Clone, PartialEq)]
struct Shape {
    dtypes: (DType, DType),
    elements: (u64, u64),
    /// Offset of `send`, where peers read it by offset.
    offset: Option<u64>,
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind.name())?;
        for (at, Shape { dtypes, elements, offset }) in self.transfers.iter().enumerate() {
            let (from, to) = (dtypes.0, dtypes.1);
            write!(
                f,
                "{} {from}[{}] to {to}[{}]",
                if at == 0 { " of" } else { "," },
                elements.0,
                elements.1
            )?;
            if let Some(offset) = offset {
                write!(f, " at offset {offset} of the window")?;
            }
        }
        Ok(())
    }
}

impl Call {
    /// Checks dtypes, sizes, overlap and registration for position `rank` in the group.
    pub(crate) fn new(
        kind: Collective,
        transfers: &[Transfer<HostMemory>],
        rank: u32,
        group: &Group,
    ) -> Result<Self, DeviceError> {
        let size = group.ranks.len() as u64;
        kind.check(transfers, rank, size, &group.name, |memory| memory.window() == Some(group.id))?;
        let (name, member) = (group.name.as_str().into(), rank.into());
        Ok(Call { group: name, size, member, kind, transfers: transfers.to_vec() })
    }

    pub(crate) fn signature(&self) -> Signature {
        let shape = |Transfer { send, recv }: &Transfer<HostMemory>| Shape {
            dtypes: (send.dtype(), recv.dtype()),
            elements: (send.elements(), recv.elements()),
            offset: self.kind.registers_send().then(|| send.range().start),
        };
        Signature { kind: self.kind, transfers: self.transfers.iter().map(shape).collect() }
    }

    /// Whether the part runs in three steps: meet, read peers' memory, meet again.
    pub(crate) fn reads_peers(&self) -> bool {
        self.kind.scaled().is_some()
    }
}

/// The ranges of a transfer to lease: what it sends and what it receives, or in place the hull of both.
fn ranges(transfer: &Transfer<HostMemory>) -> impl Iterator<Item = (&HostMemory, ByteRange, bool)> {
    let Transfer { send, recv } = transfer;
    let (from, to) = (send.range(), recv.range());
    let (read, write) = if transfer.in_place() {
        (None, ByteRange { start: from.start.min(to.start), end: from.end.max(to.end) })
    } else {
        (Some((send.memory(), from, false)), to)
    };
    read.into_iter().chain([(recv.memory(), write, true)])
}

/// A collective that all ranks have reached, in group order.
pub(crate) struct Joint {
    pub(crate) calls: Vec<Arc<Call>>,
}

impl Joint {
    /// Nothing is leased to meet: what is read of peers is leased when it is read.
    pub(crate) fn lease(&self) -> Option<Lease> {
        let moving = self.calls.iter().filter(|call| !call.reads_peers());
        Lease::acquire(moving.flat_map(|call| &call.transfers).flat_map(ranges))
    }

    /// Moves and sums the bytes of all ranks.
    pub(crate) fn run(&self, lease: &mut Lease) {
        let Some(first) = self.calls.first().filter(|call| !call.reads_peers()) else { return };
        let mut slots = lease.slots().into_iter();
        let per_rank: Vec<Vec<Moved<'_>>> = self
            .calls
            .iter()
            .map(|call| call.transfers.iter().map(|transfer| Moved::take(transfer, &mut slots)).collect())
            .collect();
        let mut per_rank: Vec<_> = per_rank.into_iter().map(Vec::into_iter).collect();
        for transfer in &first.transfers {
            let parts: Vec<Moved<'_>> = per_rank.iter_mut().filter_map(Iterator::next).collect();
            match transfer.send.dtype() {
                DType::Bf16 => run_typed::<bf16>(first.kind, parts),
                DType::F32 => run_typed::<f32>(first.kind, parts),
                DType::U32 => run_typed::<u32>(first.kind, parts),
            }
        }
    }
}

/// The bytes of one rank's transfer.
struct Moved<'a> {
    send: Cow<'a, [u8]>,
    recv: &'a mut [u8],
}

impl<'a> Moved<'a> {
    /// Takes what [`ranges`] leased for the transfer.
    fn take(transfer: &Transfer<HostMemory>, slots: &mut impl Iterator<Item = Slot<'a>>) -> Self {
        match (slots.next(), transfer.in_place()) {
            (Some(Slot::Write(hull)), true) => {
                let (from, to) = (transfer.send.range(), transfer.recv.range());
                let start = from.start.min(to.start);
                let part = |r: ByteRange| (r.start - start) as usize..(r.end - start) as usize;
                let send = Cow::Owned(hull[part(from)].to_vec());
                Moved { send, recv: &mut hull[part(to)] }
            }
            (Some(Slot::Read(send)), false) => match slots.next() {
                Some(Slot::Write(recv)) => Moved { send: Cow::Borrowed(send), recv },
                _ => unreachable!("the lease follows `ranges`"),
            },
            _ => unreachable!("the lease follows `ranges`"),
        }
    }
}

fn run_typed<T: Element>(kind: Collective, parts: Vec<Moved<'_>>) {
    let (mut sends, mut recvs): (Vec<Cow<'_, [T]>>, Vec<&mut [T]>) = (Vec::new(), Vec::new());
    for Moved { send, recv } in parts {
        sends.push(match send {
            Cow::Borrowed(bytes) => Cow::Borrowed(bytemuck::cast_slice(bytes)),
            // A copy of bytes has no alignment.
            Cow::Owned(bytes) => {
                let elements = bytes.chunks_exact(size_of::<T>());
                Cow::Owned(elements.map(bytemuck::pod_read_unaligned).collect())
            }
        });
        recvs.push(bytemuck::cast_slice_mut(recv));
    }
    match kind {
        Collective::AllGather => all_gather(&sends, &mut recvs),
        Collective::AllToAll => all_to_all(&sends, &mut recvs),
        Collective::ReduceScatter => reduce_scatter(&sends, &mut recvs),
        Collective::SymmetricReduceScatter => symmetric_reduce_scatter(&sends, &mut recvs),
        Collective::AllReduce => all_reduce(&sends, &mut recvs),
        // Read peers in `Reads` instead.
        Collective::ReduceScatterAccumulate { .. } | Collective::ReduceScatterStore { .. } => {}
    }
}

/// A rank's own step of a collective that reads peers' memory: what it reads of each member, in group order.
pub(crate) struct Reads {
    call: Arc<Call>,
    /// Block of this rank in every member's `send`, by transfer.
    blocks: Vec<Vec<View<HostMemory>>>,
}

impl Reads {
    /// What the member of `call` reads once all members have come with `calls`. `None` if their calls do not match, which
    /// the meeting has reported.
    pub(crate) fn of(call: &Arc<Call>, calls: &[Arc<Call>]) -> Option<Self> {
        let of_transfer = |at: usize| {
            let n = call.transfers[at].recv.elements();
            let block = |peer: &Arc<Call>| peer.transfers.get(at)?.send.slice(call.member * n, n).ok();
            calls.iter().map(block).collect::<Option<Vec<_>>>()
        };
        let blocks = (0..call.transfers.len()).map(of_transfer).collect::<Option<Vec<_>>>()?;
        Some(Reads { call: call.clone(), blocks })
    }

    /// The rank's own part.
    pub(crate) fn call(&self) -> &Call {
        &self.call
    }

    /// Every view, and whether it is written.
    pub(crate) fn uses(&self) -> impl Iterator<Item = (&View<HostMemory>, bool)> {
        self.call.transfers.iter().zip(&self.blocks).flat_map(|(transfer, blocks)| {
            blocks.iter().map(|block| (block, false)).chain([(&transfer.recv, true)])
        })
    }

    pub(crate) fn lease(&self) -> Option<Lease> {
        Lease::acquire(self.uses().map(|(view, writes)| (view.memory(), view.range(), writes)))
    }

    /// `recv = recv + (scale * sum)` or `recv = scale * sum`, the sum in FP32 in rank order from 0.
    pub(crate) fn run(&self, lease: &mut Lease) {
        let Some(scaled) = self.call.kind.scaled() else { return };
        let mut slots = lease.slots().into_iter();
        for (transfer, blocks) in self.call.transfers.iter().zip(&self.blocks) {
            let mut sends = Vec::new();
            for slot in slots.by_ref().take(blocks.len()) {
                if let Slot::Read(bytes) = slot {
                    sends.push(bytes);
                }
            }
            let Some(Slot::Write(recv)) = slots.next() else {
                unreachable!("the lease follows `Reads::lease`")
            };
            let recv: &mut [f32] = bytemuck::cast_slice_mut(recv);
            match transfer.send.dtype() {
                DType::Bf16 => reduce(&sends, recv, scaled, bf16::to_f32),
                _ => reduce(&sends, recv, scaled, |x: f32| x),
            }
        }
    }
}

fn reduce<T: bytemuck::Pod>(
    sends: &[&[u8]],
    recv: &mut [f32],
    (scale, beta): (f32, Beta),
    widen: impl Fn(T) -> f32,
) {
    let sends: Vec<&[T]> = sends.iter().map(|bytes| bytemuck::cast_slice(bytes)).collect();
    for (at, recv) in recv.iter_mut().enumerate() {
        let sum = <f32 as Element>::sum(sends.iter().map(|send| widen(send[at])));
        // Never contracted: product and sum are each rounded.
        let scaled = scale * sum;
        *recv = if beta == Beta::Accumulate { *recv + scaled } else { scaled };
    }
}

/// An element type of collectives. `u32` is moved, never summed ([`Call::new`] refuses).
trait Element: bytemuck::Pod {
    fn add(self, other: Self) -> Self;
    fn sum(ranks: impl Iterator<Item = Self>) -> Self;
}

impl Element for bf16 {
    fn add(self, other: Self) -> Self {
        bf16::from_f32(self.to_f32() + other.to_f32())
    }

    /// In FP32, rounded once.
    fn sum(ranks: impl Iterator<Item = Self>) -> Self {
        bf16::from_f32(Element::sum(ranks.map(bf16::to_f32)))
    }
}

impl Element for f32 {
    fn add(self, other: Self) -> Self {
        self + other
    }

    fn sum(mut ranks: impl Iterator<Item = Self>) -> Self {
        let first = ranks.next().unwrap_or(0.0); // not 0 + first: that would lose the sign of -0
        ranks.fold(first, |sum, x| sum + x)
    }
}

impl Element for u32 {
    fn add(self, other: Self) -> Self {
        self.wrapping_add(other)
    }

    fn sum(ranks: impl Iterator<Item = Self>) -> Self {
        ranks.fold(0, u32::wrapping_add)
    }
}

fn all_gather<T: Element>(sends: &[Cow<'_, [T]>], recvs: &mut [&mut [T]]) {
    for recv in recvs {
        let mut at = 0;
        for send in sends {
            recv[at..at + send.len()].copy_from_slice(send);
            at += send.len();
        }
    }
}

fn all_to_all<T: Element>(sends: &[Cow<'_, [T]>], recvs: &mut [&mut [T]]) {
    let size = sends.len();
    for (rank, recv) in recvs.iter_mut().enumerate() {
        let n = recv.len() / size;
        for (peer, send) in sends.iter().enumerate() {
            recv[peer * n..(peer + 1) * n].copy_from_slice(&send[rank * n..(rank + 1) * n]);
        }
    }
}

/// Block b starts as rank (b+1)'s, travels the ring upwards, and each rank adds its own; rank b is the last.
fn reduce_scatter<T: Element>(sends: &[Cow<'_, [T]>], recvs: &mut [&mut [T]]) {
    let size = sends.len();
    for (block, recv) in recvs.iter_mut().enumerate() {
        let n = recv.len();
        for hop in 1..=size {
            let own = &sends[(block + hop) % size][block * n..(block + 1) * n];
            if hop == 1 {
                recv.copy_from_slice(own);
            } else {
                for (sum, &x) in recv.iter_mut().zip(own) {
                    *sum = sum.add(x);
                }
            }
        }
    }
}

/// Each block is summed in FP32, in rank order, and rounded once.
fn symmetric_reduce_scatter<T: Element>(sends: &[Cow<'_, [T]>], recvs: &mut [&mut [T]]) {
    for (block, recv) in recvs.iter_mut().enumerate() {
        let first = block * recv.len();
        for (at, sum) in recv.iter_mut().enumerate() {
            *sum = T::sum(sends.iter().map(|send| send[first + at]));
        }
    }
}

fn all_reduce<T: Element>(sends: &[Cow<'_, [T]>], recvs: &mut [&mut [T]]) {
    let Some((first, others)) = recvs.split_first_mut() else { return };
    for (at, sum) in first.iter_mut().enumerate() {
        *sum = T::sum(sends.iter().map(|send| send[at]));
    }
    for other in others {
        other.copy_from_slice(first);
    }
}
