//! The crate's kernels: loading and launching.
//!
//! ```text
//! kernels/finish.cu ── build.py (NVRTC, by hand) ──► kernels/finish.ptx ── in this binary; compiled by the driver
//!          └── runs on the CPU in tests/device/kernels.rs
//! ```
//!
//! Limits: rows < 2^31; pictures as checked by `finish.rs`. Any launch shape gives the same bytes, so the shapes here
//! only affect speed. Nothing here waits: each launch is ordered by its stream.
//!
//! Invariant: every launch has ended before [`Kernels`] is dropped.

#![allow(unsafe_code)]

use super::driver::{DevicePtr, Gpu, Handle};
use crate::device::finish::{FinishPlan, Moments};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::sync::Hold;
use crate::tensor::DType;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

/// The kernels as PTX text, NUL-terminated. The driver compiles it for the GPU at hand.
pub(crate) const PTX: &str = concat!(include_str!("kernels/finish.ptx"), "\0");

/// `const u8* in, T* out, const u8* flips, u32 rows, height, width, channels, int channels_first, Moments`.
pub(crate) const FINISH_F32: &CStr = c"feedline_finish_f32";
/// As [`FINISH_F32`].
pub(crate) const FINISH_F16: &CStr = c"feedline_finish_f16";
/// As [`FINISH_F32`].
pub(crate) const FINISH_BF16: &CStr = c"feedline_finish_bf16";
/// `const u8* staging, const u64* offsets, u8* out, u64 row_bytes, u64 rows`.
pub(crate) const GATHER: &CStr = c"feedline_gather";

/// Threads per block; the kernels are compiled for at most this many.
const THREADS: u32 = 256;
/// Maximum blocks of a grid in y.
const GRID_Y_MAX: u32 = 65_535;

/// The loaded module and its functions.
pub(crate) struct Kernels {
    gpu: Arc<Gpu>,
    module: Handle,
    f32: Handle,
    f16: Handle,
    bf16: Handle,
    gather: Handle,
}

impl Kernels {
    /// The kernels of a GPU: loaded on first use, and shared until the last user drops them.
    ///
    /// Errors: as [`load`](Self::load).
    pub(crate) fn of(gpu: &Arc<Gpu>) -> Result<Arc<Self>> {
        let mut shared = gpu.loaded.hold();
        if let Some(Ok(loaded)) = shared.upgrade().map(Arc::downcast) {
            return Ok(loaded);
        }
        let loaded = Arc::new(Self::load(gpu)?);
        let weak = Arc::downgrade(&loaded);
        *shared = weak;
        Ok(loaded)
    }

