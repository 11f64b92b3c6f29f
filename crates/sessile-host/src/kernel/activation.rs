//! Squared ReLU.

use half::bf16;

use super::{Args, Fault};

pub(super) fn forward(mut args: Args<'_>) -> Result<(), Fault> {
    let x = args.read::<bf16>()?;
    for (y, x) in args.write::<bf16>()?.iter_mut().zip(x) {
        let x = x.to_f32();
        // Not `max`: that would turn NaN into 0.
        *y = bf16::from_f32(if x <= 0.0 { 0.0 } else { x * x });
    }
    Ok(())
}

pub(super) fn backward(mut args: Args<'_>) -> Result<(), Fault> {
    let (dy, x) = (args.read::<bf16>()?, args.read::<bf16>()?);
    for ((dx, dy), x) in args.write::<bf16>()?.iter_mut().zip(dy).zip(x) {
        let x = x.to_f32();
        let slope = if x <= 0.0 { 0.0 } else { 2.0 * x };
        *dx = bf16::from_f32(dy.to_f32() * slope);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use sessile_hal::Kernel;

    use super::super::testing::{Buffer, check_gradient, random, run};

    #[test]
    fn squares_what_is_positive_and_keeps_nan() {
        let mut operands = [Buffer::bf16(&[-2.0, 0.0, 3.0, f32::NAN]), Buffer::bf16(&[9.0; 4])];
        run(&Kernel::SquaredReluForward, 1, &mut operands).expect("fits");
        let y = operands[1].floats();
        assert_eq!(y[..3], [0.0, 0.0, 9.0]);
        assert!(y[3].is_nan());
    }

    #[test]
    fn the_gradient_matches_differences() {
        let (x, dy) = (Buffer::bf16(&random(1, 32)), Buffer::bf16(&random(2, 32)));
        let mut operands = [dy.clone(), x.clone(), Buffer::bf16(&[0.0; 32])];
        run(&Kernel::SquaredReluBackward, 2, &mut operands).expect("fits");
        check_gradient(&x.floats(), &operands[2].floats(), 1e-3, 5e-3, |x| {
            x.iter().zip(dy.floats()).map(|(x, dy)| f64::from(x.max(0.0)).powi(2) * f64::from(dy)).sum()
        });
    }
}
