//! Timelines of a run.