    /// Compiles and loads the kernels. Takes up to seconds the first time; the driver caches the result.
    ///
    /// Errors: driver failures, for instance on a GPU older than Volta.
    fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let text = CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap_or_default();
        let module = gpu.load_module(text)?;
        let mut kernels = Self { gpu: gpu.clone(), module, f32: 0, f16: 0, bf16: 0, gather: 0 };
        for (function, name) in [
            (&mut kernels.f32, FINISH_F32),
            (&mut kernels.f16, FINISH_F16),
            (&mut kernels.bf16, FINISH_BF16),
            (&mut kernels.gather, GATHER),
        ] {
            *function = gpu.function(module, name)?;
        }
        Ok(kernels)
    }

    /// Converts `rows` pictures, as [`crate::device::Finish::apply`], in stream order. 0 rows launch nothing.
    ///
    /// Fast if both arrays are aligned to 16 bytes and the width is a multiple of 4; correct in any case.
    ///
    /// Errors: [`ErrorKind::Config`] for 2^31 rows or more; driver failures.
    ///
    /// # Safety
    /// The context is bound. Until the kernel has ended:
    /// * `input` is `rows * plan.input_bytes()` bytes in it, without a writer;
    /// * `out` is `rows * plan.output_bytes()` bytes without another user, aligned to the dtype;
    /// * `flips`, if given, is `rows` bytes without a writer.
    pub(crate) unsafe fn finish(
        &self,
        stream: Handle,
        plan: &FinishPlan,
        (input, out): (DevicePtr, DevicePtr),
        flips: Option<DevicePtr>,
        rows: usize,
    ) -> Result<()> {
        let Some(shape) = Shape::finish(plan.size.height * plan.size.width, rows)? else { return Ok(()) };
        let function = match plan.dtype {
            DType::F16 => self.f16,
            DType::BF16 => self.bf16,
            _ => self.f32,
        };
        // A plan has fewer than 2^31 values per picture, and the shape fewer than 2^31 rows, so no value is truncated.
        let sizes = [rows, plan.size.height, plan.size.width, plan.size.channels].map(|size| size as c_uint);
        let channels_first = c_int::from(plan.channels_first);
        let (flips, moments): (_, Moments) = (flips.unwrap_or(0), plan.moments);
        let params = [
            place(&input),
            place(&out),
            place(&flips),
            place(&sizes[0]),
            place(&sizes[1]),
            place(&sizes[2]),
            place(&sizes[3]),
            place(&channels_first),
            place(&moments),
        ];
        // SAFETY: the parameters match `FINISH_F32` in order and types; the caller promises the arrays.
        unsafe { self.launch(function, shape, stream, params) }
    }

    /// Copies `row_bytes` bytes of `staging` from `offsets[i]` to row `i` of `out`, in stream order.
    ///
    /// Any offset, length and address works. 0 rows or 0 bytes launch nothing.
    ///
    /// Errors: driver failures.
    ///
    /// # Safety
    /// The context is bound. Until the kernel has ended:
    /// * `offsets` is `rows` aligned `u64`s without a writer;
    /// * `offsets[i] + row_bytes` is at most the length of `staging`, and these bytes have no writer;
    /// * the 4-byte words around these bytes lie in the same allocation (true if it ends at a multiple of 4 bytes);
    /// * `out` is `rows * row_bytes` bytes without another user.
    pub(crate) unsafe fn gather(
        &self,
        stream: Handle,
        (staging, offsets, out): (DevicePtr, DevicePtr, DevicePtr),
        row_bytes: u64,
        rows: u64,
    ) -> Result<()> {
        let Some(shape) = Shape::gather(row_bytes, rows) else { return Ok(()) };
        let params = [place(&staging), place(&offsets), place(&out), place(&row_bytes), place(&rows)];
        // SAFETY: the parameters match `GATHER` in order and types; the caller promises the arrays.
        unsafe { self.launch(self.gather, shape, stream, params) }
    }

    /// # Safety
    /// Each of `params` points to a value of the function's parameter type, and the kernel may run with them.
    unsafe fn launch<const N: usize>(
        &self,
        function: Handle,
        shape: Shape,
        stream: Handle,
        mut params: [*mut c_void; N],
    ) -> Result<()> {
        let ([grid_x, grid_y], [block_x, block_y]) = (shape.grid, shape.block);
        // SAFETY: the caller's promise.
        unsafe { self.gpu.launch(function, [grid_x, grid_y, 1], [block_x, block_y, 1], stream, &mut params) }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        self.gpu.unload_module(self.module);
    }
}

/// A pointer to a parameter, as the driver takes it. The driver reads it during the launch call, and never writes it.
fn place<T>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

/// Blocks and threads of a launch, (x, y) each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    grid: [u32; 2],
    block: [u32; 2],
}

