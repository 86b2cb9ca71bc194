//! libjpeg-turbo, called as from C: the oracle of the JPEG engine, and what benches compare it
//! with.

#![allow(unsafe_code, dead_code, reason = "each user needs a part")]

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use turbojpeg_sys as sys;

/// Left, top, width, height.
pub type Region = [u32; 4];

struct Handle(NonNull<c_void>);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `tj3Init` and destroyed only here.
        unsafe { sys::tj3Destroy(self.0.as_ptr()) };
    }
}

impl Handle {
    fn new(kind: sys::TJINIT) -> Self {
        // SAFETY: no pointers are passed.
        let handle = unsafe { sys::tj3Init(kind as c_int) };
        Self(NonNull::new(handle).expect("memory for libjpeg-turbo"))
    }

    /// A decompressor that has read this picture's header, and takes damage or not.
    fn of(picture: &[u8], strict: bool) -> Option<Self> {
        let mut handle = Self::new(sys::TJINIT_TJINIT_DECOMPRESS);
        handle.set(sys::TJPARAM_TJPARAM_STOPONWARNING, c_int::from(strict));
        (handle.read(picture) || (!strict && handle.warned())).then_some(handle)
    }

    /// Whether the last call failed by a warning alone.
    fn warned(&self) -> bool {
        // SAFETY: the handle is alive.
        unsafe { sys::tj3GetErrorCode(self.0.as_ptr()) == sys::TJERR_TJERR_WARNING as c_int }
    }

    fn set(&mut self, parameter: sys::TJPARAM, value: c_int) {
        // SAFETY: the handle is alive; the library checks numbers.
        let code = unsafe { sys::tj3Set(self.0.as_ptr(), parameter as c_int, value) };
        assert_eq!(code, 0);
    }

    fn get(&self, parameter: sys::TJPARAM) -> c_int {
        // SAFETY: the handle is alive; an unknown parameter gives -1.
        unsafe { sys::tj3Get(self.0.as_ptr(), parameter as c_int) }
    }

    fn read(&mut self, picture: &[u8]) -> bool {
        let size = picture.len() as sys::size_t;
        // SAFETY: the handle is alive, and `picture` for the length of the call; the library reads
        // within it.
        unsafe { sys::tj3DecompressHeader(self.0.as_ptr(), picture.as_ptr(), size) == 0 }
    }

    fn size(&self) -> (usize, usize) {
        let side = |parameter| self.get(parameter) as usize;
        (
            side(sys::TJPARAM_TJPARAM_JPEGWIDTH),
            side(sys::TJPARAM_TJPARAM_JPEGHEIGHT),
        )
    }

    /// Decodes to rows without gaps, as many bytes as `out` has; `false` on an error or a warning.
    fn decode(&mut self, picture: &[u8], format: sys::TJPF, out: &mut [u8]) -> bool {
        let size = picture.len() as sys::size_t;
        // SAFETY: the handle is alive, `picture` and `out` for the length of the call. The library
        // reads the same header again, and callers give the room that its size, scale and region
        // need.
        unsafe {
            sys::tj3Decompress8(
                self.0.as_ptr(),
                picture.as_ptr(),
                size,
                out.as_mut_ptr(),
                0,
                format as c_int,
            ) == 0
        }
    }
}

/// Width and height of a Huffman JPEG of 8 bits.
pub fn size(picture: &[u8]) -> Option<(usize, usize)> {
    let handle = Handle::of(picture, true)?;
    let other = [
        sys::TJPARAM_TJPARAM_ARITHMETIC,
        sys::TJPARAM_TJPARAM_LOSSLESS,
    ];
    let plain = other.iter().all(|kind| handle.get(*kind) == 0)
        && handle.get(sys::TJPARAM_TJPARAM_PRECISION) == 8;
    plain.then(|| handle.size())
}

pub fn is_progressive(picture: &[u8]) -> bool {
    Handle::of(picture, false)
        .is_some_and(|handle| handle.get(sys::TJPARAM_TJPARAM_PROGRESSIVE) == 1)
}

/// Size and RGB at 1 / `scale` of the picture's size, each side rounded up; nothing if there is a
/// warning.
pub fn pixels(picture: &[u8], scale: usize) -> Option<((usize, usize), Vec<u8>)> {
    pixels_of(picture, scale, (true, 0))
}

/// As [`pixels`], also of what is damaged; nothing if there is an error.
pub fn shown(picture: &[u8], scale: usize) -> Option<((usize, usize), Vec<u8>)> {
    // An error behind a warning is told as a warning. But it leaves pixels unwritten.
    let [black, white] = [0, 255].map(|value| pixels_of(picture, scale, (false, value)));
    black.filter(|black| white.as_ref() == Some(black))
}

