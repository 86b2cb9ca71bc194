//! Loads and launches the crate's kernels, and uploads their tables of results.
//!
//! ```text
//! kernels/finish.cu ─┬─ build.py (by hand) ──► kernels/finish.ptx ──► kernels/finish.fatbin: machine code and PTX, in this binary
//!                    └─ runs on the CPU in tests/device/kernels.rs
//! ```
//!
//! Limits: rows < 2^31; pictures as checked by `finish.rs`. Any launch shape gives the same bytes,
//! so the shapes here only affect speed. No launch waits: each is ordered by its stream.
//!
//! Invariant: every launch has ended before [`Kernels`] and [`Finisher`] are dropped.

#![allow(unsafe_code)]

use super::driver::{Gpu, Handle};
use crate::backend::DevicePtr;
use crate::cuda::driver::DeviceMemory;
use crate::finish::FinishPlan;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use feedline_base::sync::Hold;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;

/// A fat binary, aligned as NVIDIA's tools align it.
#[repr(C, align(16))]
struct FatBinary<B: ?Sized>(B);

/// The kernels for all GPUs: the driver uses matching machine code, or else compiles the PTX.
static KERNELS: &FatBinary<[u8]> = &FatBinary(*include_bytes!("kernels/finish.fatbin"));

/// Results of 2 bytes: `const u8* in, T* out, const u8* flips, const T* table, u32 rows, height,
/// width, channels, int channels_first`.
const FINISH_2: &CStr = c"feedline_finish_2";
/// Results of 4 bytes; the parameters are those of [`FINISH_2`].
const FINISH_4: &CStr = c"feedline_finish_4";
/// `const u8* staging, const u64* offsets, u8* out, u64 row_bytes, u64 rows`.
const GATHER: &CStr = c"feedline_gather";

/// Threads per block; the kernels are compiled for at most this many.
const THREADS: u32 = 256;
/// Maximum blocks of [`FINISH_2`] and [`FINISH_4`]. Each block loads the table, 1 to 4 KiB, so it
/// should convert many pixels. With 256 pictures of 224 x 224, a block converts 7168 pixels, and
/// the table is 2 to 3 % of its traffic. The largest GPUs run 800 to 1200 blocks at once, so
/// about two waves run, and the GPU is not underused for long at the end.
const BLOCKS: usize = 2048;
/// Maximum blocks of a grid in y.
const GRID_Y_MAX: u32 = 65_535;

/// The loaded module and its functions.
pub(crate) struct Kernels {
    gpu: Arc<Gpu>,
    module: Handle,
    finish_2: Handle,
    finish_4: Handle,
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

    /// Loads the kernels. On a GPU without matching machine code this takes half a second, but only
    /// once, because the driver caches the compiled code.
    ///
    /// Errors: driver failures, for instance on a GPU older than Volta.
    fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        // SAFETY: made by NVIDIA's `fatbinary`, and whole.
        let module = unsafe { gpu.load_module(&KERNELS.0) }?;
        let mut kernels = Self {
            gpu: gpu.clone(),
            module,
            finish_2: 0,
            finish_4: 0,
            gather: 0,
        };
        for (function, name) in [
            (&mut kernels.finish_2, FINISH_2),
            (&mut kernels.finish_4, FINISH_4),
            (&mut kernels.gather, GATHER),
        ] {
            *function = gpu.function(module, name)?;
        }
        Ok(kernels)
    }

    /// Copies `row_bytes` bytes of `staging` from `offsets[i]` to row `i` of `out`, in stream
    /// order.
    ///
    /// Any offset, length and address works. 0 rows or 0 bytes launch nothing.
    ///
    /// Errors: driver failures.
    ///
    /// # Safety
    /// The context is bound. Until the kernel has ended:
    /// * `offsets` is `rows` aligned `u64`s without a writer;
    /// * `offsets[i] + row_bytes` is at most the length of `staging`, and these bytes have no
    ///   writer;
    /// * the 4-byte words around these bytes lie in the same allocation (true if it ends at a
    ///   multiple of 4 bytes);
    /// * `out` is `rows * row_bytes` bytes without another user.
    pub(crate) unsafe fn gather(
        &self,
        stream: Handle,
        staging: DevicePtr,
        offsets: DevicePtr,
        out: DevicePtr,
        row_bytes: u64,
        rows: u64,
    ) -> Result<()> {
        let Some(shape) = Shape::gather(row_bytes, rows) else {
            return Ok(());
        };
        let params = [
            place(&staging),
            place(&offsets),
            place(&out),
            place(&row_bytes),
            place(&rows),
        ];
        // SAFETY: the parameters match `GATHER` in order and types; the caller promises the arrays.
        unsafe { self.launch(self.gather, shape, stream, params) }
    }

    /// # Safety
    /// Each of `params` points to a value of the function's parameter type, and the kernel may run
    /// with them.
    unsafe fn launch<const N: usize>(
        &self,
        function: Handle,
        shape: Shape,
        stream: Handle,
        mut params: [*mut c_void; N],
    ) -> Result<()> {
        let [grid_x, grid_y] = shape.grid;
        let [block_x, block_y] = shape.block;
        // SAFETY: the caller's promise.
        unsafe {
            self.gpu.launch(
                function,
                [grid_x, grid_y, 1],
                [block_x, block_y, 1],
                stream,
                &mut params,
            )
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        self.gpu.unload_module(self.module);
    }
}

