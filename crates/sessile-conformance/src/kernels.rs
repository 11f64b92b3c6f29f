//! The kernels' numbers. Where the contract pins bits they are compared as bits; elsewhere with a definition in f64.
#![allow(missing_docs, clippy::missing_panics_doc, reason = "the names say what is checked")]

use half::bf16;
use sessile_hal::{AdamW, Attention, Beta, Combine, Device, DeviceError, Gemm, Kernel, Op, Transpose, View};
use sessile_plan::{DType, Domain};

use crate::Worlds;

/// A buffer on the host.
#[derive(Clone, Debug, PartialEq)]
enum Data {
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    U32(Vec<u32>),
}

impl Data {
    fn bf16(values: &[f32]) -> Self {
        Data::Bf16(values.iter().map(|x| bf16::from_f32(*x)).collect())
    }

    fn of(dtype: DType, values: &[f32]) -> Self {
        if dtype == DType::Bf16 { Data::bf16(values) } else { Data::F32(values.to_vec()) }
    }

    fn dtype(&self) -> DType {
        match self {
            Data::Bf16(_) => DType::Bf16,
            Data::F32(_) => DType::F32,
            Data::U32(_) => DType::U32,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Data::Bf16(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::F32(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Data::U32(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    fn like(&self, bytes: &[u8]) -> Self {
        match self {
            Data::Bf16(_) => {
                Data::Bf16(bytes.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]])).collect())
            }
            Data::F32(_) => Data::F32(
                bytes.chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect(),
            ),
            Data::U32(_) => Data::U32(
                bytes.chunks_exact(4).map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect(),
            ),
        }
    }

    fn floats(&self) -> Vec<f32> {
        match self {
            Data::Bf16(values) => values.iter().map(|x| x.to_f32()).collect(),
            Data::F32(values) => values.clone(),
            Data::U32(values) => values.iter().map(|x| *x as f32).collect(),
        }
    }
}

/// Runs a kernel on buffers that begin `shift` elements into their memory; what they hold afterwards.
fn run<D: Device>(device: &D, kernel: &Kernel, operands: &[Data], shift: u64) -> Vec<Data> {
    try_run(device, kernel, operands, shift).unwrap_or_else(|why| panic!("{kernel:?}: {why}"))
}

fn try_run<D: Device>(
    device: &D,
    kernel: &Kernel,
    operands: &[Data],
    shift: u64,
) -> Result<Vec<Data>, DeviceError> {
    let stream = device.stream("kernels")?;
    let views: Vec<View<D::Memory>> = operands
        .iter()
        .map(|data| {
            let (bytes, size) = (data.bytes(), data.dtype().size());
            let memory = device.alloc(bytes.len() as u64 + shift * size, &Domain::Default, "operand")?;
            let view = View::new(&memory, shift * size, bytes.len() as u64 / size, data.dtype())?;
            device.write(&stream, &view, &bytes)?;
            Ok(view)
        })
        .collect::<Result<_, DeviceError>>()?;
    device.enqueue(&stream, Op::new(kernel.clone(), "kernels", views.clone())?)?;
    operands.iter().zip(&views).map(|(data, view)| Ok(data.like(&device.read(&stream, view)?))).collect()
}

/// `n` values in [-1, 1), the same for the same seed.
fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

/// Values with signs of zero, subnormals, infinities and NaN among them.
fn odd(seed: u64, n: usize) -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-40,
        -1e-41,
        f32::MAX,
        f32::MIN_POSITIVE,
        256.0,
    ];
    let plain = random(seed, n);
    let pick = |(at, x): (usize, f32)| if at % 7 == 3 { special[at / 7 % special.len()] } else { x * 3.0 };
    plain.into_iter().enumerate().map(pick).collect()
}

/// Bits, with one for all NaN.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() }).collect()
}

fn assert_near(what: &str, got: &[f32], want: &[f64], within: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= within * (1.0 + want.abs()), "{what} at {at}: {got}, defined as {want}");
    }
}

