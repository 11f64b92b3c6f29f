//! The stack that is measured is right in every variant, also where fences stand at the borders of graphs.

use sessile_host::{World, WorldOptions};
use sessile_model::{
    RankLayout, ReduceScatter,
    bench::{Comms, StackConfig, Variant, bench_stack},
};
use sessile_plan::DType;
use sessile_runtime::{
    RuntimeError,
    check::check,
    log::{Log, LogLevel, Recorded},
};

#[test]
fn every_variant_of_the_stack_gives_the_same_bits_and_nothing_races() {
    let config =
        StackConfig { layers: 5, hidden: 24, tokens: 8, wgrad_dtype: DType::Bf16, steps: 3, rounds: 1 };
    for kind in ReduceScatter::ALL {
        let world = World::new(WorldOptions::threads(4, 4));
        let results = world.run(|device| {
            let device = Recorded::new(device, LogLevel::On);
            let layouts = [4, 2].map(|size| RankLayout::new(4, size).expect("divides"));
            let comms = Comms::make(&device, &layouts)?;
            let mut timings = Vec::new();
            // One by one, as the log of a program has one plan at a time.
            for variant in Variant::ALL {
                timings.extend(bench_stack(&device, &comms, &config, kind, &[variant], &|_| {})?);
            }
            drop(comms);
            Ok::<_, RuntimeError>((device.take_log(), timings))
        });
        let (logs, timings): (Vec<_>, Vec<_>) =
            results.into_iter().map(|result| result.expect("runs")).unzip();
        for of_rank in &timings {
            let with =
                |variant: Variant| of_rank.iter().find(|timing| timing.variant == variant).expect("ran");
            let eager = &with(Variant::Eager).digest;
            assert!(!eager.is_empty());
            for variant in [Variant::Serial, Variant::Depth1, Variant::Depth2, Variant::Depth2Borders] {
                assert_eq!(&with(variant).digest, eager, "{kind} {}", variant.name());
            }
            assert_eq!(with(Variant::Depth1).fences, 0);
            for variant in [Variant::Compute, Variant::NoReduce, Variant::Reduce] {
                assert_eq!(with(variant).digest, "", "{kind} {}", variant.name());
            }
        }
        let report = check(&Log::from_ranks(logs));
        assert!(report.operations > 0);
        assert!(report.violations.is_empty(), "{kind}: {:?}", report.violations.first());
    }
}

/// As they are timed: all at once, a round of each in turn.
#[test]
fn variants_that_take_turns_give_the_bits_of_each_alone() {
    let config =
        StackConfig { layers: 5, hidden: 24, tokens: 8, wgrad_dtype: DType::Bf16, steps: 2, rounds: 2 };
    let digests = |together: bool| {
        let world = World::new(WorldOptions::threads(2, 2));
        let results = world.run(|device| {
            let comms = Comms::make(&device, &[RankLayout::new(2, 2).expect("divides")])?;
            let kind = ReduceScatter::OneShot;
            let bench = |variants: &[Variant]| bench_stack(&device, &comms, &config, kind, variants, &|_| {});
            let timings = if together {
                bench(&Variant::ALL)?
            } else {
                Variant::ALL.iter().map(|variant| bench(&[*variant])).collect::<Result<Vec<_>, _>>()?.concat()
            };
            Ok::<_, RuntimeError>(timings.into_iter().map(|timing| timing.digest).collect::<Vec<_>>())
        });
        results.into_iter().map(|result| result.expect("runs")).collect::<Vec<_>>()
    };
    let alone = digests(false);
    assert!(alone[0].iter().filter(|digest| !digest.is_empty()).count() == 5, "{alone:?}");
    assert_eq!(digests(true), alone);
}
