//! Converts results of cuFile calls to errors. No I/O.
//!
//! ```text
//! cuFileRead:  n ≥ 0          bytes
//!              -1             errno: of the operating system, or, above 5000, a cuFile code (the library does both)
//!              -(5000 + n)    a cuFile code
//! others:      { err, cu_err }  0, or 5000 + n; with 5011, cu_err is a CUDA code
//! ```

use feedline_base::error::{Error, ErrorKind, Stage};
use std::fmt;

/// cuFile codes start above this.
const BASE: i32 = 5000;
/// A CUDA driver call failed within cuFile.
pub(super) const CUDA_DRIVER_ERROR: i32 = 5011;
/// The driver is already open, by other code in this process.
pub(super) const DRIVER_ALREADY_OPEN: i32 = 5026;
/// EIO, for a failed read that left no errno.
const EIO: i32 = 5;
/// The largest errno of the kernel.
const ERRNO_MAX: i32 = 4095;

/// A cuFile call that failed, or that was not made because it could not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    call: &'static str,
    cause: FailureCause,
}

/// Where a failure comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FailureCause {
    /// The operating system, with this errno.
    Os(i32),
    /// cuFile, with this `CUfileOpError`; with 5011 also this `CUresult`.
    CuFile { code: i32, cuda: i32 },
    /// This crate, before the call.
    Refused(String),
}

impl Failure {
    pub(super) fn new(call: &'static str, cause: FailureCause) -> Self {
        Self { call, cause }
    }

    pub(super) fn refused(call: &'static str, why: impl Into<String>) -> Self {
        Self::new(call, FailureCause::Refused(why.into()))
    }

    /// The origin, with its code.
    #[cfg(test)]
    pub(crate) fn cause(&self) -> &FailureCause {
        &self.cause
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.cause)
    }
}

impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Os(errno) => write!(f, "{}", std::io::Error::from_raw_os_error(*errno)),
            Self::CuFile { code, cuda } => {
                write!(f, "{} ({code})", name(*code))?;
                if *code == CUDA_DRIVER_ERROR && *cuda != 0 {
                    write!(f, ", CUDA error {cuda}")?;
                }
                if let Some(hint) = hint(*code) {
                    write!(f, ": {hint}")?;
                }
                Ok(())
            }
            Self::Refused(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Failure {}

impl Failure {
    /// The crate's error, without path and range.
    pub fn into_error(self) -> Error {
        let stage = Stage::Device;
        match self.cause {
            FailureCause::Os(errno) => {
                Error::os(stage, self.call, std::io::Error::from_raw_os_error(errno))
            }
            FailureCause::CuFile { .. } | FailureCause::Refused(_) => {
                Error::new(ErrorKind::Device, stage, self.to_string())
            }
        }
    }
}

/// Interprets the return value of a `cuFileRead` of `asked` bytes. `errno` was read right after the
/// call.
pub(super) fn outcome(returned: isize, asked: usize, errno: i32) -> Result<usize, FailureCause> {
    if let Ok(bytes) = usize::try_from(returned) {
        // A library that returns more than requested has written out of bounds, or counts wrongly.
        return if bytes <= asked {
            Ok(bytes)
        } else {
            Err(FailureCause::Refused(format!(
                "the library returned {bytes} bytes for a read of {asked}"
            )))
        };
    }
    let code = i32::try_from(returned.unsigned_abs()).unwrap_or(i32::MAX);
    Err(match code {
        1 if errno > BASE => FailureCause::CuFile {
            code: errno,
            cuda: 0,
        },
        1 => FailureCause::Os(if errno > 0 { errno } else { EIO }),
        2..=ERRNO_MAX => FailureCause::Os(code),
        _ => FailureCause::CuFile { code, cuda: 0 },
    })
}

/// Name of a `CUfileOpError`.
pub(super) fn name(code: i32) -> &'static str {
    NAMES
        .iter()
        .find(|(known, _)| *known == code)
        .map_or("an unknown cuFile error", |(_, name)| name)
}