const SIZES: [usize; 9] = [1, 2, 7, 8, 9, 255, 256, 4097, 70_001];

pub fn elementwise_kernels_give_the_pinned_bits<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        for (case, n) in SIZES.into_iter().enumerate() {
            for shift in [0, 1, 3] {
                elementwise(&device, n, case as u64, shift);
            }
        }
    });
}

fn elementwise<D: Device>(device: &D, n: usize, seed: u64, shift: u64) {
    let (x, y) = (odd(seed + 1, n), odd(seed + 2, n));
    let scale = 1.0 / 3.0;
    for dtype in [DType::Bf16, DType::F32] {
        let from = Data::of(dtype, &x);
        let wide = from.floats();
        let operands = [from, Data::F32(y.clone())];
        let got = run(device, &Kernel::Add, &operands, shift)[1].floats();
        let want: Vec<f32> = y.iter().zip(&wide).map(|(y, x)| y + x).collect();
        assert_eq!(bits(&got), bits(&want), "add {dtype} {n} {shift}");
        let got = run(device, &Kernel::AddScaled { scale }, &operands, shift)[1].floats();
        let want: Vec<f32> = y.iter().zip(&wide).map(|(y, x)| y + scale * x).collect();
        assert_eq!(bits(&got), bits(&want), "add_scaled {dtype} {n} {shift}");
        let got = &run(device, &Kernel::Fill { value: 0.1 }, &operands[..1], shift)[0];
        assert_eq!(*got, Data::of(dtype, &vec![0.1; n]), "fill {dtype} {n} {shift}");
    }
    let got = run(device, &Kernel::Scale { factor: scale }, &[Data::F32(y.clone())], shift)[0].floats();
    assert_eq!(bits(&got), bits(&y.iter().map(|y| y * scale).collect::<Vec<_>>()), "scale {n} {shift}");
    let narrow = run(device, &Kernel::Cast, &[Data::F32(x.clone()), Data::bf16(&y)], shift)[1].floats();
    assert_eq!(bits(&narrow), bits(&Data::bf16(&x).floats()), "narrowed {n} {shift}");
    let wide = run(device, &Kernel::Cast, &[Data::bf16(&x), Data::F32(y.clone())], shift)[1].floats();
    assert_eq!(bits(&wide), bits(&Data::bf16(&x).floats()), "widened {n} {shift}");
    let relu = run(device, &Kernel::SquaredReluForward, &[Data::bf16(&x), Data::bf16(&y)], shift)[1].floats();
    let of = |x: f32| if x <= 0.0 { 0.0 } else { x * x };
    let want: Vec<f32> = Data::bf16(&x).floats().into_iter().map(of).collect();
    assert_eq!(bits(&relu), bits(&Data::bf16(&want).floats()), "squared relu {n} {shift}");
    adamw(device, n, seed, shift);
}

fn adamw<D: Device>(device: &D, n: usize, seed: u64, shift: u64) {
    let s = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 };
    let positive = |values: Vec<f32>| values.into_iter().map(f32::abs).collect::<Vec<_>>();
    let (grad, w, m, v) =
        (random(seed, n), random(seed + 1, n), random(seed + 2, n), positive(random(seed + 3, n)));
    let operands = [&grad, &w, &m, &v]
        .map(|x| Data::F32(x.clone()))
        .into_iter()
        .chain([Data::bf16(&w)])
        .collect::<Vec<_>>();
    let got = run(device, &Kernel::AdamW(s), &operands, shift);
    let correction = |beta: f32| (1.0 - f64::from(beta).powf(3.0)) as f32;
    let (c1, c2) = (correction(s.beta1), correction(s.beta2));
    for at in 0..n {
        let m = s.beta1 * m[at] + (1.0 - s.beta1) * grad[at];
        let v = s.beta2 * v[at] + (1.0 - s.beta2) * grad[at] * grad[at];
        let update = (m / c1) / ((v / c2).sqrt() + s.eps);
        let w = w[at] - s.lr * (update + s.weight_decay * w[at]);
        let have = [1, 2, 3].map(|operand: usize| got[operand].floats()[at].to_bits());
        assert_eq!(have, [w, m, v].map(f32::to_bits), "adamw {n} {shift} at {at}");
        if at > 300 {
            break;
        }
    }
    assert_eq!(got[4], Data::bf16(&got[1].floats()), "adamw's copy");
    let plain = run(device, &Kernel::AdamWF32(s), &operands[..4], shift);
    assert_eq!(plain[1..4], got[1..4], "adamw without a copy");
}

