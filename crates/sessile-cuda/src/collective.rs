//! What a batch of collectives must look like, and how each kind runs.

use sessile_hal::{Beta, Collective, DeviceError, Transfer};
use sessile_plan::DType;

use crate::comm::CommCell;
use crate::context::RawStream;
use crate::kernel::{Argument, Extent, Modules};
use crate::memory::CudaMemory;
use crate::nccl::RawComm;
use crate::oneshot;

/// Checks dtypes, sizes, overlap and registration of a batch.
pub(crate) fn check(
    kind: Collective,
    transfers: &[Transfer<CudaMemory>],
    comm: &CommCell,
) -> Result<(), DeviceError> {
    let size = comm.ranks.len() as u64;
    let registered = |memory: &CudaMemory| memory.0.window(comm.id).is_some();
    kind.check(transfers, comm.member, size, &comm.name, registered)
}

/// What the parts of a batch are enqueued with. The context is current.
pub(crate) struct Work<'a> {
    pub(crate) modules: &'a Modules,
    pub(crate) stream: &'a RawStream,
    /// Memory for intermediate results, by bytes: its address. It lives as long as the work.
    pub(crate) scratch: &'a mut dyn FnMut(u64) -> Result<u64, DeviceError>,
}

impl Work<'_> {
    /// Enqueues a checked batch.
    pub(crate) fn run(
        &mut self,
        comm: &CommCell,
        kind: Collective,
        transfers: &[Transfer<CudaMemory>],
    ) -> Result<(), DeviceError> {
        if comm.ranks.len() == 1 {
            return transfers.iter().try_for_each(|transfer| self.alone(kind, transfer));
        }
        if kind.scaled().is_some() {
            let signals = comm.signals.as_ref().ok_or_else(|| comm.unreachable(kind))?;
            return oneshot::run(self.modules, self.stream, comm, signals, kind, transfers, self.scratch);
        }
        let nccl = comm.nccl.as_ref().ok_or_else(|| comm.unreachable(kind))?;
        if kind == Collective::AllReduce {
            return self.all_reduce(comm, nccl, transfers);
        }
        nccl.group_start()?;
        let queued = transfers.iter().try_for_each(|transfer| self.through(comm, nccl, kind, transfer));
        let ended = nccl.group_end();
        queued.and(ended)
    }

    /// In a group of one, everything is a copy or an addition.
    fn alone(
        &self,
        kind: Collective,
        Transfer { send, recv }: &Transfer<CudaMemory>,
    ) -> Result<(), DeviceError> {
        if let Some((scale, beta)) = kind.scaled() {
            let n = recv.elements();
            if beta == Beta::Overwrite {
                // What is added to -0 stays as it is.
                let zero = Argument::U32((-0.0f32).to_bits());
                self.over("fill_u32", n, &[Argument::U64(recv.address()), Argument::U64(n), zero])?;
            }
            let name = if send.dtype() == DType::Bf16 { "add_scaled_bf16" } else { "add_scaled_f32" };
            let arguments = [
                Argument::U64(send.address()),
                Argument::U64(recv.address()),
                Argument::U64(n),
                Argument::F32(scale),
            ];
            return self.over(name, n, &arguments);
        }
        if send.address() == recv.address() || send.range().bytes() == 0 {
            return Ok(());
        }
        let bytes = send.range().bytes() as usize;
        // SAFETY: both views lie inside live memory and have this size (`check`); they are kept until the work ended.
        unsafe {
            crate::error::cuda!(cuMemcpyDtoDAsync_v2(
                recv.address(),
                send.address(),
                bytes,
                self.stream.raw()
            ))
        }
    }

    fn through(
        &self,
        comm: &CommCell,
        nccl: &RawComm,
        kind: Collective,
        Transfer { send, recv }: &Transfer<CudaMemory>,
    ) -> Result<(), DeviceError> {
        let (pair, dtype) = ((send.address(), recv.address()), send.dtype());
        match kind {
            // SAFETY (each below): the extents were checked; the memory is kept until the work has ended, by the
            // device's ownership of work in flight or by the graph.
            Collective::AllGather => {
                // SAFETY: see above.
                unsafe { nccl.all_gather(self.stream, pair, send.elements(), dtype) }
            }
            Collective::ReduceScatter | Collective::SymmetricReduceScatter => {
                // SAFETY: see above.
                unsafe { nccl.reduce_scatter(self.stream, pair, recv.elements(), dtype) }
            }
            Collective::AllToAll => {
                let size = comm.ranks.len() as u64;
                let (count, bytes) = (send.elements() / size, send.range().bytes() / size);
                (0u32..).zip(&comm.ranks).try_for_each(|(peer, _)| {
                    let offset = u64::from(peer) * bytes;
                    // SAFETY: see above; block `peer` of `size` equal blocks lies inside the view.
                    unsafe { nccl.send(self.stream, pair.0 + offset, count, dtype, peer) }?;
                    // SAFETY: as for the line above.
                    unsafe { nccl.recv(self.stream, pair.1 + offset, count, dtype, peer) }
                })
            }
            Collective::AllReduce
            | Collective::ReduceScatterAccumulate { .. }
            | Collective::ReduceScatterStore { .. } => Err(comm.unreachable(kind)),
        }
    }

    /// All-gathers, then sums in rank order: NCCL's own sums in an order that depends on its algorithm.
    fn all_reduce(
        &mut self,
        comm: &CommCell,
        nccl: &RawComm,
        transfers: &[Transfer<CudaMemory>],
    ) -> Result<(), DeviceError> {
        let size = comm.ranks.len() as u64;
        let gathered: Vec<u64> = transfers
            .iter()
            .map(|transfer| (self.scratch)(size * transfer.send.range().bytes()))
            .collect::<Result<_, _>>()?;
        nccl.group_start()?;
        let queued = transfers.iter().zip(&gathered).try_for_each(|(transfer, to)| {
            let send = &transfer.send;
            // SAFETY: `send` was checked; the scratch was asked for with the size of all parts and lives as long as
            // the work.
            unsafe { nccl.all_gather(self.stream, (send.address(), *to), send.elements(), send.dtype()) }
        });
        let ended = nccl.group_end();
        queued.and(ended)?;
        for (Transfer { recv, .. }, from) in transfers.iter().zip(gathered) {
            let name = if recv.dtype() == DType::Bf16 { "reduce_ranks_bf16" } else { "sum_ranks_f32" };
            let parts = u32::try_from(size).unwrap_or(u32::MAX);
            let n = recv.elements();
            let arguments =
                [Argument::U64(from), Argument::U64(recv.address()), Argument::U64(n), Argument::U32(parts)];
            self.over(name, n, &arguments)?;
        }
        Ok(())
    }

    fn over(&self, name: &'static str, n: u64, arguments: &[Argument]) -> Result<(), DeviceError> {
        if n == 0 {
            return Ok(());
        }
        let grid = u32::try_from(n.div_ceil(8 * 256).min(4096)).unwrap_or(4096);
        let extent = Extent { grid: (grid, 1, 1), block: (256, 1), shared: 0 };
        // SAFETY: the addresses are of checked views, and of scratch of the size that the kernel reads; all live until
        // the work has ended.
        unsafe { self.modules.launch(self.stream, name, extent, arguments) }
    }
}
