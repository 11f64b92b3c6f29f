//! Compiled kernels as the driver holds them, and how they are launched.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use sessile_hal::DeviceError;

use super::compile::{Target, Unit, image};
use crate::context::{Context, RawStream};
use crate::error::cuda;

/// Every kernel, with the unit that holds it.
const KERNELS: &[(Unit, &[&str])] = &[
    (
        Unit::Elementwise,
        &[
            "fill_u16",
            "fill_u32",
            "cast_bf16_f32",
            "cast_f32_bf16",
            "add_bf16",
            "add_f32",
            "add_scaled_bf16",
            "add_scaled_f32",
            "scale_f32",
            "sum_ranks_bf16",
            "sum_ranks_f32",
            "reduce_ranks_bf16",
            "squared_relu_forward",
            "squared_relu_backward",
            "adamw",
            "spin",
            "stamp",
        ],
    ),
    (
        Unit::Model,
        &[
            "embedding_forward",
            "embedding_backward_f32",
            "embedding_backward_bf16",
            "rms_norm_forward",
            "rms_norm_backward",
            "rms_norm_dweight_parts",
            "rms_norm_dweight",
            "cross_entropy_rows",
            "mean_of_losses",
        ],
    ),
    (
        Unit::Attention,
        &[
            "attention_forward_1",
            "attention_forward_2",
            "attention_forward_4",
            "attention_backward_q_1",
            "attention_backward_q_2",
            "attention_backward_q_4",
            "attention_backward_kv_1",
            "attention_backward_kv_2",
            "attention_backward_kv_4",
        ],
    ),
    (
        Unit::OneShot,
        &[
            "one_shot_push_bf16_2",
            "one_shot_push_bf16_4",
            "one_shot_push_bf16_8",
            "one_shot_push_bf16_any",
            "one_shot_push_f32_2",
            "one_shot_push_f32_4",
            "one_shot_push_f32_8",
            "one_shot_push_f32_any",
            "one_shot_pull_bf16_2",
            "one_shot_pull_bf16_4",
            "one_shot_pull_bf16_8",
            "one_shot_pull_bf16_any",
            "one_shot_pull_f32_2",
            "one_shot_pull_f32_4",
            "one_shot_pull_f32_8",
            "one_shot_pull_f32_any",
            "one_shot_shift_bf16_2",
            "one_shot_shift_bf16_4",
            "one_shot_shift_bf16_8",
            "one_shot_shift_bf16_any",
            "one_shot_shift_f32_2",
            "one_shot_shift_f32_4",
            "one_shot_shift_f32_8",
            "one_shot_shift_f32_any",
            "one_shot_sum_bf16_2",
            "one_shot_sum_bf16_4",
            "one_shot_sum_bf16_8",
            "one_shot_sum_bf16_any",
            "one_shot_sum_f32_2",
            "one_shot_sum_f32_4",
            "one_shot_sum_f32_8",
            "one_shot_sum_f32_any",
            "one_shot_bulk_bf16_2",
            "one_shot_bulk_bf16_4",
            "one_shot_bulk_bf16_8",
            "one_shot_bulk_bf16_any",
            "one_shot_bulk_f32_2",
            "one_shot_bulk_f32_4",
            "one_shot_bulk_f32_8",
            "one_shot_bulk_f32_any",
            "one_shot_enter",
            "one_shot_leave",
        ],
    ),
    (Unit::Experts, &["router_forward", "router_backward", "combine_forward", "combine_backward"]),
    (Unit::Matrix, &["product_bf16_bf16", "product_bf16_f32", "product_f32_bf16", "product_f32_f32"]),
];

/// One argument of a kernel, by its size.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Argument {
    /// A pointer, or a 64-bit number.
    U64(u64),
    U32(u32),
    F32(f32),
    /// A structure of words, by value.
    Words(Vec<u64>),
}

impl Argument {
    fn size(&self) -> usize {
        match self {
            Argument::U64(_) => 8,
            Argument::U32(_) | Argument::F32(_) => 4,
            Argument::Words(words) => 8 * words.len(),
        }
    }

    /// Its bytes; a short one is the first part of a word.
    fn words(&self) -> Vec<u64> {
        match self {
            Argument::U64(value) => vec![*value],
            Argument::U32(value) => vec![u64::from(*value).to_le()],
            Argument::F32(value) => vec![u64::from(value.to_bits()).to_le()],
            Argument::Words(words) => words.clone(),
        }
    }
}

/// How many blocks of how many threads, with how much dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub(crate) grid: (u32, u32, u32),
    pub(crate) block: (u32, u32),
    pub(crate) shared: u32,
}

struct Function {
    raw: sys::CUfunction,
    /// Sizes of its parameters, as compiled.
    parameters: Vec<usize>,
}

/// All kernels, loaded.
pub(crate) struct Modules {
    modules: Vec<sys::CUmodule>,
    functions: HashMap<&'static str, Function>,
    context: Arc<Context>,
}

// SAFETY: driver handles of loaded code, which nothing changes after `load`.
unsafe impl Send for Modules {}
// SAFETY: as for `Send`.
unsafe impl Sync for Modules {}

impl Modules {
    /// Compiles, or takes from disk, and loads everything, so that nothing is loaded in a capture.
    pub(crate) fn load(context: &Arc<Context>) -> Result<Self, DeviceError> {
        Self::load_units(context, &Unit::ALL)
    }

