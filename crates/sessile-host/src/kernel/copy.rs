//! Moving, converting and adding elements.

use bytemuck::Pod;
use half::bf16;
use sessile_plan::DType;

use super::{Args, Fault, Floats, FloatsMut, narrow};

pub(super) fn fill(mut args: Args<'_>, value: f32) -> Result<(), Fault> {
    match args.peek_dtype() {
        Some(DType::Bf16) => args.write::<bf16>()?.fill(bf16::from_f32(value)),
        Some(DType::F32) => args.write::<f32>()?.fill(value),
        // `as` saturates, and takes NaN to 0.
        Some(DType::U32) => args.write::<u32>()?.fill(value as u32),
        None => return Err("one operand".to_owned()),
    }
    Ok(())
}

pub(super) fn copy(mut args: Args<'_>) -> Result<(), Fault> {
    fn same<T: Pod>(mut args: Args<'_>) -> Result<(), Fault> {
        let from = args.read::<T>()?;
        args.write::<T>()?.copy_from_slice(from);
        Ok(())
    }
    match args.peek_dtype() {
        Some(DType::Bf16) => same::<bf16>(args),
        _ => {
            let from = args.read::<u32>()?;
            args.write::<u32>()?.copy_from_slice(from);
            Ok(())
        }
    }
}

pub(super) fn cast(mut args: Args<'_>) -> Result<(), Fault> {
    match (args.read_floats()?, args.write_floats()?) {
        (Floats::Bf16(from), FloatsMut::F32(to)) => {
            for (to, from) in to.iter_mut().zip(from) {
                *to = from.to_f32();
            }
        }
        (Floats::F32(from), FloatsMut::Bf16(to)) => narrow(to, from),
        _ => return Err("bf16 and f32, or f32 and bf16".to_owned()),
    }
    Ok(())
}

pub(super) fn add(mut args: Args<'_>) -> Result<(), Fault> {
    let from = args.read_floats()?;
    let to = args.write::<f32>()?;
    match from {
        Floats::Bf16(from) => to.iter_mut().zip(from).for_each(|(to, from)| *to += from.to_f32()),
        Floats::F32(from) => to.iter_mut().zip(from).for_each(|(to, from)| *to += from),
    }
    Ok(())
}

/// Rust never contracts `to + scale * from`: product and sum are each rounded.
pub(super) fn add_scaled(mut args: Args<'_>, scale: f32) -> Result<(), Fault> {
    let from = args.read_floats()?;
    let to = args.write::<f32>()?;
    match from {
        Floats::Bf16(from) => to.iter_mut().zip(from).for_each(|(to, from)| *to += scale * from.to_f32()),
        Floats::F32(from) => to.iter_mut().zip(from).for_each(|(to, from)| *to += scale * from),
    }
    Ok(())
}

/// Starts from part 0 itself: 0 + part 0 would lose the sign of -0.
pub(super) fn sum_parts(mut args: Args<'_>) -> Result<(), Fault> {
    fn sum<T: Pod>(from: &[T], to: &mut [f32], widen: impl Fn(T) -> f32) {
        let n = to.len();
        for (at, to) in to.iter_mut().enumerate() {
            let mut parts = from.iter().skip(at).step_by(n.max(1)).map(|x| widen(*x));
            let first = parts.next().unwrap_or(0.0);
            *to = parts.fold(first, |sum, x| sum + x);
        }
    }
    let from = args.read_floats()?;
    let to = args.write::<f32>()?;
    match from {
        Floats::Bf16(from) => sum(from, to, bf16::to_f32),
        Floats::F32(from) => sum(from, to, |x| x),
    }
    Ok(())
}

pub(super) fn scale(mut args: Args<'_>, factor: f32) -> Result<(), Fault> {
    args.write::<f32>()?.iter_mut().for_each(|x| *x *= factor);
    Ok(())
}

#[cfg(test)]
mod tests {
    use sessile_hal::Kernel;

    use super::super::testing::{Buffer, run};

    #[test]
    fn casts_round_to_nearest_even_and_keep_nan() {
        // Halfway between 1 and the next bf16 goes to the even one, above it up.
        let source = [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, 1.0 + 1.1 / 256.0, f32::NAN, f32::MAX];
        let mut operands = [Buffer::f32(&source), Buffer::bf16(&[0.0; 6])];
        run(&Kernel::Cast, 1, &mut operands).expect("fits");
        let got = operands[1].floats();
        assert_eq!(got[..4], [1.0, 1.0, 1.0 + 4.0 / 256.0, 1.0 + 2.0 / 256.0]);
        assert!(got[4].is_nan());
        assert_eq!(got[5], f32::INFINITY);
        let mut back = [operands[1].clone(), Buffer::f32(&[0.0; 6])];
        run(&Kernel::Cast, 1, &mut back).expect("fits");
        assert_eq!(back[1].floats()[..4], got[..4]);
    }

    #[test]
    fn add_scaled_rounds_the_product_before_it_adds() {
        // 3 · (1 + 2^-23) rounds; with a fused multiply-add the sum would differ.
        let (scale, x, y) = (3.0f32, 1.0 + f32::EPSILON, -3.0f32);
        let mut operands = [Buffer::f32(&[x]), Buffer::f32(&[y])];
        run(&Kernel::AddScaled { scale }, 1, &mut operands).expect("fits");
        let product = scale * x;
        assert_eq!(operands[1].floats(), [y + product]);
        assert_ne!(y + product, scale.mul_add(x, y), "the case tells the two apart");
    }

    #[test]
    fn parts_are_summed_in_fp32_in_order_from_the_first() {
        // bf16 adds from part 0 would stay at 256; and 1 + (-1e8 + 1e8) is not (1 - 1e8) + 1e8.
        let mut trap = [Buffer::bf16(&[256.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), Buffer::f32(&[0.0])];
        run(&Kernel::SumParts { parts: 8 }, 1, &mut trap).expect("fits");
        assert_eq!(trap[1].floats(), [263.0]);
        let mut order = [Buffer::f32(&[1.0, -0.0, -1e8, -0.0, 1e8, -0.0]), Buffer::f32(&[9.0, 9.0])];
        run(&Kernel::SumParts { parts: 3 }, 1, &mut order).expect("fits");
        assert_eq!(order[1].floats().iter().map(|x| x.to_bits()).collect::<Vec<_>>(), [0, 1 << 31]);
    }

    #[test]
    fn fills_every_dtype() {
        let mut operands = [Buffer::U32(vec![9; 3])];
        run(&Kernel::Fill { value: 7.0 }, 0, &mut operands).expect("fits");
        assert_eq!(operands[0], Buffer::U32(vec![7; 3]));
        let mut operands = [Buffer::bf16(&[0.0; 3])];
        run(&Kernel::Fill { value: -2.0 }, 0, &mut operands).expect("fits");
        assert_eq!(operands[0].floats(), [-2.0; 3]);
    }
}
