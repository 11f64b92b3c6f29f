//! What a batch of collectives must look like, and how each kind runs.

use sessile_hal::{ByteRange, Collective, DeviceError, Memory, Transfer, View};
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
    if transfers.is_empty() {
        return Err(DeviceError::Operands {
            kernel: kind.name(),
            expected: "one transfer or more".to_owned(),
            given: Vec::new(),
        });
    }
    for transfer in transfers {
        check_one(kind, transfer, comm.member, comm.ranks.len() as u64)?;
        let needs = [(&transfer.send, kind.registers_send()), (&transfer.recv, kind.registers_recv())];
        for (view, needed) in needs {
            if needed && view.memory().0.window(comm.id).is_none() {
                return Err(DeviceError::NotRegistered {
                    kernel: kind.name(),
                    label: view.memory().label().to_owned(),
                    group: comm.name.clone(),
                });
            }
        }
    }
    for (at, one) in transfers.iter().enumerate() {
        let shares = |view: &View<CudaMemory>| {
            view.memory().id() == one.recv.memory().id() && view.range().overlaps(one.recv.range())
        };
        let mut others = transfers.iter().enumerate().filter(|(other, _)| *other != at);
        if others.any(|(_, other)| shares(&other.send) || shares(&other.recv)) {
            return Err(refused(kind, one, format!("a result of its own (transfer {at} of the batch)")));
        }
    }
    Ok(())
}

fn check_one(
    kind: Collective,
    transfer: &Transfer<CudaMemory>,
    rank: u32,
    g: u64,
) -> Result<(), DeviceError> {
    let Transfer { send, recv } = transfer;
    let (sent, received) = (send.elements(), recv.elements());
    let times = |n: u64| n.checked_mul(g);
    let (fits, sizes) = match kind {
        Collective::AllGather => (times(sent) == Some(received), format!("n, {g}·n elements")),
        Collective::ReduceScatter
        | Collective::SymmetricReduceScatter
        | Collective::ReduceScatterAccumulate { .. } => {
            (times(received) == Some(sent), format!("{g}·n, n elements"))
        }
        Collective::AllReduce => (sent == received, "n, n elements".to_owned()),
        Collective::AllToAll => {
            (sent == received && sent.is_multiple_of(g), format!("{g}·n, {g}·n elements"))
        }
    };
    let (dtypes, expected) = match kind {
        Collective::ReduceScatterAccumulate { .. } => (
            send.dtype() != DType::U32 && recv.dtype() == DType::F32,
            format!("{sizes} of a float dtype and f32"),
        ),
        Collective::ReduceScatter | Collective::SymmetricReduceScatter | Collective::AllReduce => (
            send.dtype() == recv.dtype() && send.dtype() != DType::U32,
            format!("{sizes} of one float dtype"),
        ),
        Collective::AllGather | Collective::AllToAll => {
            (send.dtype() == recv.dtype(), format!("{sizes} of one dtype"))
        }
    };
    if !fits || !dtypes {
        return Err(refused(kind, transfer, expected));
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
            Collective::AllToAll
            | Collective::SymmetricReduceScatter
            | Collective::ReduceScatterAccumulate { .. } => false,
        };
        if !in_place {
            return Err(refused(kind, transfer, "views that are disjoint or exactly in place".to_owned()));
        }
    }
    Ok(())
}

fn refused(kind: Collective, transfer: &Transfer<CudaMemory>, expected: String) -> DeviceError {
    let given = [&transfer.send, &transfer.recv].map(|view| (view.dtype(), view.elements()));
    DeviceError::Operands { kernel: kind.name(), expected, given: given.to_vec() }
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
        if let Collective::ReduceScatterAccumulate { scale } = kind {
            let signals = comm.signals.as_ref().ok_or_else(|| comm.unreachable(kind))?;
            return oneshot::run(self.modules, self.stream, comm, signals, scale, transfers);
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
        if let Collective::ReduceScatterAccumulate { scale } = kind {
            let name = if send.dtype() == DType::Bf16 { "add_scaled_bf16" } else { "add_scaled_f32" };
            let n = recv.elements();
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
            Collective::AllReduce | Collective::ReduceScatterAccumulate { .. } => Err(comm.unreachable(kind)),
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
