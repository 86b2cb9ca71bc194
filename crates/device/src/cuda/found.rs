//! A device visible to the driver, or the reason why CUDA is not used.

use std::fmt;

/// Reason why CUDA is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Absent {
    /// The driver library could not be loaded; includes the dynamic linker's message.
    NoLibrary(String),
    /// The library is too old for this crate, or is not a driver.
    TooOld(String),
    /// The driver fails to start: code and name.
    Init(i32, String),
    /// The driver sees no device: none installed, or hidden by `CUDA_VISIBLE_DEVICES`.
    NoDevice,
}

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary(words) => write!(f, "no CUDA driver: {words}"),
            Self::TooOld(words) => write!(f, "the CUDA driver is too old: {words}"),
            Self::Init(code @ 999, name) => {
                write!(
                    f,
                    "the CUDA driver does not start: {name} ({code}): is there a device \
                     /dev/nvidia-uvm?"
                )
            }
            Self::Init(code, name) => write!(
                f,
                "the CUDA driver does not start: {name} ({code}){}",
                hint(*code)
            ),
            Self::NoDevice => match std::env::var("CUDA_VISIBLE_DEVICES") {
                Ok(seen) => write!(
                    f,
                    "no CUDA device is visible (CUDA_VISIBLE_DEVICES={seen:?})"
                ),
                Err(_) => f.write_str("no CUDA device"),
            },
        }
    }
}

impl std::error::Error for Absent {}

/// Hints for the driver's result codes, from any call.
const HINTS: [(i32, &str); 11] = [
    (
        34,
        "this libcuda is the stub for linking, the driver's own must come first on \
         the library path",
    ),
    (
        46,
        "another process uses the GPU exclusively, or its compute mode forbids work; \
         see nvidia-smi -q -d COMPUTE",
    ),
    (
        209,
        "the kernels run on GPUs of compute capability 7.0 (Volta) and newer",
    ),
    (
        221,
        "the driver compiles the kernels for this GPU with libnvidia-ptxjitcompiler; \
         install the one of its release",
    ),
    (
        222,
        "libnvidia-ptxjitcompiler is older than the driver, install that of the driver's release",
    ),
    (
        223,
        "the driver must compile the kernels for this GPU; unset CUDA_DISABLE_JIT and \
         CUDA_DISABLE_PTX_JIT",
    ),
    (
        802,
        "GPUs behind an NVSwitch need the service nvidia-fabricmanager, of the driver's release",
    ),
    (
        803,
        "libcuda and the kernel's driver are of different releases",
    ),
    (
        804,
        "the compatibility libraries of CUDA do not support this GPU",
    ),
    (
        916,
        "the GPU's keys for confidential computing were not renewed, start the process again",
    ),
    (
        919,
        "the links between the GPUs are not up yet, try again in a minute; see \
         nvidia-smi -q, Fabric",
    ),
];

/// The hint to append to a code's name; empty for most codes.
pub(super) fn hint(code: i32) -> String {
    HINTS
        .iter()
        .find(|(other, _)| *other == code)
        .map_or_else(String::new, |(_, words)| format!(": {words}"))
}

/// A GPU visible to the process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// Number for `Device::cuda(ordinal)`.
    pub ordinal: usize,
    /// The vendor's name.
    pub name: String,
    /// Bytes of device memory.
    pub bytes: usize,
    /// PCI address, as in `/sys/bus/pci/devices`.
    pub pci_bus_id: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_does_not_start_is_explained() {
        for (code, words) in [
            (3, "(3)"),
            (34, "(34): this libcuda is the stub for linking"),
            (46, "(46): another process uses the GPU exclusively"),
            (
                209,
                "(209): the kernels run on GPUs of compute capability 7.0",
            ),
            (
                221,
                "(221): the driver compiles the kernels for this GPU with \
                 libnvidia-ptxjitcompiler; install",
            ),
            (
                222,
                "(222): libnvidia-ptxjitcompiler is older than the driver",
            ),
            (
                223,
                "(223): the driver must compile the kernels for this GPU; unset CUDA_DISABLE_JIT",
            ),
            (
                802,
                "(802): GPUs behind an NVSwitch need the service nvidia-fabricmanager",
            ),
            (803, "(803): libcuda and the kernel's driver"),
            (804, "(804): the compatibility libraries"),
            (916, "(916): the GPU's keys for confidential computing"),
            (
                919,
                "(919): the links between the GPUs are not up yet, try again",
            ),
            (999, "(999): is there a device /dev/nvidia-uvm?"),
        ] {
            let said = Absent::Init(code, "NAME".into()).to_string();
            let start = format!("the CUDA driver does not start: NAME {words}");
            assert!(
                said.starts_with(&start) && (code != 3 || said == start),
                "{said}"
            );
        }
    }
}
