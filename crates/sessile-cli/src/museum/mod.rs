//! The museum of faults: what goes wrong for people who do this work, each built in small on the host device, once
//! without sessile's rule and once with it.

mod capture;
mod lab;
mod lifetime;
mod numbers;
mod order;
mod places;
mod registration;
mod repeated;

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Serialize;

/// What an exhibit showed.
pub(crate) enum Seen {
    /// The fault: a wrong value, a refusal too late, ranks that wait for one another.
    Wrong(String),
    /// The right result, or an error in time that names the fault.
    Right(String),
}

/// One way of an exhibit. `Err`: it did not come to its point.
type Way = fn() -> Result<Seen, String>;

/// A known fault.
pub(crate) struct Exhibit {
    /// Its name.
    pub(crate) id: &'static str,
    /// What must hold.
    pub(crate) behaviour: &'static str,
    without: Way,
    with: Way,
}

/// One row of the table.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) id: &'static str,
    pub(crate) behaviour: &'static str,
    pub(crate) without: String,
    pub(crate) with: String,
    /// The fault shows without the rule, and not with it.
    pub(crate) ok: bool,
}

/// All of them.
pub(crate) fn exhibits() -> Vec<Exhibit> {
    let all = [
        registration::EXHIBITS,
        places::EXHIBITS,
        lifetime::EXHIBITS,
        capture::EXHIBITS,
        order::EXHIBITS,
        repeated::EXHIBITS,
        numbers::EXHIBITS,
    ];
    all.into_iter().flat_map(|room| room.iter().map(|e| Exhibit { ..*e })).collect()
}

impl Exhibit {
    /// Shows it both ways.
    pub(crate) fn show(&self) -> Row {
        let look = |way: Way| {
            catch_unwind(AssertUnwindSafe(way)).unwrap_or_else(|_| Err("the exhibit panicked".to_owned()))
        };
        let (without, with) = (look(self.without), look(self.with));
        let ok = matches!((&without, &with), (Ok(Seen::Wrong(_)), Ok(Seen::Right(_))));
        let text = |seen: Result<Seen, String>| match seen {
            Ok(Seen::Wrong(text)) => format!("wrong: {text}"),
            Ok(Seen::Right(text)) => text,
            Err(text) => format!("not shown: {text}"),
        };
        Row { id: self.id, behaviour: self.behaviour, without: text(without), with: text(with), ok }
    }
}
