//! A capture takes exactly what the discovery found, and leaves nothing behind when it fails.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sessile_hal::{Device, EventScope};
use sessile_plan::{PlanOptions, Role};
use sessile_runtime::{RuntimeError, capture, discover};

use super::lab::{Lab, Outcome, all_failed, buffer, on_ranks, short, spec, threads, well};
use super::{Exhibit, Seen};

pub(super) const EXHIBITS: &[Exhibit] = &[
    Exhibit {
        id: "swapped-requests",
        behaviour: "capture asks for the discovered sequence; equal totals are not enough",
        without: totals_are_equal,
        with: || compared(&["small", "large"]),
    },
    Exhibit {
        id: "request-beyond-the-plan",
        behaviour: "a request more than discovered is refused at once",
        without: bump_beyond_the_end,
        with: || compared(&["large", "small", "small"]),
    },
    Exhibit {
        id: "request-left-over",
        behaviour: "a capture that asks for less than discovered is an error that names what is left",
        without: half_a_graph,
        with: || compared(&["large"]),
    },
    Exhibit {
        id: "panic-in-capture",
        behaviour: "a panic in user code ends the capture; the next one works",
        without: stream_stays_in_capture,
        with: capture_is_given_up,
    },
    Exhibit {
        id: "internal-event-across-graphs",
        behaviour: "order between graphs goes through external events",
        without: internal_event,
        with: external_event,
    },
];

fn elements(name: &str) -> u64 {
    if name == "large" { 128 } else { 64 }
}

fn body(lab: &mut Lab, names: &[&str]) -> Outcome<()> {
    for name in names {
        let compute = lab.runtime.compute().clone();
        let slot = lab.runtime.request(&compute, spec(name, Role::WgradInput, elements(name)))?;
        lab.fill(slot.view(), 1.0)?;
        lab.runtime.release(&compute, slot)?;
    }
    Ok(())
}

/// Discovers a large and a small request, captures others.
fn compared(names: &[&str]) -> Result<Seen, String> {
    let errors = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        discover(&mut lab, "layer", |lab| body(lab, &["large", "small"]))?;
        lab.runtime.seal("museum", &PlanOptions::default())?;
        let refused = capture(&mut lab, "layer", |lab| body(lab, names));
        // The plan is as it was, and the right capture follows.
        capture(&mut lab, "layer", |lab| body(lab, &["large", "small"]))?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        Ok(refused.err().map(|error| error.to_string()))
    })?;
    match &errors[0] {
        Some(text) => Ok(Seen::Right(format!("refused, and the plan is reusable: {}", short(text)))),
        None => Ok(Seen::Wrong("it was taken".to_owned())),
    }
}

/// A capacity and an offset, as a plan has them that compares totals only.
struct Bump {
    capacity: u64,
    offset: u64,
}

impl Bump {
    fn take(&mut self, name: &str) -> Result<u64, String> {
        let at = self.offset;
        self.offset += elements(name) * 4;
        if self.offset <= self.capacity {
            Ok(at)
        } else {
            Err(format!("{} of {} bytes", self.offset, self.capacity))
        }
    }
}

fn totals_are_equal() -> Result<Seen, String> {
    let layout = |names: [&str; 2]| {
        let mut bump = Bump { capacity: 768, offset: 0 };
        let offsets = names.map(|name| (name.to_owned(), bump.take(name)));
        (bump.offset == bump.capacity, offsets)
    };
    let (fits, planned) = layout(["large", "small"]);
    let (also_fits, captured) = layout(["small", "large"]);
    let moved = planned.iter().any(|entry| !captured.contains(entry));
    if fits && also_fits && moved {
        Ok(Seen::Wrong(format!("both consume 768 bytes, at other offsets: {planned:?}, {captured:?}")))
    } else {
        Err("the totals differ".to_owned())
    }
}

/// A ring that is too short is noticed in the middle of a capture, which is lost.
fn bump_beyond_the_end() -> Result<Seen, String> {
    let results = on_ranks(threads(1), |device| {
        let stream = device.stream("s")?;
        device.begin_capture(&stream)?;
        let mut bump = Bump { capacity: 768, offset: 0 };
        let third = ["large", "small", "small"].map(|name| bump.take(name)).into_iter().find_map(Result::err);
        // Nothing is left but to allocate here.
        let grown = device.alloc(256, &sessile_plan::Domain::Default, "one more");
        device.abort_capture(&stream);
        assert!(third.is_some(), "the third does not fit");
        Ok(grown.map(drop)?)
    });
    all_failed(results).map(|error| Seen::Wrong(format!("the capture is lost: {}", short(&error))))
}

