//! The allocator's options, by name.

use crate::sys;
use std::ffi::CString;
use std::{error, fmt, io};

/// Why an option cannot be read or set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Error {
    /// There is no option of this name.
    UnknownOption,
    /// The value is invalid.
    InvalidValue,
    /// The option can be set only at the start, by `CALM_OPTIONS`.
    FixedAtStart,
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Error::UnknownOption => "calmalloc has no such option",
            Error::InvalidValue => "the option does not take this value",
            Error::FixedAtStart => "the option is fixed at the start, by CALM_OPTIONS",
        })
    }
}

impl error::Error for Error {}

const ENOENT: i32 = 2;
const EBUSY: i32 = 16;

/// Sets an option for the whole process: `set("memory_per_cpu", "4")`.
///
/// Numbers are decimal. The table of options in calmalloc's manual lists units and other values.
///
/// # Errors
///
/// [`Error::UnknownOption`], [`Error::InvalidValue`] or [`Error::FixedAtStart`]; the option is then
/// unchanged.
pub fn set(option: &str, value: &str) -> Result<(), Error> {
    let option = CString::new(option).map_err(|_| Error::UnknownOption)?;
    let value = CString::new(value).map_err(|_| match get_raw(&option) {
        Some(_) => Error::InvalidValue,
        None => Error::UnknownOption,
    })?;
    // SAFETY: both are strings that end with NUL, and are only read.
    if unsafe { sys::calm_set(option.as_ptr(), value.as_ptr()) } == 0 {
        return Ok(());
    }
    Err(match io::Error::last_os_error().raw_os_error() {
        Some(ENOENT) => Error::UnknownOption,
        Some(EBUSY) => Error::FixedAtStart,
        _ => Error::InvalidValue,
    })
}

/// The value of an option, in the form that [`set`] accepts.
///
/// # Errors
///
/// [`Error::UnknownOption`].
pub fn get(option: &str) -> Result<String, Error> {
    CString::new(option).ok().and_then(|option| get_raw(&option)).ok_or(Error::UnknownOption)
}

fn get_raw(option: &CString) -> Option<String> {
    // SAFETY: writes at most the given size.
    sys::text(|buffer, size| unsafe { sys::calm_get(option.as_ptr(), buffer, size) })
}
