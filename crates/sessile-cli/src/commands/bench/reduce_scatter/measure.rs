//! The measurements: one thread a rank and GPU, graphs of calls, rotating buffers.

use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use sessile_cuda::{
    CudaComm, CudaDevice, CudaGraph, CudaMemory, CudaStream, DeviceOptions, OneShotOptions, Way, job::Job,
};
use sessile_hal::{
    Beta, Collective, Comm, Device, DeviceError, Gemm, Graph, Kernel, Memory, Op, Transpose, View,
};
use sessile_plan::{DType, Domain};

/// Calls in a graph.
pub(super) const CALLS: usize = 20;
/// Bytes that inputs take turns in: more than caches hold, where a graph's calls suffice for it.
const ROTATED: u64 = 1 << 30;
/// A round lasts at least so long.
const ROUND: Duration = Duration::from_millis(3);

/// What is called.
#[derive(Clone, Debug)]
pub(super) enum What {
    /// The one-shot reduce-scatter, which adds.
    OneShot(OneShotOptions),
    /// NCCL's reduce-scatter, in plain or registered memory, and `add_scaled` after it.
    Nccl { symmetric: bool, add: bool },
    /// A rank's share of the input out of each peer's memory, one after the other, the next rank's first, by a copy engine.
    PeerCopy,
    /// `add_scaled` alone: what NCCL's reduce-scatter needs after it.
    Add,
    /// A copy of a rank's share on its own GPU.
    Copy,
}

/// A measurement over all sizes.
#[derive(Clone, Debug)]
pub(super) struct Variant {
    pub(super) name: String,
    pub(super) what: What,
}

impl Variant {
    fn new(name: impl Into<String>, what: What) -> Self {
        Variant { name: name.into(), what }
    }

    /// Whether a call that begins with this kernel goes the way that the variant asks for.
    fn goes_its_way(&self, kernel: &str) -> bool {
        let asked = match &self.what {
            What::OneShot(options) => options.way,
            _ => None,
        };
        match asked {
            None => true,
            Some(Way::Copy) => kernel == "one_shot_enter",
            Some(way) => kernel.starts_with(&format!("one_shot_{}_", way.name())),
        }
    }

    /// What this process measures of groups of this size.
    pub(super) fn all(group: u32) -> Vec<Variant> {
        let one_shot = |name: String, way, blocks, budget| {
            let options = OneShotOptions { way, blocks, budget, ..OneShotOptions::default() };
            Variant::new(name, What::OneShot(options))
        };
        let mut all = vec![one_shot("one_shot".to_owned(), None, None, None)];
        for budget in [0, 8, 16, 32] {
            all.push(one_shot(format!("one_shot, {budget} SMs"), None, None, Some(budget)));
        }
        for (way, blocks) in [
            (Way::Push, &[32, 128, 384][..]),
            (Way::Pull, &[16, 64, 128, 256]),
            (Way::Bulk, &[8, 16, 32, 64, 128]),
        ] {
            for blocks in blocks {
                all.push(one_shot(
                    format!("{}, {blocks} blocks", way.name()),
                    Some(way),
                    Some(*blocks),
                    None,
                ));
            }
        }
        // Of two ranks each has one peer to begin with.
        if group > 2 {
            for (way, blocks) in [(Way::Push, 128), (Way::Bulk, 32)] {
                let options = OneShotOptions {
                    way: Some(way),
                    blocks: Some(blocks),
                    in_order: true,
                    ..OneShotOptions::default()
                };
                let name = format!("{}, {blocks} blocks, all from rank 0", way.name());
                all.push(Variant::new(name, What::OneShot(options)));
            }
        }
        all.push(one_shot("copy".to_owned(), Some(Way::Copy), None, None));
        all.push(Variant::new("ring", What::Nccl { symmetric: false, add: false }));
        all.push(Variant::new("ring + add", What::Nccl { symmetric: false, add: true }));
        all.extend(Variant::symmetric(""));
        all.push(Variant::new("peer copy", What::PeerCopy));
        all.push(Variant::new("add", What::Add));
        all.push(Variant::new("copy on the GPU", What::Copy));
        all
    }

    /// What a process with another setting of NCCL measures.
    pub(super) fn symmetric(suffix: &str) -> Vec<Variant> {
        vec![
            Variant::new(format!("symmetric{suffix}"), What::Nccl { symmetric: true, add: false }),
            Variant::new(format!("symmetric{suffix} + add"), What::Nccl { symmetric: true, add: true }),
        ]
    }
}