/// The remedy, if known.
fn hint(code: i32) -> Option<&'static str> {
    Some(match code {
        5001 | 5033 => "CUDA or the kernel module nvidia-fs is not usable here",
        5004 | 5005 => "the kernel module nvidia-fs and libcufile are of different releases",
        5008 => "the file system does not support it",
        5014 | 5017 => "the range exceeds the registered memory",
        5016 | 5036 => {
            "no more GPU memory can be pinned: register fewer buffers, or raise the \
             limits in cufile.json"
        }
        5019 | 5020 => "the file must be opened with O_DIRECT",
        5024 => "the memory was not registered",
        5027 => {
            "the file was not registered, or udev does not know its device (in a \
             container: mount /run/udev)"
        }
        _ => return None,
    })
}

/// The codes of `CUfileOpError` in cuFile 1.20, except those of batches and asynchronous reads,
/// which this crate does not use.
pub(super) const NAMES: [(i32, &str); 40] = [
    (5001, "CU_FILE_DRIVER_NOT_INITIALIZED"),
    (5002, "CU_FILE_DRIVER_INVALID_PROPS"),
    (5003, "CU_FILE_DRIVER_UNSUPPORTED_LIMIT"),
    (5004, "CU_FILE_DRIVER_VERSION_MISMATCH"),
    (5005, "CU_FILE_DRIVER_VERSION_READ_ERROR"),
    (5006, "CU_FILE_DRIVER_CLOSING"),
    (5007, "CU_FILE_PLATFORM_NOT_SUPPORTED"),
    (5008, "CU_FILE_IO_NOT_SUPPORTED"),
    (5009, "CU_FILE_DEVICE_NOT_SUPPORTED"),
    (5010, "CU_FILE_NVFS_DRIVER_ERROR"),
    (CUDA_DRIVER_ERROR, "CU_FILE_CUDA_DRIVER_ERROR"),
    (5012, "CU_FILE_CUDA_POINTER_INVALID"),
    (5013, "CU_FILE_CUDA_MEMORY_TYPE_INVALID"),
    (5014, "CU_FILE_CUDA_POINTER_RANGE_ERROR"),
    (5015, "CU_FILE_CUDA_CONTEXT_MISMATCH"),
    (5016, "CU_FILE_INVALID_MAPPING_SIZE"),
    (5017, "CU_FILE_INVALID_MAPPING_RANGE"),
    (5018, "CU_FILE_INVALID_FILE_TYPE"),
    (5019, "CU_FILE_INVALID_FILE_OPEN_FLAG"),
    (5020, "CU_FILE_DIO_NOT_SET"),
    (5022, "CU_FILE_INVALID_VALUE"),
    (5023, "CU_FILE_MEMORY_ALREADY_REGISTERED"),
    (5024, "CU_FILE_MEMORY_NOT_REGISTERED"),
    (5025, "CU_FILE_PERMISSION_DENIED"),
    (DRIVER_ALREADY_OPEN, "CU_FILE_DRIVER_ALREADY_OPEN"),
    (5027, "CU_FILE_HANDLE_NOT_REGISTERED"),
    (5028, "CU_FILE_HANDLE_ALREADY_REGISTERED"),
    (5029, "CU_FILE_DEVICE_NOT_FOUND"),
    (5030, "CU_FILE_INTERNAL_ERROR"),
    (5031, "CU_FILE_GETNEWFD_FAILED"),
    (5033, "CU_FILE_NVFS_SETUP_ERROR"),
    (5034, "CU_FILE_IO_DISABLED"),
    (5036, "CU_FILE_GPU_MEMORY_PINNING_FAILED"),
    (5043, "CU_FILE_NOMEM_ERROR"),
    (5044, "CU_FILE_IO_ERROR"),
    (5045, "CU_FILE_INTERNAL_BUF_REGISTER_ERROR"),
    (5046, "CU_FILE_HASH_OPR_ERROR"),
    (5047, "CU_FILE_INVALID_CONTEXT_ERROR"),
    (5048, "CU_FILE_NVFS_INTERNAL_DRIVER_ERROR"),
    (5050, "CU_FILE_IO_MAX_ERROR"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_return_bytes_an_errno_or_a_cufile_code() {
        let cufile = |code| Err(FailureCause::CuFile { code, cuda: 0 });
        let table = [
            (4096, 0, Ok(4096)),
            (0, 0, Ok(0)),
            (100, 5, Ok(100)),
            (-1, 5, Err(FailureCause::Os(5))),
            (-1, 22, Err(FailureCause::Os(22))),
            // The answer of libcufile 1.20 to an unknown handle.
            (-1, 5027, cufile(5027)),
            (-1, 0, Err(FailureCause::Os(EIO))),
            (-1, -3, Err(FailureCause::Os(EIO))),
            (-14, 0, Err(FailureCause::Os(14))),
            (-5011, 0, cufile(5011)),
            (-5099, 7, cufile(5099)),
            (isize::MIN, 0, cufile(i32::MAX)),
        ];
        for (returned, errno, expected) in table {
            assert_eq!(
                outcome(returned, 4096, errno),
                expected,
                "{returned} with errno {errno}"
            );
        }
        assert!(
            matches!(outcome(4097, 4096, 0), Err(FailureCause::Refused(why)) if why.contains("4097"))
        );
    }

    proptest! {
        #[test]
        fn no_read_returns_more_bytes_than_requested(returned: isize, asked: usize, errno: i32) {
            match outcome(returned, asked, errno) {
                Ok(bytes) => prop_assert!(bytes <= asked && bytes as isize == returned),
                Err(cause) => prop_assert!(!cause.to_string().is_empty()),
            }
        }
    }

    #[test]
    fn codes_have_one_name_and_unknown_ones_keep_their_number() {
        assert!(NAMES.is_sorted_by(|a, b| a.0 < b.0));
        for (code, name) in NAMES {
            let failure = Failure::new("cuFileBufRegister", FailureCause::CuFile { code, cuda: 0 });
            assert!(
                failure
                    .to_string()
                    .starts_with(&format!("cuFileBufRegister: {name} ({code})")),
                "{failure}"
            );
        }
        let unknown = Failure::new(
            "cuFileRead",
            FailureCause::CuFile {
                code: 5999,
                cuda: 0,
            },
        );
        assert_eq!(
            unknown.to_string(),
            "cuFileRead: an unknown cuFile error (5999)"
        );
        let cuda = FailureCause::CuFile {
            code: CUDA_DRIVER_ERROR,
            cuda: 201,
        };
        assert_eq!(
            cuda.to_string(),
            "CU_FILE_CUDA_DRIVER_ERROR (5011), CUDA error 201"
        );
    }

    #[test]
    fn failures_become_errors_of_the_crate() {
        let table = [
            (
                Failure::new("cuFileHandleRegister", FailureCause::Os(5)),
                ErrorKind::Io,
                "cuFileHandleRegister",
            ),
            (
                Failure::new(
                    "cuFileBufRegister",
                    FailureCause::CuFile {
                        code: 5044,
                        cuda: 0,
                    },
                ),
                ErrorKind::Device,
                "5044",
            ),
            (
                Failure::refused("cuFileBufRegister", "too small"),
                ErrorKind::Device,
                "too small",
            ),
        ];
        for (failure, kind, words) in table {
            let error = failure.into_error().with_path("/data/x");
            assert_eq!((error.kind(), error.stage()), (kind, Stage::Device));
            assert!(
                error.to_string().contains(words) && error.to_string().contains("path=/data/x"),
                "{error}"
            );
        }
    }
}
