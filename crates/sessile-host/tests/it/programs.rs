//! Random programs without races against a naive interpreter that runs them in order.
//!
//! A program works on a few small buffers from a few streams, and captures parts of itself. The runner adds an edge
//! for exactly those pairs of accesses that conflict, so every legal order must give the interpreter's bytes.

use std::collections::HashMap;

use sessile_hal::{Collective, Device, EventScope, Kernel, View};
use sessile_host::{HostComm, HostDevice, HostMemory, HostStream, Order, WorldOptions};

use crate::support::{buffer, enqueue, read, run};

const BUFFERS: usize = 5;
const STREAMS: usize = 3;
const RANKS: u32 = 2;
const ELEMENTS: usize = 4;

/// One operation: buffer `from` (if it has one) into buffer `to`.
#[derive(Clone, Copy, Debug)]
enum What {
    Fill(f32),
    Halve,
    Copy,
    Add,
    Reduce,
    Scatter,
    Gather,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    stream: usize,
    what: What,
    from: usize,
    to: usize,
}

#[derive(Clone, Debug)]
enum Item {
    Step(Step),
    /// Captured with stream `origin` as origin, launched on `on`.
    Graph {
        origin: usize,
        steps: Vec<Step>,
        on: Vec<usize>,
    },
    /// A named wait.
    Wait(usize),
}

fn generate(seed: u64) -> Vec<Item> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let step = |rng: &mut fastrand::Rng| {
        let from = rng.usize(..BUFFERS);
        let what = match rng.u8(..7) {
            0 => What::Fill(f32::from(rng.u8(..8))),
            1 => What::Halve,
            2 => What::Copy,
            3 => What::Add,
            4 => What::Reduce,
            5 => What::Scatter,
            _ => What::Gather,
        };
        Step { stream: rng.usize(..STREAMS), what, from, to: (from + rng.usize(1..BUFFERS)) % BUFFERS }
    };
    let length = rng.usize(3..14);
    (0..length)
        .map(|_| match rng.u8(..6) {
            0 => Item::Wait(rng.usize(..STREAMS)),
            1 | 2 => {
                let steps = (0..rng.usize(..7)).map(|_| step(&mut rng)).collect();
                let on = (0..rng.usize(1..4)).map(|_| rng.usize(..STREAMS)).collect();
                Item::Graph { origin: rng.usize(..STREAMS), steps, on }
            }
            _ => Item::Step(step(&mut rng)),
        })
        .collect()
}

fn initial(rank: u32, at: usize) -> Vec<f32> {
    (0..ELEMENTS).map(|i| (rank as usize * 64 + at * 8 + i) as f32).collect()
}

/// The interpreter: all ranks' buffers, by rank.
fn interpret(program: &[Item]) -> Vec<Vec<Vec<f32>>> {
    let mut all: Vec<Vec<Vec<f32>>> =
        (0..RANKS).map(|rank| (0..BUFFERS).map(|at| initial(rank, at)).collect()).collect();
    let mut apply = |step: &Step| {
        let sources: Vec<Vec<f32>> = all.iter().map(|buffers| buffers[step.from].clone()).collect();
        let half = ELEMENTS / RANKS as usize;
        for (rank, buffers) in all.iter_mut().enumerate() {
            let to = &mut buffers[step.to];
            for i in 0..ELEMENTS {
                match step.what {
                    What::Fill(value) => to[i] = value,
                    What::Halve => to[i] *= 0.5,
                    What::Copy => to[i] = sources[rank][i],
                    What::Add => to[i] += sources[rank][i],
                    What::Reduce => to[i] = sources[0][i] + sources[1][i],
                    What::Scatter if i < half => {
                        // Ring order: the block of rank r begins at the other rank.
                        to[i] = sources[1 - rank][rank * half + i] + sources[rank][rank * half + i];
                    }
                    What::Scatter => {}
                    What::Gather => to[i] = sources[i / half][i % half],
                }
            }
        }
    };
    for item in program {
        match item {
            Item::Wait(_) => {}
            Item::Step(step) => apply(step),
            Item::Graph { steps, on, .. } => on.iter().for_each(|_| steps.iter().for_each(&mut apply)),
        }
    }
    all
}

/// Where the last uses of a buffer were enqueued.
#[derive(Clone, Default)]
struct Uses {
    writer: Option<usize>,
    readers: Vec<usize>,
}

struct Runner {
    device: HostDevice,
    comm: HostComm,
    streams: Vec<HostStream>,
    buffers: Vec<View<HostMemory>>,
}

impl Runner {
    /// Lets `later` wait for `earlier`.
    fn edge(&self, earlier: usize, later: usize) {
        if earlier != later {
            let event = self.device.event(EventScope::Internal).expect("event");
            self.device.record(&self.streams[earlier], &event).expect("record");
            self.device.wait(&self.streams[later], &event).expect("wait");
        }
    }

