//! What work costs on the virtual clock: a model of the device, in whole nanoseconds.
//!
//! ```text
//!  kernel      kernel_ns + max(flop / gemm_flops, bytes / memory_bytes)       on the rank's one compute engine
//!  collective  latency_ns + hops · hop_ns + wire bytes / bytes_per_second     on the group's link, of every member
//!  enqueue     launch_ns of host time, a graph graph_launch_ns
//! ```
//!
//! - **Kernels of a rank run one at a time**, in the order in which they became ready: a kernel that fills the device lets
//!   the next one begin when it has no block left to start. So a small kernel behind a large one waits for it.
//! - **A link carries one collective at a time**, in the order in which all members were ready. Groups that name one link
//!   share it.
//! - **A collective in flight delays the kernels of its members** by a part of its own time, [`Contention`]: none by default.
//!   Kernels take nothing from collectives.
//! - Host waits, records, waits and joins take no time.
//! - Wire bytes are those that leave one rank: `(G-1)/G` of the whole for a gather, a reduce-scatter or an all-to-all, twice
//!   that for an all-reduce. A group of one costs a copy.
//! - Hops are G-1 around a ring, 1 where all members meet at once, `2·log2(G)` up and down a tree (all-reduce).

use sessile_hal::{Collective, Kernel, Op};

use crate::contention::Contention;
use crate::memory::HostMemory;

/// A link between the members of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Groups that name the same link share it.
    pub name: String,
    /// What one member can send, in bytes per second.
    pub bytes_per_second: u64,
    /// Of every collective.
    pub latency_ns: u64,
    /// Of each hop, besides.
    pub hop_ns: u64,
}

/// Speeds of the modelled device. Zero stands for infinitely fast.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CostModel {
    /// Floating-point operations per second of GEMMs and attention.
    pub gemm_flops: u64,
    /// Bytes per second that kernels read and write.
    pub memory_bytes: u64,
    /// Of every kernel, besides.
    pub kernel_ns: u64,
    /// Host time of an enqueue.
    pub launch_ns: u64,
    /// Host time of a graph launch, however many nodes it has.
    pub graph_launch_ns: u64,
    /// What collectives take from kernels beside them.
    pub contention: Contention,
    /// Links by group: a group takes the longest name that is its own, or its own up to a dot.
    pub links: Vec<(String, Link)>,
    /// The link of all other groups.
    pub other_link: Link,
}

impl Default for CostModel {
    /// 1.2 PFLOP/s, 4 TB/s, links of 500 GB/s and 20 us; 2 us for a kernel, 3 us for an enqueue, 10 us for a graph, no
    /// contention. Round figures of a present-day device, not a measurement.
    fn default() -> Self {
        CostModel {
            gemm_flops: 1_200_000_000_000_000,
            memory_bytes: 4_000_000_000_000,
            kernel_ns: 2_000,
            launch_ns: 3_000,
            graph_launch_ns: 10_000,
            contention: Contention::NONE,
            links: Vec::new(),
            other_link: Link {
                name: "link".to_owned(),
                bytes_per_second: 500_000_000_000,
                latency_ns: 20_000,
                hop_ns: 0,
            },
        }
    }
}

/// `amount` at so much a second, rounded up to a nanosecond.
fn nanoseconds(amount: u128, per_second: u64) -> u64 {
    if per_second == 0 {
        return 0;
    }
    u64::try_from((amount * 1_000_000_000).div_ceil(per_second.into())).unwrap_or(u64::MAX)
}

