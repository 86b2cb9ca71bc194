//! Errors that may pass: which ones, and how long to wait before the next try.

use feedline_base::error::{Error, ErrorKind, Result};
use feedline_base::metadata::is_url;
use rustix::io::Errno;
use std::time::Duration;

/// Pause before each retry. Together they are shorter than a stall.
pub const PAUSES: [Duration; 3] = [
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(100),
];

/// Whether memory or descriptors are short, which affects every sample. A retry may help; another
/// sample does not.
pub fn exhausted(error: &Error) -> bool {
    use Errno as E;
    matches!(
        code(error),
        Some(E::NOMEM | E::MFILE | E::NFILE | E::NOBUFS)
    )
}

/// Whether the error concerns a whole store, and not only one of its objects. The errors of a
/// single object are that it is gone, or has changed.
pub fn out_of_reach(error: &Error) -> bool {
    let of_store = matches!(error.kind(), ErrorKind::Io | ErrorKind::Permission);
    of_store && error.site().path.as_deref().is_some_and(is_url)
}

/// Whether an object has a version other than the listed one, or its servers disagree about it.
pub fn has_other_version(error: &Error) -> bool {
    error.kind() == ErrorKind::Changed && error.site().path.as_deref().is_some_and(is_url)
}

/// Whether a retry of a failed read may work: a resource is short, or storage or network has a
/// temporary failure. Only this function knows the system's codes for that.
pub fn may_pass(error: &Error) -> bool {
    use Errno as E;
    let Some(code) = code(error) else {
        return exhausted(error);
    };
    let storage = matches!(
        code,
        E::INTR | E::AGAIN | E::IO | E::STALE | E::BUSY | E::TIMEDOUT | E::REMOTEIO
    );
    let network = matches!(
        code,
        E::NETDOWN
            | E::NETUNREACH
            | E::HOSTDOWN
            | E::HOSTUNREACH
            | E::NOLINK
            | E::CONNRESET
            | E::CONNABORTED
            | E::NOTCONN
    );
    exhausted(error) || storage || network
}

/// The system's error code.
pub fn code(error: &Error) -> Option<Errno> {
    let source =
        std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    source.and_then(Errno::from_io_error)
}

/// Repeats `work` while its error may be temporary, with the pauses in [`PAUSES`].
pub fn patiently<T>(mut work: impl FnMut() -> Result<T>) -> Result<T> {
    for pause in PAUSES {
        match work() {
            Err(error) if may_pass(&error) => std::thread::sleep(pause),
            done => return done,
        }
    }
    work()
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline_base::error::Stage;

    #[test]
    fn every_error_is_classified_as_transient_and_as_shortage() {
        let os = |code| Error::os(Stage::Read, "", std::io::Error::from_raw_os_error(code));
        let of = |error: &Error| (may_pass(error), exhausted(error));
        for (is, codes) in [
            ((true, false), &[4, 5, 11, 16, 110, 116][..]),
            ((true, true), &[12, 23, 24, 105]),
            ((false, false), &[2, 13, 20, 21, 22, 40]),
        ] {
            codes
                .iter()
                .for_each(|code| assert_eq!(of(&os(*code)), is, "{code}"));
        }
        for kind in [
            ErrorKind::Truncated,
            ErrorKind::Decode,
            ErrorKind::Changed,
            ErrorKind::User,
        ] {
            assert_eq!(
                of(&Error::new(kind, Stage::Read, "")),
                (false, false),
                "{kind:?}"
            );
        }
    }
}