pub fn sums_of_parts_run_in_order<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let trap: Vec<f32> = [256.0].into_iter().chain([1.0; 7]).collect();
        let got = run(&device, &Kernel::SumParts { parts: 8 }, &[Data::bf16(&trap), Data::F32(vec![0.0])], 0);
        assert_eq!(got[1].floats(), [263.0]);
        for (case, n) in SIZES.into_iter().enumerate() {
            for (parts, shift) in [(1usize, 0), (2, 0), (3, 1), (5, 0)] {
                for dtype in [DType::Bf16, DType::F32] {
                    let from = Data::of(dtype, &odd(case as u64, parts * n));
                    let wide = from.floats();
                    let sum = |at: usize| (1..parts).fold(wide[at], |sum, part| sum + wide[part * n + at]);
                    let want: Vec<f32> = (0..n).map(sum).collect();
                    let kernel = Kernel::SumParts { parts: parts as u64 };
                    let got = run(&device, &kernel, &[from, Data::F32(vec![9.0; n])], shift)[1].floats();
                    assert_eq!(bits(&got), bits(&want), "{parts} parts of {n} {dtype} at {shift}");
                }
            }
        }
    });
}

pub fn matrix_products_match_their_definition<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        for (m, n, k) in [(1, 1, 1), (16, 24, 8), (33, 17, 65), (128, 256, 192), (64, 64, 0)] {
            for (a, b) in [(false, false), (true, false), (false, true), (true, true)] {
                for (from, to) in [
                    (DType::Bf16, DType::Bf16),
                    (DType::Bf16, DType::F32),
                    (DType::F32, DType::F32),
                    (DType::F32, DType::Bf16),
                ] {
                    for beta in [Beta::Overwrite, Beta::Accumulate] {
                        product(&device, (m, n, k), (a, b), (from, to), beta);
                    }
                }
            }
        }
    });
}

fn product<D: Device>(
    device: &D,
    (m, n, k): (usize, usize, usize),
    (ta, tb): (bool, bool),
    (from, to): (DType, DType),
    beta: Beta,
) {
    let (a, b) = (Data::of(from, &random(1, m * k)), Data::of(from, &random(2, k * n)));
    let c = Data::of(to, &random(3, m * n));
    let (wa, wb, wc) = (a.floats(), b.floats(), c.floats());
    let at = |row: usize, col: usize| {
        let sum: f64 = (0..k)
            .map(|i| {
                let x = if ta { wa[i * m + row] } else { wa[row * k + i] };
                let y = if tb { wb[col * k + i] } else { wb[i * n + col] };
                f64::from(x) * f64::from(y)
            })
            .sum();
        if beta == Beta::Accumulate { f64::from(wc[row * n + col]) + sum } else { sum }
    };
    let want: Vec<f64> = (0..m * n).map(|i| at(i / n, i % n)).collect();
    let transpose = |yes| if yes { Transpose::Yes } else { Transpose::No };
    let shape = Gemm { m: m as u64, n: n as u64, k: k as u64, a: transpose(ta), b: transpose(tb), beta };
    let operands = [a, b, c];
    let got = run(device, &Kernel::Gemm(shape), &operands, 0);
    let within = if to == DType::Bf16 { 1e-2 } else { 1e-4 };
    assert_near(&format!("{shape:?} {from} {to}"), &got[2].floats(), &want, within);
    assert_eq!(run(device, &Kernel::Gemm(shape), &operands, 0)[2], got[2], "the same bits again");
}

