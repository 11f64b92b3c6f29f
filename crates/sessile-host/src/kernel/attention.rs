//! Causal self-attention, a head at a time, softmax in FP32 with the row's maximum taken out.
//!
//! `P = softmax(Q·Kᵀ / sqrt(d))` over keys up to the query's own place; `O = P·V`; `lse = log Σ exp(scores)`.
//! Backward rebuilds P from `lse`; with `D = rowsum(dO ∘ O)`:
//! `dV = Pᵀ·dO`, `dS = P ∘ (dO·Vᵀ - D)`, `dQ = dS·K / sqrt(d)`, `dK = dSᵀ·Q / sqrt(d)`.

use half::bf16;
use sessile_hal::Attention;

use super::{Args, Fault, length, narrow};

/// Extents as lengths.
struct Extents {
    batch: usize,
    seq: usize,
    heads: usize,
    dim: usize,
    scale: f32,
}

impl Extents {
    fn new(shape: Attention) -> Result<Self, Fault> {
        Ok(Extents {
            batch: length(shape.batch)?,
            seq: length(shape.seq)?,
            heads: length(shape.heads)?,
            dim: length(shape.head_dim)?,
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
        })
    }

    fn hidden(&self) -> usize {
        self.heads * self.dim
    }

    /// All (batch, head) pairs, in order; none if something is empty.
    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (batch, heads) = if self.seq * self.dim == 0 { (0, 0) } else { (self.batch, self.heads) };
        (0..batch).flat_map(move |b| (0..heads).map(move |h| (b, h)))
    }

    /// Where a head's elements of a token begin, in rows of `width` heads, with `part` hiddens before it.
    fn at(&self, b: usize, t: usize, h: usize, part: usize, parts: usize) -> usize {
        ((b * self.seq + t) * parts + part) * self.hidden() + h * self.dim
    }

    /// Copies one head of `part` out as `[seq, dim]` in FP32.
    fn gather(&self, from: &[bf16], to: &mut [f32], (b, h): (usize, usize), part: usize, parts: usize) {
        for (t, row) in to.chunks_exact_mut(self.dim).enumerate() {
            let at = self.at(b, t, h, part, parts);
            for (to, from) in row.iter_mut().zip(&from[at..at + self.dim]) {
                *to = from.to_f32();
            }
        }
    }

    fn scatter(&self, from: &[f32], to: &mut [bf16], (b, h): (usize, usize), part: usize, parts: usize) {
        for (t, row) in from.chunks_exact(self.dim).enumerate() {
            let at = self.at(b, t, h, part, parts);
            narrow(&mut to[at..at + self.dim], row);
        }
    }
}

/// Sum of products in eight interleaved sums: a fixed order that vectorizes.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest: f32 = a8.remainder().iter().zip(b8.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a8.zip(b8) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest
}

