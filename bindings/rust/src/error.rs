use std::ffi::CStr;
use std::fmt;

use crate::ffi;

/// Why a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Status {
    InvalidArgument,
    Unsupported,
    Unavailable,
    OutOfMemory,
    WorkspaceTooSmall,
    StalePlan,
    DeviceError,
    Internal,
    /// A code of a later version.
    Other(i32),
}

impl Status {
    fn from_code(code: i32) -> Self {
        match code {
            ffi::FOLIO_INVALID_ARGUMENT => Self::InvalidArgument,
            ffi::FOLIO_UNSUPPORTED => Self::Unsupported,
            ffi::FOLIO_UNAVAILABLE => Self::Unavailable,
            ffi::FOLIO_OUT_OF_MEMORY => Self::OutOfMemory,
            ffi::FOLIO_WORKSPACE_TOO_SMALL => Self::WorkspaceTooSmall,
            ffi::FOLIO_STALE_PLAN => Self::StalePlan,
            ffi::FOLIO_DEVICE_ERROR => Self::DeviceError,
            ffi::FOLIO_INTERNAL => Self::Internal,
            other => Self::Other(other),
        }
    }
}

/// A failed call: its code, and what was given and what is offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    status: Status,
    message: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn status(&self) -> Status {
        self.status
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self {
            status: Status::InvalidArgument,
            message: message.into(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// A status of the C API as a result, with this thread's message.
pub(crate) fn check(status: ffi::folio_status) -> Result<()> {
    if status == ffi::FOLIO_OK {
        return Ok(());
    }
    // SAFETY: never null, and valid until this thread's next failing call.
    let message = unsafe { CStr::from_ptr(ffi::folio_last_error()) };
    Err(Error {
        status: Status::from_code(status),
        message: message.to_string_lossy().into_owned(),
    })
}

/// An error unless `condition` holds.
pub(crate) fn require(condition: bool, message: impl FnOnce() -> String) -> Result<()> {
    if condition {
        Ok(())
    } else {
        Err(Error::invalid(message()))
    }
}

/// A length as the C API counts requests and rows.
pub(crate) fn count(length: usize, name: &str) -> Result<i32> {
    i32::try_from(length)
        .map_err(|_| Error::invalid(format!("{name} has {length} elements; at most 2^31 - 1 are taken")))
}
