//! Allocations, and the borrow table that makes slices of them sound.
//!
//! Programs with a missing edge run on this device on purpose, and workers run at once; so two operations may
//! reach the same bytes in no order. That must give a wrong number, never undefined behaviour. Each allocation
//! therefore holds a table of the ranges in use, a [`Lease`] is the only way to a slice, and a lease is given
//! only if none of its ranges conflicts (same bytes, one of the two writes) with one that is out. The loser waits
//! its turn.

use std::alloc::{Layout, alloc, dealloc};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use sessile_hal::{ByteRange, DeviceError, Memory, MemoryId};
use sessile_plan::Domain;

use crate::sync::{Arc, Mutex, lock};

/// Alignment of every allocation, in bytes; also what registered memory needs.
pub(crate) const BASE_ALIGN: u64 = 4096;

/// Fresh bytes: NaN in bf16 and f32, and no token id.
const POISON: u8 = 0xFF;

/// What one rank has allocated.
#[derive(Debug)]
pub(crate) struct Account {
    rank: u32,
    limit: Option<u64>,
    state: Mutex<Tally>,
}

#[derive(Debug, Default)]
struct Tally {
    live: u64,
    peak: u64,
    serial: u64,
    /// The next address without data.
    addresses: u64,
    /// Successful or failed allocations so far.
    calls: u64,
    /// The call (from 1) that fails, for tests.
    fail_at: Option<u64>,
}

impl Account {
    pub(crate) fn new(rank: u32, limit: Option<u64>) -> Self {
        Account { rank, limit, state: Mutex::new(Tally::default()) }
    }

    /// What is left of the limit, if there is one.
    pub(crate) fn free(&self) -> Option<u64> {
        self.limit.map(|limit| limit.saturating_sub(self.live()))
    }

    pub(crate) fn live(&self) -> u64 {
        lock(&self.state).live
    }

    pub(crate) fn peak(&self) -> u64 {
        lock(&self.state).peak
    }

    /// Lets the `nth` allocation from now (from 1) fail.
    pub(crate) fn fail_allocation(&self, nth: u64) {
        let mut tally = lock(&self.state);
        tally.fail_at = Some(tally.calls.saturating_add(nth));
    }

    /// Books `bytes` and gives a serial number, or the bytes that were free.
    fn book(&self, bytes: u64) -> Result<u64, u64> {
        let mut tally = lock(&self.state);
        tally.calls += 1;
        let free = self.limit.unwrap_or(u64::MAX).saturating_sub(tally.live);
        if tally.fail_at == Some(tally.calls) {
            tally.fail_at = None;
            return Err(free.min(bytes.saturating_sub(1)));
        }
        if bytes > free {
            return Err(free);
        }
        tally.live += bytes;
        tally.peak = tally.peak.max(tally.live);
        tally.serial += 1;
        Ok(tally.serial)
    }

    /// An address of its own for an allocation without data. None is given twice.
    fn address(&self, bytes: u64) -> Option<u64> {
        let mut tally = lock(&self.state);
        let address = tally.addresses.max(BASE_ALIGN);
        tally.addresses = address.checked_add(bytes.max(1))?.checked_next_multiple_of(BASE_ALIGN)?;
        Some(address)
    }

    fn give_back(&self, bytes: u64) {
        lock(&self.state).live -= bytes;
    }
}

/// Memory of the host device: see [`Memory`].
#[derive(Clone)]
pub struct HostMemory(Arc<Allocation>);

struct Allocation {
    id: MemoryId,
    bytes: u64,
    domain: Domain,
    label: String,
    account: Arc<Account>,
    bytes_at: Backing,
    borrows: Mutex<Vec<Borrow>>,
    /// The group it is registered with, by [`Group::id`](crate::comm::Group).
    window: Mutex<Option<u64>>,
    mapping: AtomicU64,
}

/// Where the bytes are.
enum Backing {
    /// Start of `layout.size()` initialized bytes that the allocation owns.
    Heap { base: NonNull<u8>, layout: Layout },
    /// Nowhere: an address that nothing else has.
    Nowhere { address: u64 },
}

#[derive(Clone, Copy)]
struct Borrow {
    range: ByteRange,
    writes: bool,
}

impl Borrow {
    fn conflicts(self, other: Borrow) -> bool {
        (self.writes || other.writes) && self.range.overlaps(other.range)
    }
}

