//! Routing tokens to experts, and weighing what the experts give.

use half::bf16;
use sessile_hal::Combine;

use super::{Args, Fault, length};

/// Softmax over the `top_k` largest logits of each row, the row's maximum taken out first.
pub(super) fn route(mut args: Args<'_>, experts: u64, top_k: u64) -> Result<(), Fault> {
    let (logits, gates) = (args.read::<f32>()?, args.write::<f32>()?);
    let (experts, top_k) = (length(experts)?, length(top_k)?);
    let mut order: Vec<usize> = Vec::with_capacity(experts);
    for (logits, gates) in logits.chunks_exact(experts).zip(gates.chunks_exact_mut(experts)) {
        order.clear();
        order.extend(0..experts);
        // Stable: of equal logits the first comes first. A total order, so that NaN has a place too.
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        gates.fill(0.0);
        let max = logits[order[0]];
        for &expert in &order[..top_k] {
            gates[expert] = (logits[expert] - max).exp();
        }
        let sum: f32 = gates.iter().sum();
        gates.iter_mut().for_each(|gate| *gate /= sum);
    }
    Ok(())
}

/// `dlogit = gate · (dgate - Σ gate · dgate)`.
pub(super) fn route_backward(mut args: Args<'_>, experts: u64) -> Result<(), Fault> {
    let (dgates, gates) = (args.read::<f32>()?, args.read::<f32>()?);
    let dlogits = args.write::<bf16>()?;
    let experts = length(experts)?;
    let rows = dgates.chunks_exact(experts).zip(gates.chunks_exact(experts));
    for ((dgates, gates), dlogits) in rows.zip(dlogits.chunks_exact_mut(experts)) {
        let mean: f32 = gates.iter().zip(dgates).map(|(gate, dgate)| gate * dgate).sum();
        for ((dlogit, gate), dgate) in dlogits.iter_mut().zip(gates).zip(dgates) {
            *dlogit = bf16::from_f32(gate * (dgate - mean));
        }
    }
    Ok(())
}

pub(super) fn combine(mut args: Args<'_>, shape: Combine) -> Result<(), Fault> {
    let (gates, y) = (args.read::<f32>()?, args.read::<bf16>()?);
    let out = args.write::<bf16>()?;
    let (tokens, experts, hidden) = extents(shape)?;
    let mut sum = vec![0.0f32; hidden];
    for (token, out) in (0..tokens).zip(out.chunks_exact_mut(hidden)) {
        sum.fill(0.0);
        for expert in 0..experts {
            let gate = gates[token * experts + expert];
            if gate != 0.0 {
                let y = &y[(expert * tokens + token) * hidden..][..hidden];
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += gate * y.to_f32());
            }
        }
        super::narrow(out, &sum);
    }
    Ok(())
}

/// `dy = gate · dout`, `dgate = Σ dout · y`.
pub(super) fn combine_backward(mut args: Args<'_>, shape: Combine) -> Result<(), Fault> {
    let (dout, gates) = (args.read::<bf16>()?, args.read::<f32>()?);
    let y = args.read::<bf16>()?;
    let (dy, dgates) = (args.write::<bf16>()?, args.write::<f32>()?);
    let (tokens, experts, hidden) = extents(shape)?;
    for (token, dout) in (0..tokens).zip(dout.chunks_exact(hidden)) {
        for expert in 0..experts {
            let gate = gates[token * experts + expert];
            let at = (expert * tokens + token) * hidden;
            let (y, dy) = (&y[at..][..hidden], &mut dy[at..][..hidden]);
            let dgate = &mut dgates[token * experts + expert];
            if gate == 0.0 {
                *dgate = 0.0;
                dy.fill(bf16::ZERO);
                continue;
            }
            *dgate = dout.iter().zip(y).map(|(dout, y)| dout.to_f32() * y.to_f32()).sum();
            for (dy, dout) in dy.iter_mut().zip(dout) {
                *dy = bf16::from_f32(gate * dout.to_f32());
            }
        }
    }
    Ok(())
}

/// Tokens, experts and columns; none of columns 0.
fn extents(shape: Combine) -> Result<(usize, usize, usize), Fault> {
    let hidden = length(shape.hidden)?;
    if hidden == 0 {
        return Err("one column or more".to_owned());
    }
    Ok((length(shape.tokens)?, length(shape.experts)?, hidden))
}

#[cfg(test)]
mod tests {
    use sessile_hal::Kernel;

    use super::super::testing::{Buffer, check_gradient, random, run};
    use super::*;

    const TOKENS: usize = 3;
    const EXPERTS: usize = 4;
    const HIDDEN: usize = 5;
    const SHAPE: Combine = Combine { tokens: 3, experts: 4, hidden: 5 };

    fn routed(logits: &[f32], top_k: u64) -> Vec<f32> {
        let mut operands = [Buffer::f32(logits), Buffer::f32(&vec![f32::NAN; logits.len()])];
        let kernel = Kernel::RouterForward { tokens: TOKENS as u64, experts: EXPERTS as u64, top_k };
        run(&kernel, 1, &mut operands).expect("fits");
        operands[1].floats()
    }

