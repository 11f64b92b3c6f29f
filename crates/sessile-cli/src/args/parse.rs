//! Values of options. Each error names what would do; clap adds the option and the value.

use std::{num::IntErrorKind, str::FromStr};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use sessile_host::Contention;
use sessile_model::simulate::KindSet;
use sessile_model::{
    ReduceScatter, Repeat,
    config::{GraphScope, Mode, ModuleKind, Overlap, ScheduleOrder},
};
use sessile_plan::{DType, StepCut};

use super::Sms;

/// A depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    Fixed(u32),
    Auto,
}

/// A whole number of any width.
pub(crate) fn whole<T: FromStr<Err = std::num::ParseIntError>>(text: &str) -> Result<T, String> {
    let remedy = |error: std::num::ParseIntError| match error.kind() {
        IntErrorKind::PosOverflow => "too large: use a smaller whole number".to_owned(),
        _ => "use a whole number, such as 4".to_owned(),
    };
    text.parse().map_err(remedy)
}

/// A group and its depth.
pub(crate) fn group_depth(text: &str) -> Result<(String, u32), String> {
    let wrong = || "use GROUP=N, such as expert=1".to_owned();
    let (group, depth) = text.rsplit_once('=').filter(|(group, _)| !group.is_empty()).ok_or_else(wrong)?;
    Ok((group.to_owned(), whole(depth)?))
}

/// A depth, or that it is to be chosen.
pub(crate) fn depth_or_auto(text: &str) -> Result<Depth, String> {
    match text {
        "auto" => Ok(Depth::Auto),
        _ => whole(text).map(Depth::Fixed).map_err(|_| "use a whole number, such as 2, or auto".to_owned()),
    }
}

/// A part of a collective's time.
pub(crate) fn contention(text: &str) -> Result<Contention, String> {
    let fraction = text.parse().ok().and_then(Contention::from_fraction);
    fraction.ok_or_else(|| "use a fraction from 0 to 1, such as 0.5".to_owned())
}

/// Multiprocessors of a launch.
pub(crate) fn sms(text: &str) -> Result<Sms, String> {
    match text {
        "all" => Ok(Sms::All),
        _ => whole(text).map(Sms::Most).map_err(|_| "use a whole number, such as 16, or all".to_owned()),
    }
}

/// One of a few words, each with its meaning.
pub(crate) fn word<T: Clone + Send + Sync + 'static>(
    words: &'static [(&'static str, T)],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(words.iter().map(|(word, _)| *word)).try_map(move |text| {
        let found = words.iter().find(|(word, _)| *word == text);
        found.map(|(_, value)| value.clone()).ok_or_else(|| format!("unknown word {text}"))
    })
}

pub(crate) const MODES: &[(&str, Mode)] =
    &[("eager", Mode::Eager), ("graphs", Mode::Graphs), ("both", Mode::Both)];
pub(crate) const SCOPES: &[(&str, GraphScope)] =
    &[("module", GraphScope::Module), ("layer", GraphScope::Layer)];
pub(crate) const MODULES: &[(&str, ModuleKind)] =
    &[("attention", ModuleKind::Attention), ("mlp", ModuleKind::Mlp), ("moe", ModuleKind::Moe)];
pub(crate) const REPEATS: &[(&str, Repeat)] =
    &[("distinct", Repeat::Distinct), ("drain", Repeat::Drain), ("reduce-once", Repeat::ReduceOnce)];
pub(crate) const KIND_SETS: &[(&str, KindSet)] = &[("own", KindSet::Own), ("upstream", KindSet::Upstream)];
pub(crate) const FOLDS: &[(&str, bool)] = &[("on", true), ("off", false)];
pub(crate) const OVERLAPS: &[(&str, Overlap)] = &[("on", Overlap::On), ("off", Overlap::Off)];
pub(crate) const ORDERS: &[(&str, ScheduleOrder)] = &[
    ("random", ScheduleOrder::Random),
    ("writers-early", ScheduleOrder::WritersEarly),
    ("readers-early", ScheduleOrder::ReadersEarly),
];
pub(crate) const CUTS: &[(&str, StepCut)] = &[("barrier", StepCut::Barrier), ("wrap", StepCut::Wrap)];
pub(crate) const KINDS: &[(&str, ReduceScatter)] = &[
    ("ring", ReduceScatter::Ring),
    ("symmetric", ReduceScatter::Symmetric),
    ("fp32_a2a", ReduceScatter::Fp32A2a),
    ("one_shot", ReduceScatter::OneShot),
];
pub(crate) const WIRE_DTYPES: &[(&str, DType)] = &[("bf16", DType::Bf16), ("f32", DType::F32)];