pub fn norms_losses_and_activations_match_their_definitions<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        for (rows, cols) in [(1, 1), (3, 5), (200, 96), (7, 1500)] {
            norm(&device, rows, cols);
            loss(&device, rows, cols + 1);
        }
        let (dy, x) = (Data::bf16(&random(1, 1000)), Data::bf16(&random(2, 1000)));
        let want: Vec<f64> =
            dy.floats().iter().zip(x.floats()).map(|(d, x)| f64::from(d * 2.0 * x.max(0.0))).collect();
        let got = run(&device, &Kernel::SquaredReluBackward, &[dy, x.clone(), x], 0);
        assert_near("squared relu backward", &got[2].floats(), &want, 1e-2);
    });
}

fn norm<D: Device>(device: &D, rows: usize, cols: usize) {
    let (x, w) = (random(1, rows * cols), random(2, cols));
    let eps = 1e-5f32;
    let kernel = Kernel::RmsNormForward { rows: rows as u64, cols: cols as u64, eps };
    let zeros = vec![0.0; rows * cols];
    let operands =
        [Data::F32(x.clone()), Data::F32(w.clone()), Data::bf16(&zeros), Data::F32(vec![0.0; rows])];
    let forward = run(device, &kernel, &operands, 0);
    let rstd: Vec<f64> = x
        .chunks_exact(cols)
        .map(|row| {
            let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
            1.0 / (squares / cols as f64 + f64::from(eps)).sqrt()
        })
        .collect();
    let normal = |at: usize| f64::from(x[at]) * rstd[at / cols];
    let y: Vec<f64> = (0..rows * cols).map(|at| normal(at) * f64::from(w[at % cols])).collect();
    assert_near("norm", &forward[2].floats(), &y, 1e-2);
    assert_near("rstd", &forward[3].floats(), &rstd, 1e-5);
    let dy = Data::bf16(&random(3, rows * cols));
    let d = dy.floats();
    let (dx, dw) = (random(4, rows * cols), random(5, cols));
    let kernel = Kernel::RmsNormBackward { rows: rows as u64, cols: cols as u64 };
    let operands = [
        dy,
        Data::F32(x.clone()),
        Data::F32(w.clone()),
        forward[3].clone(),
        Data::F32(dx.clone()),
        Data::F32(dw.clone()),
    ];
    let got = run(device, &kernel, &operands, 0);
    let mean = |row: usize| -> f64 {
        let each =
            (row * cols..(row + 1) * cols).map(|at| f64::from(d[at]) * f64::from(w[at % cols]) * normal(at));
        each.sum::<f64>() / cols as f64
    };
    let means: Vec<f64> = (0..rows).map(mean).collect();
    let of = |at: usize| {
        let g = f64::from(d[at]) * f64::from(w[at % cols]);
        f64::from(dx[at]) + rstd[at / cols] * (g - normal(at) * means[at / cols])
    };
    assert_near("dx", &got[4].floats(), &(0..rows * cols).map(of).collect::<Vec<_>>(), 1e-4);
    let of = |col: usize| {
        let each = (0..rows).map(|row| f64::from(d[row * cols + col]) * normal(row * cols + col));
        f64::from(dw[col]) + each.sum::<f64>()
    };
    assert_near("dweight", &got[5].floats(), &(0..cols).map(of).collect::<Vec<_>>(), 1e-4);
}