/// A variant at a size.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Row {
    pub(super) variant: String,
    /// Bytes of the whole gradient.
    pub(super) bytes: u64,
    /// Microseconds a call: median of the rounds, least and most.
    pub(super) median_us: f64,
    pub(super) least_us: f64,
    pub(super) most_us: f64,
    /// The first kernel of the call and its blocks; null if there is none.
    pub(super) kernel: Option<String>,
    pub(super) blocks: Option<u32>,
}

/// A matrix product beside a reduce-scatter.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Load {
    pub(super) variant: String,
    pub(super) bytes: u64,
    /// Medians: products alone, beside reduce-scatters; reduce-scatters alone, beside products.
    pub(super) product_alone_us: f64,
    pub(super) product_us: f64,
    pub(super) reduce_alone_us: f64,
    pub(super) reduce_us: f64,
}

/// Runs a program on every rank; the results by rank, or the first error.
pub(super) fn ranks<T: Send>(
    count: u32,
    program: impl Fn(&CudaDevice) -> Result<T, DeviceError> + Sync,
) -> Result<Vec<T>, DeviceError> {
    let bound = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = bound.map(|address| address.port()).map_err(|error| DeviceError::Rendezvous {
        rank: 0,
        address: "127.0.0.1".to_owned(),
        why: error.to_string(),
    })?;
    let secret = format!("{}-{port}", std::process::id()).into_bytes();
    let run = |rank| {
        let job = Job {
            rank,
            world: count,
            local_rank: rank,
            address: "127.0.0.1".to_owned(),
            port,
            secret: secret.clone(),
        };
        let options = DeviceOptions { deadline: Duration::from_secs(60), ..DeviceOptions::default() };
        let device = CudaDevice::open(&job, options)?;
        program(&device).inspect_err(|error| device.fail(&error.to_string()))
    };
    let run = &run;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|rank| scope.spawn(move || run(rank))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|why| std::panic::resume_unwind(why)))
            .collect()
    })
}

/// The buffers of a rank.
pub(super) struct Bench<'a> {
    device: &'a CudaDevice,
    /// This rank's group, and all ranks, who begin together.
    comm: CudaComm,
    all: CudaComm,
    stream: CudaStream,
    rounds: u32,
    /// Inputs, then outputs, in registered and in plain memory.
    registered: CudaMemory,
    plain: CudaMemory,
    sums: CudaMemory,
}

impl<'a> Bench<'a> {
    /// # Errors
    /// Those of the device.
    pub(super) fn new(
        device: &'a CudaDevice,
        group: u32,
        largest: u64,
        rounds: u32,
    ) -> Result<Self, DeviceError> {
        let ranks: Vec<u32> = (0..device.world_size()).collect();
        let all = device.communicator("all", &ranks)?;
        let comm = if group == device.world_size() {
            all.clone()
        } else {
            let number = device.rank() / group;
            let ranks: Vec<u32> = (number * group..(number + 1) * group).collect();
            device.communicator(&format!("group {number}"), &ranks)?
        };
        let stream = device.stream("reduce")?;
        let room = ROTATED.max(largest);
        let registered = device.alloc(2 * room, &Domain::Symmetric(comm.name().to_owned()), "registered")?;
        device.register_window(&comm, &registered)?;
        let plain = device.alloc(2 * room, &Domain::Default, "plain")?;
        let sums = device.alloc(2 * room, &Domain::Default, "sums")?;
        let bench = Bench { device, comm, all, stream, rounds, registered, plain, sums };
        for (memory, dtype, value) in [
            (&bench.registered, DType::Bf16, 1.0),
            (&bench.plain, DType::Bf16, 1.0),
            (&bench.sums, DType::F32, 0.0),
        ] {
            bench.op(&bench.stream, Kernel::Fill { value }, vec![View::whole(memory, dtype)?])?;
        }
        Ok(bench)
    }

    fn op(
        &self,
        stream: &CudaStream,
        kernel: Kernel,
        views: Vec<View<CudaMemory>>,
    ) -> Result<(), DeviceError> {
        self.device.enqueue(stream, Op::new(kernel, "bench", views)?).map(|_| ())
    }

