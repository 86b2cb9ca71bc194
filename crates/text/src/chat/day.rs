//! A day as text, by Python's `strftime`.

use super::value::{Res, unsupported};

/// Year, month, day.
pub type Day = (i32, u32, u32);

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

const WEEKDAYS: [&str; 7] = [
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
];

/// Days before each month of a common year.
const BEFORE: [i32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];

/// Reads `YYYY-MM-DD`.
pub fn parse(text: &str) -> Option<Day> {
    let mut parts = text.splitn(3, '-');
    let year = parts.next().filter(|year| year.len() == 4)?.parse().ok()?;
    let month = parts
        .next()?
        .parse()
        .ok()
        .filter(|month| (1..=12).contains(month))?;
    let day = parts
        .next()?
        .parse()
        .ok()
        .filter(|day| (1..=31).contains(day))?;
    Some((year, month, day))
}

/// Midnight of the day, in the format.
pub fn strftime((year, month, day): Day, format: &str) -> Res<String> {
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let weekday = WEEKDAYS[weekday((year, month, day))];
        let name = MONTHS[month as usize - 1];
        text += &match letters.next() {
            Some('Y') => format!("{year:04}"),
            Some('y') => format!("{:02}", year % 100),
            Some('m') => format!("{month:02}"),
            Some('d') => format!("{day:02}"),
            Some('B') => name.into(),
            Some('b') => name[..3].into(),
            Some('A') => weekday.into(),
            Some('a') => weekday[..3].into(),
            Some('H' | 'M' | 'S') => "00".into(),
            Some('%') => "%".into(),
            _ => return unsupported(format!("`strftime_now` with the format {format:?}")),
        };
    }
    Ok(text)
}

/// Days since a Monday, modulo 7: 0001-01-01 was one.
fn weekday((year, month, day): Day) -> usize {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let years = year - 1;
    let days = years * 365 + years / 4 - years / 100
        + years / 400
        + BEFORE[month as usize - 1]
        + i32::from(leap && month > 2)
        + day as i32
        - 1;
    days.rem_euclid(7) as usize
}