fn pixels_of(
    picture: &[u8],
    scale: usize,
    (strict, before): (bool, u8),
) -> Option<((usize, usize), Vec<u8>)> {
    let mut handle = Handle::of(picture, strict)?;
    let (width, height) = handle.size();
    let width = width.div_ceil(scale);
    let height = height.div_ceil(scale);
    let colours = handle.get(sys::TJPARAM_TJPARAM_COLORSPACE);
    let inks = [sys::TJCS_TJCS_CMYK, sys::TJCS_TJCS_YCCK]
        .iter()
        .any(|space| *space as c_int == colours);
    let (channels, format) = if inks {
        (4, sys::TJPF_TJPF_CMYK)
    } else {
        (3, sys::TJPF_TJPF_RGB)
    };
    let mut pixels = vec![before; channels * width * height];
    let factor = sys::tjscalingfactor {
        num: 1,
        denom: scale as c_int,
    };
    // SAFETY: the handle is alive; the factor is passed by value and checked by the library.
    let code = unsafe { sys::tj3SetScalingFactor(handle.0.as_ptr(), factor) };
    assert_eq!(code, 0);
    let done = handle.decode(picture, format, &mut pixels) || (!strict && handle.warned());
    done.then(|| {
        (
            (width, height),
            if inks { rgb_of_inks(&pixels) } else { pixels },
        )
    })
}

/// Inverted CMYK, as Adobe stores it: each ink times black, of 255, rounded.
fn rgb_of_inks(pixels: &[u8]) -> Vec<u8> {
    let times = |ink: u8, black: u8| ((2 * u32::from(ink) * u32::from(black) + 255) / 510) as u8;
    pixels
        .as_chunks::<4>()
        .0
        .iter()
        .flat_map(|[c, m, y, k]| [*c, *m, *y].map(|ink| times(ink, *k)))
        .collect()
}

/// A decompressor for many pictures, and its pixels.
pub struct Turbo {
    handle: Handle,
    pub pixels: Vec<u8>,
}

impl Default for Turbo {
    fn default() -> Self {
        Self {
            handle: Handle::new(sys::TJINIT_TJINIT_DECOMPRESS),
            pixels: vec![0; 1 << 26],
        }
    }
}

impl Turbo {
    /// Decodes the picture or a region. Returns the decoded part, its left side rounded down to 16
    /// pixels.
    pub fn decode(
        &mut self,
        input: &[u8],
        region: impl FnOnce(u32, u32) -> Option<Region>,
    ) -> Region {
        assert!(self.handle.read(input));
        let (width, height) = self.handle.size();
        assert!(width * height * 3 <= self.pixels.len());
        let width = width as u32;
        let height = height as u32;
        let region = region(width, height).unwrap_or([0, 0, width, height]);
        let left = region[0] / 16 * 16;
        let there = [left, region[1], region[0] + region[2] - left, region[3]];
        let [x, y, w, h] = there.map(|side| side as c_int);
        let region = sys::tjregion { x, y, w, h };
        // SAFETY: the handle is alive; the region is passed by value and checked by the library.
        let code = unsafe { sys::tj3SetCroppingRegion(self.handle.0.as_ptr(), region) };
        assert_eq!(code, 0);
        assert!(
            self.handle
                .decode(input, sys::TJPF_TJPF_RGB, &mut self.pixels)
        );
        there
    }
}

/// Settings of a JPEG that libjpeg-turbo writes.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    pub subsampling: c_int,
    pub quality: c_int,
    /// MCUs between restart markers; 0: none.
    pub interval: c_int,
    pub progressive: bool,
}

/// Encodes RGB pixels.
pub fn encoded(pixels: &[u8], (width, height): (u32, u32), written: Written) -> Vec<u8> {
    assert_eq!(
        pixels.len() as u64,
        3 * u64::from(width) * u64::from(height)
    );
    let mut handle = Handle::new(sys::TJINIT_TJINIT_COMPRESS);
    handle.set(sys::TJPARAM_TJPARAM_SUBSAMP, written.subsampling);
    handle.set(sys::TJPARAM_TJPARAM_QUALITY, written.quality);
    handle.set(sys::TJPARAM_TJPARAM_RESTARTBLOCKS, written.interval);
    handle.set(
        sys::TJPARAM_TJPARAM_PROGRESSIVE,
        c_int::from(written.progressive),
    );
    let mut start = std::ptr::null_mut();
    let mut length = 0;
    let width = width as c_int;
    let height = height as c_int;
    let format = sys::TJPF_TJPF_RGB as c_int;
    // SAFETY: `pixels` has width × height pixels (assertion above). Null lets the library allocate
    // the output; the returned length of it is copied, and it is freed once.
    unsafe {
        let source = pixels.as_ptr();
        let code = sys::tj3Compress8(
            handle.0.as_ptr(),
            source,
            width,
            0,
            height,
            format,
            &mut start,
            &mut length,
        );
        assert_eq!(code, 0);
        let bytes = std::slice::from_raw_parts(start, length as usize).to_vec();
        sys::tj3Free(start.cast());
        bytes
    }
}
