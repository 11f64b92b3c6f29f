//! From an operation to launches: which kernel, how many blocks, which arguments.

use sessile_hal::{AdamW, Attention, Beta, Combine, DeviceError, Gemm, Kernel, Op, Transpose, View};
use sessile_plan::DType;

use super::gemm::{Found, Products};
use super::module::Argument::{F32, U32, U64};
use super::module::{Argument, Extent, Modules};
use crate::context::RawStream;
use crate::error::cuda;
use crate::memory::CudaMemory;

/// Columns that a head of attention may have: as many registers are there for them.
pub const MOST_HEAD_DIM: u64 = 128;

/// What a launch needs beside the operation.
pub(crate) struct Launcher<'a> {
    pub(crate) modules: &'a Modules,
    pub(crate) products: &'a Products,
    pub(crate) stream: &'a RawStream,
    /// Address of the words where kernels report what they found wrong.
    pub(crate) fault: u64,
    /// Memory for intermediate results, by bytes: its address. It lives as long as the work.
    pub(crate) scratch: &'a mut dyn FnMut(u64) -> Result<u64, DeviceError>,
}

/// Enqueues an operation; as one or several launches in order. The context is current, and the operation's memory is
/// kept alive until its work has ended.
pub(crate) fn run(launcher: &mut Launcher<'_>, op: &Op<CudaMemory>) -> Result<(), DeviceError> {
    let views: Vec<&View<CudaMemory>> = op.operands().iter().map(|operand| &operand.view).collect();
    match *op.kernel() {
        Kernel::Fill { value } => launcher.fill(views[0], value),
        Kernel::Copy => launcher.copy(views[0], views[1]),
        Kernel::Cast => {
            let name = if views[0].dtype() == DType::Bf16 { "cast_bf16_f32" } else { "cast_f32_bf16" };
            launcher.elements(name, &views, &[])
        }
        Kernel::Add => launcher.elements(pick(views[0], "add_bf16", "add_f32"), &views, &[]),
        Kernel::AddScaled { scale } => {
            launcher.elements(pick(views[0], "add_scaled_bf16", "add_scaled_f32"), &views, &[F32(scale)])
        }
        Kernel::SumParts { parts } => {
            let parts = u32::try_from(parts).map_err(|_| {
                unsupported("sum_parts", format!("fewer than 2^32 parts, not {parts}"), &views)
            })?;
            launcher.elements(pick(views[0], "sum_ranks_bf16", "sum_ranks_f32"), &views, &[U32(parts)])
        }
        Kernel::Scale { factor } => launcher.elements("scale_f32", &views, &[F32(factor)]),
        Kernel::SquaredReluForward => launcher.elements("squared_relu_forward", &views, &[]),
        Kernel::SquaredReluBackward => launcher.elements("squared_relu_backward", &views, &[]),
        Kernel::Gemm(shape) => launcher.gemm(shape, [views[0], views[1], views[2]]),
        Kernel::EmbeddingForward { tokens, hidden, vocab } => launcher.rows(
            "embedding_forward",
            tokens,
            &[addresses(&views), vec![U64(hidden), U64(vocab), U64(launcher.fault)]].concat(),
        ),
        Kernel::EmbeddingBackward { tokens, hidden, vocab } => launcher.rows(
            pick(views[2], "embedding_backward_bf16", "embedding_backward_f32"),
            vocab,
            &[addresses(&views), vec![U64(tokens), U64(hidden), U64(vocab), U64(launcher.fault)]].concat(),
        ),
        Kernel::RmsNormForward { rows, cols, eps } => {
            launcher.rows("rms_norm_forward", rows, &[addresses(&views), vec![U64(cols), F32(eps)]].concat())
        }
        Kernel::RmsNormBackward { rows, cols } => launcher.rms_norm_backward(&views, rows, cols),
        Kernel::AttentionForward(shape) => launcher.attention(&["attention_forward"], 3, shape, &views),
        Kernel::AttentionBackward(shape) => {
            launcher.attention(&["attention_backward_q", "attention_backward_kv"], 4, shape, &views)
        }
        Kernel::RouterForward { tokens, experts, top_k } => {
            launcher.tokens("router_forward", tokens, &views, &[U64(experts), U64(top_k)])
        }
        Kernel::RouterBackward { tokens, experts } => {
            launcher.tokens("router_backward", tokens, &views, &[U64(experts)])
        }
        Kernel::CombineForward(Combine { tokens, experts, hidden }) => {
            let tail = vec![U64(tokens), U64(experts), U64(hidden)];
            launcher.rows("combine_forward", tokens, &[addresses(&views), tail].concat())
        }
        Kernel::CombineBackward(Combine { tokens, experts, hidden }) => {
            let tail = vec![U64(tokens), U64(experts), U64(hidden)];
            launcher.rows("combine_backward", tokens * experts, &[addresses(&views), tail].concat())
        }
        Kernel::CrossEntropy { rows, classes, scale } => launcher.cross_entropy(&views, rows, classes, scale),
        Kernel::AdamW(settings) => launcher.adamw(&views, settings),
        Kernel::AdamWF32(settings) => launcher.adamw(&views, settings),
        Kernel::Spin { micros } => launcher.launch("spin", one_block(1), &[U64(micros)]),
    }
}

