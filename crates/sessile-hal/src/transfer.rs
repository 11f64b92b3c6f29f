//! The buffers of a collective, and what they must look like on every device.

use sessile_plan::DType;

use crate::{ByteRange, Collective, DeviceError, Memory, View};

/// One of the pairs of buffers that a batch of collectives moves.
#[derive(Clone, Debug)]
pub struct Transfer<M> {
    /// What this rank gives.
    pub send: View<M>,
    /// Where its result goes.
    pub recv: View<M>,
}

impl<M: Memory> Transfer<M> {
    /// Whether both views share bytes.
    pub fn in_place(&self) -> bool {
        self.send.memory().id() == self.recv.memory().id() && self.send.range().overlaps(self.recv.range())
    }
}

impl Collective {
    /// Checks dtypes, sizes, overlap and registration of a batch, for position `rank` in a group of `size`. `registered`
    /// says whether memory is a window of exactly this group's communicator.
    ///
    /// # Errors
    /// [`DeviceError::Operands`], [`DeviceError::NotRegistered`].
    pub fn check<M: Memory>(
        self,
        transfers: &[Transfer<M>],
        rank: u32,
        size: u64,
        group: &str,
        registered: impl Fn(&M) -> bool,
    ) -> Result<(), DeviceError> {
        if transfers.is_empty() {
            return Err(DeviceError::Operands {
                kernel: self.name(),
                expected: "one transfer or more".to_owned(),
                given: Vec::new(),
            });
        }
        for transfer in transfers {
            check_one(self, transfer, rank, size)?;
            let needs = [(&transfer.send, self.registers_send()), (&transfer.recv, self.registers_recv())];
            for (view, needed) in needs {
                if needed && !registered(view.memory()) {
                    return Err(DeviceError::NotRegistered {
                        kernel: self.name(),
                        label: view.memory().label().to_owned(),
                        group: group.to_owned(),
                    });
                }
            }
        }
        for (at, one) in transfers.iter().enumerate() {
            let shares = |view: &View<M>| {
                view.memory().id() == one.recv.memory().id() && view.range().overlaps(one.recv.range())
            };
            let mut others = transfers.iter().enumerate().filter(|(other, _)| *other != at);
            if others.any(|(_, other)| shares(&other.send) || shares(&other.recv)) {
                return Err(refused(self, one, format!("a result of its own (transfer {at} of the batch)")));
            }
        }
        Ok(())
    }
}

/// Checks dtypes, sizes and overlap of one transfer for position `rank` in a group of `g`.
fn check_one<M: Memory>(
    kind: Collective,
    transfer: &Transfer<M>,
    rank: u32,
    g: u64,
) -> Result<(), DeviceError> {
    let Transfer { send, recv } = transfer;
    let (sent, received) = (send.elements(), recv.elements());
    let times = |n: u64| n.checked_mul(g);
    let (fits, expected) = match kind {
        Collective::AllGather => (times(sent) == Some(received), format!("n, {g}·n elements")),
        Collective::ReduceScatter
        | Collective::SymmetricReduceScatter
        | Collective::ReduceScatterAccumulate { .. }
        | Collective::ReduceScatterStore { .. } => {
            (times(received) == Some(sent), format!("{g}·n, n elements"))
        }
        Collective::AllReduce => (sent == received, "n, n elements".to_owned()),
        Collective::AllToAll => {
            (sent == received && sent.is_multiple_of(g), format!("{g}·n, {g}·n elements"))
        }
    };
    let (dtypes, expected) = match kind {
        Collective::ReduceScatterAccumulate { .. } | Collective::ReduceScatterStore { .. } => (
            send.dtype() != DType::U32 && recv.dtype() == DType::F32,
            format!("{expected} of a float dtype and f32"),
        ),
        Collective::ReduceScatter | Collective::SymmetricReduceScatter | Collective::AllReduce => (
            send.dtype() == recv.dtype() && send.dtype() != DType::U32,
            format!("{expected} of one float dtype"),
        ),
        Collective::AllGather | Collective::AllToAll => {
            (send.dtype() == recv.dtype(), format!("{expected} of one dtype"))
        }
    };
    if !fits || !dtypes {
        return Err(refused(kind, transfer, expected));
    }
    let (from, to) = (send.range(), recv.range());
    if transfer.in_place() {
        let block = |whole: ByteRange| {
            let bytes = whole.bytes() / g;
            let start = whole.start + u64::from(rank) * bytes;
            ByteRange { start, end: start + bytes }
        };
        let allowed = match kind {
            Collective::AllGather => from == block(to),
            Collective::ReduceScatter => to == block(from),
            Collective::AllReduce => from == to,
            Collective::AllToAll
            | Collective::SymmetricReduceScatter
            | Collective::ReduceScatterAccumulate { .. }
            | Collective::ReduceScatterStore { .. } => false,
        };
        if !allowed {
            return Err(refused(kind, transfer, "views that are disjoint or exactly in place".to_owned()));
        }
    }
    Ok(())
}

fn refused<M: Memory>(kind: Collective, transfer: &Transfer<M>, expected: String) -> DeviceError {
    let given = [&transfer.send, &transfer.recv].map(|view| (view.dtype(), view.elements()));
    DeviceError::Operands { kernel: kind.name(), expected, given: given.to_vec() }
}