    /// The same for some of the units.
    pub(crate) fn load_units(context: &Arc<Context>, units: &[Unit]) -> Result<Self, DeviceError> {
        let target = Target { capability: context.gpu.capability };
        let mut loaded = Modules { modules: Vec::new(), functions: HashMap::new(), context: context.clone() };
        for (unit, names) in KERNELS.iter().filter(|(unit, _)| units.contains(unit)) {
            loaded.add(&image(*unit, target)?, names)?;
        }
        Ok(loaded)
    }

    /// The one-shot kernels that take all ranks in one launch, from a text like theirs.
    #[cfg(test)]
    pub(crate) fn together(context: &Arc<Context>, text: &str) -> Result<Self, DeviceError> {
        let mut loaded = Modules { modules: Vec::new(), functions: HashMap::new(), context: context.clone() };
        let target = Target { capability: context.gpu.capability };
        let image = super::compile::compile_text(text, Unit::Together, target)?.image;
        let names = KERNELS.iter().filter(|(unit, _)| *unit == Unit::OneShot);
        names.map(|(_, names)| *names).try_for_each(|names| loaded.add(&image, names))?;
        Ok(loaded)
    }

    fn add(&mut self, image: &[u8], names: &[&'static str]) -> Result<(), DeviceError> {
        let _entered = self.context.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` lives over the call; the image is a whole cubin or zero-terminated PTX from the compiler,
        // checked by its hash if it came from disk.
        unsafe { cuda!(cuModuleLoadData(&raw mut module, image.as_ptr().cast())) }?;
        self.modules.push(module);
        let (major, _) = self.context.gpu.capability;
        for name in names.iter().filter(|name| major >= 9 || !name.starts_with("one_shot_bulk")) {
            self.functions.insert(name, function(module, name)?);
        }
        Ok(())
    }

    /// Whether this GPU has a kernel: bulk copies need Hopper.
    pub(crate) fn has(&self, name: &'static str) -> bool {
        self.functions.contains_key(name)
    }

    fn get(&self, name: &'static str) -> Result<&Function, DeviceError> {
        self.functions.get(name).ok_or(DeviceError::Driver {
            call: "kernel",
            code: 0,
            name: "unknown kernel".to_owned(),
            text: name.to_owned(),
        })
    }

    /// Enqueues a kernel. The context is current.
    ///
    /// # Safety
    /// - Each pointer among the arguments is the device address of live memory of the extent that the kernel's source
    ///   reads or writes for these arguments, and stays so until the work has ended.
    /// - No work in flight that is not ordered with this one conflicts with it.
    pub(crate) unsafe fn launch(
        &self,
        stream: &RawStream,
        name: &'static str,
        extent: Extent,
        arguments: &[Argument],
    ) -> Result<(), DeviceError> {
        let function = self.get(name)?;
        let given: Vec<usize> = arguments.iter().map(Argument::size).collect();
        assert_eq!(given, function.parameters, "{name}: sizes of arguments");
        let ((x, y, z), (bx, by)) = (extent.grid, extent.block);
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        let mut words: Vec<Vec<u64>> = arguments.iter().map(Argument::words).collect();
        let mut pointers: Vec<*mut std::ffi::c_void> =
            words.iter_mut().map(|words| words.as_mut_ptr().cast()).collect();
        // SAFETY: the function is loaded; `pointers` has one pointer for each parameter, to at least as many bytes as
        // it has (asserted above), alive over the call, which copies them; what they point to is the caller's promise.
        unsafe {
            cuda!(cuLaunchKernel(
                function.raw,
                x,
                y,
                z,
                bx,
                by,
                1,
                extent.shared,
                stream.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            ))
        }
    }
}

fn function(module: sys::CUmodule, name: &str) -> Result<Function, DeviceError> {
    let mut raw = std::ptr::null_mut();
    let c_name = CString::new(name).unwrap_or_default();
    // SAFETY: the module is loaded; `raw` and `c_name` live over the call.
    unsafe { cuda!(cuModuleGetFunction(&raw mut raw, module, c_name.as_ptr())) }?;
    // SAFETY: `raw` came from the call above. Loads the code now rather than at the first launch.
    unsafe { cuda!(cuFuncLoad(raw)) }?;
    // Attention keeps four tiles, bulk copies many; the driver refuses more than 48 KiB unless it is asked.
    let shared = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let most = match name {
        name if name.starts_with("attention") => 96 << 10,
        name if name.starts_with("one_shot_bulk") => 224 << 10,
        _ => 0,
    };
    if most > 0 {
        // SAFETY: `raw` is a loaded function; a size the GPU does not have is an error of the driver.
        unsafe { cuda!(cuFuncSetAttribute(raw, shared, most)) }?;
    }
    let mut parameters = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: `raw` is a loaded function; both locals live over the call; an index too high is an error.
        let code = unsafe { sys::cuFuncGetParamInfo(raw, parameters.len(), &raw mut offset, &raw mut size) };
        if code == CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(Function { raw, parameters });
        }
        crate::error::driver("cuFuncGetParamInfo", code)?;
        parameters.push(size);
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            for module in &self.modules {
                // SAFETY: loaded in `load`, unloaded here alone, after all work of the device has ended.
                let _ = unsafe { sys::cuModuleUnload(*module) };
            }
        }
    }
}
