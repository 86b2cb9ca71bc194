//! The route of each field's bytes to the device. `build` chooses it once and gives a reason. Pure.
//!
//! ```text
//! Staged   storage → slot (host) → device     fields that a worker decodes, checks or changes, and small rows
//! Direct   storage → device, by cuFile        stored rows of at least 16 KiB, where cuFile really bypasses the host
//! ```
//!
//! The checks run in the order of their cost. cuFile is queried, and one trial read is made, only
//! if a field could be read directly.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use std::fmt;
use std::str::FromStr;

/// Below this many bytes per read, the route through the host is faster than cuFile.
const ROW_LEAST: usize = 16 << 10;

/// Whether fields go from storage to device memory without passing through the host (GPUDirect
/// Storage).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gds {
    /// Use it if it is available and faster.
    #[default]
    Auto,
    /// At least one field must use it; otherwise `build` fails and says why no field can. A read
    /// that cuFile cannot do is also an error.
    Require,
    /// Never use it.
    Off,
}

impl FromStr for Gds {
    type Err = Error;

    /// Parses `auto`, `require` or `off`. Errors: [`ErrorKind::Config`] for other words.
    fn from_str(words: &str) -> Result<Self> {
        match words {
            "auto" => Ok(Self::Auto),
            "require" => Ok(Self::Require),
            "off" => Ok(Self::Off),
            _ => {
                let message =
                    format!("unknown GPUDirect Storage mode {words:?}; use auto, require or off");
                Err(Error::new(ErrorKind::Config, Stage::Build, message))
            }
        }
    }
}

/// A route to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Route {
    /// Through a slot in host memory.
    Staged,
    /// By cuFile.
    Direct,
}

/// The route of one field, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FieldRoute {
    /// Name of the dataset's field.
    pub field: String,
    /// Its route.
    pub route: Route,
    /// The reason.
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

/// The properties of one field that decide its route.
#[derive(Clone, Debug)]
pub(crate) struct FieldCandidate<'a> {
    pub(crate) name: &'a str,
    /// Bytes of a row, if stored bytes are the row.
    pub(crate) row_bytes: Option<usize>,
    /// The field is delivered, or another delivered field is made from it.
    pub(crate) wanted: bool,
    /// Rows are stored unchanged in files.
    pub(crate) plain: bool,
}

/// The properties of the loader that decide the routes.
#[derive(Clone, Debug)]
pub(crate) struct RouteContext {
    pub(crate) on_device: bool,
    /// `.map` or `.map_batch` see the rows.
    pub(crate) transforms: bool,
    /// The dataset's rows come from chunks that the host opens.
    pub(crate) in_chunks: bool,
    /// The dataset fits in the page cache.
    pub(crate) cached: bool,
    /// Failed samples are substituted.
    pub(crate) substitutes: bool,
    /// Number of files, if more than the limit of open files.
    pub(crate) too_many: Option<usize>,
}

