//! What collectives compute.

use std::borrow::Cow;

use half::bf16;
use sessile_hal::{ByteRange, Collective, DeviceError, Memory, View};
use sessile_plan::DType;

use crate::memory::{HostMemory, Lease, Slot};
use crate::sync::Arc;

/// One rank's part of a collective.
pub(crate) struct Call {
    pub(crate) kind: Collective,
    send: View<HostMemory>,
    recv: View<HostMemory>,
}

/// What must be equal on all ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature {
    kind: Collective,
    dtype: DType,
    send: u64,
    recv: u64,
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} of {dtype}[{}] to {dtype}[{}]",
            self.kind.name(),
            self.send,
            self.recv,
            dtype = self.dtype
        )
    }
}

impl Call {
    /// Checks dtypes, sizes and overlap for position `rank` in a group of `size`.
    pub(crate) fn new(
        kind: Collective,
        send: &View<HostMemory>,
        recv: &View<HostMemory>,
        rank: u32,
        size: u32,
    ) -> Result<Self, DeviceError> {
        let g = u64::from(size);
        let (sent, received) = (send.elements(), recv.elements());
        let times = |n: u64| n.checked_mul(g);
        let (fits, expected) = match kind {
            Collective::AllGather => (times(sent) == Some(received), format!("n, {g}·n elements")),
            Collective::ReduceScatter => (times(received) == Some(sent), format!("{g}·n, n elements")),
            Collective::AllReduce => (sent == received, "n, n elements".to_owned()),
            Collective::AllToAll => {
                (sent == received && sent.is_multiple_of(g), format!("{g}·n, {g}·n elements"))
            }
        };
        let sums = matches!(kind, Collective::ReduceScatter | Collective::AllReduce);
        let refused = |expected: String| DeviceError::Operands {
            kernel: kind.name(),
            expected,
            given: vec![(send.dtype(), sent), (recv.dtype(), received)],
        };
        if !fits || send.dtype() != recv.dtype() || (sums && send.dtype() == DType::U32) {
            let floats = if sums { "one float dtype" } else { "one dtype" };
            return Err(refused(format!("{expected} of {floats}")));
        }
        let (from, to) = (send.range(), recv.range());
        if send.memory().id() == recv.memory().id() && from.overlaps(to) {
            let block = |whole: ByteRange| {
                let bytes = whole.bytes() / g;
                let start = whole.start + u64::from(rank) * bytes;
                ByteRange { start, end: start + bytes }
            };
            let in_place = match kind {
                Collective::AllGather => from == block(to),
                Collective::ReduceScatter => to == block(from),
                Collective::AllReduce => from == to,
                Collective::AllToAll => false,
            };
            if !in_place {
                return Err(refused("views that are disjoint or exactly in place".to_owned()));
            }
        }
        Ok(Call { kind, send: send.clone(), recv: recv.clone() })
    }

    pub(crate) fn signature(&self) -> Signature {
        Signature {
            kind: self.kind,
            dtype: self.send.dtype(),
            send: self.send.elements(),
            recv: self.recv.elements(),
        }
    }

    pub(crate) fn send(&self) -> &View<HostMemory> {
        &self.send
    }

    pub(crate) fn recv(&self) -> &View<HostMemory> {
        &self.recv
    }

    fn in_place(&self) -> bool {
        self.send.memory().id() == self.recv.memory().id() && self.send.range().overlaps(self.recv.range())
    }

    /// The ranges to lease: what it sends and what it receives, or in place the hull of both.
    fn ranges(&self) -> impl Iterator<Item = (&HostMemory, ByteRange, bool)> {
        let (from, to) = (self.send.range(), self.recv.range());
        let (read, write) = if self.in_place() {
            (None, ByteRange { start: from.start.min(to.start), end: from.end.max(to.end) })
        } else {
            (Some((self.send.memory(), from, false)), to)
        };
        read.into_iter().chain([(self.recv.memory(), write, true)])
    }
}

/// A collective that all ranks have reached, in group order.
pub(crate) struct Joint {
    pub(crate) calls: Vec<Arc<Call>>,
}

impl Joint {
    pub(crate) fn lease(&self) -> Option<Lease> {
        Lease::acquire(self.calls.iter().flat_map(|call| call.ranges()))
    }

    /// Moves and sums the bytes of all ranks.
    pub(crate) fn run(&self, lease: &mut Lease) {
        match self.calls.first().map(|call| call.send.dtype()) {
            None => {}
            Some(DType::Bf16) => self.run_typed::<bf16>(lease),
            Some(DType::F32) => self.run_typed::<f32>(lease),
            Some(DType::U32) => self.run_typed::<u32>(lease),
        }
    }

    fn run_typed<T: Element>(&self, lease: &mut Lease) {
        let mut slots = lease.slots().into_iter();
        let (mut sends, mut recvs): (Vec<Cow<'_, [T]>>, Vec<&mut [T]>) = (Vec::new(), Vec::new());
        for call in &self.calls {
            let (from, to) = (call.send.range(), call.recv.range());
            match (slots.next(), call.in_place()) {
                (Some(Slot::Write(hull)), true) => {
                    let start = from.start.min(to.start);
                    let part = |r: ByteRange| (r.start - start) as usize..(r.end - start) as usize;
                    sends.push(Cow::Owned(bytemuck::cast_slice(&hull[part(from)]).to_vec()));
                    recvs.push(bytemuck::cast_slice_mut(&mut hull[part(to)]));
                }
                (Some(Slot::Read(send)), false) => {
                    sends.push(Cow::Borrowed(bytemuck::cast_slice(send)));
                    if let Some(Slot::Write(recv)) = slots.next() {
                        recvs.push(bytemuck::cast_slice_mut(recv));
                    }
                }
                _ => unreachable!("the lease follows `Call::ranges`"),
            }
        }
        match self.calls[0].kind {
            Collective::AllGather => all_gather(&sends, &mut recvs),
            Collective::AllToAll => all_to_all(&sends, &mut recvs),
            Collective::ReduceScatter => reduce_scatter(&sends, &mut recvs),
            Collective::AllReduce => all_reduce(&sends, &mut recvs),
        }
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

fn all_reduce<T: Element>(sends: &[Cow<'_, [T]>], recvs: &mut [&mut [T]]) {
    let Some((first, others)) = recvs.split_first_mut() else { return };
    for (at, sum) in first.iter_mut().enumerate() {
        *sum = T::sum(sends.iter().map(|send| send[at]));
    }
    for other in others {
        other.copy_from_slice(first);
    }
}