fn loss<D: Device>(device: &D, rows: usize, classes: usize) {
    let logits: Vec<f32> = random(1, rows * classes).into_iter().map(|x| 5.0 * x).collect();
    let targets: Vec<u32> = (0..rows).map(|row| (row * 31 % classes) as u32).collect();
    let scale = 0.5;
    let kernel = Kernel::CrossEntropy { rows: rows as u64, classes: classes as u64, scale };
    let operands = [
        Data::F32(logits.clone()),
        Data::U32(targets.clone()),
        Data::F32(vec![0.0]),
        Data::bf16(&vec![0.0; rows * classes]),
    ];
    let got = run(device, &kernel, &operands, 0);
    let (mut total, mut gradient) = (0.0, Vec::new());
    for (row, target) in logits.chunks_exact(classes).zip(&targets) {
        let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
        total += sum.ln() - f64::from(row[*target as usize]);
        for (at, x) in row.iter().enumerate() {
            let hit = f64::from(u8::from(at == *target as usize));
            gradient.push((f64::from(*x).exp() / sum - hit) * f64::from(scale) / rows as f64);
        }
    }
    assert_near("loss", &got[2].floats(), &[total / rows as f64], 1e-5);
    assert_near("dlogits", &got[3].floats(), &gradient, 1e-2);
}

pub fn attention_and_its_gradient_match_their_definition<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        for (batch, seq, heads, head_dim) in
            [(1, 1, 1, 1), (2, 4, 2, 3), (2, 70, 2, 16), (1, 129, 1, 64), (1, 40, 2, 128)]
        {
            attention(&device, Attention { batch, seq, heads, head_dim });
        }
    });
}

fn attention<D: Device>(device: &D, shape: Attention) {
    let (b, s, h, d) =
        (shape.batch as usize, shape.seq as usize, shape.heads as usize, shape.head_dim as usize);
    let (tokens, hidden) = (b * s, h * d);
    let qkv = Data::bf16(&random(1, tokens * 3 * hidden));
    let dout = Data::bf16(&random(2, tokens * hidden));
    let narrow = |n: usize| Data::bf16(&vec![0.0; n]);
    let forward = run(
        device,
        &Kernel::AttentionForward(shape),
        &[qkv.clone(), narrow(tokens * hidden), Data::F32(vec![0.0; b * h * s])],
        0,
    );
    let (w, g) = (qkv.floats(), dout.floats());
    let (mut out, mut lse) = (vec![0.0f64; tokens * hidden], vec![0.0f64; b * h * s]);
    let mut gradient = vec![0.0f64; tokens * 3 * hidden];
    let at = |i: usize, t: usize, part: usize, k: usize| (i * s + t) * 3 * hidden + part * hidden + k;
    let scale = 1.0 / (d as f64).sqrt();
    for (i, k) in (0..b).flat_map(|i| (0..h).map(move |k| (i, k))) {
        for t in 0..s {
            let dot = |u: usize| -> f64 {
                let pair =
                    |x: usize| f64::from(w[at(i, t, 0, k * d + x)]) * f64::from(w[at(i, u, 1, k * d + x)]);
                (0..d).map(pair).sum::<f64>() * scale
            };
            let scores: Vec<f64> = (0..=t).map(dot).collect();
            let total: f64 = scores.iter().map(|x| x.exp()).sum();
            lse[(i * h + k) * s + t] = total.ln();
            let p: Vec<f64> = scores.iter().map(|x| x.exp() / total).collect();
            let token = (i * s + t) * hidden + k * d;
            for x in 0..d {
                out[token + x] = (0..=t).map(|u| p[u] * f64::from(w[at(i, u, 2, k * d + x)])).sum();
            }
            let delta: f64 = (0..d).map(|x| f64::from(g[token + x]) * out[token + x]).sum();
            for u in 0..=t {
                let dp: f64 =
                    (0..d).map(|x| f64::from(g[token + x]) * f64::from(w[at(i, u, 2, k * d + x)])).sum();
                let ds = p[u] * (dp - delta) * scale;
                for x in 0..d {
                    gradient[at(i, t, 0, k * d + x)] += ds * f64::from(w[at(i, u, 1, k * d + x)]);
                    gradient[at(i, u, 1, k * d + x)] += ds * f64::from(w[at(i, t, 0, k * d + x)]);
                    gradient[at(i, u, 2, k * d + x)] += p[u] * f64::from(g[token + x]);
                }
            }
        }
    }
    assert_near(&format!("{shape:?} out"), &forward[1].floats(), &out, 1e-2);
    assert_near(&format!("{shape:?} lse"), &forward[2].floats(), &lse, 1e-4);
    let operands = [dout, qkv, forward[1].clone(), forward[2].clone(), narrow(tokens * 3 * hidden)];
    let got = run(device, &Kernel::AttentionBackward(shape), &operands, 0);
    assert_near(&format!("{shape:?} dqkv"), &got[4].floats(), &gradient, 2e-2);
    assert_eq!(
        run(device, &Kernel::AttentionBackward(shape), &operands, 0)[4],
        got[4],
        "the same bits again"
    );
}