/// A conversion of pictures, with its table in device memory.
pub(crate) struct Finisher {
    kernels: Arc<Kernels>,
    table: DeviceMemory,
}

impl Finisher {
    /// Loads the kernels and uploads the plan's table. Waits for the copy.
    pub(crate) fn new(gpu: &Arc<Gpu>, plan: &FinishPlan) -> Result<Self> {
        let kernels = Kernels::of(gpu)?;
        let table = DeviceMemory::holding(gpu, plan.table(), "a table of pixel values")?;
        Ok(Self { kernels, table })
    }

    /// Converts `rows` pictures, as [`crate::Finish::apply`], in stream order. 0 rows
    /// launch nothing.
    ///
    /// Fast if both arrays are aligned to 16 bytes and the width is a multiple of 4; correct in any
    /// case.
    ///
    /// Errors: [`ErrorKind::Config`] for 2^31 rows or more; driver failures.
    ///
    /// # Safety
    /// The context is bound, and the plan is that of [`Finisher::new`]. Until the kernel has ended:
    /// * `input` is `rows * plan.input_bytes()` bytes in it, without a writer;
    /// * `out` is `rows * plan.output_bytes()` bytes without another user, aligned to the dtype;
    /// * `flips`, if given, is `rows` bytes without a writer.
    pub(crate) unsafe fn run(
        &self,
        stream: Handle,
        plan: &FinishPlan,
        input: DevicePtr,
        out: DevicePtr,
        flips: Option<DevicePtr>,
        rows: usize,
    ) -> Result<()> {
        let Some(shape) = Shape::finish(plan.size.height * plan.size.width, rows)? else {
            return Ok(());
        };
        let function = match plan.dtype.size() {
            2 => self.kernels.finish_2,
            _ => self.kernels.finish_4,
        };
        // A plan has fewer than 2^31 values per picture, and the shape fewer than 2^31 rows, so no
        // value is truncated.
        let sizes = [rows, plan.size.height, plan.size.width, plan.size.channels]
            .map(|size| size as c_uint);
        let channels_first = c_int::from(plan.channels_first);
        let flips = flips.unwrap_or(0);
        let table = self.table.ptr();
        let params = [
            place(&input),
            place(&out),
            place(&flips),
            place(&table),
            place(&sizes[0]),
            place(&sizes[1]),
            place(&sizes[2]),
            place(&sizes[3]),
            place(&channels_first),
        ];
        // SAFETY: the parameters match `FINISH_2` in order and types; the caller promises the
        // arrays, and `self` has the table.
        unsafe { self.kernels.launch(function, shape, stream, params) }
    }
}

/// A pointer to a parameter, as the driver takes it. The driver reads it during the launch call,
/// and never writes it.
fn place<T>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

/// Numbers of blocks and of threads per block of a launch, each as (x, y).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    grid: [u32; 2],
    block: [u32; 2],
}

impl Shape {
    /// The shape for `FINISH_2` and `FINISH_4`: one thread per 4 pixels in x, pictures in y. All
    /// blocks convert the same number of pixels and pictures. `None`: nothing to launch.
    fn finish(pixels: usize, rows: usize) -> Result<Option<Self>> {
        if rows > i32::MAX as usize {
            let message =
                format!("a batch has {rows} pictures to convert; at most 2^31 - 1 are possible");
            return Err(Error::new(ErrorKind::Config, Stage::Device, message));
        }
        if pixels == 0 || rows == 0 {
            return Ok(None);
        }
        let down = rows.div_ceil(rows.div_ceil(BLOCKS));
        let whole = pixels.div_ceil(4 * THREADS as usize);
        let across = whole.div_ceil(whole.div_ceil(BLOCKS / down));
        Ok(Some(Self {
            grid: [across as u32, down as u32],
            block: [THREADS, 1],
        }))
    }

