//! Which way the bytes of each field take to the device: chosen once, when the loader is built, with a reason. Pure.
//!
//! ```text
//! Staged   storage → slot (host) → device     everything that a worker decodes, checks or changes, and small rows
//! Direct   storage → device, by cuFile        rows as they stand, of at least 16 KiB, where cuFile really goes past the host
//! ```
//!
//! The questions come in the order of what they cost: cuFile is asked, and a few reads are tried, only when a field could
//! go that way.

use crate::error::{Error, ErrorKind, Result, Stage};
use std::fmt;
use std::str::FromStr;

/// Below this many bytes for each read, the way through the host is faster than cuFile's.
const ROW_LEAST: usize = 16 << 10;

/// Whether fields go from storage to the device's memory without the host (GPUDirect Storage).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gds {
    /// Where it is there and worth it.
    #[default]
    Auto,
    /// At least one field, or `build` fails and says why none can. A read that cuFile cannot do is an error, too.
    Require,
    /// No.
    Off,
}

impl FromStr for Gds {
    type Err = Error;

    /// `auto`, `require` or `off`. Errors: [`ErrorKind::Config`] for other words.
    fn from_str(words: &str) -> Result<Self> {
        match words {
            "auto" => Ok(Self::Auto),
            "require" => Ok(Self::Require),
            "off" => Ok(Self::Off),
            _ => {
                let message = format!("{words:?} is no setting of GPUDirect Storage; there are auto, require and off");
                Err(Error::new(ErrorKind::Config, Stage::Build, message))
            }
        }
    }
}

/// A way to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// By a slot in host memory.
    Staged,
    /// By cuFile.
    Direct,
}

/// The way of one field, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FieldRoute {
    /// Name of the field of the dataset.
    pub field: String,
    /// Its way.
    pub route: Route,
    /// Why.
    pub why: String,
}

impl fmt::Display for FieldRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let route = match self.route {
            Route::Staged => "staged",
            Route::Direct => "direct",
        };
        write!(f, "{} {route} ({})", self.field, self.why)
    }
}

/// What is known of a field.
#[derive(Clone, Debug)]
pub(crate) struct FieldCandidate<'a> {
    pub(crate) name: &'a str,
    /// Bytes of a row, when they are taken as they stand.
    pub(crate) row_bytes: Option<usize>,
    /// Somebody wants it: it is handed out, or something is made of it.
    pub(crate) wanted: bool,
    /// Rows lie in files as they stand.
    pub(crate) plain: bool,
}

/// What is known of the loader.
#[derive(Clone, Debug)]
pub(crate) struct RouteContext {
    pub(crate) on_device: bool,
    /// `.map` or `.map_batch` see the rows.
    pub(crate) transforms: bool,
    /// The dataset's rows come out of chunks that the host opens.
    pub(crate) in_chunks: bool,
    /// The page cache has room for the dataset.
    pub(crate) cached: bool,
    /// Rows whose sample cannot be had get another one.
    pub(crate) substitutes: bool,
    /// More files than may be kept open.
    pub(crate) too_many: Option<usize>,
}

