//! Random programs: eager work is the model, and every way of replaying must give its bits.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use sessile_hal::Collective;
use sessile_host::{Mode, Order};
use sessile_plan::{DType, Fence, PlanOptions, StepCut, Strategy as Layout};
use sessile_runtime::check::check;

use crate::support::job_log;
use crate::support::program::{ACCUMULATOR, GROUPS, Grad, Module, Program, Release, Run, try_run};

#[derive(Clone, Debug)]
struct Case {
    program: Program,
    options: PlanOptions,
    steps: Vec<Vec<usize>>,
    seed: u64,
}

const ACCUMULATORS: usize = 3;

fn grad() -> impl Strategy<Value = Grad> {
    let kind = prop_oneof![
        4 => Just(Collective::ReduceScatter),
        1 => Just(Collective::AllReduce),
        1 => Just(Collective::AllToAll),
        1 => Just(Collective::AllGather),
    ];
    let release =
        prop_oneof![4 => Just(Release::Side), 2 => Just(Release::Compute), 1 => Just(Release::Never)];
    let dtype = prop_oneof![Just(DType::F32), Just(DType::Bf16)];
    let sizes = prop_oneof![Just(8_u64), Just(40), Just(64), 1..=ACCUMULATOR / 4];
    (dtype, sizes, kind, 0..GROUPS.len(), any::<bool>(), 0..2_usize, 0..ACCUMULATORS, release).prop_map(
        |(dtype, elements, kind, group, symmetric, side, accumulator, release)| Grad {
            dtype,
            elements,
            kind,
            group,
            symmetric,
            side,
            accumulator,
            release,
            spin: 0,
        },
    )
}

fn module() -> impl Strategy<Value = Module> {
    (vec(grad(), 0..4), prop::bool::weighted(0.3), prop::bool::weighted(0.8))
        .prop_map(|(grads, carries, completes)| Module { grads, carries, completes })
}

/// Modules, and the launches of one step: chains of modules that hand on buffers, each at least once.
fn program() -> impl Strategy<Value = Program> {
    (1..=4_u32, vec(module(), 1..6), vec(any::<prop::sample::Index>(), 0..3), any::<u64>()).prop_map(
        |(ranks, mut modules, again, shuffle)| {
            if let Some(last) = modules.last_mut() {
                last.carries = false;
            }
            let mut chains: Vec<Vec<usize>> = Vec::new();
            for at in 0..modules.len() {
                match chains.last_mut() {
                    Some(chain) if at > 0 && modules[at - 1].carries => chain.push(at),
                    _ => chains.push(vec![at]),
                }
            }
            let more: Vec<_> = again.iter().map(|index| index.get(&chains).clone()).collect();
            chains.extend(more);
            fastrand::Rng::with_seed(shuffle).shuffle(&mut chains);
            let launches = chains.into_iter().flatten().collect();
            Program { ranks, modules, launches, accumulators: ACCUMULATORS }
        },
    )
}

fn options() -> impl Strategy<Value = PlanOptions> {
    // A ring of three never fails: no module has more than three inputs.
    let layout = prop_oneof![
        4 => Just(Layout::Sessile),
        1 => (1..=3_u32).prop_map(Layout::Generations),
        1 => Just(Layout::Ring(3)),
        1 => Just(Layout::PerRequest),
    ];
    (layout, 1..=3_u32, any::<bool>()).prop_map(|(strategy, depth, wrap)| PlanOptions {
        strategy,
        depth,
        step_cut: if wrap { StepCut::Wrap } else { StepCut::Barrier },
        ..PlanOptions::default()
    })
}

fn case() -> impl Strategy<Value = Case> {
    let deviations = vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), 0..3_u8), 0..3);
    (program(), options(), deviations, any::<u64>()).prop_map(|(program, options, deviations, seed)| {
        let mut steps = vec![program.launches.clone(); 3];
        for (step, at, what) in deviations {
            let step = step.index(steps.len());
            let at = at.index(steps[step].len().max(1));
            match (what, steps[step].len()) {
                (_, 0) => {}
                (0, _) => drop(steps[step].remove(at)),
                (1, _) => {
                    let again = steps[step][at];
                    steps[step].insert(at, again);
                }
                (_, _) => steps[step].truncate(at),
            }
        }
        Case { program, options, steps, seed }
    })
}

