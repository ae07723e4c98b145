use crate::ffi;

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    Float32,
    Float16,
    BFloat16,
    Float8E4M3,
    Float8E5M2,
}

impl DType {
    pub(crate) fn code(self) -> ffi::folio_dtype {
        match self {
            Self::Float32 => ffi::FOLIO_DTYPE_FLOAT32,
            Self::Float16 => ffi::FOLIO_DTYPE_FLOAT16,
            Self::BFloat16 => ffi::FOLIO_DTYPE_BFLOAT16,
            Self::Float8E4M3 => ffi::FOLIO_DTYPE_FLOAT8_E4M3,
            Self::Float8E5M2 => ffi::FOLIO_DTYPE_FLOAT8_E5M2,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// What tensors and caches hold. The bits of types that Rust does not have stand in integers.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    const DTYPE: DType;
}

macro_rules! element {
    ($(#[$comment:meta])* $name:ident, $bits:ty) => {
        $(#[$comment])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(transparent)]
        pub struct $name(pub $bits);
    };
}
element!(/// The bits of an IEEE binary16.
    F16, u16);
element!(/// The upper half of a binary32.
    Bf16, u16);
element!(/// OCP e4m3, without infinities.
    Fp8E4M3, u8);
element!(/// OCP e5m2.
    Fp8E5M2, u8);

impl Bf16 {
    /// Rounded to nearest even; NaNs stay NaNs.
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Self((bits >> 16) as u16 | 0x40);
        }
        Self((bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
    }

    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }
}

macro_rules! dtype_of {
    ($($type:ty => $dtype:ident),*) => {
        $(impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}
dtype_of!(f32 => Float32, F16 => Float16, Bf16 => BFloat16, Fp8E4M3 => Float8E4M3, Fp8E5M2 => Float8E5M2);
