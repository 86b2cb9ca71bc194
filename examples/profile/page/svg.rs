//! Basics of all drawings: coordinates, scales with ticks, formatted numbers, escaping.
//!
//! Every coordinate is finite and within its scale, so no input number can break a drawing.

use crate::text::{self, grouped};
use std::fmt::{self, Display, Write};

/// Width of a drawing; the page scales it.
pub(super) const WIDTH: f64 = 1100.0;
/// Start of scales, after their labels, and their end, which leaves space for half of the last tick.
pub(super) const LEFT: f64 = 92.0;
pub(super) const RIGHT: f64 = WIDTH - 22.0;

/// Escapes text for HTML and SVG, in elements and attributes. Characters illegal in either become U+FFFD.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(character),
            control if control.is_control() => out.push('\u{fffd}'),
            // Noncharacters, and characters that change the direction of the following text.
            '\u{fffe}' | '\u{ffff}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => out.push('\u{fffd}'),
            other => out.push(other),
        }
    }
    out
}

/// A coordinate with one decimal; always a number.
#[derive(Clone, Copy)]
pub(super) struct C(pub(super) f64);

impl Display for C {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = if self.0.is_finite() { (self.0.clamp(-1e5, 1e5) * 10.0).round() as i64 } else { 0 };
        let sign = if tenths < 0 { "-" } else { "" };
        let (whole, tenth) = (tenths.abs() / 10, tenths.abs() % 10);
        if tenth == 0 { write!(f, "{sign}{whole}") } else { write!(f, "{sign}{whole}.{tenth}") }
    }
}

/// Maps values to coordinates.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    from: f64,
    to: f64,
    at: f64,
    end: f64,
}

impl Scale {
    /// Maps values `from..to` to `at..end`. Replaces an empty or invalid range.
    pub(super) fn new(from: f64, to: f64, at: f64, end: f64) -> Self {
        let from = if from.is_finite() { from } else { 0.0 };
        let to = if to.is_finite() && to > from { to } else { from + from.abs().max(1.0) };
        Self { from, to, at, end }
    }

    /// Coordinate of a value, clamped to the scale.
    pub(super) fn place(&self, value: f64) -> f64 {
        let share = ((value - self.from) / (self.to - self.from)).clamp(0.0, 1.0);
        self.at + if share.is_nan() { 0.0 } else { share } * (self.end - self.at)
    }

    /// About `count` round values in the range, and the decimals that distinguish them.
    pub(super) fn ticks(&self, count: usize) -> (Vec<f64>, usize) {
        let raw = (self.to - self.from) / count.max(1) as f64;
        let power = 10_f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|step| *step >= raw * 0.999);
        let step = step.filter(|step| step.is_normal()).unwrap_or(raw);
        let first = (self.from / step).ceil();
        let ticks = (0..4 * count.max(1)).map(|at| (first + at as f64) * step);
        let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
        (ticks.take_while(|tick| *tick <= self.to + step * 1e-6).collect(), decimals)
    }
}

/// A drawing under construction.
pub(super) struct Svg {
    out: String,
}

