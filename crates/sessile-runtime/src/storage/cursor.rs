//! Where replay stands in the sealed order: which of the alternative steps, and which launch of it comes next.

/// The launch that is expected next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The alternative under way, or of the last step if `launch` is 0.
    step: usize,
    /// Place in it.
    launch: usize,
}

/// Where a launch has its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Whether the fences of the plan order it.
    pub in_order: bool,
    /// Whether it begins a step.
    pub begins: bool,
    /// Where the order stands after it.
    pub after: Cursor,
}

impl Cursor {
    /// Finds the place of a launch of `runner`. `wraps`: the step cut is no barrier, so that only a step of the same
    /// alternative may follow without a join.
    pub fn place(self, steps: &[Vec<u32>], wraps: bool, runner: u32) -> Place {
        let starts = self.launch == 0;
        let is_next = |step: usize, launch: usize| steps[step].get(launch) == Some(&runner);
        if is_next(self.step, self.launch) {
            return Place::of(steps, self.step, self.launch, true);
        }
        // Another alternative, which so far is the same: its graphs hold the same fences.
        let done = &steps[self.step][..self.launch];
        let other =
            (0..steps.len()).find(|&step| is_next(step, self.launch) && steps[step].starts_with(done));
        if let Some(step) = other {
            return Place::of(steps, step, self.launch, !(starts && wraps));
        }
        // Out of order: the runner's next place in this alternative, else its first one anywhere.
        let here = steps[self.step].len();
        let later = (0..here).map(|ahead| (self.launch + ahead) % here).find(|&at| is_next(self.step, at));
        let anywhere = || {
            (0..steps.len()).find_map(|step| Some((step, steps[step].iter().position(|&at| at == runner)?)))
        };
        match later.map(|at| (self.step, at)).or_else(anywhere) {
            Some((step, at)) => Place::of(steps, step, at, false),
            None => Place { in_order: false, begins: false, after: self },
        }
    }
}

impl Place {
    fn of(steps: &[Vec<u32>], step: usize, launch: usize, in_order: bool) -> Place {
        let next = (launch + 1) % steps[step].len();
        Place { in_order, begins: launch == 0, after: Cursor { step, launch: next } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(steps: &[Vec<u32>], wraps: bool, launches: &[u32]) -> Vec<(bool, bool)> {
        let mut cursor = Cursor::default();
        launches
            .iter()
            .map(|&runner| {
                let place = cursor.place(steps, wraps, runner);
                cursor = place.after;
                (place.in_order, place.begins)
            })
            .collect()
    }

    const OK: (bool, bool) = (true, false);
    const BEGINS: (bool, bool) = (true, true);

    #[test]
    fn alternatives_may_follow_each_other_in_any_order_behind_a_barrier() {
        let steps = [vec![0, 1], vec![2, 3, 2]];
        let launches = [0, 1, 2, 3, 2, 2, 3, 2, 0, 1, 0, 1];
        let order = walk(&steps, false, &launches);
        assert_eq!(order, [BEGINS, OK, BEGINS, OK, OK, BEGINS, OK, OK, BEGINS, OK, BEGINS, OK]);
        // Without a barrier another alternative is a deviation.
        let order = walk(&steps, true, &[0, 1, 0, 1, 2, 3, 2]);
        assert_eq!(order, [BEGINS, OK, BEGINS, OK, (false, true), OK, OK]);
    }

    #[test]
    fn alternatives_that_begin_alike_are_told_apart_where_they_part() {
        let steps = [vec![0, 1, 2], vec![0, 1, 3]];
        assert_eq!(walk(&steps, false, &[0, 1, 3, 0, 1, 2]), [BEGINS, OK, OK, BEGINS, OK, OK]);
    }

    #[test]
    fn a_switch_in_the_middle_is_a_deviation_and_the_order_goes_on_from_there() {
        let steps = [vec![0, 1], vec![2, 3]];
        assert_eq!(walk(&steps, false, &[0, 3, 2, 3]), [BEGINS, (false, false), BEGINS, OK]);
    }

    #[test]
    fn a_repeated_or_skipped_runner_is_a_deviation() {
        let steps = [vec![0, 1, 2]];
        assert_eq!(walk(&steps, false, &[0, 0, 1]), [BEGINS, (false, true), OK]);
        assert_eq!(walk(&steps, false, &[0, 2, 0]), [BEGINS, (false, false), BEGINS]);
    }
}
