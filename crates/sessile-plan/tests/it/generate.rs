//! Random valid traces: a small program for each runner, interpreted so that every point is legal.

use proptest::{collection::vec, prelude::*};
use sessile_plan::{DType, Domain, PointKind, Request, Role, Runner, Trace};

use crate::support::{point, request, trace};

#[derive(Clone, Debug)]
struct Wish {
    units: u64,
    domain: u8,
    dtype: u8,
    role: u8,
    group: Option<u8>,
    accumulator: Option<u8>,
    spans: bool,
}

#[derive(Clone, Debug)]
enum Op {
    Acquire(usize),
    Release(usize),
    ReleaseForeign(usize),
    Record,
    Wait(usize),
    Collective(u8),
    Work,
    Complete,
}

/// Any number; whoever uses it divides.
fn choice() -> impl Strategy<Value = usize> {
    0usize..10_000
}

fn wish() -> impl Strategy<Value = Wish> {
    let accumulator = prop_oneof![3 => Just(None), 1 => (0u8..3).prop_map(Some)];
    let group = prop_oneof![1 => Just(None), 1 => (0u8..2).prop_map(Some)];
    (1u64..7, 0u8..3, 0u8..3, 0u8..3, group, accumulator, prop::bool::weighted(0.2)).prop_map(
        |(units, domain, dtype, role, group, accumulator, spans)| Wish {
            units,
            domain,
            dtype,
            role,
            group,
            accumulator,
            spans,
        },
    )
}

fn op() -> impl Strategy<Value = (u32, Op)> {
    let kind = prop_oneof![
        4 => choice().prop_map(Op::Acquire),
        4 => choice().prop_map(Op::Release),
        2 => choice().prop_map(Op::ReleaseForeign),
        2 => Just(Op::Record),
        2 => choice().prop_map(Op::Wait),
        2 => (0u8..2).prop_map(Op::Collective),
        4 => Just(Op::Work),
        1 => Just(Op::Complete),
    ];
    (0u32..3, kind)
}

/// Requests, and points. Two of three runners acquire everything and complete before the rest, as backwards do, so
/// that launches overlap.
type Program = (Vec<Wish>, Vec<(u32, Op)>);

fn program() -> impl Strategy<Value = Program> {
    (vec(wish(), 0..5), vec(op(), 0..16), 0u32..3).prop_map(|(wishes, ops, early)| {
        let head = if early == 0 { 0 } else { wishes.len() };
        let acquires = std::iter::repeat_n((0, Op::Acquire(0)), head);
        let complete = (head > 0).then_some((0, Op::Complete));
        (wishes, acquires.chain(complete).chain(ops).collect())
    })
}

/// Up to `runners` runners of up to five requests, launched up to three times that often; one in three with up to two
/// more steps that launch some of them, in another order.
pub(crate) fn traces(runners: usize) -> impl Strategy<Value = Trace> {
    let more = prop_oneof![2 => Just(Vec::new()), 1 => vec(vec(choice(), 1..=runners), 1..=2)];
    (vec(program(), 1..=runners), vec(choice(), 0..2 * runners), more).prop_map(|(programs, again, more)| {
        let count = programs.len();
        let mut made = build(programs, &again);
        let step = |chosen: Vec<usize>| chosen.into_iter().map(|index| (index % count) as u32).collect();
        made.steps.extend(more.into_iter().map(step));
        made
    })
}

fn build(programs: Vec<Program>, again: &[usize]) -> Trace {
    // Every runner once, the rest mixed in between.
    let count = programs.len();
    let mut launches: Vec<u32> = (0..count as u32).collect();
    for index in again {
        let at = index % (launches.len() + 1);
        launches.insert(at, (index / 7 % count) as u32);
    }
    let first = |runner: usize| launches.iter().position(|&launch| launch as usize == runner);
    let last = |runner: usize| launches.iter().rposition(|&launch| launch as usize == runner);

    let mut id = 0;
    let mut spanning: Vec<(usize, u32)> = Vec::new();
    let mut all: Vec<Vec<(Request, bool)>> = Vec::new();
    for (r, (wishes, _)) in programs.iter().enumerate() {
        let mut requests = Vec::new();
        for wish in wishes {
            // Ids neither dense nor in order.
            let made = (make(id * 7 % 1009, wish), wish.spans);
            if wish.spans {
                spanning.push((r, made.0.id.0));
            }
            requests.push(made);
            id += 1;
        }
        all.push(requests);
    }
    let outliving: Vec<u32> = spanning.iter().map(|&(_, id)| id).collect();
    let mut runners = Vec::new();
    for (r, (_, ops)) in programs.into_iter().enumerate() {
        let mut waiting: Vec<u32> = all[r].iter().map(|(request, _)| request.id.0).collect();
        let mut held: Vec<u32> = Vec::new();
        let (mut events, mut completed) = (0, false);
        let mut points = Vec::new();
        for (stream, op) in ops {
            let kind = match op {
                Op::Acquire(_) if waiting.is_empty() => continue,
                Op::Acquire(index) => {
                    let id = waiting.remove(index % waiting.len());
                    if !outliving.contains(&id) {
                        held.push(id);
                    }
                    PointKind::Acquire(sessile_plan::RequestId(id))
                }
                Op::Release(_) if held.is_empty() => continue,
                Op::Release(index) => {
                    PointKind::Release(sessile_plan::RequestId(held.remove(index % held.len())))
                }
                Op::ReleaseForeign(index) => {
                    let may = |&&(owner, _): &&(usize, u32)| owner != r && last(r) > first(owner);
                    let able: Vec<(usize, u32)> = spanning.iter().filter(may).copied().collect();
                    if able.is_empty() {
                        continue;
                    }
                    let chosen = able[index % able.len()];
                    spanning.retain(|&other| other != chosen);
                    PointKind::Release(sessile_plan::RequestId(chosen.1))
                }
                Op::Record => {
                    events += 1;
                    PointKind::Record(events - 1)
                }
                Op::Wait(_) if events == 0 => continue,
                Op::Wait(index) => PointKind::Wait((index % events as usize) as u32),
                Op::Work => PointKind::Work,
                Op::Collective(group) => PointKind::Collective(format!("g{group}")),
                Op::Complete if completed => continue,
                Op::Complete => {
                    completed = true;
                    PointKind::Complete
                }
            };
            points.push(point(stream, kind));
        }
        let requests = all[r].iter().map(|(request, _)| request.clone()).collect();
        runners.push(Runner { name: format!("r{r}"), requests, points });
    }
    trace(runners, launches)
}

fn make(id: u32, wish: &Wish) -> Request {
    let mut made = request(id, wish.units);
    made.spec.domain = match wish.domain {
        0 => Domain::Default,
        group => Domain::Symmetric(format!("g{group}")),
    };
    made.spec.dtype = [DType::Bf16, DType::F32, DType::U32][wish.dtype as usize];
    made.spec.role = [Role::WgradInput, Role::RsOutput, Role::GatheredWeight][wish.role as usize].clone();
    made.spec.group = wish.group.map(|number| format!("g{number}"));
    made.spec.accumulates_into = wish.accumulator.map(|number| format!("main_grad {number}"));
    made
}