/// By the dtype of a float view.
fn pick(view: &View<CudaMemory>, bf16: &'static str, f32: &'static str) -> &'static str {
    if view.dtype() == DType::Bf16 { bf16 } else { f32 }
}

fn addresses(views: &[&View<CudaMemory>]) -> Vec<Argument> {
    views.iter().map(|view| U64(view.address())).collect()
}

fn one_block(threads: u32) -> Extent {
    Extent { grid: (1, 1, 1), block: (threads, 1), shared: 0 }
}

fn unsupported(kernel: &'static str, expected: String, views: &[&View<CudaMemory>]) -> DeviceError {
    DeviceError::Operands {
        kernel,
        expected,
        given: views.iter().map(|view| (view.dtype(), view.elements())).collect(),
    }
}

/// A number of blocks, which the grid's first extent can be.
fn blocks(kernel: &'static str, count: u64) -> Result<u32, DeviceError> {
    u32::try_from(count)
        .ok()
        .filter(|count| *count <= i32::MAX.cast_unsigned())
        .ok_or_else(|| unsupported(kernel, format!("at most 2^31 - 1 blocks, not {count}"), &[]))
}

impl Launcher<'_> {
    fn launch(&self, name: &'static str, extent: Extent, arguments: &[Argument]) -> Result<(), DeviceError> {
        // SAFETY: addresses are those of the operation's views, whose sizes `Op::new` has checked against the shapes
        // that are passed along with them, of scratch of the size the kernel's source names, or of the fault words;
        // all live until the work has ended. Order against other work is the device's contract with its users.
        unsafe { self.modules.launch(self.stream, name, extent, arguments) }
    }

    /// A kernel over elements: the views' addresses, the number of elements of the last one, then `more`.
    fn elements(
        &self,
        name: &'static str,
        views: &[&View<CudaMemory>],
        more: &[Argument],
    ) -> Result<(), DeviceError> {
        let n = views.last().map_or(0, |view| view.elements());
        self.over(name, n, &[addresses(views), vec![U64(n)], more.to_vec()].concat())
    }

    /// A kernel over `n` elements in strides of the grid, eight a thread.
    fn over(&self, name: &'static str, n: u64, arguments: &[Argument]) -> Result<(), DeviceError> {
        if n == 0 {
            return Ok(());
        }
        let grid = u32::try_from(n.div_ceil(8 * 256).min(4096)).unwrap_or(4096);
        self.launch(name, Extent { grid: (grid, 1, 1), block: (256, 1), shared: 0 }, arguments)
    }

    /// A kernel with a block of 256 threads for each of `rows` rows.
    fn rows(&self, name: &'static str, rows: u64, arguments: &[Argument]) -> Result<(), DeviceError> {
        let extent = Extent { grid: (blocks(name, rows)?, 1, 1), block: (256, 1), shared: 0 };
        self.launch(name, extent, arguments)
    }

    /// A kernel with a thread for each of `tokens` tokens.
    fn tokens(
        &self,
        name: &'static str,
        tokens: u64,
        views: &[&View<CudaMemory>],
        more: &[Argument],
    ) -> Result<(), DeviceError> {
        let extent = Extent { grid: (blocks(name, tokens.div_ceil(128))?, 1, 1), block: (128, 1), shared: 0 };
        self.launch(name, extent, &[addresses(views), vec![U64(tokens)], more.to_vec()].concat())
    }

    fn fill(&self, view: &View<CudaMemory>, value: f32) -> Result<(), DeviceError> {
        let (name, bits) = match view.dtype() {
            DType::Bf16 => ("fill_u16", u32::from(half::bf16::from_f32(value).to_bits())),
            DType::F32 => ("fill_u32", value.to_bits()),
            // `as` saturates, and takes NaN to 0, as on the host.
            DType::U32 => ("fill_u32", value as u32),
        };
        self.elements(name, &[view], &[U32(bits)])
    }

    fn copy(&self, from: &View<CudaMemory>, to: &View<CudaMemory>) -> Result<(), DeviceError> {
        let bytes = from.range().bytes() as usize;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both views lie inside live memory (`View::new`) and have this size (`Op::new`); the memory is kept
        // until the work has ended.
        unsafe { cuda!(cuMemcpyDtoDAsync_v2(to.address(), from.address(), bytes, self.stream.raw())) }
    }

    fn gemm(&self, shape: Gemm, views: [&View<CudaMemory>; 3]) -> Result<(), DeviceError> {
        if shape.m == 0 || shape.n == 0 {
            return Ok(());
        }
        if shape.k == 0 {
            // Nothing to add up: the library wants no empty operands.
            return if shape.beta == Beta::Accumulate { Ok(()) } else { self.fill(views[2], 0.0) };
        }
        if self.products.enqueue(self.stream, shape, views)? == Found::Enqueued {
            return Ok(());
        }
        let [a, _, c] = views;
        let name = match a.dtype() {
            DType::Bf16 => pick(c, "product_bf16_bf16", "product_bf16_f32"),
            _ => pick(c, "product_f32_bf16", "product_f32_f32"),
        };
        let flag = |transpose| U32(u32::from(transpose == Transpose::Yes));
        let accumulate = U32(u32::from(shape.beta == Beta::Accumulate));
        let extents = [U64(shape.m), U64(shape.n), U64(shape.k), flag(shape.a), flag(shape.b), accumulate];
        let down = shape.m.div_ceil(16);
        if down > 65_535 {
            return Err(unsupported("gemm", "at most 1,048,560 rows for these dtypes".to_owned(), &views));
        }
        let grid = (blocks("gemm", shape.n.div_ceil(16))?, blocks("gemm", down)?, 1);
        let extent = Extent { grid, block: (16, 16), shared: 0 };
        self.launch(name, extent, &[addresses(&views), extents.to_vec()].concat())
    }

    fn rms_norm_backward(
        &mut self,
        views: &[&View<CudaMemory>],
        rows: u64,
        cols: u64,
    ) -> Result<(), DeviceError> {
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let [dy, x, weight, rstd, dx, dweight] = [0, 1, 2, 3, 4, 5].map(|at| U64(views[at].address()));
        self.rows("rms_norm_backward", rows, &[dy.clone(), x.clone(), weight, rstd.clone(), dx, U64(cols)])?;
        let chunks = rows.div_ceil(64);
        if chunks > 65_535 {
            return Err(unsupported("rms_norm_backward", "at most 4,194,240 rows".to_owned(), views));
        }
        let partial = U64((self.scratch)(4 * chunks * cols)?);
        let across = blocks("rms_norm_backward", cols.div_ceil(128))?;
        let parts = Extent { grid: (across, blocks("", chunks)?, 1), block: (128, 1), shared: 0 };
        self.launch("rms_norm_dweight_parts", parts, &[dy, x, rstd, partial.clone(), U64(rows), U64(cols)])?;
        let whole = Extent { grid: (across, 1, 1), block: (128, 1), shared: 0 };
        self.launch("rms_norm_dweight", whole, &[partial, dweight, U64(chunks), U64(cols)])
    }

    /// `tiles`: shared tiles of 32 tokens, beside 32 floats.
    fn attention(
        &self,
        names: &[&'static str],
        tiles: u32,
        shape: Attention,
        views: &[&View<CudaMemory>],
    ) -> Result<(), DeviceError> {
        let Attention { batch, seq, heads, head_dim } = shape;
        if batch * seq * heads * head_dim == 0 {
            return Ok(());
        }
        if head_dim > MOST_HEAD_DIM || heads > 65_535 || batch > 65_535 {
            let expected = format!("head_dim up to {MOST_HEAD_DIM}, heads and batch up to 65,535");
            return Err(unsupported("attention", expected, views));
        }
        let (grid_y, grid_z) = (blocks("attention", heads)?, blocks("attention", batch)?);
        let grid = (blocks("attention", seq.div_ceil(32))?, grid_y, grid_z);
        let shared = 4 * (tiles * 32 * (u32::try_from(head_dim).unwrap_or(128) + 1) + 32);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let tail = vec![U64(seq), U64(heads), U64(head_dim), F32(scale)];
        for name in names {
            let width = head_dim.div_ceil(32).next_power_of_two();
            self.launch(
                attention_name(name, width),
                Extent { grid, block: (128, 1), shared },
                &[addresses(views), tail.clone()].concat(),
            )?;
        }
        Ok(())
    }

    fn cross_entropy(
        &mut self,
        views: &[&View<CudaMemory>],
        rows: u64,
        classes: u64,
        scale: f32,
    ) -> Result<(), DeviceError> {
        let [logits, targets, loss, dlogits] = [0, 1, 2, 3].map(|at| U64(views[at].address()));
        let losses = U64((self.scratch)(4 * rows.max(1))?);
        let factor = F32(scale / rows as f32);
        let fault = U64(self.fault);
        self.rows(
            "cross_entropy_rows",
            rows,
            &[logits, targets, dlogits, losses.clone(), U64(classes), factor, fault],
        )?;
        self.launch("mean_of_losses", one_block(256), &[losses, loss, U64(rows)])
    }

    fn adamw(&self, views: &[&View<CudaMemory>], settings: AdamW) -> Result<(), DeviceError> {
        let AdamW { lr, beta1, beta2, eps, weight_decay, step } = settings;
        // In f64, as on the host: 1 - beta^step loses all digits in f32 for small steps.
        let correction = |beta: f32| F32((1.0 - f64::from(beta).powf(f64::from(step))) as f32);
        let weight = U64(views.get(4).map_or(0, |view| view.address()));
        let n = views[0].elements();
        let mut arguments = addresses(&views[..4]);
        arguments.extend([weight, U64(n), F32(lr), F32(beta1), F32(beta2), F32(eps), F32(weight_decay)]);
        arguments.extend([correction(beta1), correction(beta2)]);
        self.over("adamw", n, &arguments)
    }
}

fn attention_name(name: &str, width: u64) -> &'static str {
    match (name, width) {
        ("attention_forward", 1) => "attention_forward_1",
        ("attention_forward", 2) => "attention_forward_2",
        ("attention_forward", _) => "attention_forward_4",
        ("attention_backward_q", 1) => "attention_backward_q_1",
        ("attention_backward_q", 2) => "attention_backward_q_2",
        ("attention_backward_q", _) => "attention_backward_q_4",
        (_, 1) => "attention_backward_kv_1",
        (_, 2) => "attention_backward_kv_2",
        (_, _) => "attention_backward_kv_4",
    }
}