    /// The shape for `GATHER`: one thread per 16 bytes in x; rows in y, several per block if rows
    /// are short. `None`: nothing to launch.
    fn gather(row_bytes: u64, rows: u64) -> Option<Self> {
        if row_bytes == 0 || rows == 0 {
            return None;
        }
        let windows = row_bytes / 16 + 2;
        let across = u32::try_from(windows)
            .unwrap_or(u32::MAX)
            .min(THREADS)
            .next_power_of_two();
        let down = THREADS / across;
        let blocks = |count: u64, size: u32| {
            u32::try_from(count.div_ceil(u64::from(size)))
                .unwrap_or(u32::MAX)
                .min(GRID_Y_MAX)
        };
        Some(Self {
            grid: [blocks(windows, across), blocks(rows, down)],
            block: [across, down],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SOURCE: &str = include_str!("kernels/finish.cu");
    const PTX: &str = include_str!("kernels/finish.ptx");

    /// The images of the fat binary: kind (1 is PTX, 2 is ELF), GPU, bytes.
    fn images() -> Vec<(u16, u32, &'static [u8])> {
        let number = |at: usize, len: usize| {
            let bytes = KERNELS.0[at..at + len].iter().rev();
            bytes.fold(0, |number, byte| number << 8 | usize::from(*byte))
        };
        assert_eq!(
            (number(0, 4), number(8, 8)),
            (0xba55_ed50, KERNELS.0.len() - 16),
            "magic number, length"
        );
        let mut images = Vec::new();
        let mut at = 16;
        while at < KERNELS.0.len() {
            let from = at + number(at + 4, 4);
            let len = number(at + 8, 8);
            images.push((
                number(at, 2) as u16,
                number(at + 28, 4) as u32,
                &KERNELS.0[from..from + len],
            ));
            at = from + len;
        }
        images
    }

    #[test]
    fn ptx_is_built_from_the_present_source() {
        let sum = format!(
            "// crc32c of finish.cu: {:08x};",
            crc32c::crc32c(SOURCE.as_bytes())
        );
        let first = PTX.lines().next().unwrap();
        assert!(
            first.starts_with(&sum),
            "`{first}` is not `{sum}`: run src/device/cuda/kernels/build.py"
        );
    }

    #[test]
    fn ptx_targets_cuda_12_0_and_volta() {
        let lines: Vec<&str> = PTX.lines().collect();
        assert!(lines.contains(&".version 8.0") && lines.contains(&".target sm_70"));
        assert!(lines.contains(&".address_size 64"));
    }

    #[test]
    fn ptx_has_exactly_the_named_kernels() {
        let word = ".visible .entry ";
        let mut entries: Vec<&str> = PTX
            .lines()
            .filter_map(|line| line.strip_prefix(word))
            .map(|name| name.trim_end_matches('('))
            .collect();
        entries.sort_unstable();
        assert_eq!(
            entries,
            [FINISH_2, FINISH_4, GATHER].map(|name| name.to_str().unwrap())
        );
    }

    #[test]
    fn ptx_computes_nothing_with_floats() {
        assert!(!PTX.contains(".f32") && !PTX.contains(".f16") && !PTX.contains(".f64"));
    }

    #[test]
    fn the_fat_binary_has_the_ptx_and_code_for_four_gpus() {
        let images = images();
        let kinds: Vec<(u16, u32)> = images.iter().map(|(kind, gpu, _)| (*kind, *gpu)).collect();
        assert_eq!(kinds, [(2, 80), (2, 90), (2, 100), (2, 120), (1, 70)]);
        // `fatbinary` removes comments and tabs.
        let bare = |text: &str| -> String {
            let lines = text.lines().filter_map(|line| line.split("//").next());
            lines
                .flat_map(str::chars)
                .filter(|c| !c.is_whitespace())
                .collect()
        };
        let text = CStr::from_bytes_until_nul(images[4].2)
            .unwrap()
            .to_str()
            .unwrap();
        assert!(
            bare(text) == bare(PTX),
            "finish.fatbin has other PTX: run src/device/cuda/kernels/build.py"
        );
        for (_, gpu, code) in &images[..4] {
            assert!(code.starts_with(b"\x7fELF"), "sm_{gpu}");
            for name in [FINISH_2, FINISH_4, GATHER].map(CStr::to_bytes_with_nul) {
                let symbol = [b".text.", name].concat();
                assert!(
                    code.windows(symbol.len()).any(|part| part == symbol),
                    "sm_{gpu}: {name:?}"
                );
            }
        }
    }

    #[test]
    fn empty_launches_have_no_shape() {
        assert_eq!(Shape::finish(100, 0).unwrap(), None);
        assert_eq!(Shape::gather(100, 0), None);
        assert_eq!(Shape::gather(0, 100), None);
        assert_eq!(
            Shape::finish(100, 1 << 31).unwrap_err().kind(),
            ErrorKind::Config
        );
    }

    #[test]
    fn usual_launches_have_equal_blocks() {
        let cases = [
            (Shape::finish(224 * 224, 256).unwrap(), [7, 256], [256, 1]),
            (Shape::finish(224 * 224, 16).unwrap(), [49, 16], [256, 1]),
            (Shape::finish(32 * 32, 2049).unwrap(), [1, 1025], [256, 1]),
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