/// The way of every field. `cufile` says what cuFile does here, or why it is not to be used; asked at most once.
///
/// Errors: [`ErrorKind::Device`] for [`Gds::Require`] when no field can go directly, with the reasons.
pub(crate) fn choose(
    gds: Gds,
    fields: &[FieldCandidate<'_>],
    context: &RouteContext,
    cufile: impl FnOnce() -> Result<String, String>,
) -> Result<Vec<FieldRoute>> {
    let obstacles: Vec<_> = fields.iter().map(|field| obstacle(gds, field, context)).collect();
    let answer = obstacles.iter().any(Option::is_none).then(cufile);
    let route = |(field, obstacle): (&FieldCandidate<'_>, Option<String>)| {
        let (route, why) = match (obstacle, &answer) {
            (Some(why), _) => (Route::Staged, why),
            (None, Some(Err(why))) => (Route::Staged, why.clone()),
            (None, Some(Ok(how))) => (Route::Direct, how.clone()),
            (None, None) => (Route::Staged, String::new()),
        };
        FieldRoute { field: field.name.into(), route, why }
    };
    let routes: Vec<_> = fields.iter().zip(obstacles).map(route).collect();
    if gds == Gds::Require && routes.iter().all(|route| route.route == Route::Staged) {
        let reasons: Vec<_> = routes.iter().map(|route| format!("`{}`: {}", route.field, route.why)).collect();
        let message = format!("no field can be read directly: {}", reasons.join("; "));
        return Err(Error::new(ErrorKind::Device, Stage::Build, message));
    }
    Ok(routes)
}

/// What speaks against reading the field directly, apart from cuFile.
fn obstacle(gds: Gds, field: &FieldCandidate<'_>, context: &RouteContext) -> Option<String> {
    let words = match field {
        _ if gds == Gds::Off => "switched off",
        _ if !context.on_device => "batches are handed out on the host",
        FieldCandidate { wanted: false, .. } => "not handed out",
        FieldCandidate { row_bytes: None, .. } => "made by the host of what is read",
        _ if context.transforms => "transforms of the host see it",
        _ if context.substitutes => "a row that cannot be read gets another sample, which the host finds",
        _ if context.in_chunks => "rows come out of chunks that the host opens",
        FieldCandidate { plain: false, .. } => {
            "not in a file as it stands: in memory, or unpacked or checked by the host"
        }
        FieldCandidate { row_bytes: Some(bytes), .. } if gds == Gds::Auto && *bytes < ROW_LEAST => {
            return Some(format!("rows of {bytes} bytes: the host's way is faster below {ROW_LEAST}"));
        }
        _ if gds == Gds::Auto && context.cached => "the page cache has room for the dataset",
        _ => match context.too_many {
            Some(files) => return Some(format!("{files} files, more than may be kept open")),
            None => return None,
        },
    };
    Some(words.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELD: FieldCandidate<'_> = FieldCandidate { name: "x", row_bytes: Some(1 << 20), wanted: true, plain: true };
    const CONTEXT: RouteContext = RouteContext {
        on_device: true,
        transforms: false,
        in_chunks: false,
        cached: false,
        substitutes: false,
        too_many: None,
    };

    #[test]
    fn a_field_goes_directly_when_nothing_speaks_against_it_and_says_why_when_something_does() {
        let small = FieldCandidate { row_bytes: Some(100), ..FIELD };
        let cases: [(Gds, FieldCandidate<'_>, RouteContext, &str); 11] = [
            (Gds::Auto, FIELD, CONTEXT, "direct (p2p)"),
            (Gds::Off, FIELD, CONTEXT, "staged (switched off)"),
            (
                Gds::Auto,
                FIELD,
                RouteContext { on_device: false, ..CONTEXT },
                "staged (batches are handed out on the host)",
            ),
            (Gds::Auto, FieldCandidate { wanted: false, ..FIELD }, CONTEXT, "staged (not handed out)"),
            (Gds::Auto, FieldCandidate { row_bytes: None, ..FIELD }, CONTEXT, "staged (made by the host"),
            (Gds::Auto, FIELD, RouteContext { transforms: true, ..CONTEXT }, "staged (transforms"),
            (Gds::Auto, FIELD, RouteContext { in_chunks: true, ..CONTEXT }, "staged (rows come out of chunks"),
            (Gds::Auto, FieldCandidate { plain: false, ..FIELD }, CONTEXT, "staged (not in a file as it stands"),
            (Gds::Auto, small, CONTEXT, "staged (rows of 100 bytes: the host's way is faster below 16384)"),
            (Gds::Auto, FIELD, RouteContext { cached: true, ..CONTEXT }, "staged (the page cache has room"),
            (Gds::Auto, FIELD, RouteContext { too_many: Some(7), ..CONTEXT }, "staged (7 files, more than"),
        ];
        for (gds, field, context, words) in cases {
            let routes = choose(gds, &[field], &context, || Ok("p2p".into())).unwrap();
            assert!(routes[0].to_string().starts_with(&format!("x {words}")), "{}", routes[0]);
        }
    }

    #[test]
    fn cufile_is_asked_once_and_only_when_a_field_could_go_that_way() {
        let mut asked = 0;
        let two =
            [FIELD, FieldCandidate { name: "y", row_bytes: None, ..FIELD }, FieldCandidate { name: "z", ..FIELD }];
        let routes = choose(Gds::Auto, &two, &CONTEXT, || {
            asked += 1;
            Err("no driver".into())
        });
        let words: Vec<_> = routes.unwrap().iter().map(FieldRoute::to_string).collect();
        assert_eq!(words[0], "x staged (no driver)");
        assert_eq!(words[2], "z staged (no driver)");
        assert_eq!(asked, 1);
        choose(Gds::Off, &two, &CONTEXT, || panic!("nobody needs it")).unwrap();
    }

    #[test]
    fn what_is_required_takes_small_and_cached_rows_too_and_fails_with_every_reason_otherwise() {
        let small = FieldCandidate { row_bytes: Some(100), ..FIELD };
        let context = RouteContext { cached: true, ..CONTEXT };
        let routes = choose(Gds::Require, &[small], &context, || Ok("nvidia-fs".into())).unwrap();
        assert_eq!(routes[0].route, Route::Direct);
        let two = [FIELD, FieldCandidate { name: "y", row_bytes: None, ..FIELD }];
        let error = choose(Gds::Require, &two, &CONTEXT, || Err("no driver".into())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
        assert!(error.message().ends_with("`x`: no driver; `y`: made by the host of what is read"), "{error}");
    }
}
