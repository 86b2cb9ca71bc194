//! Why a part of a file gives no rows: damage, or a file that cannot be read.

use feedline_base::error::Error;
use feedline_core::dataset::DamageKind;

/// Why a part of a file gives no rows.
#[derive(Debug)]
pub(super) enum Fault {
    Damage(DamageKind, String),
    /// The file cannot be read.
    Failed(Error),
}

impl Fault {
    pub(super) fn wrong(message: impl Into<String>) -> Self {
        Self::Damage(DamageKind::Header, message.into())
    }

    pub(super) fn unsupported(message: impl Into<String>) -> Self {
        Self::Damage(DamageKind::Unsupported, message.into())
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}