    #[test]
    fn the_largest_logits_share_one_and_of_equal_ones_the_first_are_taken() {
        let logits = [0.0, 1.0, 1.0, 1.0, 3.0, -1e30, 2.0, f32::NEG_INFINITY, 5.0, 5.0, 5.0, 5.0];
        let gates = routed(&logits, 2);
        assert_eq!(gates[..4], [0.0, 0.5, 0.5, 0.0]);
        assert_eq!((gates[5], gates[7]), (0.0, 0.0));
        assert!(gates[4] > gates[6] && (gates[4] + gates[6] - 1.0).abs() < 1e-6, "{gates:?}");
        assert_eq!(gates[8..], [0.5, 0.5, 0.0, 0.0]);
        assert_eq!(routed(&logits, 1)[..4], [0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn the_router_gradient_matches_differences() {
        let (logits, dgates) = (random(1, TOKENS * EXPERTS), random(2, TOKENS * EXPERTS));
        for top_k in [1, 2, 4] {
            let mut operands = [
                Buffer::f32(&dgates),
                Buffer::f32(&routed(&logits, top_k)),
                Buffer::bf16(&[f32::NAN; TOKENS * EXPERTS]),
            ];
            let kernel = Kernel::RouterBackward { tokens: TOKENS as u64, experts: EXPERTS as u64 };
            run(&kernel, 2, &mut operands).expect("fits");
            check_gradient(&logits, &operands[2].floats(), 1e-3, 5e-3, |logits| {
                routed(logits, top_k).iter().zip(&dgates).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum()
            });
        }
    }

    fn combined(gates: &[f32], y: &[f32]) -> Vec<f64> {
        let at = |token: usize, col: usize| {
            let each = (0..EXPERTS).map(|expert| {
                let y = y[(expert * TOKENS + token) * HIDDEN + col];
                f64::from(gates[token * EXPERTS + expert]) * f64::from(y)
            });
            each.sum()
        };
        (0..TOKENS * HIDDEN).map(|i| at(i / HIDDEN, i % HIDDEN)).collect()
    }

    #[test]
    fn what_experts_give_is_weighed_and_summed() {
        let gates = routed(&random(1, TOKENS * EXPERTS), 2);
        let y = Buffer::bf16(&random(2, EXPERTS * TOKENS * HIDDEN));
        let mut operands = [Buffer::f32(&gates), y.clone(), Buffer::bf16(&[f32::NAN; TOKENS * HIDDEN])];
        run(&Kernel::CombineForward(SHAPE), 2, &mut operands).expect("fits");
        for (got, want) in operands[2].floats().iter().zip(combined(&gates, &y.floats())) {
            assert!((f64::from(*got) - want).abs() <= 0.01, "{got} {want}");
        }
    }

    #[test]
    fn gradients_of_the_combination_match_differences_and_are_zero_without_a_gate() {
        let gates = routed(&random(1, TOKENS * EXPERTS), 2);
        let y = Buffer::bf16(&random(2, EXPERTS * TOKENS * HIDDEN));
        let dout = Buffer::bf16(&random(3, TOKENS * HIDDEN));
        let mut operands = [
            dout.clone(),
            Buffer::f32(&gates),
            y.clone(),
            Buffer::bf16(&[f32::NAN; EXPERTS * TOKENS * HIDDEN]),
            Buffer::f32(&[f32::NAN; TOKENS * EXPERTS]),
        ];
        run(&Kernel::CombineBackward(SHAPE), 3, &mut operands).expect("fits");
        let value = |gates: &[f32], y: &[f32]| -> f64 {
            combined(gates, y).iter().zip(dout.floats()).map(|(out, d)| out * f64::from(d)).sum()
        };
        check_gradient(&y.floats(), &operands[3].floats(), 1e-3, 5e-3, |y| value(&gates, y));
        let dgates = operands[4].floats();
        for (at, gate) in gates.iter().enumerate() {
            let chosen = *gate != 0.0;
            assert!(chosen || dgates[at] == 0.0, "an expert without the token has no part in it");
            if chosen {
                let moved = |by: f32| {
                    let mut gates = gates.clone();
                    gates[at] += by;
                    value(&gates, &y.floats())
                };
                let slope = (moved(1e-3) - moved(-1e-3)) / 2e-3;
                assert!((slope - f64::from(dgates[at])).abs() < 5e-3, "{slope} {}", dgates[at]);
            }
        }
    }

    #[test]
    fn an_expert_without_tokens_gets_zeros_whatever_it_gave() {
        let gates: Vec<f32> = (0..TOKENS).flat_map(|_| [1.0, 0.0, 0.0, 0.0]).collect();
        let mut y = vec![f32::NAN; EXPERTS * TOKENS * HIDDEN];
        y[..TOKENS * HIDDEN].fill(2.0);
        let mut forward = [Buffer::f32(&gates), Buffer::bf16(&y), Buffer::bf16(&[0.0; TOKENS * HIDDEN])];
        run(&Kernel::CombineForward(SHAPE), 2, &mut forward).expect("fits");
        assert_eq!(forward[2].floats(), [2.0; TOKENS * HIDDEN]);
        let mut backward = [
            Buffer::bf16(&[1.0; TOKENS * HIDDEN]),
            Buffer::f32(&gates),
            Buffer::bf16(&y),
            Buffer::bf16(&y),
            Buffer::f32(&gates),
        ];
        run(&Kernel::CombineBackward(SHAPE), 3, &mut backward).expect("fits");
        assert!(backward[3].floats()[TOKENS * HIDDEN..].iter().all(|dy| *dy == 0.0));
        assert_eq!(backward[4].floats()[..4], [10.0, 0.0, 0.0, 0.0]);
    }
}
