//! libjpeg-turbo alone, called as from C: the reference for the crate's overhead.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use turbojpeg_sys as sys;

/// Left, top, width, height.
pub type Region = [u32; 4];

/// A decompressor, and its pixels.
pub struct Turbo {
    handle: *mut c_void,
    pub pixels: Vec<u8>,
}

impl Turbo {
    pub fn new() -> Self {
        // SAFETY: no pointers are passed.
        let handle = unsafe { sys::tj3Init(sys::TJINIT_TJINIT_DECOMPRESS as c_int) };
        assert!(!handle.is_null());
        Self { handle, pixels: vec![0; 1 << 26] }
    }

    /// Decodes the picture or a region. Returns the decoded part, its left side rounded down to 16 pixels.
    pub fn decode(&mut self, input: &[u8], region: impl FnOnce(u32, u32) -> Option<Region>) -> Region {
        // SAFETY: handle and slices are alive for the length of the calls. The pixels have room for the largest
        // picture, which is asserted.
        unsafe {
            let size = input.len() as sys::size_t;
            assert_eq!(sys::tj3DecompressHeader(self.handle, input.as_ptr(), size), 0);
            let get = |parameter| sys::tj3Get(self.handle, parameter as c_int) as u32;
            let (width, height) = (get(sys::TJPARAM_TJPARAM_JPEGWIDTH), get(sys::TJPARAM_TJPARAM_JPEGHEIGHT));
            assert!((width * height * 3) as usize <= self.pixels.len());
            let region = region(width, height).unwrap_or([0, 0, width, height]);
            let left = region[0] / 16 * 16;
            let there = [left, region[1], region[0] + region[2] - left, region[3]];
            let [x, y, w, h] = there.map(|side| side as c_int);
            assert_eq!(sys::tj3SetCroppingRegion(self.handle, sys::tjregion { x, y, w, h }), 0);
            let format = sys::TJPF_TJPF_RGB as c_int;
            let code = sys::tj3Decompress8(self.handle, input.as_ptr(), size, self.pixels.as_mut_ptr(), 3 * w, format);
            assert_eq!(code, 0);
            there
        }
    }
}

impl Drop for Turbo {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        unsafe { sys::tj3Destroy(self.handle) };
    }
}