    /// A graph of calls that take turns in memory; the first kernel and its blocks.
    fn graph(&self, stream: &CudaStream, what: &What, bytes: u64) -> Result<CudaGraph, DeviceError> {
        if let What::OneShot(options) = what {
            self.comm.set_one_shot(options.clone());
        }
        let ranks = self.comm.ranks().len() as u64;
        let (n, room) = (bytes / 2, self.registered.bytes() / 2);
        let turns = (ROTATED / bytes).clamp(1, CALLS as u64);
        self.device.begin_capture(stream)?;
        for call in 0..CALLS as u64 {
            let turn = call % turns;
            let memory = match what {
                What::Nccl { symmetric: false, .. } => &self.plain,
                _ => &self.registered,
            };
            let send = View::new(memory, turn * bytes, n, DType::Bf16)?;
            let recv = View::new(memory, room + turn * bytes / ranks, n / ranks, DType::Bf16)?;
            let sum = View::new(&self.sums, turn * bytes * 2 / ranks, n / ranks, DType::F32)?;
            let scale = 1.0 / ranks as f32;
            match what {
                What::OneShot(_) => {
                    let kind = Collective::ReduceScatterAccumulate { scale };
                    self.device.collective(stream, &self.comm, kind, &send, &sum)?;
                }
                What::Nccl { symmetric, add } => {
                    let kind = if *symmetric {
                        Collective::SymmetricReduceScatter
                    } else {
                        Collective::ReduceScatter
                    };
                    self.device.collective(stream, &self.comm, kind, &send, &recv)?;
                    if *add {
                        self.op(stream, Kernel::AddScaled { scale }, vec![recv, sum])?;
                    }
                }
                What::PeerCopy => {
                    let share = send.slice(u64::from(self.comm.rank()) * n / ranks, n / ranks)?;
                    let size = self.comm.ranks().len() as u32;
                    for next in 1..size {
                        let peer = (self.comm.rank() + next) % size;
                        self.device.copy_from_peer(stream, &self.comm, peer, &share, &recv)?;
                    }
                }
                What::Add => self.op(stream, Kernel::AddScaled { scale }, vec![recv, sum])?,
                What::Copy => {
                    let share = send.slice(0, n / ranks)?;
                    self.op(stream, Kernel::Copy, vec![share, recv])?;
                }
            }
        }
        self.device.end_capture(stream)
    }

    /// Microseconds of `launches` launches, all ranks at once.
    fn time(&self, graph: &CudaGraph, launches: u32) -> Result<f64, DeviceError> {
        self.device.wait_stream(&self.stream)?;
        self.all.exchange(&[])?;
        let begin = Instant::now();
        for _ in 0..launches {
            self.device.launch(graph, &self.stream)?;
        }
        self.device.wait_stream(&self.stream)?;
        Ok(begin.elapsed().as_secs_f64() * 1e6)
    }

    /// The slowest rank's time.
    fn slowest(&self, micros: f64) -> Result<f64, DeviceError> {
        let all = self.all.exchange(&micros.to_le_bytes())?;
        let times = all.iter().filter_map(|bytes| <[u8; 8]>::try_from(&bytes[..]).ok());
        Ok(times.map(f64::from_le_bytes).fold(0.0, f64::max))
    }

