//! What runs on the GPU: the project's own kernels, and matrix products through cuBLASLt.

pub mod compile;
mod gemm;
mod launch;
mod module;

pub(crate) use gemm::Products;
pub use launch::MOST_HEAD_DIM;
pub(crate) use launch::{Launcher, run};
pub(crate) use module::{Argument, Extent, Modules};