/// Nobody looks at what a capture left over: the graph lacks half of its work.
fn half_a_graph() -> Result<Seen, String> {
    let nodes = well(threads(1), |device| {
        let capture = |fills: u64| {
            let stream = device.stream("s")?;
            let views = (0..fills).map(|_| buffer(&device, 64, 0.0)).collect::<Result<Vec<_>, _>>()?;
            device.begin_capture(&stream)?;
            for view in views {
                let fill = sessile_hal::Kernel::Fill { value: 1.0 };
                device.enqueue(&stream, sessile_hal::Op::new(fill, "fill", vec![view])?)?;
            }
            Ok::<_, RuntimeError>(sessile_hal::Graph::nodes(&device.end_capture(&stream)?).len())
        };
        Ok((capture(2)?, capture(1)?))
    })?;
    match nodes[0] {
        (2, 1) => Ok(Seen::Wrong("a graph of 1 node where discovery ran 2, and no error".to_owned())),
        other => Err(format!("{other:?}")),
    }
}

fn stream_stays_in_capture() -> Result<Seen, String> {
    let results = on_ranks(threads(1), |device| {
        let stream = device.stream("s")?;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            device.begin_capture(&stream).expect("idle");
            panic!("user code");
        }));
        assert!(ended.is_err());
        let after = device.wait_stream(&stream);
        device.abort_capture(&stream);
        Ok(after?)
    });
    all_failed(results).map(|error| Seen::Wrong(format!("the stream still captures: {}", short(&error))))
}

fn capture_is_given_up() -> Result<Seen, String> {
    well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let names = ["large", "small"];
        discover(&mut lab, "layer", |lab| body(lab, &names))?;
        lab.runtime.seal("museum", &PlanOptions::default())?;
        let ended = catch_unwind(AssertUnwindSafe(|| {
            capture(&mut lab, "layer", |lab| {
                body(lab, &names[..1])?;
                if lab.runtime.is_capturing() {
                    panic!("user code");
                }
                Ok::<_, RuntimeError>(())
            })
        }));
        assert!(ended.is_err(), "the panic goes on after the capture was given up");
        capture(&mut lab, "layer", |lab| body(lab, &names))?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        Ok(lab.device.wait_stream(&lab.main)?)
    })?;
    Ok(Seen::Right("the capture was given up; the next one was made and replayed".to_owned()))
}

/// Captures a producer that records an event, then a consumer that waits for it.
fn across(scope: EventScope) -> Vec<Result<f32, String>> {
    on_ranks(threads(1), |device| {
        let (one, other) = (device.stream("one")?, device.stream("other")?);
        let done = device.event(scope)?;
        let (x, y) = (buffer(&device, 64, 0.0)?, buffer(&device, 64, 0.0)?);
        let op = |kernel, views| sessile_hal::Op::new(kernel, "op", views);
        device.begin_capture(&one)?;
        device.enqueue(&one, op(sessile_hal::Kernel::Fill { value: 3.0 }, vec![x.clone()])?)?;
        device.record(&one, &done)?;
        let producer = device.end_capture(&one)?;
        device.begin_capture(&other)?;
        let waits = device.wait(&other, &done);
        if waits.is_err() {
            device.abort_capture(&other);
        }
        waits?;
        device.enqueue(&other, op(sessile_hal::Kernel::Copy, vec![x.clone(), y.clone()])?)?;
        let consumer = device.end_capture(&other)?;
        for _ in 0..2 {
            device.launch(&producer, &one)?;
            device.launch(&consumer, &other)?;
        }
        Ok(super::lab::floats(&device.read(&other, &y)?)[0])
    })
}

fn internal_event() -> Result<Seen, String> {
    all_failed(across(EventScope::Internal))
        .map(|error| Seen::Wrong(format!("the capture breaks: {}", short(&error))))
}

fn external_event() -> Result<Seen, String> {
    let found = across(EventScope::External).into_iter().collect::<Result<Vec<_>, _>>()?;
    super::lab::judge("the consumer reads", found[0], 3.0)
}