    /// One variant at one size; none if it can't go its way at that size, and went another.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn row(&self, variant: &Variant, bytes: u64) -> Result<Option<Row>, DeviceError> {
        let graph = self.graph(&self.stream, &variant.what, bytes)?;
        if !variant.goes_its_way(graph.kernels().first().map_or("", |kernel| &kernel.name)) {
            return Ok(None);
        }
        self.time(&graph, 1)?;
        let once = self.slowest(self.time(&graph, 1)?)?;
        let launches = (ROUND.as_secs_f64() * 1e6 / once).ceil().clamp(1.0, 40.0) as u32;
        let mut times = Vec::new();
        for _ in 0..self.rounds {
            let time = self.slowest(self.time(&graph, launches)?)?;
            times.push(time / f64::from(launches) / CALLS as f64);
        }
        times.sort_by(f64::total_cmp);
        let kernel = graph.kernels().first();
        Ok(Some(Row {
            variant: variant.name.clone(),
            bytes,
            median_us: median(&times),
            least_us: times.first().copied().unwrap_or(0.0),
            most_us: times.last().copied().unwrap_or(0.0),
            kernel: kernel.map(|kernel| kernel.name.clone()),
            blocks: kernel.map(|kernel| kernel.grid),
        }))
    }

    /// Products of 4096 x 8192 x 8192 on another stream, beside reduce-scatters.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn load(&self, variant: &Variant, bytes: u64) -> Result<Load, DeviceError> {
        let products = self.device.stream("products")?;
        let (m, k) = (4096u64, 8192u64);
        let operand = |rows: u64, seed: u32| {
            let memory = self.device.alloc(2 * rows * k, &Domain::Default, "product")?;
            let view = View::whole(&memory, DType::Bf16)?;
            self.device.write(&products, &view, &numbers(rows * k, seed))?;
            Ok::<_, DeviceError>(view)
        };
        let (a, b, c) = (operand(m, 1)?, operand(k, 2)?, operand(m, 3)?);
        let shape = Gemm { m, n: k, k, a: Transpose::No, b: Transpose::No, beta: Beta::Overwrite };
        self.device.begin_capture(&products)?;
        for _ in 0..8 {
            self.op(&products, Kernel::Gemm(shape), vec![a.clone(), b.clone(), c.clone()])?;
        }
        let product = self.device.end_capture(&products)?;
        let reduce = self.graph(&self.stream, &variant.what, bytes)?;
        let once = self.slowest(self.time(&reduce, 1)?)?;
        // As long as the products, about.
        let launches = (6000.0 / once).ceil().max(1.0) as u32;
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..self.rounds {
            let alone = |with_products: bool, with_reduce: bool| -> Result<(f64, f64), DeviceError> {
                self.device.wait_stream(&self.stream)?;
                self.device.wait_stream(&products)?;
                self.all.exchange(&[])?;
                let begin = Instant::now();
                if with_reduce {
                    for _ in 0..launches {
                        self.device.launch(&reduce, &self.stream)?;
                    }
                }
                if with_products {
                    self.device.launch(&product, &products)?;
                }
                let (first, second) =
                    if with_products { (&products, &self.stream) } else { (&self.stream, &products) };
                self.device.wait_stream(first)?;
                let one = begin.elapsed().as_secs_f64() * 1e6;
                self.device.wait_stream(second)?;
                let both = begin.elapsed().as_secs_f64() * 1e6;
                Ok((self.slowest(one)?, self.slowest(both)?))
            };
            times[0].push(alone(true, false)?.0);
            times[1].push(alone(false, true)?.0);
            let (product, both) = alone(true, true)?;
            times[2].push(product);
            times[3].push(both);
        }
        times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
        let [product_alone_us, reduce_alone_us, product_us, reduce_us] =
            [0, 1, 2, 3].map(|at: usize| median(&times[at]));
        let variant = variant.name.clone();
        Ok(Load { variant, bytes, product_alone_us, product_us, reduce_alone_us, reduce_us })
    }
}

/// BF16 numbers between 1 and 2, of both signs, in no order: products of equal numbers run faster than they should.
fn numbers(count: u64, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let bits = (state >> 16) as u16;
        (0x3f80 | bits & 0x807f).to_le_bytes()
    };
    std::iter::repeat_with(next).take(count as usize).flatten().collect()
}

fn median(sorted: &[f64]) -> f64 {
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_of_products_are_between_1_and_2_and_differ() {
        let all: Vec<f32> = numbers(1000, 1)
            .chunks_exact(2)
            .map(|pair| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16))
            .collect();
        assert_eq!(all.len(), 1000);
        assert!(all.iter().all(|x| (1.0..2.0).contains(&x.abs())));
        assert!(all.iter().any(|x| *x < 0.0) && all.windows(2).any(|two| two[0].abs() != two[1].abs()));
    }

    #[test]
    fn a_way_that_was_not_gone_is_no_row_of_it() {
        let all = Variant::all(2);
        let find = |name: &str| all.iter().find(|variant| variant.name == name).expect("there");
        assert!(find("push, 32 blocks").goes_its_way("one_shot_push_bf16_2"));
        assert!(!find("push, 32 blocks").goes_its_way("one_shot_pull_bf16_2"));
        assert!(find("bulk, 8 blocks").goes_its_way("one_shot_bulk_bf16_2"));
        assert!(find("copy").goes_its_way("one_shot_enter"));
        assert!(find("one_shot").goes_its_way("one_shot_pull_bf16_2") && find("ring").goes_its_way(""));
    }

    #[test]
    fn every_variant_has_a_name_of_its_own() {
        for (group, others) in [(2, 0), (4, 2), (8, 2)] {
            let mut names: Vec<String> =
                Variant::all(group).into_iter().map(|variant| variant.name).collect();
            let all = names.len();
            names.sort();
            names.dedup();
            assert_eq!((names.len(), all), (all, Variant::all(2).len() + others));
        }
    }
}
