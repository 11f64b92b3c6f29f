//! AdamW.

use half::bf16;
use sessile_hal::AdamW;

use super::{Args, Fault};

/// `cast`: a bf16 copy of the master weight is the last operand.
pub(super) fn adamw(mut args: Args<'_>, settings: AdamW, cast: bool) -> Result<(), Fault> {
    let AdamW { lr, beta1, beta2, eps, weight_decay, step } = settings;
    let grad = args.read::<f32>()?;
    let (master, m, v) = (args.write::<f32>()?, args.write::<f32>()?, args.write::<f32>()?);
    // In f64: 1 - beta^step loses all digits in f32 for small steps.
    let correction = |beta: f32| (1.0 - f64::from(beta).powf(f64::from(step))) as f32;
    let (correct1, correct2) = (correction(beta1), correction(beta2));
    for (((grad, master), m), v) in grad.iter().zip(&mut *master).zip(m).zip(v) {
        *m = beta1 * *m + (1.0 - beta1) * grad;
        *v = beta2 * *v + (1.0 - beta2) * grad * grad;
        let update = (*m / correct1) / ((*v / correct2).sqrt() + eps);
        *master -= lr * (update + weight_decay * *master);
    }
    if cast {
        for (weight, master) in args.write::<bf16>()?.iter_mut().zip(master) {
            *weight = bf16::from_f32(*master);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use sessile_hal::{AdamW, Kernel};

    use super::super::testing::{Buffer, random, run};

    #[test]
    fn follows_the_definition_for_some_steps() {
        let n = 8;
        let (mut master, mut m, mut v) = (random(1, n), vec![0.0f32; n], vec![0.0f32; n]);
        let mut exact: Vec<[f64; 3]> = master.iter().map(|x| [f64::from(*x), 0.0, 0.0]).collect();
        for step in 1..=5 {
            let grad = random(10 + u64::from(step), n);
            let settings = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step };
            let mut operands = [
                Buffer::f32(&grad),
                Buffer::f32(&master),
                Buffer::f32(&m),
                Buffer::f32(&v),
                Buffer::bf16(&vec![0.0; n]),
            ];
            let mut plain = operands[..4].to_vec();
            run(&Kernel::AdamW(settings), 1, &mut operands).expect("fits");
            run(&Kernel::AdamWF32(settings), 1, &mut plain).expect("fits");
            assert_eq!(operands[..4], plain);
            [master, m, v] = [1, 2, 3].map(|at| operands[at].floats());
            assert_eq!(operands[4], Buffer::bf16(&master));
            for (at, [w, m, v]) in exact.iter_mut().enumerate() {
                let g = f64::from(grad[at]);
                *m = 0.9 * *m + 0.1 * g;
                *v = 0.99 * *v + 0.01 * g * g;
                let (mh, vh) =
                    (*m / (1.0 - 0.9f64.powf(step.into())), *v / (1.0 - 0.99f64.powf(step.into())));
                *w -= 0.01 * (mh / (vh.sqrt() + 1e-8) + 0.1 * *w);
                assert!((f64::from(master[at]) - *w).abs() < 1e-5, "step {step}, element {at}");
            }
        }
    }
}