/// Chooses the route of every field. `cufile` returns how cuFile reads on this machine, or the
/// reason not to use it. It is called at most once.
///
/// Errors: [`ErrorKind::Unsupported`] for [`Gds::Require`] if no field can be read directly, with
/// all reasons.
pub(crate) fn choose(
    gds: Gds,
    fields: &[FieldCandidate<'_>],
    context: &RouteContext,
    cufile: impl FnOnce() -> Result<String, String>,
) -> Result<Vec<FieldRoute>> {
    let obstacles: Vec<_> = fields
        .iter()
        .map(|field| obstacle(gds, field, context))
        .collect();
    let answer = obstacles.iter().any(Option::is_none).then(cufile);
    let route = |(field, obstacle): (&FieldCandidate<'_>, Option<String>)| {
        let (route, why) = match (obstacle, &answer) {
            (Some(why), _) => (Route::Staged, why),
            (None, Some(Err(why))) => (Route::Staged, why.clone()),
            (None, Some(Ok(how))) => (Route::Direct, how.clone()),
            (None, None) => (Route::Staged, String::new()),
        };
        FieldRoute {
            field: field.name.into(),
            route,
            why,
        }
    };
    let routes: Vec<_> = fields.iter().zip(obstacles).map(route).collect();
    if gds == Gds::Require && routes.iter().all(|route| route.route == Route::Staged) {
        let reasons: Vec<_> = routes
            .iter()
            .map(|route| format!("`{}`: {}", route.field, route.why))
            .collect();
        let message = format!("no field can be read directly: {}", reasons.join("; "));
        return Err(Error::new(ErrorKind::Unsupported, Stage::Build, message));
    }
    Ok(routes)
}

/// Why the field cannot be read directly, apart from cuFile's own reasons.
fn obstacle(gds: Gds, field: &FieldCandidate<'_>, context: &RouteContext) -> Option<String> {
    let words = match field {
        _ if gds == Gds::Off => "switched off",
        _ if !context.on_device => "batches are delivered on the host",
        FieldCandidate { wanted: false, .. } => "not delivered",
        FieldCandidate {
            row_bytes: None, ..
        } => "made by the host from the bytes read",
        _ if context.transforms => "transforms on the host see it",
        _ if context.substitutes => "the host finds substitutes for rows that cannot be read",
        _ if context.in_chunks => "rows come out of chunks that the host opens",
        FieldCandidate { plain: false, .. } => {
            "not stored unchanged in a file: in memory, or unpacked or checked by the host"
        }
        FieldCandidate {
            row_bytes: Some(bytes),
            ..
        } if gds == Gds::Auto && *bytes < ROW_LEAST => {
            return Some(format!(
                "rows of {bytes} bytes: below {ROW_LEAST}, reads through the host are faster"
            ));
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

    const FIELD: FieldCandidate<'_> = FieldCandidate {
        name: "x",
        row_bytes: Some(1 << 20),
        wanted: true,
        plain: true,
    };
    const CONTEXT: RouteContext = RouteContext {
        on_device: true,
        transforms: false,
        in_chunks: false,
        cached: false,
        substitutes: false,
        too_many: None,
    };

    #[test]
    fn a_field_is_read_directly_unless_a_reason_speaks_against_it() {
        let small = FieldCandidate {
            row_bytes: Some(100),
            ..FIELD
        };
        let cases: [(Gds, FieldCandidate<'_>, RouteContext, &str); 11] = [
            (Gds::Auto, FIELD, CONTEXT, "direct (p2p)"),
            (Gds::Off, FIELD, CONTEXT, "staged (switched off)"),
            (
                Gds::Auto,
                FIELD,
                RouteContext {
                    on_device: false,
                    ..CONTEXT
                },
                "staged (batches are delivered on the host)",
            ),
            (
                Gds::Auto,
                FieldCandidate {
                    wanted: false,
                    ..FIELD
                },
                CONTEXT,
                "staged (not delivered)",
            ),
            (
                Gds::Auto,
                FieldCandidate {
                    row_bytes: None,
                    ..FIELD
                },
                CONTEXT,
                "staged (made by the host",
            ),
            (
                Gds::Auto,
                FIELD,
                RouteContext {
                    transforms: true,
                    ..CONTEXT
                },
                "staged (transforms",
            ),
            (
                Gds::Auto,
                FIELD,
                RouteContext {
                    in_chunks: true,
                    ..CONTEXT
                },
                "staged (rows come out of chunks",
            ),
            (
                Gds::Auto,
                FieldCandidate {
                    plain: false,
                    ..FIELD
                },
                CONTEXT,
                "staged (not stored unchanged in a file",
            ),
            (
                Gds::Auto,
                small,
                CONTEXT,
                "staged (rows of 100 bytes: below 16384, reads through the host are faster)",
            ),
            (
                Gds::Auto,
                FIELD,
                RouteContext {
                    cached: true,
                    ..CONTEXT
                },
                "staged (the page cache has room",
            ),
            (
                Gds::Auto,
                FIELD,
                RouteContext {
                    too_many: Some(7),
                    ..CONTEXT
                },
                "staged (7 files, more than",
            ),
        ];
        for (gds, field, context, words) in cases {
            let routes = choose(gds, &[field], &context, || Ok("p2p".into())).unwrap();
            assert!(
                routes[0].to_string().starts_with(&format!("x {words}")),
                "{}",
                routes[0]
            );
        }
    }

    #[test]
    fn cufile_is_asked_once_and_only_if_a_field_could_use_it() {
        let mut asked = 0;
        let two = [
            FIELD,
            FieldCandidate {
                name: "y",
                row_bytes: None,
                ..FIELD
            },
            FieldCandidate { name: "z", ..FIELD },
        ];
        let routes = choose(Gds::Auto, &two, &CONTEXT, || {
            asked += 1;
            Err("no driver".into())
        });
        let words: Vec<_> = routes.unwrap().iter().map(FieldRoute::to_string).collect();
        assert_eq!(words[0], "x staged (no driver)");
        assert_eq!(words[2], "z staged (no driver)");
        assert_eq!(asked, 1);
        choose(Gds::Off, &two, &CONTEXT, || panic!("no field needs it")).unwrap();
    }

    #[test]
    fn require_takes_small_and_cached_rows_or_names_every_reason() {
        let small = FieldCandidate {
            row_bytes: Some(100),
            ..FIELD
        };
        let context = RouteContext {
            cached: true,
            ..CONTEXT
        };
        let routes = choose(Gds::Require, &[small], &context, || Ok("nvidia-fs".into())).unwrap();
        assert_eq!(routes[0].route, Route::Direct);
        let two = [
            FIELD,
            FieldCandidate {
                name: "y",
                row_bytes: None,
                ..FIELD
            },
        ];
        let error = choose(Gds::Require, &two, &CONTEXT, || Err("no driver".into())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(
            error
                .message()
                .ends_with("`x`: no driver; `y`: made by the host from the bytes read"),
            "{error}"
        );
    }
}