/// `to += factor * from`.
fn axpy(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

pub(super) fn forward(mut args: Args<'_>, shape: Attention) -> Result<(), Fault> {
    let qkv = args.read::<bf16>()?;
    let (out, lse) = (args.write::<bf16>()?, args.write::<f32>()?);
    let e = Extents::new(shape)?;
    let (seq, dim) = (e.seq, e.dim);
    let mut parts = vec![0.0f32; 4 * seq * dim];
    let (mut scores, mut head) = (vec![0.0f32; seq], 0);
    for pair in e.pairs() {
        let (q, rest) = parts.split_at_mut(seq * dim);
        let (k, rest) = rest.split_at_mut(seq * dim);
        let (v, o) = rest.split_at_mut(seq * dim);
        e.gather(qkv, q, pair, 0, 3);
        e.gather(qkv, k, pair, 1, 3);
        e.gather(qkv, v, pair, 2, 3);
        o.fill(0.0);
        for t in 0..seq {
            let query = &q[t * dim..][..dim];
            let scores = &mut scores[..=t];
            for (score, key) in scores.iter_mut().zip(k.chunks_exact(dim)) {
                *score = dot(query, key) * e.scale;
            }
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter_mut().for_each(|score| *score = (*score - max).exp());
            let sum: f32 = scores.iter().sum();
            lse[head * seq + t] = max + sum.ln();
            let row = &mut o[t * dim..][..dim];
            for (p, value) in scores.iter().zip(v.chunks_exact(dim)) {
                axpy(row, p / sum, value);
            }
        }
        e.scatter(o, out, pair, 0, 1);
        head += 1;
    }
    Ok(())
}

pub(super) fn backward(mut args: Args<'_>, shape: Attention) -> Result<(), Fault> {
    let (dout, qkv) = (args.read::<bf16>()?, args.read::<bf16>()?);
    let (out, lse) = (args.read::<bf16>()?, args.read::<f32>()?);
    let dqkv = args.write::<bf16>()?;
    let e = Extents::new(shape)?;
    let (seq, dim) = (e.seq, e.dim);
    let buffer = || vec![0.0f32; seq * dim];
    let (mut q, mut k, mut v, mut o, mut d_o) = (buffer(), buffer(), buffer(), buffer(), buffer());
    let (mut dq, mut dk, mut dv) = (buffer(), buffer(), buffer());
    for (head, pair) in e.pairs().enumerate() {
        e.gather(qkv, &mut q, pair, 0, 3);
        e.gather(qkv, &mut k, pair, 1, 3);
        e.gather(qkv, &mut v, pair, 2, 3);
        e.gather(out, &mut o, pair, 0, 1);
        e.gather(dout, &mut d_o, pair, 0, 1);
        for sum in [&mut dq, &mut dk, &mut dv] {
            sum.fill(0.0);
        }
        for t in 0..seq {
            let row = t * dim..(t + 1) * dim;
            let (query, d_out) = (&q[row.clone()], &d_o[row.clone()]);
            let delta = dot(d_out, &o[row.clone()]);
            let keys = k.chunks_exact(dim).zip(v.chunks_exact(dim));
            let sums = dk.chunks_exact_mut(dim).zip(dv.chunks_exact_mut(dim));
            for ((key, value), (dkey, dvalue)) in keys.zip(sums).take(t + 1) {
                let p = (dot(query, key) * e.scale - lse[head * seq + t]).exp();
                let ds = p * (dot(d_out, value) - delta) * e.scale;
                axpy(dvalue, p, d_out);
                axpy(dkey, ds, query);
                axpy(&mut dq[row.clone()], ds, key);
            }
        }
        e.scatter(&dq, dqkv, pair, 0, 3);
        e.scatter(&dk, dqkv, pair, 1, 3);
        e.scatter(&dv, dqkv, pair, 2, 3);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use sessile_hal::Kernel;

    use super::super::testing::{Buffer, check_gradient, random, run};
    use super::*;

    const SHAPE: Attention = Attention { batch: 2, seq: 4, heads: 2, head_dim: 3 };
    const HIDDEN: usize = 6;
    const TOKENS: usize = 8;

    /// The definition in f64: outputs, and log-sum-exp by batch, head, place.
    fn oracle(qkv: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let at = |b: usize, t: usize, part: usize, h: usize, i: usize| {
            f64::from(qkv[(b * 4 + t) * 3 * HIDDEN + part * HIDDEN + h * 3 + i])
        };
        let (mut out, mut lse) = (vec![0.0; TOKENS * HIDDEN], Vec::new());
        for b in 0..2 {
            for h in 0..2 {
                for t in 0..4 {
                    let score = |s: usize| {
                        (0..3).map(|i| at(b, t, 0, h, i) * at(b, s, 1, h, i)).sum::<f64>() / 3f64.sqrt()
                    };
                    let total: f64 = (0..=t).map(|s| score(s).exp()).sum();
                    lse.push(total.ln());
                    for i in 0..3 {
                        out[(b * 4 + t) * HIDDEN + h * 3 + i] =
                            (0..=t).map(|s| score(s).exp() / total * at(b, s, 2, h, i)).sum();
                    }
                }
            }
        }
        (out, lse)
    }

    #[test]
    fn forward_and_gradient_match_the_definition() {
        let qkv = Buffer::bf16(&random(1, TOKENS * 3 * HIDDEN));
        let dout = Buffer::bf16(&random(2, TOKENS * HIDDEN));
        let mut forward = [qkv.clone(), Buffer::bf16(&[0.0; 48]), Buffer::f32(&[0.0; 16])];
        run(&Kernel::AttentionForward(SHAPE), 1, &mut forward).expect("fits");
        let (out, lse) = oracle(&qkv.floats());
        let [_, got_out, got_lse] = forward;
        for (got, want) in got_out.floats().iter().zip(&out) {
            assert!((f64::from(*got) - want).abs() < 5e-3);
        }
        for (got, want) in got_lse.floats().iter().zip(&lse) {
            assert!((f64::from(*got) - want).abs() < 1e-5);
        }
        let mut backward = [dout.clone(), qkv.clone(), got_out, got_lse, Buffer::bf16(&[0.0; 144])];
        run(&Kernel::AttentionBackward(SHAPE), 4, &mut backward).expect("fits");
        let value =
            |qkv: &[f32]| oracle(qkv).0.iter().zip(dout.floats()).map(|(o, d)| o * f64::from(d)).sum();
        check_gradient(&qkv.floats(), &backward[4].floats(), 1e-3, 1e-2, value);
    }

    #[test]
    fn later_tokens_do_not_reach_earlier_outputs() {
        let mut qkv = random(1, TOKENS * 3 * HIDDEN);
        let run_on = |qkv: &[f32]| {
            let mut operands = [Buffer::bf16(qkv), Buffer::bf16(&[0.0; 48]), Buffer::f32(&[0.0; 16])];
            run(&Kernel::AttentionForward(SHAPE), 1, &mut operands).expect("fits");
            operands[1].floats()
        };
        let before = run_on(&qkv);
        qkv[3 * 3 * HIDDEN..4 * 3 * HIDDEN].fill(5.0); // the last token of the first sequence
        let after = run_on(&qkv);
        assert_eq!(before[..3 * HIDDEN], after[..3 * HIDDEN]);
        assert_ne!(before[3 * HIDDEN..4 * HIDDEN], after[3 * HIDDEN..4 * HIDDEN]);
    }
}
