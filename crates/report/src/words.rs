//! Formats of numbers for people.

/// Digits with commas between thousands.
pub(super) fn grouped(digits: &str) -> String {
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number with one decimal below 100, and commas between thousands.
pub(super) fn number(value: f64) -> String {
    if value < 100.0 {
        return format!("{value:.1}");
    }
    if value >= 1e15 {
        return format!("{value:.1e}");
    }
    grouped(&format!("{value:.0}"))
}

/// Nanoseconds as a time.
pub(super) fn time(ns: f64) -> String {
    match ns {
        1e9.. => format!("{:.2} s", ns / 1e9),
        1e6.. => format!("{:.2} ms", ns / 1e6),
        _ => format!("{:.1} µs", ns / 1e3),
    }
}

/// Bytes, with decimal units.
pub(super) fn bytes(count: f64) -> String {
    match count {
        1e6.. => format!("{:.1} MB", count / 1e6),
        1e3.. => format!("{:.0} kB", count / 1e3),
        _ => format!("{count:.0} bytes"),
    }
}

/// The text to append to a number that is a lower bound.
pub(super) fn or_more(at_least: bool) -> &'static str {
    if at_least { " or more" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_separate_thousands() {
        let table = [
            ("", ""),
            ("7", "7"),
            ("999", "999"),
            ("1000", "1,000"),
            ("1234567", "1,234,567"),
        ];
        table
            .iter()
            .for_each(|(digits, text)| assert_eq!(grouped(digits), *text));
    }

    #[test]
    fn numbers_are_written_for_people() {
        let cases = [
            (0.0, "0.0"),
            (7.34, "7.3"),
            (999.6, "1,000"),
            (1780.2, "1,780"),
            (1234567.0, "1,234,567"),
            (1e300, "1.0e300"),
        ];
        cases
            .iter()
            .for_each(|(value, text)| assert_eq!(number(*value), *text));
        assert_eq!(
            [time(1500.0), time(2.5e6), time(3e9)],
            ["1.5 µs", "2.50 ms", "3.00 s"]
        );
        assert_eq!(
            [bytes(17.0), bytes(4096.0), bytes(2.5e6)],
            ["17 bytes", "4 kB", "2.5 MB"]
        );
    }
}
