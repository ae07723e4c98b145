use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use crate::error::{check, Error, Result};
use crate::ffi;

/// A CPU with Folio's own threads.
#[derive(Debug)]
pub struct Context {
    handle: NonNull<ffi::folio_context>,
}

// SAFETY: "Contexts and ops may be used from several threads at once" (folio/c/folio.h).
unsafe impl Send for Context {}
unsafe impl Sync for Context {}

impl Context {
    /// `num_threads`: 0 = as many as the process may run on.
    pub fn cpu(num_threads: i32) -> Result<Self> {
        Self::with_kernel(num_threads, "")
    }

    /// A context whose ops all use the kernel of that name; "" = the cheapest.
    pub fn with_kernel(num_threads: i32, kernel: &str) -> Result<Self> {
        let kernel = c_string(kernel, "kernel")?;
        let mut options = init(ffi::folio_context_options_init)?;
        options.num_threads = num_threads;
        options.force_kernel = kernel.as_ptr();
        let mut handle = ptr::null_mut();
        // SAFETY: options are initialised; the kernel's name is copied.
        check(unsafe { ffi::folio_create_cpu_context(&options, &mut handle) })?;
        Ok(Self {
            handle: created(handle),
        })
    }

    /// How many pieces of work make progress at once.
    pub fn concurrency(&self) -> Result<i32> {
        let mut concurrency = 0;
        // SAFETY: a live handle.
        check(unsafe { ffi::folio_concurrency(self.as_ptr(), &mut concurrency) })?;
        Ok(concurrency)
    }

    /// The C handle, for calls of [`ffi`]. It lives as long as `self`.
    pub fn as_ptr(&self) -> *const ffi::folio_context {
        self.handle.as_ptr()
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: freed once; ops and pools keep what they need of it.
        unsafe { ffi::folio_free_context(self.handle.as_ptr()) }
    }
}

pub(crate) fn c_string(text: &str, name: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::invalid(format!("{name} has a zero byte: {text:?}")))
}

/// A copy of a text that the library keeps.
///
/// # Safety
/// `text` is null or a string that lives through the call.
pub(crate) unsafe fn copied(text: *const std::os::raw::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    CStr::from_ptr(text).to_string_lossy().into_owned()
}

/// What a successful folio_create_... call has given.
pub(crate) fn created<T>(handle: *mut T) -> NonNull<T> {
    NonNull::new(handle).expect("folio returned FOLIO_OK without a handle")
}

/// A growing structure with every default.
pub(crate) fn init<T>(function: unsafe extern "C" fn(*mut T, usize) -> ffi::folio_status) -> Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the function writes size_of::<T>() bytes. Its structures are plain data, for which zeros are valid.
    check(unsafe { function(value.as_mut_ptr(), std::mem::size_of::<T>()) })?;
    Ok(unsafe { value.assume_init() })
}
