//! Numbers of fixed width, bars, plots, and fitted text. Pure.

use ratatui::text::Span;

/// Placeholder of a missing number.
pub(super) const NONE: &str = "–";

/// Three significant digits, at most nine characters: `12.3`, `123,456`, `1.23 M`.
pub(super) fn number(value: f64) -> String {
    match value {
        _ if !value.is_finite() => NONE.into(),
        ..99.95 => format!("{value:.1}"),
        ..999_999.5 => grouped(value.round() as u64),
        ..1e15 => {
            let (unit, name) = [(1e12, 'T'), (1e9, 'G'), (1e6, 'M')]
                .into_iter()
                .find(|(unit, _)| value >= *unit)
                .unwrap_or((1e6, 'M'));
            format!("{:.2} {name}", value / unit)
        }
        _ => format!("{value:.1e}"),
    }
}

/// With commas between thousands.
pub(super) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3 + 1);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

pub(super) fn or_none(value: Option<f64>, text: impl Fn(f64) -> String) -> String {
    value.filter(|value| value.is_finite()).map_or(NONE.into(), text)
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share.clamp(0.0, 9.99))
}

/// At most nine characters up to a year.
pub(super) fn time(ns: f64) -> String {
    match ns {
        _ if !ns.is_finite() => NONE.into(),
        1e13.. => format!("{:.1e} s", ns / 1e9),
        1e11.. => format!("{:.0} s", ns / 1e9),
        1e9.. => format!("{:.2} s", ns / 1e9),
        1e6.. => format!("{:.2} ms", ns / 1e6),
        _ => format!("{:.1} µs", ns / 1e3),
    }
}

/// Hours, minutes, seconds.
pub(super) fn clock(ns: u64) -> String {
    let seconds = ns / 1_000_000_000;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Columns of the text.
pub(super) fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// Cuts the text to `columns`, with `…` at the cut. Control characters become spaces.
pub(super) fn fit(text: &str, columns: usize) -> String {
    let clean: String = text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
    if width(&clean) <= columns {
        return clean;
    }
    let mut out = String::new();
    for char in clean.chars() {
        out.push(char);
        if width(&out) >= columns {
            out.pop();
            break;
        }
    }
    if columns > 0 {
        out.push('…');
    }
    out
}

/// Aligned to the right of this many columns.
pub(super) fn right(text: &str, columns: usize) -> String {
    format!("{}{text}", " ".repeat(columns.saturating_sub(width(text))))
}

/// Aligned to the left of this many columns.
pub(super) fn left(text: &str, columns: usize) -> String {
    format!("{text}{}", " ".repeat(columns.saturating_sub(width(text))))
}

/// Wraps text to lines of `columns`, all except the first indented. A longer word stays whole, and is cut when drawn.
pub(super) fn wrap(first: &str, rest: &str, text: &str, columns: usize) -> Vec<String> {
    let (mut lines, mut line, mut fresh) = (Vec::new(), first.to_string(), true);
    for word in text.split_whitespace() {
        if !fresh && width(&line) + 1 + width(word) > columns {
            lines.push(std::mem::replace(&mut line, rest.to_string()));
            fresh = true;
        }
        if !fresh {
            line.push(' ');
        }
        line.push_str(word);
        fresh = false;
    }
    lines.push(line);
    lines
}

/// A share of `columns`. Tiny and nearly full shares stay visible.
pub(super) fn bar(share: f64, columns: usize) -> String {
    let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
    let mut full = (share * columns as f64).round() as usize;
    if columns > 1 && share > 0.0 && share < 1.0 {
        full = full.clamp(1, columns - 1);
    }
    "█".repeat(full.min(columns)) + &"░".repeat(columns.saturating_sub(full))
}

/// Amounts side by side, each with its own character. They fill all columns, by the largest remainders.
pub(super) fn stacked(parts: &[(char, f64)], columns: usize) -> String {
    let amount = |value: f64| if value.is_finite() { value.clamp(0.0, 1e18) } else { 0.0 };
    let all: f64 = parts.iter().map(|(_, value)| amount(*value)).sum();
    if all <= 0.0 {
        return " ".repeat(columns);
    }
    let exact: Vec<f64> = parts.iter().map(|(_, value)| amount(*value) / all * columns as f64).collect();
    let mut cells: Vec<usize> = exact.iter().map(|value| *value as usize).collect();
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()));
    let missing = columns.saturating_sub(cells.iter().sum());
    for at in order.into_iter().take(missing) {
        cells[at] += 1;
    }
    parts.iter().zip(cells).map(|((char, _), cells)| char.to_string().repeat(cells)).collect()
}

