//! t
#![allow(unsafe_code)]
use feedline::decode::Image;
use feedline::tensor::EncodedField;
use std::time::Instant;
use turbojpeg_sys as sys;
fn turbo(h: *mut std::ffi::c_void, input: &[u8], out: &mut Vec<u8>, crop: Option<(i32, i32, i32, i32)>) {
    unsafe {
        assert_eq!(sys::tj3DecompressHeader(h, input.as_ptr(), input.len() as _), 0);
        let w = sys::tj3Get(h, sys::TJPARAM_TJPARAM_JPEGWIDTH as i32);
        let hh = sys::tj3Get(h, sys::TJPARAM_TJPARAM_JPEGHEIGHT as i32);
        out.resize((3 * w * hh) as usize, 0);
        let r = crop.map_or(sys::tjregion { x: 0, y: 0, w: 0, h: 0 }, |(x, y, w, h)| sys::tjregion { x, y, w, h });
        assert_eq!(sys::tj3SetCroppingRegion(h, r), 0);
        assert_eq!(
            sys::tj3Decompress8(
                h,
                input.as_ptr(),
                input.len() as _,
                out.as_mut_ptr(),
                3 * crop.map_or(w, |c| c.2),
                sys::TJPF_TJPF_RGB as i32
            ),
            0
        );
    }
}
fn main() {
    let h = unsafe { sys::tj3Init(sys::TJINIT_TJINIT_DECOMPRESS as i32) };
    for path in std::env::args().skip(1) {
        let input = std::fs::read(&path).unwrap();
        let mut out = Vec::new();
        turbo(h, &input, &mut out, None);
        let (w, hh) = unsafe {
            (
                sys::tj3Get(h, sys::TJPARAM_TJPARAM_JPEGWIDTH as i32),
                sys::tj3Get(h, sys::TJPARAM_TJPARAM_JPEGHEIGHT as i32),
            )
        };
        let n = (200_000_000 / (w * hh) / 3).max(5) as u32;
        // 43 % of area: 0.656 of the sides
        let (cw, ch) = ((w as f64 * 0.656) as i32, (hh as f64 * 0.656) as i32);
        for crop in [false, true] {
            let image = if crop {
                Image::center_crop(w.min(hh) as u32, (w.min(hh) as f64 * 0.757) as u32)
            } else {
                Image::resize(w as u32, hh as u32)
            };
            let _ = ch;
            let side = (w.min(hh) as f64 * 0.757) as i32;
            let region = ((w - side) / 2 / 16 * 16, (hh - side) / 2, side + 16, side);
            let _ = cw;
            let mut single = feedline::decode::Single::new(image, &EncodedField::image("x")).unwrap();
            let mut ratios = Vec::new();
            let (mut a, mut b) = (0.0, 0.0);
            for _ in 0..15 {
                let t = Instant::now();
                for _ in 0..n / 15 + 1 {
                    single.decode(&input, 0, 0, 0).unwrap();
                }
                a = t.elapsed().as_secs_f64();
                let t = Instant::now();
                for _ in 0..n / 15 + 1 {
                    turbo(h, &input, &mut out, crop.then_some(region));
                }
                b = t.elapsed().as_secs_f64();
                ratios.push(b / a);
            }
            ratios.sort_by(f64::total_cmp);
            println!(
                "{path} crop {crop}: {:.3} [{:.3} {:.3}] own {:.2} ms turbo {:.2} ms",
                ratios[7],
                ratios[2],
                ratios[12],
                1e3 * a / (n / 15 + 1) as f64,
                1e3 * b / (n / 15 + 1) as f64
            );
        }
    }
}