impl CostModel {
    /// The link of a group.
    pub fn link(&self, group: &str) -> &Link {
        let matches = |name: &str| {
            group.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let named = self.links.iter().filter(|(name, _)| matches(name));
        named.max_by_key(|(name, _)| name.len()).map_or(&self.other_link, |(_, link)| link)
    }

    /// Time on the compute engine.
    pub(crate) fn op_ns(&self, op: &Op<HostMemory>) -> u64 {
        let uses = op.operands().iter();
        let bytes = uses.map(|operand| {
            let times = u128::from(operand.access.reads()) + u128::from(operand.access.writes());
            times * u128::from(operand.view.range().bytes())
        });
        self.kernel_cost(op.kernel(), bytes.sum())
    }

    /// Time of a kernel that moves this many bytes.
    fn kernel_cost(&self, kernel: &Kernel, bytes: u128) -> u64 {
        let wide = u128::from;
        let flop = match *kernel {
            Kernel::Spin { micros } => return micros.saturating_mul(1_000),
            Kernel::Gemm(gemm) => 2 * wide(gemm.m) * wide(gemm.n) * wide(gemm.k),
            // Two products of [seq, seq, head_dim] a head, half of each masked; backward has five.
            Kernel::AttentionForward(a) => {
                2 * wide(a.batch) * wide(a.heads) * wide(a.seq).pow(2) * wide(a.head_dim)
            }
            Kernel::AttentionBackward(a) => {
                5 * wide(a.batch) * wide(a.heads) * wide(a.seq).pow(2) * wide(a.head_dim)
            }
            _ => 0,
        };
        let work = nanoseconds(flop, self.gemm_flops).max(nanoseconds(bytes, self.memory_bytes));
        work.saturating_add(self.kernel_ns)
    }

    /// Time on the link: before anybody reads, and of the bytes.
    pub(crate) fn collective_ns(&self, kind: Collective, group: &str, size: u64, bytes: (u64, u64)) -> Costs {
        let (sent, received) = (u128::from(bytes.0), u128::from(bytes.1));
        if size <= 1 {
            return Costs { latency: 0, transfer: nanoseconds(sent + received, self.memory_bytes) };
        }
        let (whole, hops) = match kind {
            Collective::AllGather => (received, size - 1),
            Collective::ReduceScatter => (sent, size - 1),
            Collective::SymmetricReduceScatter
            | Collective::ReduceScatterAccumulate { .. }
            | Collective::ReduceScatterStore { .. }
            | Collective::AllToAll => (sent, 1),
            Collective::AllReduce => (2 * sent, 2 * u64::from(size.next_power_of_two().ilog2())),
        };
        let link = self.link(group);
        let wire = whole * u128::from(size - 1) / u128::from(size);
        Costs {
            latency: link.latency_ns.saturating_add(hops.saturating_mul(link.hop_ns)),
            transfer: nanoseconds(wire, link.bytes_per_second),
        }
    }
}

/// The two parts of a collective's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Costs {
    pub(crate) latency: u64,
    pub(crate) transfer: u64,
}

#[cfg(test)]
mod tests {
    use sessile_hal::{Beta, Gemm, Transpose};

    use super::*;

    fn gemm(m: u64, n: u64, k: u64) -> Kernel {
        Kernel::Gemm(Gemm { m, n, k, a: Transpose::No, b: Transpose::No, beta: Beta::Overwrite })
    }

    #[test]
    fn a_kernel_is_bound_by_arithmetic_or_by_memory() {
        let model = CostModel { kernel_ns: 7, ..CostModel::default() };
        // 2·1000³ flop at 1.2e15 a second are 1666.67 ns.
        assert_eq!(model.kernel_cost(&gemm(1000, 1000, 1000), 0), 1667 + 7);
        assert_eq!(model.kernel_cost(&gemm(1000, 1000, 1), 4_000_000), 1000 + 7);
        assert_eq!(model.kernel_cost(&Kernel::Copy, 8_000_000), 2000 + 7);
        assert_eq!(model.kernel_cost(&Kernel::Spin { micros: 3 }, 0), 3000);
    }

    #[test]
    fn a_collective_sends_what_leaves_a_rank() {
        let model = CostModel::default();
        let cost = |kind, size, bytes| model.collective_ns(kind, "dense", size, bytes);
        // 16 MB at 500 GB/s are 32 us, of which 15/16 leave a rank of 16.
        let wire = Costs { latency: 20_000, transfer: 30_000 };
        assert_eq!(cost(Collective::ReduceScatter, 16, (16_000_000, 1_000_000)), wire);
        assert_eq!(cost(Collective::AllGather, 16, (1_000_000, 16_000_000)), wire);
        let twice = Costs { latency: 20_000, transfer: 60_000 };
        assert_eq!(cost(Collective::AllReduce, 16, (16_000_000, 16_000_000)), twice);
        let alone = Costs { latency: 0, transfer: 8_000 };
        assert_eq!(cost(Collective::ReduceScatter, 1, (16_000_000, 16_000_000)), alone);
    }

    #[test]
    fn a_group_takes_the_link_of_its_name_up_to_a_dot() {
        let link = |name: &str, hop_ns| Link {
            name: name.to_owned(),
            bytes_per_second: 1_000_000_000,
            latency_ns: 5,
            hop_ns,
        };
        let model = CostModel {
            links: vec![("expert".into(), link("network", 1)), ("expert.7".into(), link("far", 2))],
            ..CostModel::default()
        };
        let name = |group: &str| model.link(group).name.clone();
        assert_eq!(["expert", "expert.3", "expert.7"].map(name), ["network", "network", "far"]);
        assert_eq!(["experts", "dense.7"].map(name), ["link", "link"]);
        // A ring of 4 has 3 hops.
        assert_eq!(model.collective_ns(Collective::ReduceScatter, "expert.0", 4, (0, 0)).latency, 8);
        assert_eq!(model.collective_ns(Collective::AllReduce, "expert.0", 4, (0, 0)).latency, 9);
    }
}