impl Svg {
    /// `what` describes the drawing for screen readers.
    pub(super) fn new(width: f64, height: f64, what: &str) -> Self {
        let mut out = String::new();
        let (width, height, what) = (C(width), C(height), escape(what));
        let _ = writeln!(out, r#"<svg viewBox="0 0 {width} {height}" role="img" aria-label="{what}">"#);
        Self { out }
    }

    /// A rectangle of a class; omitted if it is empty.
    pub(super) fn rect(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64) {
        if width > 0.0 && height > 0.0 {
            let (x, y, width, height) = (C(x), C(y), C(width.max(0.1)), C(height));
            let _ = writeln!(self.out, r#"<rect class="{class}" x="{x}" y="{y}" width="{width}" height="{height}"/>"#);
        }
    }

    /// Text; `class` sets size and anchor.
    pub(super) fn text(&mut self, class: &str, x: f64, y: f64, text: &str) {
        let _ = writeln!(self.out, r#"<text class="{class}" x="{}" y="{}">{}</text>"#, C(x), C(y), escape(text));
    }

    pub(super) fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let ((x1, y1), (x2, y2)) = ((C(from.0), C(from.1)), (C(to.0), C(to.1)));
        let _ = writeln!(self.out, r#"<line class="{class}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>"#);
    }

    /// Shows `title` under the pointer over everything that `inside` draws.
    pub(super) fn titled(&mut self, title: &str, inside: impl FnOnce(&mut Self)) {
        let _ = write!(self.out, "<g><title>{}</title>", escape(title));
        inside(self);
        self.out.push_str("</g>\n");
    }

    /// A vertical axis of amounts on the left, with grid lines to `end`.
    pub(super) fn amount_axis(&mut self, scale: &Scale, at: f64, end: f64, unit: &str) {
        let (ticks, decimals) = scale.ticks(3);
        for tick in ticks {
            let y = scale.place(tick);
            self.line("grid", (at, y), (end, y));
            self.text("tick end", at - 6.0, y + 3.5, &format!("{tick:.decimals$}{unit}"));
        }
    }

    pub(super) fn finish(mut self) -> String {
        self.out.push_str("</svg>\n");
        self.out
    }
}

/// A readable whole number, grouped by thousands.
pub(super) fn count(value: u64) -> String {
    grouped(&value.to_string())
}

/// A readable number.
pub(super) fn number(value: f64) -> String {
    if value.is_finite() { text::number(value) } else { "–".into() }
}

/// Readable nanoseconds.
pub(super) fn time(ns: f64) -> String {
    let units = [(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")];
    let (size, unit) = units.into_iter().find(|(size, _)| ns >= size * 0.9995).unwrap_or((1.0, "ns"));
    format!("{} {unit}", number(ns / size))
}

/// Readable bytes.
pub(super) fn bytes(bytes: f64) -> String {
    text::bytes(bytes as u64)
}

/// A share in percent.
pub(super) fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.1} %", 100.0 * share) } else { "–".into() }
}

/// `part` of `whole`; 0 if `whole` is 0.
pub(super) fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn times_and_shares_are_readable() {
        let table = [(0.0, "0 ns"), (1.0, "1 ns"), (1234.0, "1.23 µs"), (999_999.0, "1 ms"), (61e9, "61 s")];
        for (ns, expected) in table {
            assert_eq!(time(ns), expected);
        }
        assert_eq!((count(u64::MAX), number(f64::NAN)), ("18,446,744,073,709,551,615".into(), "–".into()));
        assert_eq!((share(1.0, 0.0), percent(share(1.0, 3.0))), (0.0, "33.3 %".into()));
    }

    #[test]
    fn escaped_text_has_no_markup() {
        assert_eq!(escape("<a href='x'>&\"\u{0}\n"), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;\u{fffd}\n");
    }

    proptest! {
        #[test]
        fn coordinates_and_ticks_stay_in_range(from in any::<f64>(), to in any::<f64>(), value in any::<f64>(), count in 0_usize..20) {
            let scale = Scale::new(from, to, 10.0, 90.0);
            prop_assert!((10.0..=90.0).contains(&scale.place(value)));
            prop_assert!((10.0..=90.0).contains(&Scale::new(to, from, 90.0, 10.0).place(value)));
            prop_assert!(scale.ticks(count).0.len() <= 4 * count.max(1));
        }

        #[test]
        fn ticks_are_round_few_and_distinct(from in -1e9_f64..1e9, length in 1e-6_f64..1e9, count in 2_usize..12) {
            let (ticks, decimals) = Scale::new(from, from + length, 0.0, 1.0).ticks(count);
            prop_assert!((count / 3..=count + 1).contains(&ticks.len()), "{:?}", ticks);
            // As far as doubles of this size differ.
            if length > 1e-3 {
                let texts: std::collections::BTreeSet<String> = ticks.iter().map(|tick| format!("{tick:.decimals$}")).collect();
                prop_assert_eq!(texts.len(), ticks.len());
            }
        }

        #[test]
        fn coordinates_are_numbers_near_their_values(value in any::<f64>()) {
            let text = C(value).to_string();
            let read: f64 = text.parse().unwrap();
            let expected = if value.is_finite() { value.clamp(-1e5, 1e5) } else { 0.0 };
            prop_assert!((read - expected).abs() <= 0.051, "{} for {}", text, value);
        }
    }
}
