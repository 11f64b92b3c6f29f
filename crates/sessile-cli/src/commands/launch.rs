//! `--launch N`: starts the ranks of a job on this machine, one process each, and ends with them.

use std::{
    env,
    process::{Child, Command, ExitStatus},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use sessile_cuda::job::Job;

use crate::{
    failure::{Failure, Verdict},
    ui::note,
};

/// Process id of the launcher, in the environment of the ranks that it starts.
pub(crate) const LAUNCHER: &str = "SESSILE_LAUNCHER";
/// NCCL uses NVLink multicast unless this is 0; ranks leave it off unless the user says otherwise.
const MULTICAST: &str = "NCCL_NVLS_ENABLE";
/// NCCL takes ranks that share a GPU only as ranks of different machines, which this names.
const HOST: &str = "NCCL_HOSTID";
/// How long the other ranks may go on after one has failed: they learn of it and say so.
const GRACE: Duration = Duration::from_secs(30);

/// Whether this process is a rank, or another part, that a launcher started. If so, it ends when the launcher does.
///
/// # Errors
/// That the launcher has gone already.
pub(crate) fn is_rank() -> Result<bool, Failure> {
    let Some(launcher) = env::var(LAUNCHER).ok() else { return Ok(false) };
    let gone = || Failure::Run(format!("the launcher (process {launcher}) has gone"));
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|_| gone())?;
    // It may have gone before that call.
    let parent = getppid().map(|parent| parent.as_raw_nonzero().to_string());
    if parent.as_deref() == Some(launcher.as_str()) { Ok(true) } else { Err(gone()) }
}

/// The ranks to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Launch {
    /// How many.
    pub(crate) ranks: u32,
    /// Whether some have no GPU of their own.
    pub(crate) share: bool,
}

/// Runs this same command line in a process for each rank and waits for all. The worst exit status is the launcher's.
///
/// # Errors
/// That a process could not be started, or was killed.
pub(crate) fn launch(Launch { ranks, share }: Launch) -> Result<Verdict, Failure> {
    let failed =
        |what: &str, error: std::io::Error| Failure::Run(format!("--launch {ranks}: {what}: {error}"));
    let program = env::current_exe().map_err(|error| failed("where this program is", error))?;
    let environments = Job::on_this_machine(ranks).map_err(|error| failed("a new job", error))?;
    let mut job = Ranks::default();
    for (rank, environment) in environments.into_iter().enumerate() {
        let mut command = Command::new(&program);
        if env::var_os(MULTICAST).is_none() {
            command.env(MULTICAST, "0");
        }
        if share && env::var_os(HOST).is_none() {
            command.env(HOST, format!("rank-{rank}"));
        }
        let child = command
            .args(env::args_os().skip(1))
            .env(LAUNCHER, std::process::id().to_string())
            // Else the ranks would think that an agent listens at their port.
            .env_remove("TORCHELASTIC_RUN_ID")
            .envs(environment)
            .spawn()
            .map_err(|error| failed(&format!("rank {rank}"), error))?;
        job.running.push((rank, child));
    }
    job.wait()
}

/// The processes of a job. Those that still run when this goes are killed.
#[derive(Default)]
struct Ranks {
    running: Vec<(usize, Child)>,
}

impl Ranks {
    fn wait(mut self) -> Result<Verdict, Failure> {
        let mut worst = Verdict::Good;
        let mut killed: Option<Failure> = None;
        let mut first_failure: Option<Instant> = None;
        while !self.running.is_empty() {
            let mut ended = Vec::new();
            self.running.retain_mut(|(rank, child)| match child.try_wait() {
                Ok(None) => true,
                Ok(Some(status)) => {
                    ended.push((*rank, Some(status)));
                    false
                }
                Err(_) => {
                    ended.push((*rank, None));
                    false
                }
            });
            for (rank, status) in ended {
                match verdict(status) {
                    Some(verdict) => worst = worst.worse(verdict),
                    None => {
                        let how = status.map_or_else(|| "can't be waited for".to_owned(), |s| s.to_string());
                        let text = format!("rank {rank} ended by itself ({how}); the others were told");
                        killed.get_or_insert(Failure::Run(text));
                    }
                }
            }
            if (worst != Verdict::Good || killed.is_some()) && !self.running.is_empty() {
                let since = *first_failure.get_or_insert_with(Instant::now);
                if since.elapsed() > GRACE {
                    let left: Vec<String> = self.running.iter().map(|(rank, _)| rank.to_string()).collect();
                    note(format_args!(
                        "killing rank {}: still running {GRACE:?} after a rank failed",
                        left.join(", ")
                    ));
                    return killed.map_or(Ok(worst), Err);
                }
            }
            thread::sleep(Duration::from_millis(10));
        }
        killed.map_or(Ok(worst), Err)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (_, child) in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a rank's exit status says; `None` if it did not end by itself.
fn verdict(status: Option<ExitStatus>) -> Option<Verdict> {
    match status?.code()? {
        0 => Some(Verdict::Good),
        2 => Some(Verdict::Refused),
        _ => Some(Verdict::Bad),
    }
}
