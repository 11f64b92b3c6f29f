//! Matrix products through cuBLASLt.
//!
//! The same shapes, dtypes and alignment always get the same algorithm, so eager execution, capture and every replay
//! give the same bits. Algorithms that need a workspace are not used: two graphs may run at once whatever streams they
//! were captured on, and a workspace that they shared would be a race that no plan knows of. Sums stay inside one
//! kernel (no reduction over blocks).
//!
//! The library counts in columns. A row-major `[r, c]` matrix is its column-major `[c, r]`, so it is asked for
//! `Cᵀ = op(B)ᵀ · op(A)ᵀ`.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::{self, cublasStatus_t};
use sessile_hal::{Beta, DeviceError, Gemm, Transpose, View};
use sessile_plan::DType;

use crate::context::{Context, RawStream};
use crate::library::{Library, load};
use crate::memory::CudaMemory;

/// What decides the algorithm.
type Key = ([u64; 3], [bool; 2], [DType; 2], [u32; 3]);

/// The library, and the algorithms chosen so far.
pub(crate) struct Products {
    handle: sys::cublasLtHandle_t,
    chosen: Mutex<HashMap<Key, Option<Arc<Chosen>>>>,
    context: Arc<Context>,
}

// SAFETY: "cublasLt handle ... can be used from multiple host threads" (cuBLAS, Using the cuBLASLt API); the map is locked.
unsafe impl Send for Products {}
// SAFETY: as for `Send`.
unsafe impl Sync for Products {}

