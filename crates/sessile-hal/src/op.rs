//! Operations as data.

use std::sync::Arc;

use crate::{DeviceError, Kernel, Memory, View};

/// How an operation uses an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads every byte it uses, writes none.
    Read,
    /// Writes every byte, reads none.
    Write,
    /// Reads and writes.
    ReadWrite,
}

impl Access {
    /// Whether bytes change.
    pub fn writes(self) -> bool {
        self != Access::Read
    }

    /// Whether old bytes matter.
    pub fn reads(self) -> bool {
        self != Access::Write
    }
}

/// A view and how it is used.
#[derive(Clone, Debug)]
pub struct Operand<M> {
    /// The bytes.
    pub view: View<M>,
    /// Their use.
    pub access: Access,
}

/// One operation: a kernel, its name for people, and every byte it touches.
#[derive(Clone, Debug)]
pub struct Op<M> {
    kernel: Kernel,
    label: Arc<str>,
    operands: Vec<Operand<M>>,
}

impl<M: Memory> Op<M> {
    /// An operation of `kernel` on `views`, in the order that [`Kernel`] documents.
    ///
    /// # Errors
    /// [`DeviceError::Operands`] if number, dtype or size of the views is not what the kernel needs, or if a
    /// written view shares bytes with another one.
    pub fn new(kernel: Kernel, label: impl Into<Arc<str>>, views: Vec<View<M>>) -> Result<Self, DeviceError> {
        let shape: Vec<_> = views.iter().map(|view| (view.dtype(), view.elements())).collect();
        let accesses = kernel.check(&shape).map_err(|expected| DeviceError::Operands {
            kernel: kernel.name(),
            expected,
            given: shape,
        })?;
        let operands: Vec<_> =
            views.into_iter().zip(accesses).map(|(view, access)| Operand { view, access }).collect();
        for (at, one) in operands.iter().enumerate() {
            for (other_at, other) in operands.iter().enumerate() {
                if at != other_at
                    && one.access.writes()
                    && one.view.memory().id() == other.view.memory().id()
                    && one.view.range().overlaps(other.view.range())
                {
                    return Err(DeviceError::Operands {
                        kernel: kernel.name(),
                        expected: format!("operand {at} is written and must not overlap operand {other_at}"),
                        given: operands.iter().map(|o| (o.view.dtype(), o.view.elements())).collect(),
                    });
                }
            }
        }
        Ok(Op { kernel, label: label.into(), operands })
    }

    /// What runs.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Its name, for people.
    pub fn label(&self) -> &Arc<str> {
        &self.label
    }

    /// What it touches.
    pub fn operands(&self) -> &[Operand<M>] {
        &self.operands
    }
}