pub fn embeddings_gather_and_sum_in_order<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        for (tokens, hidden, vocab) in [(1usize, 1usize, 1usize), (5, 3, 2), (700, 33, 40), (300, 513, 7)] {
            let ids: Vec<u32> = (0..tokens).map(|at| (at * at % vocab) as u32).collect();
            let table = Data::bf16(&random(1, vocab * hidden));
            let (t, h, v) = (tokens as u64, hidden as u64, vocab as u64);
            let kernel = Kernel::EmbeddingForward { tokens: t, hidden: h, vocab: v };
            let out = Data::F32(vec![0.0; tokens * hidden]);
            let got = run(&device, &kernel, &[Data::U32(ids.clone()), table.clone(), out], 0)[2].floats();
            let wide = table.floats();
            let of = |at: usize| wide[ids[at / hidden] as usize * hidden + at % hidden];
            assert_eq!(got, (0..tokens * hidden).map(of).collect::<Vec<_>>());
            let dx = random(2, tokens * hidden);
            let mut want = vec![0.0f32; vocab * hidden];
            for (at, dx) in dx.iter().enumerate() {
                want[ids[at / hidden] as usize * hidden + at % hidden] += dx;
            }
            for dtype in [DType::F32, DType::Bf16] {
                let kernel = Kernel::EmbeddingBackward { tokens: t, hidden: h, vocab: v };
                let table = Data::of(dtype, &vec![7.0; vocab * hidden]);
                let got = run(&device, &kernel, &[Data::U32(ids.clone()), Data::F32(dx.clone()), table], 0);
                assert_eq!(got[2], Data::of(dtype, &want), "{tokens} {hidden} {vocab} {dtype}");
            }
        }
    });
}

