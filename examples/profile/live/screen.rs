//! Owns the terminal: takes it, draws, and restores it exactly once.
//!
//! ```text
//! open ──► draw … draw ──► close     by a key, the caller, a drop, or a panic of any thread: the first restores
//! ```
//!
//! Closing waits briefly for a frame being drawn, so that its rest does not land on the restored screen. The wait is
//! short, because the drawing itself may have panicked.

use super::state::State;
use super::view;
use crossterm::cursor::{Hide, Show};
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::backend::CrosstermBackend;
use ratatui::buffer::Buffer;
use ratatui::text::Line;
use std::error::Error;
use std::io::{self, BufWriter, IsTerminal, Stdout};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(super) type Terminal = ratatui::Terminal<CrosstermBackend<BufWriter<Stdout>>>;

/// A terminal in use, until closed.
pub(super) struct Screen {
    open: AtomicBool,
    drawing: Mutex<()>,
}

impl Screen {
    pub(super) fn open() -> Result<Self, Box<dyn Error>> {
        if !io::stdout().is_terminal() {
            return Err("the live dashboard needs a terminal, but standard output is none: omit --live".into());
        }
        if std::env::var_os("TERM").is_none_or(|term| term == "dumb") {
            return Err("the live dashboard cannot draw: TERM is dumb or not set; omit --live".into());
        }
        enable_raw_mode().map_err(|error| format!("the terminal cannot be set up: {error}"))?;
        let screen = Self { open: AtomicBool::new(true), drawing: Mutex::new(()) };
        if let Err(error) = crossterm::execute!(io::stdout(), EnterAlternateScreen, Hide) {
            screen.close();
            return Err(format!("the terminal cannot be set up: {error}").into());
        }
        Ok(screen)
    }

    /// Draws; `false` if the terminal is already restored.
    pub(super) fn draw(&self, terminal: &mut Terminal, state: &State, look: Look) -> io::Result<bool> {
        let _drawing = self.drawing.lock();
        if !self.open.load(Ordering::Acquire) {
            return Ok(false);
        }
        terminal.draw(|frame| paint(frame.buffer_mut(), state, look))?;
        Ok(true)
    }

    /// Restores the terminal once.
    pub(super) fn close(&self) {
        if !self.open.swap(false, Ordering::AcqRel) {
            return;
        }
        let mut drawing = self.drawing.try_lock();
        for _ in 0..50 {
            if drawing.is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
            drawing = self.drawing.try_lock();
        }
        // A failure here cannot be reported.
        let _ = crossterm::execute!(io::stdout(), Show, LeaveAlternateScreen);
        let _ = disable_raw_mode();
    }
}

pub(super) fn terminal() -> io::Result<Terminal> {
    Terminal::new(CrosstermBackend::new(BufWriter::with_capacity(1 << 16, io::stdout())))
}

/// Fills the whole buffer.
fn paint(buffer: &mut Buffer, state: &State, look: Look) {
    let area = *buffer.area();
    for (line, y) in view::view(&state.shown(), area.width, area.height).into_iter().zip(area.y..area.bottom()) {
        buffer.set_line(area.x, y, &look.line(line), area.width);
    }
}

/// Capabilities of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) colour: bool,
    pub(super) unicode: bool,
}

impl Look {
    pub(super) fn of_environment() -> Self {
        Self::of(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// No colour with `NO_COLOR`. ASCII if the locale, or the Linux console, has nothing else. An unset locale, as in
    /// containers, is ignored.
    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(&variable);
        let utf8 = locale.is_none_or(|locale| {
            let locale = locale.to_ascii_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        });
        Self {
            colour: variable("NO_COLOR").is_none(),
            unicode: utf8 && variable("TERM").is_none_or(|term| term != "linux"),
        }
    }

    fn line(self, mut line: Line<'static>) -> Line<'static> {
        for span in &mut line.spans {
            if !self.colour {
                (span.style.fg, span.style.bg) = (None, None);
            }
            if !self.unicode {
                span.content = span.content.chars().map(ascii).collect::<String>().into();
            }
        }
        line
    }
}

/// Replaces one character with one, so that columns stay aligned.
fn ascii(char: char) -> char {
    match char {
        ' '..='~' => char,
        '█' => '#',
        '▓' => '=',
        '▒' => '+',
        '░' => '.',
        '▁' | '▂' => '_',
        '▃' | '▄' => '-',
        '▅' | '▆' | '▇' => '=',
        '─' | '–' | '·' => '-',
        '│' => '|',
        '┌' | '┐' | '└' | '┘' => '+',
        '▶' | '→' | '≥' => '>',
        '◀' => '<',
        '×' => 'x',
        'µ' => 'u',
        '…' => '~',
        _ => '?',
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::samples;
    use super::*;
    use ratatui::style::Color;

    #[test]
    fn the_environment_sets_colour_and_characters() {
        let look = |set: &[(&str, &str)]| {
            let set: Vec<(String, String)> =
                set.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
            Look::of(|name| set.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()))
        };
        for (set, colour, unicode) in [
            (&[][..], true, true),
            (&[("NO_COLOR", "1")], false, true),
            (&[("LANG", "C")], true, false),
            (&[("LANG", "en_GB.UTF-8")], true, true),
            (&[("LANG", "en_GB.UTF-8"), ("LC_ALL", "POSIX")], true, false),
            (&[("LC_CTYPE", "C.utf8"), ("LANG", "C")], true, true),
            (&[("TERM", "linux"), ("LANG", "C.UTF-8")], true, false),
        ] {
            assert_eq!(look(set), Look { colour, unicode }, "{set:?}");
        }
    }

    #[test]
    fn plain_screens_have_the_same_text() {
        let state = samples::starved_by_decode();
        let painted = |look| {
            let mut buffer = Buffer::empty(ratatui::layout::Rect::new(0, 0, 110, 40));
            paint(&mut buffer, &state, look);
            buffer
        };
        let plain = painted(Look { colour: false, unicode: false });
        let rich = painted(Look { colour: true, unicode: true });
        assert!(plain.content().iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
        assert!(plain.content().iter().all(|cell| cell.symbol().is_ascii()));
        assert!(rich.content().iter().any(|cell| cell.fg != Color::Reset));
        for (plain, rich) in plain.content().iter().zip(rich.content()) {
            let same = rich.symbol().is_ascii() && plain.symbol() == rich.symbol();
            assert!(same || (!rich.symbol().is_ascii() && plain.symbol() != "?"), "{plain:?} for {rich:?}");
        }
        let text: String = plain.content().iter().map(|cell| cell.symbol()).collect();
        for word in ["CAUSE", "bound by decode", "AU", "target 90 % missed"] {
            assert!(text.contains(word), "{word}");
        }
    }
}
