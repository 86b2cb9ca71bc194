//! Numbers as people write them.

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

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn thousands_are_told_apart() {
        let table = [("", ""), ("7", "7"), ("999", "999"), ("1000", "1,000"), ("1234567", "1,234,567")];
        table.iter().for_each(|(digits, text)| assert_eq!(grouped(digits), *text));
    }
}
