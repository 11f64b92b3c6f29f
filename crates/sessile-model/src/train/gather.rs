//! Brings what every rank logged to rank 0, where each rank is a process.

use sessile_hal::{Comm, Device, Span, Ticket};
use sessile_runtime::{
    RuntimeError,
    log::{Log, RankLog},
};

use crate::report::GraphsOutcome;

/// Bytes that all ranks together send at once.
const AT_ONCE: usize = 32 << 20;

/// One rank's part: its log and its spans as numbers.
type Part = (RankLog, Vec<(u64, Option<u32>, u64, u64)>);

/// Gathers logs and spans at rank 0, and whether every rank kept its addresses everywhere. Collective over the job.
pub(super) fn gather<D: Device>(device: &D, graphs: &mut GraphsOutcome) -> Result<(), RuntimeError> {
    let size = device.world_size();
    if size == 1 {
        return Ok(());
    }
    let everyone: Vec<u32> = (0..size).collect();
    let world = device.communicator("world", &everyone)?;
    let kept = world.exchange(&[u8::from(graphs.addresses_kept)])?;
    graphs.addresses_kept = kept.iter().all(|kept| *kept == [1]);

    let log = std::mem::replace(&mut graphs.log, Log::from_ranks(Vec::new())).ranks.into_iter().next();
    let numbers = |span: Span| (span.ticket.0, span.node, span.begin, span.end);
    let spans = std::mem::take(&mut graphs.spans).into_iter().flatten().map(numbers).collect();
    let part: Part = (log.unwrap_or_default(), spans);
    let failed = |rank, detail: &dyn std::fmt::Display| RuntimeError::PeerFailed {
        rank,
        detail: format!("its event log: {detail}"),
    };
    let mine = serde_json::to_vec(&part).map_err(|error| failed(device.rank(), &error))?;
    drop(part);

    let parts = exchange_long(&world, &mine, device.rank() == 0)?;
    let (mut logs, mut spans) = (Vec::new(), Vec::new());
    for (rank, bytes) in (0..).zip(parts) {
        let (log, numbers): Part = serde_json::from_slice(&bytes).map_err(|error| failed(rank, &error))?;
        logs.push(log);
        let span = |(ticket, node, begin, end)| Span { ticket: Ticket(ticket), node, begin, end };
        spans.push(numbers.into_iter().map(span).collect());
    }
    graphs.log = Log::from_ranks(logs);
    graphs.spans = spans;
    Ok(())
}

/// All-gathers what may be longer than one message. Only those who keep get anything.
fn exchange_long<C: Comm>(world: &C, mine: &[u8], keep: bool) -> Result<Vec<Vec<u8>>, RuntimeError> {
    let lengths = world.exchange(&(mine.len() as u64).to_le_bytes())?;
    let length = |bytes: &Vec<u8>| bytes.as_slice().try_into().map_or(0, u64::from_le_bytes);
    let longest = lengths.iter().map(length).max().unwrap_or(0);
    let piece = AT_ONCE / lengths.len().max(1);
    let mut all = vec![Vec::new(); if keep { lengths.len() } else { 0 }];
    let rounds = longest.div_ceil(piece as u64);
    let mut left = mine;
    for _ in 0..rounds {
        let (now, later) = left.split_at(left.len().min(piece));
        left = later;
        for (whole, part) in all.iter_mut().zip(world.exchange(now)?) {
            whole.extend_from_slice(&part);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use sessile_host::{World, WorldOptions};

    use super::*;

    #[test]
    fn long_messages_of_unequal_length_arrive_whole() {
        let world = World::new(WorldOptions::threads(3, 3));
        let message = |rank: usize| vec![rank as u8 + 1; [0, 5, AT_ONCE / 3 + 7][rank]];
        let results = world.run(|device| {
            let comm = device.communicator("world", &[0, 1, 2])?;
            exchange_long(&comm, &message(device.rank() as usize), device.rank() != 1)
        });
        for (rank, result) in results.into_iter().enumerate() {
            let all = result.expect("gathered");
            if rank == 1 {
                assert!(all.is_empty());
            } else {
                assert!((0..3).all(|from| all[from] == message(from)));
            }
        }
    }
}
