use std::ptr::{self, NonNull};

use crate::cache::KvLayout;
use crate::context::{c_string, copied, created, init, Context};
use crate::dtype::DType;
use crate::error::{check, Result};
use crate::ffi;

/// Which keys a query sees, before the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mask {
    None,
    #[default]
    Causal,
    /// Bits of `AttentionArgs::custom_mask`.
    Custom,
}

/// What must not change a result's bits; each level contains those above it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Determinism {
    None,
    #[default]
    RunToRun,
    BatchInvariant,
    ScheduleInvariant,
}

/// Features that an op is prepared for; arguments that use others are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    pub soft_cap: bool,
    pub alibi: bool,
    pub sinks: bool,
}

/// What an op is prepared for.
#[derive(Clone, Debug)]
pub struct AttentionConfig {
    pub num_q_heads: i32,
    pub num_kv_heads: i32,
    pub head_dim_qk: i32,
    pub head_dim_v: i32,
    pub q: DType,
    /// Of paged segments.
    pub kv: DType,
    /// None: that of `q`, or bfloat16 where that is fp8.
    pub out: Option<DType>,
    /// How pages lie: packed or strided.
    pub layout: KvLayout,
    pub page_size: i32,
    pub mask: Mask,
    /// Keys at or after the query's position - window_left; -1 = all.
    pub window_left: i32,
    pub features: Features,
    pub determinism: Determinism,
}

impl AttentionConfig {
    /// Causal attention without a window, over NHD pages of 16 tokens.
    pub fn new(num_q_heads: i32, num_kv_heads: i32, head_dim: i32, dtype: DType) -> Self {
        Self {
            num_q_heads,
            num_kv_heads,
            head_dim_qk: head_dim,
            head_dim_v: head_dim,
            q: dtype,
            kv: dtype,
            out: None,
            layout: KvLayout::Nhd,
            page_size: 16,
            mask: Mask::default(),
            window_left: -1,
            features: Features::default(),
            determinism: Determinism::default(),
        }
    }

    fn raw(&self) -> Result<ffi::folio_attention_config> {
        let mut raw = init(ffi::folio_attention_config_init)?;
        raw.num_q_heads = self.num_q_heads;
        raw.num_kv_heads = self.num_kv_heads;
        raw.head_dim_qk = self.head_dim_qk;
        raw.head_dim_v = self.head_dim_v;
        raw.q = self.q.code();
        raw.kv = self.kv.code();
        raw.out = self.out.map_or(ffi::FOLIO_DTYPE_UNSET, DType::code);
        raw.kv_format = match self.layout {
            KvLayout::Nhd | KvLayout::Hnd => ffi::FOLIO_KV_STRIDED,
            KvLayout::CpuPacked => ffi::FOLIO_KV_CPU_PACKED,
        };
        raw.page_size = self.page_size;
        raw.mask = match self.mask {
            Mask::None => ffi::FOLIO_MASK_NONE,
            Mask::Causal => ffi::FOLIO_MASK_CAUSAL,
            Mask::Custom => ffi::FOLIO_MASK_CUSTOM,
        };
        raw.window_left = self.window_left;
        let bit = |wanted: bool, bit: u32| if wanted { bit } else { 0 };
        raw.features = bit(self.features.soft_cap, ffi::FOLIO_FEATURE_SOFT_CAP)
            | bit(self.features.alibi, ffi::FOLIO_FEATURE_ALIBI)
            | bit(self.features.sinks, ffi::FOLIO_FEATURE_SINKS);
        raw.determinism = match self.determinism {
            Determinism::None => ffi::FOLIO_DETERMINISM_NONE,
            Determinism::RunToRun => ffi::FOLIO_DETERMINISM_RUN_TO_RUN,
            Determinism::BatchInvariant => ffi::FOLIO_DETERMINISM_BATCH_INVARIANT,
            Determinism::ScheduleInvariant => ffi::FOLIO_DETERMINISM_SCHEDULE_INVARIANT,
        };
        Ok(raw)
    }
}