// SAFETY: `bytes_at` is the only field that is not `Send` by itself. Its pointer is to heap bytes that this value alone
// owns (made in `HostMemory::alloc`, freed in `Drop`); neither ties it to a thread.
unsafe impl Send for Allocation {}
// SAFETY: shared access reaches the bytes behind `bytes_at` only through `Claim::read` and `Claim::write`, whose
// claims the borrow table (a `Mutex`) keeps free of conflicts; the other fields are `Sync` by themselves.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Backing::Heap { base, layout } = self.bytes_at {
            // SAFETY: `base` came from `alloc(layout)` in `HostMemory::alloc` and is freed only here, once. No
            // slice is left: each lives inside a borrow of a `Lease`, which holds a clone of the owning `Arc`.
            unsafe { dealloc(base.as_ptr(), layout) };
        }
        self.account.give_back(self.bytes);
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}` ({} bytes, {})", self.0.id, self.0.label, self.0.bytes, self.0.domain)
    }
}

impl HostMemory {
    /// Without data, an allocation has an address and a size and no bytes.
    pub(crate) fn alloc(
        account: &Arc<Account>,
        bytes: u64,
        domain: &Domain,
        label: &str,
        shape_only: bool,
    ) -> Result<Self, DeviceError> {
        let refused = |free| DeviceError::OutOfMemory {
            rank: account.rank,
            label: label.to_owned(),
            requested: bytes,
            free,
        };
        let owned = |serial, bytes_at| {
            HostMemory(Arc::new(Allocation {
                id: MemoryId { rank: account.rank, serial },
                bytes,
                domain: domain.clone(),
                label: label.to_owned(),
                account: account.clone(),
                bytes_at,
                borrows: Mutex::new(Vec::new()),
                window: Mutex::new(None),
                mapping: AtomicU64::new(0),
            }))
        };
        if shape_only {
            let serial = account.book(bytes).map_err(refused)?;
            let address = account.address(bytes).ok_or_else(|| {
                account.give_back(bytes);
                refused(0)
            })?;
            return Ok(owned(serial, Backing::Nowhere { address }));
        }
        let layout = usize::try_from(bytes.max(1))
            .ok()
            .and_then(|size| Layout::from_size_align(size, BASE_ALIGN as usize).ok())
            .ok_or_else(|| refused(account.limit.unwrap_or(u64::MAX).saturating_sub(account.live())))?;
        let serial = account.book(bytes).map_err(refused)?;
        // SAFETY: `alloc` requires a layout of non-zero size; its size is at least 1 by `bytes.max(1)`.
        let base = unsafe { alloc(layout) };
        let Some(base) = NonNull::new(base) else {
            account.give_back(bytes);
            return Err(refused(0));
        };
        // SAFETY: `base` is not null (checked above) and was given out by `alloc` for `layout.size()` bytes,
        // which nobody else knows of yet.
        unsafe { base.write_bytes(POISON, layout.size()) };
        Ok(owned(serial, Backing::Heap { base, layout }))
    }

    /// The group it is registered with.
    pub(crate) fn window(&self) -> Option<u64> {
        *lock(&self.0.window)
    }

    /// Notes a registration.
    pub(crate) fn set_window(&self, group: u64) {
        *lock(&self.0.window) = Some(group);
    }

    /// As if the bytes were given back and fresh ones mapped at the same address: poison, no registration. `lease`
    /// covers them all.
    pub(crate) fn remap(&self, lease: &mut Lease) {
        for slot in lease.slots() {
            if let Slot::Write(bytes) = slot {
                bytes.fill(POISON);
            }
        }
        *lock(&self.0.window) = None;
        self.0.mapping.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether this was allocated against `account`.
    pub(crate) fn belongs_to(&self, account: &Arc<Account>) -> bool {
        Arc::ptr_eq(&self.0.account, account)
    }
}

impl Memory for HostMemory {
    fn id(&self) -> MemoryId {
        self.0.id
    }

    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    fn domain(&self) -> &Domain {
        &self.0.domain
    }

    fn label(&self) -> &str {
        &self.0.label
    }

    fn address(&self) -> u64 {
        match self.0.bytes_at {
            Backing::Heap { base, .. } => base.as_ptr().addr() as u64,
            Backing::Nowhere { address } => address,
        }
    }

    fn mapping(&self) -> u64 {
        self.0.mapping.load(Ordering::Relaxed)
    }
}

/// One range of a lease.
struct Claim {
    memory: HostMemory,
    borrow: Borrow,
}

impl Claim {
    /// The first byte of the range and the number of its bytes: none where there is no data.
    fn bytes(&self) -> (*mut u8, usize) {
        let range = self.borrow.range;
        match self.memory.0.bytes_at {
            // `Lease::acquire` asserted that the range lies inside the allocation.
            Backing::Heap { base, .. } => {
                (base.as_ptr().wrapping_add(range.start as usize), (range.end - range.start) as usize)
            }
            Backing::Nowhere { .. } => (NonNull::dangling().as_ptr(), 0),
        }
    }

    fn read(&self) -> &[u8] {
        let (start, len) = self.bytes();
        // SAFETY: `slice::from_raw_parts` needs
        // - valid, aligned, initialized bytes of one allocation: `Lease::acquire` asserted that the range lies
        //   inside the allocation, which `HostMemory::alloc` initialized wholly; `u8` has alignment 1; where there is
        //   no data, the slice is empty and its pointer aligned and not null;
        // - no write for the lifetime, which is that of this borrow of the claim: the claim stands in the borrow
        //   table as long as its `Lease` lives, and no claim that writes a byte of it is given out meanwhile;
        // - at most `isize::MAX` bytes: guaranteed by `Layout`.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    fn write(&mut self) -> &mut [u8] {
        debug_assert!(self.borrow.writes);
        let (start, len) = self.bytes();
        // SAFETY: as in `read`; besides, no other access at all for the lifetime: the claim writes (`Lease::slots`
        // checks it), so the borrow table gives out no other claim of any of its bytes, and `&mut self` keeps
        // this claim from giving a second slice.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }
}

/// The bytes of one operand.
pub(crate) enum Slot<'a> {
    Read(&'a [u8]),
    Write(&'a mut [u8]),
}

/// The right to use some ranges until it is dropped.
pub(crate) struct Lease {
    claims: Vec<Claim>,
}

impl Lease {
    /// The right to use nothing.
    pub(crate) fn nothing() -> Lease {
        Lease { claims: Vec::new() }
    }

    /// Takes all ranges (with `true`: to write) at once, or none.
    pub(crate) fn acquire<'m>(
        wanted: impl IntoIterator<Item = (&'m HostMemory, ByteRange, bool)>,
    ) -> Option<Lease> {
        let mut lease = Lease { claims: Vec::new() };
        for (memory, range, writes) in wanted {
            // The slices rest on this; it stays on in release builds.
            assert!(range.start <= range.end && range.end <= memory.0.bytes, "range outside its allocation");
            let borrow = Borrow { range, writes };
            {
                let mut borrows = lock(&memory.0.borrows);
                if borrows.iter().any(|other| other.conflicts(borrow)) {
                    return None; // dropping `lease` gives the earlier ranges back
                }
                borrows.push(borrow);
            }
            lease.claims.push(Claim { memory: memory.clone(), borrow });
        }
        Some(lease)
    }

    /// The bytes, in the order of `acquire`.
    pub(crate) fn slots(&mut self) -> Vec<Slot<'_>> {
        self.claims
            .iter_mut()
            .map(
                |claim| {
                    if claim.borrow.writes { Slot::Write(claim.write()) } else { Slot::Read(claim.read()) }
                },
            )
            .collect()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        for claim in &self.claims {
            let mut borrows = lock(&claim.memory.0.borrows);
            let same = |b: &Borrow| b.range == claim.borrow.range && b.writes == claim.borrow.writes;
            if let Some(at) = borrows.iter().position(same) {
                borrows.swap_remove(at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(bytes: u64) -> HostMemory {
        let account = Arc::new(Account::new(0, None));
        HostMemory::alloc(&account, bytes, &Domain::Default, "test", false).expect("small")
    }

    fn range(start: u64, end: u64) -> ByteRange {
        ByteRange { start, end }
    }

    #[test]
    fn readers_share_and_a_writer_excludes() {
        let m = memory(64);
        let first = Lease::acquire([(&m, range(0, 32), false)]).expect("free");
        let second = Lease::acquire([(&m, range(16, 48), false)]).expect("readers share");
        assert!(Lease::acquire([(&m, range(40, 64), true)]).is_none());
        drop(second);
        let writer = Lease::acquire([(&m, range(32, 64), true)]).expect("disjoint from the reader");
        assert!(Lease::acquire([(&m, range(0, 64), false)]).is_none());
        drop((first, writer));
        assert!(Lease::acquire([(&m, range(0, 64), true)]).is_some());
    }

    #[test]
    fn a_refused_lease_gives_back_what_it_had() {
        let m = memory(64);
        assert!(Lease::acquire([(&m, range(0, 8), true), (&m, range(4, 12), false)]).is_none());
        assert!(Lease::acquire([(&m, range(0, 64), true)]).is_some());
    }

    #[test]
    fn fresh_bytes_are_poison_and_written_bytes_stay() {
        let m = memory(16);
        let mut lease = Lease::acquire([(&m, range(4, 8), true)]).expect("free");
        match lease.slots().remove(0) {
            Slot::Write(bytes) => {
                assert_eq!(bytes, [POISON; 4]);
                bytes.fill(7);
            }
            Slot::Read(_) => panic!("asked to write"),
        }
        drop(lease);
        let mut lease = Lease::acquire([(&m, range(0, 16), false)]).expect("free");
        match lease.slots().remove(0) {
            Slot::Read(bytes) => assert_eq!(bytes[3..9], [POISON, 7, 7, 7, 7, POISON]),
            Slot::Write(_) => panic!("asked to read"),
        }
    }
}
