//! Options of `sessile doctor`.

use clap::Args;

use super::Common;

/// Options of `sessile doctor`.
#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) common: Common,
}