/// Columns of values from 0 to `most`, as lines from the top. A missing value is blank, zero a dot.
pub(super) fn plot(values: &[Option<f64>], most: f64, height: usize) -> Vec<String> {
    const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let eighths = |value: f64| {
        let share = if most > 0.0 && value.is_finite() { (value / most).clamp(0.0, 1.0) } else { 0.0 };
        let eighths = (share * (8 * height) as f64).round() as usize;
        if share > 0.0 { eighths.max(1) } else { 0 }
    };
    let line = |row: usize| {
        let below = 8 * (height - 1 - row);
        let cell = |value: &Option<f64>| match value.map(eighths) {
            None => ' ',
            Some(0) if below == 0 => '·',
            Some(eighths) => EIGHTHS[eighths.saturating_sub(below).min(8)],
        };
        values.iter().map(cell).collect()
    };
    (0..height).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_keep_to_their_columns() {
        for (value, wanted) in [
            (0.0, "0.0"),
            (99.94, "99.9"),
            (99.96, "100"),
            (1234.4, "1,234"),
            (999_999.4, "999,999"),
            (999_999.6, "1.00 M"),
            (123.4e6, "123.40 M"),
            (999e12, "999.00 T"),
            (1e15, "1.0e15"),
            (f64::MAX, "1.8e308"),
            (f64::NAN, NONE),
            (f64::INFINITY, NONE),
        ] {
            assert_eq!(number(value), wanted);
        }
        for (ns, wanted) in [(0.0, "0.0 µs"), (1.5e6, "1.50 ms"), (2e9, "2.00 s"), (3e11, "300 s"), (1e19, "1.0e10 s")]
        {
            assert_eq!(time(ns), wanted);
        }
        assert_eq!((percent(0.2345), percent(-1.0), percent(1e9)), ("23.4 %".into(), "0.0 %".into(), "999.0 %".into()));
        assert_eq!(clock(3_723_900_000_000), "1:02:03");
    }

    #[test]
    fn text_is_cut_by_columns_not_characters() {
        for (text, columns, wanted) in [
            ("abc", 3, "abc"),
            ("abcd", 3, "ab…"),
            ("a\tb\n", 9, "a b "),
            ("データ", 6, "データ"),
            ("データ", 5, "デー…"),
            ("データ", 4, "デ…"),
            ("abc", 1, "…"),
            ("abc", 0, ""),
        ] {
            assert_eq!(fit(text, columns), wanted);
        }
        assert_eq!((right("é", 3), left("é", 3)), ("  é".into(), "é  ".into()));
    }

    #[test]
    fn words_are_wrapped_below_an_indent() {
        assert_eq!(wrap("→ ", "  ", "one two three four", 9), ["→ one two", "  three", "  four"]);
        assert_eq!(wrap("→ ", "  ", "overlongword x", 5), ["→ overlongword", "  x"]);
        assert_eq!(wrap("→ ", "  ", "", 5), ["→ "]);
    }

    #[test]
    fn bars_show_tiny_and_nearly_full_shares() {
        for (share, wanted) in [
            (0.0, "░░░░"),
            (0.001, "█░░░"),
            (0.5, "██░░"),
            (0.999, "███░"),
            (1.0, "████"),
            (7.0, "████"),
            (f64::NAN, "░░░░"),
        ] {
            assert_eq!(bar(share, 4), wanted, "{share}");
        }
        assert_eq!(stacked(&[('a', 1.0), ('b', 1.0), ('c', 2.0)], 8), "aabbcccc");
        assert_eq!(stacked(&[('a', 1.0), ('b', 0.0), ('c', 2.0)], 4), "accc");
        assert_eq!(stacked(&[('a', 0.0)], 4), "    ");
    }

    #[test]
    fn plots_grow_from_the_bottom() {
        let values = [None, Some(0.0), Some(0.01), Some(0.5), Some(1.0), Some(9.0)];
        assert_eq!(plot(&values, 1.0, 1), [" ·▁▄██"]);
        assert_eq!(plot(&values, 1.0, 2), ["    ██", " ·▁███"]);
        assert_eq!(plot(&values, 0.0, 1), [" ·····"]);
        assert!(plot(&values, 1.0, 0).is_empty());
    }

    proptest! {
        #[test]
        fn every_text_has_the_requested_width(
            share in any::<f64>(), parts in prop::collection::vec(any::<f64>(), 0..5), columns in 0_usize..200, text in ".*"
        ) {
            prop_assert_eq!(width(&bar(share, columns)), columns);
            let parts: Vec<(char, f64)> = parts.into_iter().map(|part| ('x', part)).collect();
            prop_assert_eq!(width(&stacked(&parts, columns)), columns);
            prop_assert!(width(&fit(&text, columns)) <= columns);
            prop_assert!(width(&number(share.abs())) <= 9);
            let plotted = plot(&[Some(share); 7], share, 3);
            prop_assert!(plotted.len() == 3 && plotted.iter().all(|line| width(line) == 7));
        }
    }
}