/// Descriptions of one product, and its algorithm.
struct Chosen {
    product: Product,
    /// Layouts of Bᵀ, Aᵀ, Cᵀ.
    layouts: [Layout; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

// SAFETY: descriptions on the host that nothing changes once chosen; the algorithm is plain data.
unsafe impl Send for Chosen {}
// SAFETY: as for `Send`.
unsafe impl Sync for Chosen {}

struct Product(sys::cublasLtMatmulDesc_t);
struct Layout(sys::cublasLtMatrixLayout_t);
struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: made by `cublasLtMatmulDescCreate`, destroyed here alone.
        let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by `cublasLtMatrixLayoutCreate`, destroyed here alone.
        let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `cublasLtMatmulPreferenceCreate`, destroyed here alone.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// What [`Products::enqueue`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The product is enqueued.
    Enqueued,
    /// The library has no algorithm for it.
    Unsupported,
}

impl Products {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        load(Library::CublasLt)?;
        let _entered = context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` lives over the call; a context is current. Destroyed in `drop`.
        check("cublasLtCreate", unsafe { sys::cublasLtCreate(&raw mut handle) })?;
        Ok(Products { handle, chosen: Mutex::new(HashMap::new()), context: context.clone() })
    }

    /// Enqueues `c = op(a) · op(b)` or `c += ...`. The context is current.
    pub(crate) fn enqueue(
        &self,
        stream: &RawStream,
        shape: Gemm,
        [a, b, c]: [&View<CudaMemory>; 3],
    ) -> Result<Found, DeviceError> {
        let Some(chosen) = self.choose(shape, [a, b, c])? else { return Ok(Found::Unsupported) };
        let alpha = 1.0f32;
        let beta = if shape.beta == Beta::Accumulate { 1.0f32 } else { 0.0 };
        let pointer = |view: &View<CudaMemory>| view.address() as *const c_void;
        let [left, right, out] = &chosen.layouts;
        // SAFETY: all descriptions are alive (held by `chosen`) and were made for these shapes, dtypes and at most this
        // alignment; the three addresses are of live memory of that extent (`Op::new` has checked the sizes), kept
        // until the work has ended by the device's ownership of work in flight; `alpha` and `beta` are read during the
        // call (pointer mode host); the algorithm asked for no workspace.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                chosen.product.0,
                (&raw const alpha).cast(),
                pointer(b),
                left.0,
                pointer(a),
                right.0,
                (&raw const beta).cast(),
                pointer(c),
                out.0,
                pointer(c).cast_mut(),
                out.0,
                &raw const chosen.algorithm,
                std::ptr::null_mut(),
                0,
                stream.raw().cast(),
            )
        };
        check("cublasLtMatmul", status).map(|()| Found::Enqueued)
    }

    fn choose(&self, shape: Gemm, views: [&View<CudaMemory>; 3]) -> Result<Option<Arc<Chosen>>, DeviceError> {
        let align = views.map(|view| 1u32 << view.address().trailing_zeros().min(4));
        let key = (
            [shape.m, shape.n, shape.k],
            [shape.a == Transpose::Yes, shape.b == Transpose::Yes],
            [views[0].dtype(), views[2].dtype()],
            align,
        );
        let mut chosen = self.chosen.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = chosen.get(&key) {
            return Ok(found.clone());
        }
        let found = self.ask(key)?.map(Arc::new);
        chosen.insert(key, found.clone());
        Ok(found)
    }

    fn ask(&self, key: Key) -> Result<Option<Chosen>, DeviceError> {
        let ([m, n, k], [ta, tb], [from, to], align) = key;
        let mut raw = std::ptr::null_mut();
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: `raw` lives over the call.
        let made =
            unsafe { sys::cublasLtMatmulDescCreate(&raw mut raw, compute, sys::cudaDataType_t::CUDA_R_32F) };
        check("cublasLtMatmulDescCreate", made)?;
        let product = Product(raw);
        use sys::cublasLtMatmulDescAttributes_t as D;
        product.set(D::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(tb))?;
        product.set(D::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(ta))?;
        let stored =
            |rows: u64, cols: u64, transposed: bool| if transposed { (cols, rows) } else { (rows, cols) };
        let ((br, bc), (ar, ac)) = (stored(k, n, tb), stored(m, k, ta));
        let layouts = [layout(from, br, bc)?, layout(from, ar, ac)?, layout(to, m, n)?];
        let preference = preference(align)?;
        // SAFETY: the type is plain data, which the call below overwrites.
        let mut result = unsafe { std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>() };
        let mut found = 0;
        let [left, right, out] = &layouts;
        // SAFETY: all descriptions are alive; there is room for the one result asked for.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                product.0,
                left.0,
                right.0,
                out.0,
                out.0,
                preference.0,
                1,
                &raw mut result,
                &raw mut found,
            )
        };
        if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED || (found == 0 && status as u32 == 0) {
            return Ok(None);
        }
        check("cublasLtMatmulAlgoGetHeuristic", status)?;
        check("cublasLtMatmulAlgoGetHeuristic", result.state)?;
        Ok(Some(Chosen { product, layouts, algorithm: result.algo }))
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.chosen.lock().unwrap_or_else(PoisonError::into_inner).clear();
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: made in `new`, destroyed here alone, after all work of the device has ended.
            let _ = unsafe { sys::cublasLtDestroy(self.handle) };
        }
    }
}

impl Product {
    fn set(&self, what: sys::cublasLtMatmulDescAttributes_t, value: i32) -> Result<(), DeviceError> {
        // SAFETY: the description is alive; both attributes that are set here are of type int32_t (cuBLAS,
        // cublasLtMatmulDescAttributes_t), and `value` lives over the call.
        check("cublasLtMatmulDescSetAttribute", unsafe {
            sys::cublasLtMatmulDescSetAttribute(self.0, what, (&raw const value).cast(), 4)
        })
    }
}

/// A row-major `[rows, cols]` matrix, as the library counts.
fn layout(dtype: DType, rows: u64, cols: u64) -> Result<Layout, DeviceError> {
    let kind = match dtype {
        DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        DType::U32 => sys::cudaDataType_t::CUDA_R_32U,
    };
    let mut raw = std::ptr::null_mut();
    let ld = cols.max(1).cast_signed();
    // SAFETY: `raw` lives over the call.
    check("cublasLtMatrixLayoutCreate", unsafe {
        sys::cublasLtMatrixLayoutCreate(&raw mut raw, kind, cols, rows, ld)
    })?;
    Ok(Layout(raw))
}

/// No workspace, no reduction over blocks, alignments as they are.
fn preference([a, b, c]: [u32; 3]) -> Result<Preference, DeviceError> {
    use sys::cublasLtMatmulPreferenceAttributes_t as P;
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` lives over the call.
    check("cublasLtMatmulPreferenceCreate", unsafe { sys::cublasLtMatmulPreferenceCreate(&raw mut raw) })?;
    let preference = Preference(raw);
    let none = 0u64;
    // SAFETY: the preference is alive; this attribute is a uint64_t, and `none` lives over the call.
    check("cublasLtMatmulPreferenceSetAttribute", unsafe {
        sys::cublasLtMatmulPreferenceSetAttribute(
            raw,
            P::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const none).cast(),
            8,
        )
    })?;
    for (what, value) in [
        (P::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 0),
        (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
        (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
        (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
        (P::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
    ] {
        // SAFETY: the preference is alive; these attributes are uint32_t, and `value` lives over the call.
        check("cublasLtMatmulPreferenceSetAttribute", unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(raw, what, (&raw const value).cast(), 4)
        })?;
    }
    Ok(preference)
}

fn check(call: &'static str, status: cublasStatus_t) -> Result<(), DeviceError> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(DeviceError::Driver {
        call,
        code: status as i64,
        name: format!("{status:?}"),
        text: "cuBLASLt".to_owned(),
    })
}