/// How a kernel is picked. All defaults: the cheapest that can, for batches of any size.
#[derive(Clone, Debug, Default)]
pub struct PrepareOptions {
    /// A kernel's name: it runs, or preparing fails. Empty: the cheapest.
    pub force_kernel: String,
    /// Workers to plan for; 0 = the context's threads.
    pub num_workers: i32,
    /// Most KV splits of a query; 0 = as many as the work needs.
    pub max_kv_splits: i32,
}

/// What one kernel says to a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelAnswer {
    pub name: String,
    /// This machine can run it.
    pub available: bool,
    /// Why it cannot take the configuration; None = it can.
    pub refusal: Option<String>,
}

/// A kernel chosen for a configuration. Immutable.
#[derive(Debug)]
pub struct Op {
    handle: NonNull<ffi::folio_op>,
    num_q_heads: i32,
}

// SAFETY: "Contexts and ops may be used from several threads at once" (folio/c/folio.h).
unsafe impl Send for Op {}
unsafe impl Sync for Op {}

impl Op {
    /// Slow: once per group of layers.
    pub fn prepare(context: &Context, config: &AttentionConfig, options: &PrepareOptions) -> Result<Self> {
        let raw = config.raw()?;
        let kernel = c_string(&options.force_kernel, "force_kernel")?;
        let mut raw_options = init(ffi::folio_prepare_options_init)?;
        raw_options.force_kernel = kernel.as_ptr();
        raw_options.num_workers = options.num_workers;
        raw_options.max_kv_splits = options.max_kv_splits;
        let mut handle = ptr::null_mut();
        // SAFETY: initialised structures; the kernel's name is copied.
        check(unsafe { ffi::folio_prepare(context.as_ptr(), &raw, &raw_options, &mut handle) })?;
        Ok(Self {
            handle: created(handle),
            num_q_heads: config.num_q_heads,
        })
    }

    /// What every kernel says to a configuration, in order of preference.
    pub fn explain(context: &Context, config: &AttentionConfig) -> Result<Vec<KernelAnswer>> {
        let raw = config.raw()?;
        let mut handle = ptr::null_mut();
        // SAFETY: an initialised structure. A mix of null is not known.
        check(unsafe { ffi::folio_explain(context.as_ptr(), &raw, ptr::null(), &mut handle) })?;
        let answers = read_answers(handle);
        // SAFETY: freed once; the texts have been copied.
        unsafe { ffi::folio_free_explanation(handle) };
        answers
    }

    pub fn kernel_name(&self) -> Result<String> {
        let mut name = ptr::null();
        // SAFETY: a live handle; the name lives as long.
        check(unsafe { ffi::folio_kernel_name(self.as_ptr(), &mut name) })?;
        Ok(unsafe { copied(name) })
    }

    /// Bytes of workspace that suffice for every plan without shared segments.
    pub fn workspace_size(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: a live handle.
        check(unsafe { ffi::folio_workspace_size(self.as_ptr(), &mut bytes) })?;
        Ok(bytes)
    }

    pub fn num_q_heads(&self) -> usize {
        self.num_q_heads as usize
    }

    /// The C handle, for calls of [`ffi`]. It lives as long as `self`.
    pub fn as_ptr(&self) -> *const ffi::folio_op {
        self.handle.as_ptr()
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        // SAFETY: freed once; plan buffers keep what they need of it.
        unsafe { ffi::folio_free_op(self.handle.as_ptr()) }
    }
}

fn read_answers(handle: *const ffi::folio_explanation) -> Result<Vec<KernelAnswer>> {
    let mut size = 0;
    // SAFETY: a live handle.
    check(unsafe { ffi::folio_explanation_size(handle, &mut size) })?;
    (0..size)
        .map(|index| {
            let (mut name, mut available, mut refusal) = (ptr::null(), 0, ptr::null());
            // SAFETY: likewise; the texts live as long.
            unsafe {
                check(ffi::folio_explanation_at(
                    handle,
                    index,
                    &mut name,
                    &mut available,
                    &mut refusal,
                ))?;
                let refusal = copied(refusal);
                let refusal = if refusal.is_empty() { None } else { Some(refusal) };
                Ok(KernelAnswer {
                    name: copied(name),
                    available: available != 0,
                    refusal,
                })
            }
        })
        .collect()
}
