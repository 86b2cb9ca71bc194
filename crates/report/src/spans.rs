//! Spans and events for the crate `tracing`. Without the feature of that name, they do nothing.
//!
//! ```text
//! span  epoch {epoch, batches}        INFO    as long as the iterator lives; never entered, for it crosses user code
//!   span  wait {batch}                DEBUG   one call of next(), entered
//!   event starved {batch, ms}         DEBUG   a long wait
//! event verdict {cause, advice}       INFO    at the end of an iterator; WARN when the consumer starved
//! event fault {kind, stage, outcome}  WARN    recovered or substituted; ERROR when it ended the iterator
//! event no NVTX ranges                WARN    the tool that the environment names cannot be used; once in a process
//! ```
//!
//! To stay cheap, there are one span and at most one event per batch, none per sample, and none on
//! the threads that read and decode. All have the target `feedline`.

use feedline_base::error::Error;
use std::time::Duration;
use tracing::span::EnteredSpan;
use tracing::{Level, Span, debug, debug_span, enabled, error, info, info_span, warn};

/// The outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A further attempt delivered the data.
    Recovered,
    /// Another sample took its place.
    Substituted,
    /// The caller got the error.
    Failed,
}

/// An iterator over `batches` batches begins with epoch `epoch`.
pub fn epoch(epoch: u64, batches: u64) -> Span {
    info_span!(target: "feedline", "epoch", epoch, batches)
}

/// The consumer asks for the `batch`th batch of the iterator. Keep it on this thread.
pub fn wait(epoch: &Span, batch: u64) -> EnteredSpan {
    debug_span!(target: "feedline", parent: epoch, "wait", batch).entered()
}

/// The wait was long.
pub fn starved(epoch: &Span, batch: u64, waited: Duration) {
    let ms = waited.as_secs_f64() * 1e3;
    debug!(target: "feedline", parent: epoch, batch, ms, "starved");
}

/// Whether a subscriber receives verdicts; a verdict needs a snapshot.
pub fn wants_verdicts() -> bool {
    enabled!(target: "feedline", Level::WARN)
}

/// The limit of an iterator. `starves`: whether the consumer waited for it.
pub fn verdict(cause: &str, advice: &str, starves: bool) {
    match starves {
        true => {
            warn!(target: "feedline", cause, advice, "verdict");
        }
        false => {
            info!(target: "feedline", cause, advice, "verdict");
        }
    }
}

/// The consumer's own work on the device has not ended for the time `waited`. The wait for a batch
/// continues.
pub fn consumer_hangs(waited: Duration) {
    let waited_s = waited.as_secs_f64();
    warn!(target: "feedline", waited_s, "the consumer's streams do not end their work");
}

/// The tool that the environment names cannot be used, so it gets no NVTX ranges.
pub fn unheard(why: &str) {
    warn!(target: "feedline", "no NVTX ranges: {why}");
}

/// A fault and its outcome.
pub fn fault(fault: &Error, outcome: Outcome) {
    let kind = fault.kind().as_str();
    let stage = fault.stage().as_str();
    match outcome {
        Outcome::Failed => {
            error!(target: "feedline", kind, stage, %fault, ?outcome, "fault");
        }
        _ => {
            warn!(target: "feedline", kind, stage, %fault, ?outcome, "fault");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::{Debug, Write};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    /// Writes a line for each span and event.
    #[derive(Clone, Default)]
    struct Notes(Arc<Mutex<Vec<String>>>);

    struct Fields(String);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            let _ = write!(self.0, " {}={value:?}", field.name());
        }
    }

    impl Notes {
        fn note(&self, line: String) -> u64 {
            let mut lines = self.0.lock().unwrap();
            lines.push(line);
            lines.len() as u64
        }
    }

    impl Subscriber for Notes {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "feedline" && *metadata.level() <= Level::DEBUG
        }

        fn new_span(&self, span: &Attributes<'_>) -> Id {
            let mut fields = Fields(String::new());
            span.record(&mut fields);
            let parent = span
                .parent()
                .map_or(String::new(), |id| format!(" in {}", id.into_u64()));
            Id::from_u64(self.note(format!(
                "{} span {}{}{parent}",
                span.metadata().level(),
                span.metadata().name(),
                fields.0
            )))
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            let mut fields = Fields(String::new());
            event.record(&mut fields);
            let parent = event
                .parent()
                .map_or(String::new(), |id| format!(" in {}", id.into_u64()));
            self.note(format!(
                "{} event{}{parent}",
                event.metadata().level(),
                fields.0
            ));
        }

        fn enter(&self, span: &Id) {
            self.note(format!("enter {}", span.into_u64()));
        }

        fn exit(&self, span: &Id) {
            self.note(format!("exit {}", span.into_u64()));
        }
    }

    #[test]
    fn a_subscriber_sees_epochs_waits_verdicts_and_faults() {
        let notes = Notes::default();
        tracing::subscriber::with_default(notes.clone(), || {
            let iterator = epoch(3, 100);
            let wait = wait(&iterator, 7);
            drop(wait);
            starved(&iterator, 7, Duration::from_millis(20));
            verdict("decode", "more workers", true);
            verdict("consumer", "", false);
            let error = Error::user("too odd").with_sample(5);
            fault(&error, Outcome::Substituted);
            fault(&error, Outcome::Failed);
        });
        let expected = [
            "INFO span epoch epoch=3 batches=100",
            "DEBUG span wait batch=7 in 1",
            "enter 2",
            "exit 2",
            "DEBUG event message=starved batch=7 ms=20.0 in 1",
            "WARN event message=verdict cause=\"decode\" advice=\"more workers\"",
            "INFO event message=verdict cause=\"consumer\" advice=\"\"",
            "WARN event message=fault kind=\"user code failed\" stage=\"map\" fault=map: \
             user code failed: too odd: sample=5 outcome=Substituted",
            "ERROR event message=fault kind=\"user code failed\" stage=\"map\" \
             fault=map: user code failed: too odd: sample=5 outcome=Failed",
        ];
        assert_eq!(*notes.0.lock().unwrap(), expected);
    }
}