    fn step(&self, step: &Step, uses: &mut HashMap<usize, Uses>) {
        let reads = !matches!(step.what, What::Fill(_) | What::Halve);
        let mut after: Vec<usize> = Vec::new();
        if reads {
            after.extend(uses.get(&step.from).and_then(|u| u.writer));
        }
        let target = uses.get(&step.to).cloned().unwrap_or_default();
        after.extend(target.writer);
        after.extend(target.readers);
        after.sort_unstable();
        after.dedup();
        after.into_iter().for_each(|earlier| self.edge(earlier, step.stream));
        if reads {
            uses.entry(step.from).or_default().readers.push(step.stream);
        }
        uses.insert(step.to, Uses { writer: Some(step.stream), readers: Vec::new() });

        let (from, to) = (&self.buffers[step.from], &self.buffers[step.to]);
        let stream = &self.streams[step.stream];
        let half = |view: &View<HostMemory>| view.slice(0, (ELEMENTS / 2) as u64).expect("slice");
        let op = |kernel, views: &[&View<HostMemory>]| enqueue(&self.device, stream, kernel, views);
        let collective = |kind, send: &View<HostMemory>, recv: &View<HostMemory>| {
            self.device.collective(stream, &self.comm, kind, send, recv).expect("collective");
        };
        match step.what {
            What::Fill(value) => op(Kernel::Fill { value }, &[to]),
            What::Halve => op(Kernel::Scale { factor: 0.5 }, &[to]),
            What::Copy => op(Kernel::Copy, &[from, to]),
            What::Add => op(Kernel::Add, &[from, to]),
            What::Reduce => collective(Collective::AllReduce, from, to),
            What::Scatter => collective(Collective::ReduceScatter, from, &half(to)),
            What::Gather => collective(Collective::AllGather, &half(from), to),
        }
    }

    fn run(&self, program: &[Item]) {
        let mut uses: HashMap<usize, Uses> = HashMap::new();
        for item in program {
            match item {
                Item::Wait(stream) => self.device.wait_stream(&self.streams[*stream]).expect("wait"),
                Item::Step(step) => self.step(step, &mut uses),
                Item::Graph { origin, steps, on } => {
                    let start = &self.streams[*origin];
                    self.device.begin_capture(start).expect("begin");
                    let others: Vec<usize> = (0..STREAMS).filter(|s| s != origin).collect();
                    others.iter().for_each(|lane| self.edge(*origin, *lane));
                    let mut inside = HashMap::new();
                    steps.iter().for_each(|step| self.step(step, &mut inside));
                    others.iter().for_each(|lane| self.edge(*lane, *origin));
                    let graph = self.device.end_capture(start).expect("end");
                    for &stream in on {
                        // Everything before the launch, the launch, everything after it. Launches themselves
                        // need no edge between them.
                        (0..STREAMS).for_each(|earlier| self.edge(earlier, stream));
                        self.device.launch(&graph, &self.streams[stream]).expect("launch");
                    }
                    for &stream in on {
                        (0..STREAMS).for_each(|later| self.edge(stream, later));
                    }
                }
            }
        }
    }
}

fn check(seed: u64, options: &WorldOptions) {
    let program = generate(seed);
    let want = interpret(&program);
    let got = run(options, |device| {
        let comm = device.communicator("all", &[0, 1]).expect("comm");
        let streams = (0..STREAMS).map(|at| device.stream(&format!("s{at}")).expect("stream")).collect();
        let buffers = (0..BUFFERS).map(|at| buffer(&device, &initial(device.rank(), at))).collect();
        let runner = Runner { device, comm, streams, buffers };
        runner.run(&program);
        runner.streams.iter().for_each(|stream| runner.device.wait_stream(stream).expect("wait"));
        let end = runner.device.stream("end").expect("stream");
        runner.buffers.iter().map(|view| read(&runner.device, &end, view)).collect::<Vec<_>>()
    });
    let bits =
        |all: &[Vec<Vec<f32>>]| -> Vec<u32> { all.iter().flatten().flatten().map(|x| x.to_bits()).collect() };
    assert!(bits(&got) == bits(&want), "seed {seed}, {options:?}:\n{program:#?}\ngot {got:?}\nwant {want:?}");
}

#[test]
fn programs_without_races_give_the_interpreters_bytes_in_every_mode() {
    let fresh = fastrand::u64(..);
    for seed in (0..60).chain((0..20).map(|at| fresh.wrapping_add(at))) {
        check(seed, &WorldOptions::threads(RANKS, 3));
        check(seed, &WorldOptions::scheduled(RANKS, 0, Order::WritersEarly));
        check(seed, &WorldOptions::scheduled(RANKS, 0, Order::ReadersEarly));
        for schedule in 0..3 {
            check(seed, &WorldOptions::scheduled(RANKS, schedule, Order::Random));
        }
    }
}
