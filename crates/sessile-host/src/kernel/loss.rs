//! Cross entropy.

use half::bf16;

use super::{Args, Fault, length};

/// Mean of `log(Σ exp(logits)) - logits[target]` and its gradient, with the row's maximum taken out first.
pub(super) fn cross_entropy(mut args: Args<'_>, rows: u64, classes: u64, scale: f32) -> Result<(), Fault> {
    let (logits, targets) = (args.read::<f32>()?, args.read::<u32>()?);
    let (loss, dlogits) = (args.write::<f32>()?, args.write::<bf16>()?);
    let classes = length(classes)?;
    let mut total = 0.0f64;
    if classes > 0 {
        let factor = scale / rows as f32;
        let mut exps = vec![0.0f32; classes];
        let each = logits.chunks_exact(classes).zip(dlogits.chunks_exact_mut(classes)).zip(targets);
        for ((logits, dlogits), &target) in each {
            let target = target as usize;
            if target >= classes {
                return Err(format!("targets below {classes}, not {target}"));
            }
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            for (exp, logit) in exps.iter_mut().zip(logits) {
                *exp = (logit - max).exp();
            }
            let sum: f32 = exps.iter().sum();
            total += f64::from(max + sum.ln() - logits[target]);
            for (dlogit, exp) in dlogits.iter_mut().zip(&exps) {
                *dlogit = bf16::from_f32(exp / sum * factor);
            }
            dlogits[target] = bf16::from_f32((exps[target] / sum - 1.0) * factor);
        }
    }
    loss.fill((total / rows as f64) as f32);
    Ok(())
}

#[cfg(test)]
mod tests {
    use sessile_hal::Kernel;

    use super::super::testing::{Buffer, check_gradient, random, run};

    #[test]
    fn loss_and_gradient_match_the_definition() {
        let (rows, classes, scale) = (4usize, 6usize, 2.0f32);
        let logits = random(1, rows * classes);
        let targets = [0u32, 5, 2, 2];
        let value = |logits: &[f32]| -> f64 {
            let each = logits.chunks(classes).zip(targets).map(|(logits, target)| {
                let sum: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
                sum.ln() - f64::from(logits[target as usize])
            });
            each.sum::<f64>() / rows as f64
        };
        let mut operands = [
            Buffer::f32(&logits),
            Buffer::U32(targets.to_vec()),
            Buffer::f32(&[0.0]),
            Buffer::bf16(&vec![0.0; rows * classes]),
        ];
        let kernel = Kernel::CrossEntropy { rows: rows as u64, classes: classes as u64, scale };
        run(&kernel, 2, &mut operands).expect("fits");
        assert!((f64::from(operands[2].floats()[0]) - value(&logits)).abs() < 1e-6);
        let gradient: Vec<f32> = operands[3].floats().iter().map(|x| x / scale).collect();
        check_gradient(&logits, &gradient, 1e-2, 2e-3, value);
    }

    #[test]
    fn large_logits_stay_finite_and_wild_targets_are_errors() {
        let kernel = Kernel::CrossEntropy { rows: 1, classes: 2, scale: 1.0 };
        let operands = |target| {
            [
                Buffer::f32(&[1e4, -1e4]),
                Buffer::U32(vec![target]),
                Buffer::f32(&[0.0]),
                Buffer::bf16(&[0.0; 2]),
            ]
        };
        let mut fine = operands(1);
        run(&kernel, 2, &mut fine).expect("fits");
        assert_eq!(fine[2].floats(), [2e4]);
        assert!(run(&kernel, 2, &mut operands(2)).is_err());
    }
}
