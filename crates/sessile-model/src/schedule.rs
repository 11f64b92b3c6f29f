//! Order of micro-batches in a step.

/// Forward or backward of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Forward(u32),
    Backward(u32),
}

/// 1F1B: fill up to `in_flight` forwards, then alternate, then drain.
///
/// ```text
///  3 micro-batches, 2 in flight:  F0 F1 B0 F2 B1 B2
/// ```
pub(crate) fn one_f_one_b(microbatches: u32, in_flight: u32) -> Vec<Turn> {
    let warm_up = in_flight.min(microbatches);
    let mut turns: Vec<Turn> = (0..warm_up).map(Turn::Forward).collect();
    for backward in 0..microbatches {
        turns.push(Turn::Backward(backward));
        if backward + warm_up < microbatches {
            turns.push(Turn::Forward(backward + warm_up));
        }
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::{Turn::*, *};

    #[test]
    fn two_in_flight_alternate_after_two_forwards() {
        assert_eq!(
            one_f_one_b(3, 2),
            [Forward(0), Forward(1), Backward(0), Forward(2), Backward(1), Backward(2)]
        );
        assert_eq!(one_f_one_b(2, 1), [Forward(0), Backward(0), Forward(1), Backward(1)]);
    }

    #[test]
    fn never_more_than_the_limit_is_in_flight() {
        for microbatches in 1..8 {
            for limit in 1..=microbatches {
                let mut live = 0;
                for turn in one_f_one_b(microbatches, limit) {
                    live += if matches!(turn, Forward(_)) { 1 } else { -1 };
                    assert!((0..=i64::from(limit)).contains(&live));
                }
                assert_eq!(live, 0);
            }
        }
    }
}
