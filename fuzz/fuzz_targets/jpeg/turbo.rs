//! Whole pictures by libjpeg-turbo: the oracle.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use turbojpeg_sys as sys;

/// A decompressor that takes no damage.
struct Handle(NonNull<c_void>);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `tj3Init` and destroyed only here.
        unsafe { sys::tj3Destroy(self.0.as_ptr()) };
    }
}

impl Handle {
    /// One for a picture, whose header it has read: an earlier picture's tables are not there.
    fn of(picture: &[u8]) -> Option<Self> {
        // SAFETY: no pointers are passed.
        let handle = unsafe { sys::tj3Init(sys::TJINIT_TJINIT_DECOMPRESS as c_int) };
        let handle = Self(NonNull::new(handle).expect("memory for libjpeg-turbo"));
        // SAFETY: the handle is alive, and `picture` for the length of the call; the library reads within it.
        let code = unsafe {
            sys::tj3Set(handle.0.as_ptr(), sys::TJPARAM_TJPARAM_STOPONWARNING as c_int, 1);
            sys::tj3DecompressHeader(handle.0.as_ptr(), picture.as_ptr(), picture.len() as sys::size_t)
        };
        (code == 0).then_some(handle)
    }

    fn get(&self, parameter: sys::TJPARAM) -> c_int {
        // SAFETY: the handle is alive; an unknown parameter gives -1.
        unsafe { sys::tj3Get(self.0.as_ptr(), parameter as c_int) }
    }

    fn size(&self) -> (usize, usize) {
        let side = |parameter| self.get(parameter) as usize;
        (side(sys::TJPARAM_TJPARAM_JPEGWIDTH), side(sys::TJPARAM_TJPARAM_JPEGHEIGHT))
    }
}

/// Width and height of a sequential Huffman JPEG of 8 bits.
pub fn size_of_sequential(picture: &[u8]) -> Option<(usize, usize)> {
    let handle = Handle::of(picture)?;
    let other = [sys::TJPARAM_TJPARAM_PROGRESSIVE, sys::TJPARAM_TJPARAM_ARITHMETIC, sys::TJPARAM_TJPARAM_LOSSLESS];
    let plain = other.iter().all(|kind| handle.get(*kind) == 0) && handle.get(sys::TJPARAM_TJPARAM_PRECISION) == 8;
    plain.then(|| handle.size())
}

/// RGB at 1 / `scale` of the picture's size, which is `width` × `height` then; nothing if there is a warning.
pub fn pixels(picture: &[u8], (width, height): (usize, usize), scale: usize) -> Option<Vec<u8>> {
    let handle = Handle::of(picture)?;
    assert_eq!(handle.size(), (scale * width, scale * height));
    let colours = handle.get(sys::TJPARAM_TJPARAM_COLORSPACE);
    let inks = [sys::TJCS_TJCS_CMYK, sys::TJCS_TJCS_YCCK].iter().any(|space| *space as c_int == colours);
    let (channels, format) = if inks { (4, sys::TJPF_TJPF_CMYK) } else { (3, sys::TJPF_TJPF_RGB) };
    let mut pixels = vec![0; channels * width * height];
    let factor = sys::tjscalingfactor { num: 1, denom: scale as c_int };
    // SAFETY: the handle is alive, `picture` and `pixels` for the length of the call. The library reads the same header
    // again, and writes rows without gaps: `height` of `width` pixels of `channels` bytes, as many as `pixels` has.
    let code = unsafe {
        assert_eq!(sys::tj3SetScalingFactor(handle.0.as_ptr(), factor), 0);
        let (input, out) = (picture.as_ptr(), pixels.as_mut_ptr());
        sys::tj3Decompress8(handle.0.as_ptr(), input, picture.len() as sys::size_t, out, 0, format as c_int)
    };
    (code == 0).then(|| if inks { rgb_of_inks(&pixels) } else { pixels })
}

/// Inverted CMYK, as Adobe stores it: each ink times black, of 255, rounded.
fn rgb_of_inks(pixels: &[u8]) -> Vec<u8> {
    let times = |ink: u8, black: u8| ((2 * u32::from(ink) * u32::from(black) + 255) / 510) as u8;
    pixels.as_chunks::<4>().0.iter().flat_map(|[c, m, y, k]| [*c, *m, *y].map(|ink| times(ink, *k))).collect()
}