pub fn experts_are_routed_and_combined<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        for (tokens, experts, top_k, hidden) in
            [(1usize, 1usize, 1usize, 1usize), (9, 4, 2, 5), (130, 8, 3, 300)]
        {
            let mut logits = random(1, tokens * experts);
            if experts > 2 {
                logits[1] = logits[0]; // a tie
            }
            let (t, e, h) = (tokens as u64, experts as u64, hidden as u64);
            let kernel = Kernel::RouterForward { tokens: t, experts: e, top_k: top_k as u64 };
            let zeros = Data::F32(vec![0.0; tokens * experts]);
            let gates = run(&device, &kernel, &[Data::F32(logits.clone()), zeros.clone()], 0)[1].clone();
            let mut want = vec![0.0f64; tokens * experts];
            for token in 0..tokens {
                let row = &logits[token * experts..(token + 1) * experts];
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
                let sum: f64 = order[..top_k].iter().map(|at| f64::from(row[*at]).exp()).sum();
                order[..top_k]
                    .iter()
                    .for_each(|at| want[token * experts + at] = f64::from(row[*at]).exp() / sum);
            }
            assert_near("gates", &gates.floats(), &want, 1e-5);
            let zero = |values: &[f32]| values.iter().map(|x| *x == 0.0).collect::<Vec<_>>();
            assert_eq!(zero(&gates.floats()), want.iter().map(|x| *x == 0.0).collect::<Vec<_>>());
            let (g, dgates) = (gates.floats(), random(2, tokens * experts));
            let of = |at: usize| {
                let row = at / experts * experts..(at / experts + 1) * experts;
                let mean: f64 = row.map(|at| f64::from(g[at]) * f64::from(dgates[at])).sum();
                f64::from(g[at]) * (f64::from(dgates[at]) - mean)
            };
            let kernel = Kernel::RouterBackward { tokens: t, experts: e };
            let narrow = Data::bf16(&vec![0.0; tokens * experts]);
            let got = run(&device, &kernel, &[Data::F32(dgates.clone()), gates.clone(), narrow], 0);
            assert_near(
                "dlogits",
                &got[2].floats(),
                &(0..tokens * experts).map(of).collect::<Vec<_>>(),
                1e-2,
            );
            let y = Data::bf16(&random(3, experts * tokens * hidden));
            let wide = y.floats();
            let shape = Combine { tokens: t, experts: e, hidden: h };
            let out = Data::bf16(&vec![0.0; tokens * hidden]);
            let got =
                run(&device, &Kernel::CombineForward(shape), &[gates.clone(), y.clone(), out.clone()], 0);
            let of = |at: usize| {
                let (token, col) = (at / hidden, at % hidden);
                let each =
                    (0..experts).map(|e| (g[token * experts + e], wide[(e * tokens + token) * hidden + col]));
                each.filter(|(gate, _)| *gate != 0.0).fold(0.0f32, |sum, (gate, y)| sum + gate * y)
            };
            assert_eq!(got[2], Data::bf16(&(0..tokens * hidden).map(of).collect::<Vec<_>>()), "combine");
            let dout = Data::bf16(&random(4, tokens * hidden));
            let d = dout.floats();
            let operands = [dout, gates.clone(), y.clone(), y, zeros];
            let got = run(&device, &Kernel::CombineBackward(shape), &operands, 0);
            for at in 0..experts * tokens * hidden {
                let (e, token, col) = (at / hidden / tokens, at / hidden % tokens, at % hidden);
                let want = bf16::from_f32(g[token * experts + e] * d[token * hidden + col]).to_f32();
                assert!(got[3].floats()[at] == want, "dy at {at}");
                if at > 400 {
                    break;
                }
            }
            let of = |at: usize| {
                let (token, e) = (at / experts, at % experts);
                let y = &wide[(e * tokens + token) * hidden..][..hidden];
                let d = &d[token * hidden..][..hidden];
                let dot: f64 = y.iter().zip(d).map(|(y, d)| f64::from(*y) * f64::from(*d)).sum();
                if g[at] == 0.0 { 0.0 } else { dot }
            };
            assert_near("dgates", &got[4].floats(), &(0..tokens * experts).map(of).collect::<Vec<_>>(), 1e-4);
        }
    });
}

pub fn ids_out_of_range_are_told_at_the_next_wait<W: Worlds>(worlds: &W) {
    worlds.run(1, |device| {
        let kernel = Kernel::EmbeddingForward { tokens: 2, hidden: 4, vocab: 3 };
        let operands = [Data::U32(vec![1, 3]), Data::bf16(&[1.0; 12]), Data::F32(vec![0.0; 8])];
        let error = try_run(&device, &kernel, &operands, 0).expect_err("id 3 of 3");
        assert!(matches!(error, DeviceError::Operands { .. }) && error.to_string().contains('3'), "{error}");
        let fine = [Data::U32(vec![1, 2]), Data::bf16(&[1.0; 12]), Data::F32(vec![0.0; 8])];
        assert_eq!(run(&device, &kernel, &fine, 0)[2].floats(), [1.0; 8], "told once");
    });
}
