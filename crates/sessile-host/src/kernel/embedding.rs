//! Embedding.

use half::bf16;

use super::{Args, Fault, FloatsMut, length, narrow};

fn row(id: u32, vocab: u64) -> Result<usize, Fault> {
    if u64::from(id) < vocab { Ok(id as usize) } else { Err(format!("ids below {vocab}, not {id}")) }
}

pub(super) fn forward(mut args: Args<'_>, hidden: u64, vocab: u64) -> Result<(), Fault> {
    let (ids, table) = (args.read::<u32>()?, args.read::<bf16>()?);
    let (out, hidden) = (args.write::<f32>()?, length(hidden)?);
    for (at, &id) in ids.iter().enumerate() {
        let from = row(id, vocab)? * hidden;
        for (out, x) in out[at * hidden..(at + 1) * hidden].iter_mut().zip(&table[from..from + hidden]) {
            *out = x.to_f32();
        }
    }
    Ok(())
}

pub(super) fn backward(mut args: Args<'_>, hidden: u64, vocab: u64) -> Result<(), Fault> {
    let (ids, dx) = (args.read::<u32>()?, args.read::<f32>()?);
    let dtable = args.write_floats()?;
    let hidden = length(hidden)?;
    let sum = |table: &mut [f32]| -> Result<(), Fault> {
        table.fill(0.0);
        for (at, &id) in ids.iter().enumerate() {
            let to = row(id, vocab)? * hidden;
            for (sum, dx) in table[to..to + hidden].iter_mut().zip(&dx[at * hidden..(at + 1) * hidden]) {
                *sum += dx;
            }
        }
        Ok(())
    };
    match dtable {
        FloatsMut::F32(table) => sum(table),
        FloatsMut::Bf16(table) => {
            let mut wide = vec![0.0; table.len()];
            sum(&mut wide)?;
            narrow(table, &wide);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use sessile_hal::Kernel;

    use super::super::testing::{Buffer, run};

    #[test]
    fn looks_rows_up_and_sums_them_back() {
        let (tokens, hidden, vocab) = (3, 2, 4);
        let ids = Buffer::U32(vec![3, 1, 3]);
        let table = Buffer::bf16(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        let mut operands = [ids.clone(), table, Buffer::f32(&[0.0; 6])];
        run(&Kernel::EmbeddingForward { tokens, hidden, vocab }, 2, &mut operands).expect("fits");
        assert_eq!(operands[2].floats(), [6.0, 7.0, 2.0, 3.0, 6.0, 7.0]);
        for dtable in [Buffer::f32(&[9.0; 8]), Buffer::bf16(&[9.0; 8])] {
            let mut operands = [ids.clone(), Buffer::f32(&[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), dtable];
            run(&Kernel::EmbeddingBackward { tokens, hidden, vocab }, 2, &mut operands).expect("fits");
            assert_eq!(operands[2].floats(), [0.0, 0.0, 4.0, 8.0, 0.0, 0.0, 17.0, 34.0]);
        }
    }

    #[test]
    fn wild_ids_are_errors() {
        let mut operands = [Buffer::U32(vec![u32::MAX]), Buffer::bf16(&[0.0; 4]), Buffer::f32(&[0.0; 2])];
        assert!(run(&Kernel::EmbeddingForward { tokens: 1, hidden: 2, vocab: 2 }, 2, &mut operands).is_err());
    }
}
