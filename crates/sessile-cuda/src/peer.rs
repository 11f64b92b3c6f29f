//! Copies out of a peer's window: what a link can carry.

use sessile_hal::{DeviceError, NodeKind, Ticket, View};

use crate::comm::CudaComm;
use crate::device::CudaDevice;
use crate::error::cuda;
use crate::memory::CudaMemory;
use crate::stream::CudaStream;

impl CudaDevice {
    /// Copies to `to` what a member has where `from` is in this rank's registered memory. Nothing orders it with what the
    /// member writes: to measure.
    ///
    /// # Errors
    /// [`DeviceError::NotRegistered`], [`DeviceError::Operands`], [`DeviceError::Driver`].
    pub fn copy_from_peer(
        &self,
        stream: &CudaStream,
        comm: &CudaComm,
        member: u32,
        from: &View<CudaMemory>,
        to: &View<CudaMemory>,
    ) -> Result<Ticket, DeviceError> {
        use sessile_hal::Memory;
        let window = from.memory().0.window(comm.0.id).unwrap_or_default();
        let base = window.get(member as usize).copied().ok_or_else(|| DeviceError::NotRegistered {
            kernel: "copy_from_peer",
            label: from.memory().label().to_owned(),
            group: comm.0.name.clone(),
        })?;
        let bytes = from.range().bytes();
        if bytes != to.range().bytes() {
            return Err(DeviceError::Operands {
                kernel: "copy_from_peer",
                expected: format!("{bytes} bytes to copy to"),
                given: vec![(from.dtype(), from.elements()), (to.dtype(), to.elements())],
            });
        }
        let source = base + from.range().start;
        self.push(stream, NodeKind::Op, |enqueue| {
            // SAFETY: `bytes` of the member's window, mapped in this process as long as the window lives, and as many of a
            // view inside live memory; both are kept until the work has ended.
            unsafe {
                cuda!(cuMemcpyDtoDAsync_v2(to.address(), source, bytes as usize, enqueue.raw().raw()))
            }?;
            enqueue.keep((comm.clone(), from.clone(), to.clone()));
            Ok(())
        })
    }
}