fn holds(case: &Case) -> Result<(), TestCaseError> {
    let fail = |text: String| TestCaseError::fail(text);
    let Case { program, options, steps, seed } = case;
    let right = try_run(program, Mode::Threads { workers: 2 }, &Run::Eager, steps).map_err(fail)?;
    let report = check(&job_log(right.iter().map(|rank| rank.log.clone()).collect()));
    prop_assert!(report.is_clean(), "eager: {report}");
    let how = Run::Replayed(options.clone(), vec![]);
    for mode in [
        Mode::Threads { workers: 2 },
        Mode::Scheduled { seed: *seed, order: Order::Random },
        Mode::Scheduled { seed: *seed, order: Order::WritersEarly },
        Mode::Scheduled { seed: *seed, order: Order::ReadersEarly },
    ] {
        let ended = try_run(program, mode, &how, steps).map_err(|text| fail(format!("{mode:?}: {text}")))?;
        for (rank, right) in ended.iter().zip(&right) {
            prop_assert_eq!(&rank.bits, &right.bits, "{:?}, rank {}", mode, rank.log.rank);
            prop_assert_eq!(&rank.plan, &ended[0].plan);
        }
        let report = check(&job_log(ended.into_iter().map(|rank| rank.log).collect()));
        prop_assert!(report.is_clean(), "{mode:?}: {report}");
    }
    Ok(())
}

/// Every fence that guards bytes is missed by the checker, and by the numbers of one of the adversaries.
///
/// Fences that only keep additions in order are not asked for: they wait before the reduce-scatter, a little earlier
/// than the addition needs, so one of them may stand behind another; and two sums may round to the same few bits.
/// Buffers are given back right behind their last reader, since a later release is a wish, not a need.
fn needs_its_fences(case: &Case) -> Result<(), TestCaseError> {
    let fail = |text: String| TestCaseError::fail(text);
    let Case { mut program, options, seed, .. } = case.clone();
    for grad in program.modules.iter_mut().flat_map(|module| &mut module.grads) {
        grad.release = Release::Side;
    }
    // As sealed: a deviation joins everything, and no fence has anything left to do.
    let steps = vec![program.launches.clone(); 3];
    let right = try_run(&program, Mode::Threads { workers: 2 }, &Run::Eager, &steps).map_err(fail)?;
    let whole = Run::Replayed(options.clone(), vec![]);
    let plan =
        try_run(&program, Mode::Threads { workers: 2 }, &whole, &steps).map_err(fail)?.swap_remove(0).plan;
    let plan = plan.expect("sealed");
    let guards_bytes = |fence: &&Fence| match (plan.view(fence.release), plan.view(fence.acquire)) {
        (Some(x), Some(y)) => {
            x.arena == y.arena && x.offset < y.offset + y.bytes && y.offset < x.offset + x.bytes
        }
        _ => false,
    };
    for &fence in plan.fences.iter().filter(guards_bytes).take(4) {
        let how = Run::Replayed(options.clone(), vec![fence]);
        let mut wrong = false;
        for order in [Order::WritersEarly, Order::ReadersEarly] {
            let ended = try_run(&program, Mode::Scheduled { seed, order }, &how, &steps).map_err(fail)?;
            wrong |= ended.iter().zip(&right).any(|(rank, right)| rank.bits != right.bits);
            let report = check(&job_log(ended.into_iter().map(|rank| rank.log).collect()));
            let races =
                report.violations.iter().filter(|violation| violation.reason.range().is_some()).count();
            prop_assert!(races > 0, "{fence:?} is missed by nobody under {order:?}: {report}");
        }
        prop_assert!(wrong, "without {fence:?} of {:?} no adversary finds a wrong number", plan.fences);
    }
    Ok(())
}

fn search(seed: u64, cases: u32, property: impl Fn(&Case) -> Result<(), TestCaseError>) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases, max_shrink_iters: 400, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    if let Err(error) = runner.run(&case(), |case| property(&case)) {
        panic!("seed {seed}: {error}");
    }
}

/// How many more cases than in CI.
fn factor() -> u32 {
    if std::env::var_os("SESSILE_FULL").is_some() { 8 } else { 1 }
}

#[test]
fn random_programs_replay_to_the_eager_bits_in_every_order_from_fixed_seeds() {
    search(1, 150 * factor(), holds);
}

#[test]
fn random_programs_replay_to_the_eager_bits_in_every_order_from_a_fresh_seed() {
    search(fastrand::u64(..), 60 * factor(), holds);
}

#[test]
fn random_plans_hold_no_fence_of_bytes_that_could_be_left_out() {
    search(2, 120 * factor(), needs_its_fences);
}
