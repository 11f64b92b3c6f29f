//! What people see: lines, tables, progress.

mod clean;
mod lines;
mod paragraph;
mod progress;
mod table;

pub(crate) use clean::clean;
pub(crate) use lines::{Lines, error, note};
pub(crate) use paragraph::paragraph;
pub(crate) use progress::{Progress, notable};
pub(crate) use table::{count, milliseconds, ratio, some, table};
