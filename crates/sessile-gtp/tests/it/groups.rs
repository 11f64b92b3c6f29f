//! Groups of several sizes, names and places; experts that travel as one batch.

use sessile_gtp::{ChainKind, Gtp, ReduceScatter, WeightSpec};
use sessile_hal::{Comm, Device as _, DeviceError, Kernel, Op};
use sessile_host::{World, WorldOptions};
use sessile_plan::{DType, Role, Strategy};
use sessile_runtime::{
    HasRuntime, Runtime, RuntimeError,
    log::{LogLevel, Recorded},
};

use crate::support::{Case, Outcome, Values, both, eager, modes};

/// Different on every rank.
const VALUES: Values = |rank, number, element| {
    let mut rng = fastrand::Rng::with_seed((rank * 1_000_003 + element) as u64 + u64::from(number) * 77);
    rng.f32() - 0.5
};

#[test]
fn a_batch_of_experts_is_reduced_as_each_alone() {
    for kind in ReduceScatter::ALL {
        let case = Case { experts: Some(3), microbatches: vec![1, 1], ..Case::new(4, kind) };
        let (batch, planned) = both(&case, VALUES);
        let shard = 4 * 16 * 3;
        for expert in 0..3usize {
            let values: Values = match expert {
                0 => VALUES,
                1 => |rank, number, element| VALUES(rank, number, element + 60),
                _ => |rank, number, element| VALUES(rank, number, element + 120),
            };
            let alone = eager(&Case::new(4, kind), values);
            assert_eq!(batch.steps[1][expert * shard..][..shard], alone.steps[0], "{kind}, expert {expert}");
        }
        // One collective for all, and requests that know their expert.
        let collectives = planned.trace.runners[0]
            .points
            .iter()
            .filter(|point| matches!(point.kind, sessile_plan::PointKind::Collective(_)));
        assert_eq!(collectives.count(), 1, "{kind}");
        let inputs = planned.trace.requests().filter(|(_, q)| q.spec.role == Role::WgradInput);
        assert_eq!(inputs.map(|(_, q)| q.spec.expert).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
    }
}

#[test]
fn place_name_schedule_strategy_and_depth_never_change_a_bit() {
    for kind in ReduceScatter::ALL {
        let base = Case { uses: 2, microbatches: vec![2, 2], ..Case::new(4, kind) };
        let (want, _) = both(&base, VALUES);
        let mut others = vec![
            Case { ranks: vec![2, 0, 3, 1], ..base.clone() },
            Case { ranks: vec![3, 2, 1, 0], ..base.clone() },
            Case { group: "another name", ..base.clone() },
        ];
        let strategies =
            [Strategy::Generations(1), Strategy::Generations(2), Strategy::Ring(2), Strategy::PerRequest];
        others.extend(strategies.map(|strategy| Case { strategy, ..base.clone() }));
        others.extend([1, 3].map(|depth| Case { depth, ..base.clone() }));
        others.extend(modes().map(|mode| Case { mode, ..base.clone() }));
        for case in others {
            assert_eq!(both(&case, VALUES).0, want, "{case:?}");
        }
    }
}

/// Ones, reduced over a dense group and over an expert group of another size: their means.
fn two_groups(dense: u32, expert: u32, kinds: [ReduceScatter; 2]) -> Vec<[f32; 2]> {
    let world = World::new(WorldOptions::threads(8, 8));
    let results = world.run(|device| -> Outcome<_> {
        let device = Recorded::new(device, LogLevel::Off);
        let rank = device.rank();
        let all: Vec<u32> = (0..8).collect();
        let world = device.communicator("world", &all)?;
        let mut gtp = Gtp::new(Runtime::new(device.clone(), world)?);
        let mut weights = Vec::new();
        for (name, size, kind) in [("dense", dense, kinds[0]), ("expert", expert, kinds[1])] {
            let layout = sessile_gtp::RankLayout::new(8, size).expect("divides");
            let comm =
                device.communicator(&format!("{name}.{}", layout.group_of(rank)), &layout.group(rank))?;
            let group = gtp.add_group(name, comm, kind)?;
            weights.push(gtp.add_weight(&WeightSpec {
                name,
                rows: 128,
                cols: 2,
                group,
                chain: ChainKind::Eager,
                wgrad_dtype: DType::Bf16,
                experts: (name == "expert").then_some(2),
                uses: 1,
                repeat: sessile_gtp::Repeat::Drain,
            })?);
        }
        gtp.begin_step()?;
        for &weight in &weights {
            gtp.reduce(weight, |runtime, dw| {
                let compute = runtime.compute().clone();
                for dw in dw {
                    let op = Op::new(Kernel::Fill { value: 1.0 }, "ones", vec![dw.clone()])?;
                    runtime.enqueue(&compute, op)?;
                }
                Ok(())
            })?;
        }
        gtp.finish_backward()?;
        let main = gtp.runtime_ref().main().clone();
        let mean = |at: usize| -> Outcome<f32> {
            let grad = &gtp.weight(weights[at]).parts.last().expect("a part").main_grad;
            let bytes = device.read(&main, grad)?;
            let all: Vec<f32> =
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            assert!(all.iter().all(|x| *x == all[0]));
            Ok(all[0])
        };
        Ok([mean(0)?, mean(1)?])
    });
    results.into_iter().map(|result| result.expect("every rank ends well")).collect()
}

#[test]
fn each_group_has_its_own_scale() {
    let ring = ReduceScatter::Ring;
    for expert in [1, 2, 4] {
        for kinds in [[ring, ring], [ReduceScatter::OneShot, ReduceScatter::Fp32A2a]] {
            for means in two_groups(4, expert, kinds) {
                assert_eq!(means, [1.0, 1.0], "groups of 4 and {expert}, {kinds:?}");
            }
        }
    }
}

#[test]
fn communicators_of_equal_ranks_are_two_domains() {
    let world = World::new(WorldOptions::threads(2, 4));
    let results = world.run(|device| -> Outcome<_> {
        let world = device.communicator("world", &[0, 1])?;
        let mut gtp = Gtp::new(Runtime::new(device.clone(), world)?);
        let mut weights = Vec::new();
        for name in ["dense", "expert"] {
            let comm = device.communicator(name, &[0, 1])?;
            assert_eq!(comm.ranks(), [0, 1]);
            let group = gtp.add_group(name, comm, ReduceScatter::OneShot)?;
            weights.push(gtp.add_weight(&WeightSpec {
                name,
                rows: 32,
                cols: 1,
                group,
                chain: ChainKind::Graphed,
                wgrad_dtype: DType::Bf16,
                experts: None,
                uses: 1,
                repeat: sessile_gtp::Repeat::Drain,
            })?);
        }
        let mut input = None;
        Gtp::discover(&mut gtp, "b", |gtp| {
            for &weight in &weights {
                gtp.reduce(weight, |runtime, dw| {
                    let compute = runtime.compute().clone();
                    input = Some(dw[0].clone());
                    let op = Op::new(Kernel::Fill { value: 1.0 }, "ones", vec![dw[0].clone()])?;
                    runtime.enqueue(&compute, op)?;
                    Ok(())
                })?;
            }
            Ok::<_, RuntimeError>(())
        })?;
        gtp.runtime().seal("two", &sessile_plan::PlanOptions::default())?;
        let domains: Vec<_> =
            gtp.runtime_ref().plan().expect("sealed").arenas.iter().map(|a| a.domain.to_string()).collect();
        // A buffer of the one group in a collective of the other.
        let grad = gtp.weight(weights[0]).main_grads().next().expect("a part").clone();
        let input = input.expect("reduced");
        let main = gtp.runtime_ref().main().clone();
        let foreign = gtp.runtime().collective(
            &main,
            "dense",
            sessile_hal::Collective::ReduceScatterAccumulate { scale: 1.0 },
            &input,
            &grad,
        );
        Ok((domains, foreign.err()))
    });
    for result in results {
        let (domains, foreign) = result.expect("every rank ends well");
        assert_eq!(domains, ["symmetric(dense)", "symmetric(expert)"]);
        assert!(
            matches!(foreign, Some(RuntimeError::Device(DeviceError::WrongDomain { .. }))),
            "{foreign:?}"
        );
    }
}
