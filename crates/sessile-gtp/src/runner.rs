//! Runners: a body captured once, ended in two stages, and replayed.

use sessile_hal::{Collective, Device, Note, Transfer, View};
use sessile_runtime::{HasRuntime, Order, RuntimeError};

use crate::{ChainKind, Gtp, WeightId, chain::Prefetched};

/// Views that a runner finds filled by the runner before it, one a matrix.
pub(crate) struct Import<D: Device> {
    pub(crate) weight: WeightId,
    pub(crate) views: Vec<View<D::Memory>>,
}

/// What a runner's capture did to gradients, and each replay does again.
#[derive(Clone, Default)]
pub(crate) struct Captured {
    /// Weights that became ready.
    pub(crate) ready: Vec<WeightId>,
    /// Weights with one more use in their local sum.
    pub(crate) local: Vec<WeightId>,
}

impl<D: Device> Gtp<D> {
    /// Publishes that a gradient is ready, now or at every replay.
    pub(crate) fn note_ready(&mut self, weight: WeightId) {
        match self.runtime.runner().filter(|_| self.runtime.is_capturing()) {
            Some(runner) => self.captured.entry(runner.to_owned()).or_default().ready.push(weight),
            None => self.became_ready(weight),
        }
    }

    /// Counts a use that was added up locally, now or at every replay.
    pub(crate) fn note_local(&mut self, weight: WeightId) {
        match self.runtime.runner().filter(|_| self.runtime.is_capturing()) {
            Some(runner) => self.captured.entry(runner.to_owned()).or_default().local.push(weight),
            None => self.local[weight.0] += 1,
        }
    }

    /// The end of a runner's body: stage 1 drains the runner's own all-gathers and marks completion, stage 2
    /// drains its own reduce-scatters. It waits for nothing that the runner did not start.
    fn end_runner(&mut self) -> Result<(), RuntimeError> {
        let compute = self.runtime.compute().clone();
        if let Some(mut gathered) = self.graphed.gathered.take() {
            if let Some(ready) = gathered.ready.take() {
                self.runtime.wait(&compute, &ready)?;
            }
            self.graphed.gathered = Some(gathered);
        }
        for group in self.groups.iter().filter(|group| group.gather_used) {
            let end = self.runtime.mark(&group.gather)?;
            self.runtime.wait(&compute, &end)?;
        }
        self.runtime.complete()?;
        self.drain(ChainKind::Graphed)?;
        for group in self.groups.iter().filter(|group| group.reduce_used) {
            let end = self.runtime.mark(&group.reduce)?;
            self.runtime.wait(&compute, &end)?;
        }
        Ok(())
    }

    /// Runs `body` eagerly as the discovery of a runner, and ends it in two stages.
    ///
    /// # Errors
    /// Those of `body` and of [`sessile_runtime::discover`]. What an earlier runner prefetched for this one is gone then:
    /// discover all runners anew, after [`Runtime::restart_discovery`](sessile_runtime::Runtime::restart_discovery).
    pub fn discover<H, E>(
        holder: &mut H,
        runner: &str,
        body: impl FnOnce(&mut H) -> Result<(), E>,
    ) -> Result<(), E>
    where
        H: HasRuntime<D> + AsMut<Gtp<D>>,
        E: From<RuntimeError>,
    {
        let outcome = sessile_runtime::discover(holder, runner, |holder| Self::run(holder, body));
        if outcome.is_err() {
            holder.as_mut().graphed.give_up();
        }
        outcome
    }

    /// Captures `body` as the graph of a runner, ended in two stages.
    ///
    /// # Errors
    /// Those of `body` and of [`sessile_runtime::capture`]. What an earlier runner prefetched for this one is kept, so
    /// that it can be captured again.
    pub fn capture<H, E>(
        holder: &mut H,
        runner: &str,
        body: impl FnOnce(&mut H) -> Result<(), E>,
    ) -> Result<(), E>
    where
        H: HasRuntime<D> + AsMut<Gtp<D>>,
        E: From<RuntimeError>,
    {
        let prefetched = holder.as_mut().graphed.gathered.as_ref().and_then(Prefetched::share);
        let outcome = sessile_runtime::capture(holder, runner, |holder| Self::run(holder, body));
        if outcome.is_err() {
            let gtp = holder.as_mut();
            gtp.imports.remove(runner);
            gtp.captured.remove(runner);
            gtp.graphed.give_up();
            gtp.graphed.gathered = prefetched;
        }
        outcome
    }

    fn run<H: AsMut<Gtp<D>>, E: From<RuntimeError>>(
        holder: &mut H,
        body: impl FnOnce(&mut H) -> Result<(), E>,
    ) -> Result<(), E> {
        for group in &mut holder.as_mut().groups {
            (group.gather_used, group.reduce_used) = (false, false);
        }
        body(holder)?;
        Ok(holder.as_mut().end_runner()?)
    }

    /// To be called once the optimizer's work is enqueued: what was gathered before is out of date. Passes that end as
    /// they should leave nothing gathered, so this matters only after one that was given up.
    pub fn weights_changed(&mut self) {
        self.changed = true;
        self.eager.gathered = None;
        self.graphed.gathered = None;
    }

    /// Replays a runner. If the launch is not the next one of the sealed order, or the first since the weights changed,
    /// the weights that an earlier runner would have prefetched for it are gathered first.
    ///
    /// # Errors
    /// Those of [`sessile_runtime::Runtime::replay`].
    pub fn replay(&mut self, runner: &str) -> Result<Order, RuntimeError> {
        if self.changed || !self.runtime.in_order(runner)? {
            self.runtime.join()?;
            let main = self.runtime.main().clone();
            for Import { weight, views } in self.imports.get(runner).into_iter().flatten() {
                let weight = &self.weights[weight.0];
                let group = &self.groups[weight.group.0].name;
                let batch: Vec<_> = weight
                    .parts
                    .iter()
                    .zip(views)
                    .map(|(part, view)| Transfer { send: part.value.clone(), recv: view.clone() })
                    .collect();
                self.runtime.collective_batch(&main, group, Collective::AllGather, &batch)?;
            }
        }
        let order = self.runtime.replay(runner)?;
        self.changed = false;
        let Captured { ready, local } = self.captured.get(runner).cloned().unwrap_or_default();
        ready.into_iter().for_each(|weight| self.became_ready(weight));
        local.into_iter().for_each(|weight| self.local[weight.0] += 1);
        Ok(order)
    }

    fn became_ready(&mut self, weight: WeightId) {
        self.ready[weight.0] += 1;
        self.runtime.device().note(Note::Ready(&self.weights[weight.0].name));
    }
}
