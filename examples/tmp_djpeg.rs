//! t
use feedline::decode::Image;
use feedline::tensor::EncodedField;
fn main() {
    let dir = std::env::args().nth(1).unwrap();
    let (mut equal, mut wrong) = (0, 0);
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|e| e != "jpg") {
            continue;
        }
        let input = std::fs::read(&path).unwrap();
        let ppm = std::fs::read(path.with_extension("ppm")).unwrap();
        let mut fields = ppm.splitn(4, |b| b.is_ascii_whitespace());
        let magic = fields.next().unwrap();
        let w: u32 = std::str::from_utf8(fields.next().unwrap()).unwrap().parse().unwrap();
        let h: u32 = std::str::from_utf8(fields.next().unwrap()).unwrap().parse().unwrap();
        let rest = fields.next().unwrap();
        let pixels = &rest[4..];
        let pixels: Vec<u8> =
            if magic == b"P5" { pixels.iter().flat_map(|g| [*g; 3]).collect() } else { pixels.to_vec() };
        let mut single = feedline::decode::Single::new(Image::resize(w, h), &EncodedField::image("x")).unwrap();
        match single.decode(&input, 0, 0, 0) {
            Ok(_) if single.bytes(0) == pixels => equal += 1,
            Ok(_) => {
                wrong += 1;
                if wrong < 10 {
                    println!("differs: {path:?}")
                }
            }
            Err(e) => {
                wrong += 1;
                if wrong < 10 {
                    println!("{path:?}: {e}")
                }
            }
        }
    }
    println!("{equal} equal, {wrong} wrong");
}
