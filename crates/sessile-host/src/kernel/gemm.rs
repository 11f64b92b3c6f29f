//! Matrix products: the library `gemm`, on one thread.

use sessile_hal::{Beta, Gemm, Transpose};

use super::{Args, Fault, Floats, FloatsMut, length, narrow, widen};

/// A matrix as the library sees it: elements and the distances between rows and columns.
pub(super) struct Matrix<'a> {
    data: &'a [f32],
    row_stride: isize,
    col_stride: isize,
}

impl<'a> Matrix<'a> {
    /// `rows` by `cols`, stored row-major, or as its transpose.
    pub(super) fn new(
        data: &'a [f32],
        rows: usize,
        cols: usize,
        transpose: Transpose,
    ) -> Result<Self, Fault> {
        if rows.checked_mul(cols) != Some(data.len()) {
            return Err(format!("{rows} by {cols} elements, not {}", data.len()));
        }
        let (row_stride, col_stride) = match transpose {
            Transpose::No => (cols as isize, 1),
            Transpose::Yes => (1, rows as isize),
        };
        Ok(Matrix { data, row_stride, col_stride })
    }
}

pub(super) fn gemm(mut args: Args<'_>, shape: Gemm) -> Result<(), Fault> {
    let (a, b) = (args.read_floats()?, args.read_floats()?);
    let c = args.write_floats()?;
    let (a_wide, b_wide);
    let a = match a {
        Floats::F32(a) => a,
        Floats::Bf16(a) => {
            a_wide = widen(a);
            &a_wide
        }
    };
    let b = match b {
        Floats::F32(b) => b,
        Floats::Bf16(b) => {
            b_wide = widen(b);
            &b_wide
        }
    };
    let (m, n, k) = (length(shape.m)?, length(shape.n)?, length(shape.k)?);
    let (a, b) = (Matrix::new(a, m, k, shape.a)?, Matrix::new(b, k, n, shape.b)?);
    let accumulate = shape.beta == Beta::Accumulate;
    match c {
        FloatsMut::F32(c) => multiply(c, &a, &b, (m, n, k), accumulate),
        FloatsMut::Bf16(c) => {
            let mut wide = if accumulate { widen(c) } else { vec![0.0; c.len()] };
            multiply(&mut wide, &a, &b, (m, n, k), accumulate)?;
            narrow(c, &wide);
            Ok(())
        }
    }
}

