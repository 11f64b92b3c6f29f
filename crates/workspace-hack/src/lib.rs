//! Nothing: the manifest is what counts.
#![forbid(unsafe_code)]
