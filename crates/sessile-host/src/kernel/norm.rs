//! RMS norm: `y = x · rstd · weight`, `rstd = 1 / sqrt(mean(x²) + eps)`.

use half::bf16;

use super::{Args, Fault, length};

pub(super) fn forward(mut args: Args<'_>, cols: u64, eps: f32) -> Result<(), Fault> {
    let (x, weight) = (args.read::<f32>()?, args.read::<f32>()?);
    let (y, rstd) = (args.write::<bf16>()?, args.write::<f32>()?);
    let cols = length(cols)?;
    if cols == 0 {
        return Ok(());
    }
    for ((x, y), rstd) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)).zip(rstd) {
        let squares: f32 = x.iter().map(|x| x * x).sum();
        *rstd = 1.0 / (squares / cols as f32 + eps).sqrt();
        for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
            *y = bf16::from_f32(x * *rstd * weight);
        }
    }
    Ok(())
}

/// With `g = dy · weight` and `x̂ = x · rstd`: `dx += rstd · (g - x̂ · mean(g · x̂))`, `dweight += Σ dy · x̂`.
pub(super) fn backward(mut args: Args<'_>, cols: u64) -> Result<(), Fault> {
    let (dy, x) = (args.read::<bf16>()?, args.read::<f32>()?);
    let (weight, rstd) = (args.read::<f32>()?, args.read::<f32>()?);
    let (dx, dweight) = (args.write::<f32>()?, args.write::<f32>()?);
    let cols = length(cols)?;
    if cols == 0 {
        return Ok(());
    }
    let rows = dy.chunks_exact(cols).zip(x.chunks_exact(cols)).zip(dx.chunks_exact_mut(cols)).zip(rstd);
    for (((dy, x), dx), &rstd) in rows {
        let mut dot = 0.0;
        for ((dy, x), weight) in dy.iter().zip(x).zip(weight) {
            dot += dy.to_f32() * weight * (x * rstd);
        }
        let mean = dot / cols as f32;
        for ((((dy, x), weight), dx), dweight) in dy.iter().zip(x).zip(weight).zip(dx).zip(&mut *dweight) {
            let (dy, normal) = (dy.to_f32(), x * rstd);
            *dx += rstd * (dy * weight - normal * mean);
            *dweight += dy * normal;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use sessile_hal::Kernel;

    use super::super::testing::{Buffer, check_gradient, random, run};

    const ROWS: usize = 3;
    const COLS: usize = 5;
    const EPS: f32 = 1e-5;

    fn value(x: &[f32], weight: &[f32], dy: &[f32]) -> f64 {
        let mut total = 0.0;
        for (x, dy) in x.chunks(COLS).zip(dy.chunks(COLS)) {
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / COLS as f64;
            let rstd = 1.0 / (mean + f64::from(EPS)).sqrt();
            for ((x, w), dy) in x.iter().zip(weight).zip(dy) {
                total += f64::from(*x) * rstd * f64::from(*w) * f64::from(*dy);
            }
        }
        total
    }

    #[test]
    fn gradients_match_differences_and_add_up() {
        let (x, weight) = (random(1, ROWS * COLS), random(2, COLS));
        let dy = Buffer::bf16(&random(3, ROWS * COLS));
        let (rows, cols) = (ROWS as u64, COLS as u64);
        let mut forward =
            [Buffer::f32(&x), Buffer::f32(&weight), Buffer::bf16(&[0.0; 15]), Buffer::f32(&[0.0; ROWS])];
        run(&Kernel::RmsNormForward { rows, cols, eps: EPS }, 2, &mut forward).expect("fits");
        let [x_buffer, weight_buffer, y, rstd] = forward;
        let dot: f64 = y.floats().iter().zip(dy.floats()).map(|(y, dy)| f64::from(y * dy)).sum();
        let exact = value(&x, &weight, &dy.floats());
        assert!((dot - exact).abs() < 0.02, "{dot} {exact}");

        let mut backward = [
            dy.clone(),
            x_buffer,
            weight_buffer,
            rstd,
            Buffer::f32(&[10.0; ROWS * COLS]),
            Buffer::f32(&[20.0; COLS]),
        ];
        run(&Kernel::RmsNormBackward { rows, cols }, 4, &mut backward).expect("fits");
        let minus = |buffer: &Buffer, by: f32| buffer.floats().iter().map(|x| x - by).collect::<Vec<_>>();
        check_gradient(&x, &minus(&backward[4], 10.0), 1e-3, 1e-4, |x| value(x, &weight, &dy.floats()));
        check_gradient(&weight, &minus(&backward[5], 20.0), 1e-3, 1e-4, |w| value(&x, w, &dy.floats()));
    }
}
