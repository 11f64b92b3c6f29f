//! Plans as the options ask for them, with depths that are given or chosen.

use std::collections::BTreeSet;

use sessile_model::{
    TrainError,
    simulate::{AutoError, TraceDepth, depth_of_trace},
};
use sessile_plan::{Plan, PlanOptions, Trace, plan};

use crate::{
    args::{Depth, PlanChoices},
    auto::Auto,
    failure::Failure,
    ui::clean,
};

/// Plans a trace as the options say, choosing depths if they ask for it.
pub(super) fn planned(choices: &PlanChoices, trace: &Trace) -> Result<(Plan, Option<Auto>), Failure> {
    let options = choices.options();
    known_groups(trace, &options)?;
    match (choices.depth(), choices.memory_limit) {
        (Depth::Fixed(_), Some(_)) => {
            Err(Failure::Input("--memory-limit chooses among depths: use it with --depth auto".to_owned()))
        }
        (Depth::Fixed(_), None) => {
            let made = plan(trace, &options).map_err(|error| Failure::Input(error.to_string()))?;
            Ok((made, None))
        }
        (Depth::Auto, limit) => {
            let TraceDepth { candidates, chosen, plan } =
                depth_of_trace(trace, &options, limit).map_err(failure)?;
            Ok((plan, Some(Auto::new((candidates, chosen), limit))))
        }
    }
}

/// Groups that requests of a trace are of.
fn groups(trace: &Trace) -> BTreeSet<&str> {
    trace.requests().filter_map(|(_, request)| request.spec.group.as_deref()).collect()
}

/// Refuses depths of groups that a trace does not have.
fn known_groups(trace: &Trace, options: &PlanOptions) -> Result<(), Failure> {
    let known = groups(trace);
    let Some((group, depth)) =
        options.depth_by_group.iter().find(|(group, _)| !known.contains(group.as_str()))
    else {
        return Ok(());
    };
    let names: Vec<String> = known.into_iter().map(clean).collect();
    let remedy =
        if names.is_empty() { "use --depth".to_owned() } else { format!("name {}", names.join(", ")) };
    Err(Failure::Input(format!("--depth-group {group}={depth}: no request is of this group: {remedy}")))
}

/// Refuses options that shape a plan where none is made. `why` says so, and what to do.
pub(super) fn refuse(choices: &PlanChoices, why: &str) -> Result<(), Failure> {
    match choices.given() {
        Some(option) => Err(Failure::Input(format!("{option}: {why}"))),
        None => Ok(()),
    }
}

/// Depths of a plan as people read them: `2`, or by group `dense 1, expert 2`, after the depth of all other requests.
pub(super) fn depths_text(trace: &Trace, options: &PlanOptions) -> String {
    let PlanOptions { depth, depth_by_group, .. } = options;
    let own = |group: &str| depth_by_group.contains_key(group);
    let others = trace.requests().any(|(_, request)| !request.spec.group.as_deref().is_some_and(own));
    let all = (others || depth_by_group.is_empty()).then(|| depth.to_string());
    let each = depth_by_group.iter().map(|(group, depth)| format!("{} {depth}", clean(group)));
    all.into_iter().chain(each).collect::<Vec<_>>().join(", ")
}

/// Whose fault it is that there is no choice.
pub(super) fn failure(error: AutoError) -> Failure {
    match error {
        AutoError::Simulation(TrainError::Plan(why)) => Failure::Input(why.to_string()),
        AutoError::Simulation(error) => Failure::Run(error.to_string()),
        AutoError::OverLimit(error) => Failure::Input(error.to_string()),
    }
}
