//! Memory and views of it.

use std::fmt;

use sessile_plan::{DType, Domain};

use crate::DeviceError;

/// Identity of one allocation, unique over all ranks and never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemoryId {
    /// The rank whose device holds the bytes.
    pub rank: u32,
    /// Serial number on that rank.
    pub serial: u64,
}

impl fmt::Display for MemoryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}m{}", self.rank, self.serial)
    }
}

/// Half-open range of bytes `[start, end)` inside one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteRange {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

impl ByteRange {
    /// Number of bytes.
    pub fn bytes(self) -> u64 {
        self.end - self.start
    }

    /// Whether the two ranges share a byte.
    pub fn overlaps(self, other: ByteRange) -> bool {
        self.start < other.end && other.start < self.end
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

/// One allocation. A handle: clones share it, and the bytes live until the last clone is gone. Graphs hold
/// clones of everything they touch.
pub trait Memory: Clone + Send + Sync + fmt::Debug + 'static {
    /// Identity.
    fn id(&self) -> MemoryId;
    /// Size in bytes.
    fn bytes(&self) -> u64;
    /// Where it came from.
    fn domain(&self) -> &Domain;
    /// The name it was allocated under, for people.
    fn label(&self) -> &str;
    /// Device address of the first byte. Fixed for life.
    fn address(&self) -> u64;
    /// Number of the physical bytes behind the address, from 0; see [`Device::remap`](crate::Device::remap).
    fn mapping(&self) -> u64;
}

/// A typed range of one allocation. Keeps the allocation alive.
#[derive(Clone, Debug)]
pub struct View<M> {
    memory: M,
    range: ByteRange,
    dtype: DType,
}

impl<M: Memory> View<M> {
    /// `elements` of `dtype` from byte `offset`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] if the range leaves the allocation or `offset` is not a multiple of the
    /// element size.
    pub fn new(memory: &M, offset: u64, elements: u64, dtype: DType) -> Result<Self, DeviceError> {
        let bytes = elements.checked_mul(dtype.size());
        let end = bytes.and_then(|bytes| offset.checked_add(bytes));
        match end {
            Some(end) if end <= memory.bytes() && offset.is_multiple_of(dtype.size()) => {
                Ok(View { memory: memory.clone(), range: ByteRange { start: offset, end }, dtype })
            }
            _ => Err(DeviceError::OutOfRange {
                memory: memory.id(),
                label: memory.label().to_owned(),
                offset,
                elements,
                dtype,
                available: memory.bytes(),
            }),
        }
    }

    /// The whole allocation as `dtype`.
    ///
    /// # Errors
    /// As [`View::new`], if the size is not a multiple of the element size.
    pub fn whole(memory: &M, dtype: DType) -> Result<Self, DeviceError> {
        View::new(memory, 0, memory.bytes() / dtype.size(), dtype)
    }

    /// `elements` from element `first` of this view.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] if they leave this view.
    pub fn slice(&self, first: u64, elements: u64) -> Result<Self, DeviceError> {
        match first.checked_add(elements) {
            Some(end) if end <= self.elements() => {
                View::new(&self.memory, self.range.start + first * self.dtype.size(), elements, self.dtype)
            }
            _ => Err(DeviceError::OutOfRange {
                memory: self.memory.id(),
                label: self.memory.label().to_owned(),
                offset: first,
                elements,
                dtype: self.dtype,
                available: self.range.bytes(),
            }),
        }
    }

    /// The allocation.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The bytes inside the allocation.
    pub fn range(&self) -> ByteRange {
        self.range
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.range.bytes() / self.dtype.size()
    }

    /// Device address of the first byte.
    pub fn address(&self) -> u64 {
        self.memory.address() + self.range.start
    }
}
