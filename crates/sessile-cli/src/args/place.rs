//! Where a job runs.

use clap::Args;

use super::parse;

/// Where ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceName {
    /// Threads of this process.
    Host,
    /// One NVIDIA GPU for each.
    Cuda,
}

impl DeviceName {
    /// Its name on the command line and in files.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            DeviceName::Host => "host",
            DeviceName::Cuda => "cuda",
        }
    }
}

const DEVICES: &[(&str, DeviceName)] =
    &[(DeviceName::Host.name(), DeviceName::Host), (DeviceName::Cuda.name(), DeviceName::Cuda)];

/// Multiprocessors of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sms {
    /// As many as are useful.
    All,
    /// At most so many.
    Most(u32),
}

impl Sms {
    /// What a launch may take unless told: no step of graphs was quicker with fewer, small ones were slower
    /// (docs/PERFORMANCE.md).
    pub(crate) const USUAL: Sms = Sms::All;

    /// As the device has it.
    pub(crate) fn budget(self) -> Option<u32> {
        match self {
            Sms::All => None,
            Sms::Most(count) => Some(count),
        }
    }
}

/// Options that say where ranks run.
#[derive(Args, Debug)]
pub(crate) struct Place {
    /// Device to run on
    #[arg(long, value_name = "NAME", default_value = "host", value_parser = parse::word(DEVICES))]
    pub(crate) device: DeviceName,
    /// Start N ranks on this machine, one for each GPU; else the environment tells (torchrun, srun, mpirun)
    #[arg(long, value_name = "N", value_parser = parse::whole::<u32>)]
    pub(crate) launch: Option<u32>,
    /// With --launch: several ranks may share a GPU, to try a job; they take turns on it, and NCCL goes over sockets
    #[arg(long, requires = "launch")]
    pub(crate) share_gpus: bool,
    /// Longest wait for other ranks, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = parse::whole::<u32>)]
    pub(crate) timeout: u32,
    /// Take NCCL's plain kernel where it gives no symmetric one
    #[arg(long)]
    pub(crate) allow_plain: bool,
    /// Multiprocessors that a one-shot reduce-scatter may take, or all: few leave more to what runs beside it; 0 lets copy
    /// engines fetch [default: all]
    #[arg(long, value_name = "N", value_parser = parse::sms)]
    pub(crate) one_shot_sms: Option<Sms>,
}

impl Place {
    /// Multiprocessors of a one-shot reduce-scatter; none on the host.
    pub(crate) fn sms(&self) -> Option<Sms> {
        (self.device == DeviceName::Cuda).then(|| self.one_shot_sms.unwrap_or(Sms::USUAL))
    }
}