/// `c = a · b`, or `c += a · b`; c is row-major.
pub(super) fn multiply(
    c: &mut [f32],
    a: &Matrix<'_>,
    b: &Matrix<'_>,
    (m, n, k): (usize, usize, usize),
    accumulate: bool,
) -> Result<(), Fault> {
    if m.checked_mul(n) != Some(c.len()) {
        return Err(format!("{m} by {n} elements, not {}", c.len()));
    }
    if c.is_empty() {
        return Ok(());
    }
    // SAFETY: `gemm::gemm` reads and writes, through the pointers and strides, the m·n elements of c, the m·k of a
    // and the k·n of b, and nothing else.
    // - c is row-major (row stride n, column stride 1) and has m·n elements (checked above); we hold it `&mut`, so
    //   it overlaps neither a nor b.
    // - a and b were made by `Matrix::new`, which checked that they have m·k and k·n elements (the callers pass
    //   the same extents) and set the strides of one of the two dense layouts: the largest index is the product
    //   minus one.
    // - all elements of all three are initialized `f32`s, so reading c (when accumulating) is sound too.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            n as isize,
            accumulate,
            a.data.as_ptr(),
            a.col_stride,
            a.row_stride,
            b.data.as_ptr(),
            b.col_stride,
            b.row_stride,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use sessile_hal::Kernel;

    use super::super::testing::{Buffer, random, run};
    use super::*;

    const BOTH: [Transpose; 2] = [Transpose::No, Transpose::Yes];

    /// The definition, in f64.
    fn oracle(shape: Gemm, a: &[f32], b: &[f32], c: &[f32]) -> Vec<f64> {
        let (m, n, k) = (shape.m as usize, shape.n as usize, shape.k as usize);
        let at = |t: Transpose, data: &[f32], row: usize, col: usize, rows: usize, cols: usize| {
            f64::from(if t == Transpose::No { data[row * cols + col] } else { data[col * rows + row] })
        };
        let mut out = Vec::new();
        for row in 0..m {
            for col in 0..n {
                let old = if shape.beta == Beta::Accumulate { f64::from(c[row * n + col]) } else { 0.0 };
                let sum: f64 =
                    (0..k).map(|i| at(shape.a, a, row, i, m, k) * at(shape.b, b, i, col, k, n)).sum();
                out.push(old + sum);
            }
        }
        out
    }

    fn integers(seed: u64, n: usize) -> Vec<f32> {
        random(seed, n).into_iter().map(|x| (x * 4.0).round()).collect()
    }

    #[test]
    fn small_integers_come_out_exactly() {
        for (m, n, k) in [(1, 1, 1), (1, 5, 7), (5, 1, 7), (7, 5, 1), (3, 4, 0), (17, 33, 65), (64, 48, 32)] {
            for (a, b) in BOTH.into_iter().flat_map(|a| BOTH.map(|b| (a, b))) {
                for beta in [Beta::Overwrite, Beta::Accumulate] {
                    let shape = Gemm { m, n, k, a, b, beta };
                    let av = integers(1, (m * k) as usize);
                    let bv = integers(2, (k * n) as usize);
                    // What is overwritten must not matter, not even NaN.
                    let old = if beta == Beta::Accumulate { 3.0 } else { f32::NAN };
                    let c = vec![old; (m * n) as usize];
                    let want = oracle(shape, &av, &bv, &c);
                    for narrow_c in [false, true] {
                        let c = if narrow_c { Buffer::bf16(&c) } else { Buffer::f32(&c) };
                        let mut operands = [Buffer::bf16(&av), Buffer::bf16(&bv), c];
                        run(&Kernel::Gemm(shape), 2, &mut operands).expect("fits");
                        let got = operands[2].floats();
                        for (got, want) in got.iter().zip(&want) {
                            let want = if narrow_c { half::bf16::from_f64(*want).to_f64() } else { *want };
                            assert_eq!(f64::from(*got), want, "{shape:?}, bf16 c: {narrow_c}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn equal_inputs_give_equal_bits_at_every_address() {
        for (m, n, k) in [(64, 64, 64), (33, 17, 129), (1, 100, 50), (100, 1, 50), (8, 200, 300)] {
            for (ta, tb) in BOTH.into_iter().flat_map(|a| BOTH.map(|b| (a, b))) {
                let (av, bv) = (random(3, m * k), random(4, k * n));
                let mut first: Option<Vec<u32>> = None;
                for (oa, ob, oc) in [(0, 0, 0), (1, 0, 0), (0, 3, 0), (0, 0, 1), (5, 2, 7), (16, 8, 4)] {
                    // Shifted copies inside larger buffers.
                    let shift = |data: &[f32], by: usize| [vec![f32::NAN; by], data.to_vec()].concat();
                    let (a, b) = (shift(&av, oa), shift(&bv, ob));
                    let mut c = vec![f32::NAN; oc + m * n];
                    let a = Matrix::new(&a[oa..], m, k, ta).expect("fits");
                    let b = Matrix::new(&b[ob..], k, n, tb).expect("fits");
                    multiply(&mut c[oc..], &a, &b, (m, n, k), false).expect("fits");
                    let bits: Vec<u32> = c[oc..].iter().map(|x| x.to_bits()).collect();
                    assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{m} {n} {k} {ta:?} {tb:?}");
                }
            }
        }
    }

    #[test]
    fn wrong_sizes_are_errors() {
        let data = [0.0; 6];
        assert!(Matrix::new(&data, 2, 2, Transpose::No).is_err());
        assert!(Matrix::new(&data, usize::MAX, 2, Transpose::No).is_err());
    }
}