impl Shape {
    /// x: one thread per 4 pixels; y: pictures. `None`: nothing to launch.
    fn finish(pixels: usize, rows: usize) -> Result<Option<Self>> {
        let Some(rows) = u32::try_from(rows).ok().filter(|rows| *rows <= i32::MAX as u32) else {
            let message = format!("a batch has {rows} pictures to convert; at most 2^31 - 1 are possible");
            return Err(Error::new(ErrorKind::Config, Stage::Device, message));
        };
        let blocks = pixels.div_ceil(4 * THREADS as usize);
        // More blocks would not run at once, and the kernel's 32-bit indices must not wrap: threads loop over the grid.
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).min(1 << 20);
        let some = blocks > 0 && rows > 0;
        Ok(some.then(|| Self { grid: [blocks, rows.min(GRID_Y_MAX)], block: [THREADS, 1] }))
    }

    /// x: one thread per 16 bytes; y: rows, several per block if they are short. `None`: nothing to launch.
    fn gather(row_bytes: u64, rows: u64) -> Option<Self> {
        if row_bytes == 0 || rows == 0 {
            return None;
        }
        let windows = row_bytes / 16 + 2;
        let across = u32::try_from(windows).unwrap_or(u32::MAX).min(THREADS).next_power_of_two();
        let down = THREADS / across;
        let blocks =
            |count: u64, size: u32| u32::try_from(count.div_ceil(u64::from(size))).unwrap_or(u32::MAX).min(GRID_Y_MAX);
        Some(Self { grid: [blocks(windows, across), blocks(rows, down)], block: [across, down] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SOURCE: &str = include_str!("kernels/finish.cu");

    #[test]
    fn ptx_is_built_from_the_present_source() {
        let sum = format!("// crc32c of finish.cu: {:08x};", crc32c::crc32c(SOURCE.as_bytes()));
        let first = PTX.lines().next().unwrap();
        assert!(first.starts_with(&sum), "`{first}` is not `{sum}`: run src/device/cuda/kernels/build.py");
    }

    #[test]
    fn ptx_targets_cuda_12_0_and_volta() {
        let lines: Vec<&str> = PTX.lines().collect();
        assert!(lines.contains(&".version 8.0") && lines.contains(&".target sm_70"));
        assert!(lines.contains(&".address_size 64"));
        assert_eq!(PTX.find('\0'), Some(PTX.len() - 1), "one NUL, at the end");
    }

    #[test]
    fn ptx_has_exactly_the_named_kernels() {
        let word = ".visible .entry ";
        let mut entries: Vec<&str> =
            PTX.lines().filter_map(|line| line.strip_prefix(word)).map(|name| name.trim_end_matches('(')).collect();
        let mut names = [FINISH_F32, FINISH_F16, FINISH_BF16, GATHER].map(|name| name.to_str().unwrap());
        entries.sort_unstable();
        names.sort_unstable();
        assert_eq!(entries, names);
    }

    #[test]
    fn ptx_rounds_three_times_per_value() {
        let count = |word: &str| PTX.matches(word).count();
        let values = count("cvt.rn.f32.u16");
        assert!(values > 0);
        assert_eq!((count("div.rn.f32"), count("sub.rn.f32")), (2 * values, values));
        // Reciprocals, approximations, products, sums, fused operations, flushed subnormals.
        let others = ["rcp", "approx", "full", "mul", "add", "fma", "mad", ".ftz"];
        for line in PTX.lines().filter(|line| line.contains(".f32")) {
            assert!(!others.iter().any(|word| line.contains(word)), "{line}");
        }
    }

    #[test]
    fn empty_launches_have_no_shape() {
        assert_eq!(Shape::finish(100, 0).unwrap(), None);
        assert_eq!(Shape::gather(100, 0), None);
        assert_eq!(Shape::gather(0, 100), None);
        assert_eq!(Shape::finish(100, 1 << 31).unwrap_err().kind(), ErrorKind::Config);
    }

    #[test]
    fn usual_launches_have_one_thread_per_piece() {
        let cases = [
            (Shape::finish(224 * 224, 256).unwrap(), [49, 256], [256, 1]),
            (Shape::finish(1, 1).unwrap(), [1, 1], [256, 1]),
            (Shape::gather(150_528, 256), [37, 256], [256, 1]),
            (Shape::gather(8, 1000), [1, 8], [2, 128]),
            (Shape::gather(100, 3), [1, 1], [8, 32]),
        ];
        for (shape, grid, block) in cases {
            assert_eq!(shape, Some(Shape { grid, block }));
        }
    }

    proptest! {
        #[test]
        fn launches_stay_within_the_limits_of_cuda(
            pixels in prop_oneof![1usize..1 << 31, 1usize..2000],
            rows in prop_oneof![1u64..1 << 31, 1u64..2000],
            row_bytes in prop_oneof![any::<u64>(), 1u64..5000],
            many in any::<u64>(),
        ) {
            let finish = Shape::finish(pixels, rows as usize).unwrap().unwrap();
            let step = u64::from(finish.grid[0]) * u64::from(finish.block[0]);
            prop_assert!(pixels as u64 + step < 1 << 32, "indices of the kernel would wrap");
            let row_bytes = row_bytes.max(1);
            for shape in [Some(finish), Shape::gather(row_bytes, many.max(1)), Shape::gather(row_bytes, rows)] {
                let Shape { grid, block } = shape.unwrap();
                prop_assert!(grid.iter().chain(&block).all(|size| *size > 0));
                prop_assert!(block[0] * block[1] <= THREADS && grid[0] < 1 << 31 && grid[1] <= GRID_Y_MAX);
            }
        }
    }
}
