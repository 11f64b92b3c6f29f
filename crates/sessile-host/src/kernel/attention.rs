//! Causal self-attention, a head at a time, softmax in FP32 with the row's maximum taken out.
//!
//! `P = softmax(Q·Kᵀ / sqrt(d))` over keys up to the query's own place; `O = P·V`; `lse = log Σ exp(scores)`.
//! Backward rebuilds P from `lse`; with `D = rowsum(dO ∘ O)`:
//! `dV = Pᵀ·dO`, `dS = P ∘ (dO·Vᵀ - D)`, `dQ = dS·K / sqrt(d)`, `dK = dSᵀ·Q / sqrt(d)`.

use half::bf16;
use sessile_hal::Transpose::{No, Yes};
use sessile_hal::{Attention, Transpose};

use super::gemm::{Matrix, multiply};
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

/// `to[m, n] = a · b`.
fn product(
    to: &mut [f32],
    (a, ta): (&[f32], Transpose),
    (b, tb): (&[f32], Transpose),
    (m, n, k): (usize, usize, usize),
) -> Result<(), Fault> {
    multiply(to, &Matrix::new(a, m, k, ta)?, &Matrix::new(b, k, n, tb)?, (m, n, k), false)
}

pub(super) fn forward(mut args: Args<'_>, shape: Attention) -> Result<(), Fault> {
    let qkv = args.read::<bf16>()?;
    let (out, lse) = (args.write::<bf16>()?, args.write::<f32>()?);
    let e = Extents::new(shape)?;
    let (seq, dim) = (e.seq, e.dim);
    let buffer = || vec![0.0f32; seq * dim];
    let (mut q, mut k, mut v, mut o) = (buffer(), buffer(), buffer(), buffer());
    let mut scores = vec![0.0f32; seq * seq];
    for (head, pair) in e.pairs().enumerate() {
        e.gather(qkv, &mut q, pair, 0, 3);
        e.gather(qkv, &mut k, pair, 1, 3);
        e.gather(qkv, &mut v, pair, 2, 3);
        product(&mut scores, (&q, No), (&k, Yes), (seq, seq, dim))?;
        for (t, row) in scores.chunks_exact_mut(seq).enumerate() {
            let (row, later) = row.split_at_mut(t + 1);
            later.fill(0.0);
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) * e.scale;
            row.iter_mut().for_each(|score| *score = (*score * e.scale - max).exp());
            let sum: f32 = row.iter().sum();
            lse[head * seq + t] = max + sum.ln();
            row.iter_mut().for_each(|p| *p /= sum);
        }
        product(&mut o, (&scores, No), (&v, No), (seq, dim, seq))?;
        e.scatter(&o, out, pair, 0, 1);
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
    let mut gradient = buffer();
    let (mut p, mut ds) = (vec![0.0f32; seq * seq], vec![0.0f32; seq * seq]);
    for (head, pair) in e.pairs().enumerate() {
        e.gather(qkv, &mut q, pair, 0, 3);
        e.gather(qkv, &mut k, pair, 1, 3);
        e.gather(qkv, &mut v, pair, 2, 3);
        e.gather(out, &mut o, pair, 0, 1);
        e.gather(dout, &mut d_o, pair, 0, 1);
        product(&mut p, (&q, No), (&k, Yes), (seq, seq, dim))?;
        product(&mut ds, (&d_o, No), (&v, Yes), (seq, seq, dim))?;
        for (t, (p, ds)) in p.chunks_exact_mut(seq).zip(ds.chunks_exact_mut(seq)).enumerate() {
            let row = t * dim..(t + 1) * dim;
            let delta: f32 = d_o[row.clone()].iter().zip(&o[row]).map(|(d_o, o)| d_o * o).sum();
            let lse = lse[head * seq + t];
            p[t + 1..].fill(0.0);
            ds[t + 1..].fill(0.0);
            for (p, ds) in p.iter_mut().zip(ds).take(t + 1) {
                *p = (*p * e.scale - lse).exp();
                *ds = *p * (*ds - delta) * e.scale;
            }
        }
        product(&mut gradient, (&ds, No), (&k, No), (seq, dim, seq))?;
        e.scatter(&gradient, dqkv, pair, 0, 3);
        product(&mut gradient, (&ds, Yes), (&q, No), (seq, dim, seq))?;
        e.scatter(&gradient, dqkv, pair, 1, 3);
        product(&mut gradient, (&p, Yes), (&d_o, No), (seq, dim, seq))?;
        e.scatter(&gradient, dqkv, pair, 2, 3);
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
