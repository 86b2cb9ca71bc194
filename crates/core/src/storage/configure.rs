//! Options of object stores.

use crate::storage::remote;

/// Sets options of an object store, such as `s3://bucket`. They override the environment's. Later
/// opens and reads in the process use them; objects keep the version that was listed.
///
/// Names are those of the crate [`object_store`](https://docs.rs/object_store): for S3 `region`,
/// `endpoint`, `access_key_id`, `secret_access_key`, `session_token`, `skip_signature`,
/// `virtual_hosted_style_request`, and `profile` for one of `~/.aws`; for GCS
/// `service_account_path`; for Azure `account_name`, `account_key`, `sas_token`; for
/// `hf://datasets/org/name` `token` and `endpoint`. `timeout` applies to all stores: a request that
/// gets no answer or no more bytes for this many seconds is tried again (default 10). Reads of a
/// loader wait at most a twelfth of its stall deadline, so that all tries fit.
///
/// Errors: [`ErrorKind::Config`](feedline_base::error::ErrorKind) for an unknown option, a missing
/// one, or a build without the feature `remote`. Messages never show a value.
///
/// ```
/// # #[cfg(feature = "remote")]
/// feedline_core::storage::configure("s3://bucket", [("endpoint", "http://localhost:9000"), ("skip_signature", "true")])?;
/// # Ok::<(), feedline_core::Error>(())
/// ```
pub fn configure(
    store: &str,
    options: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>,
) -> feedline_base::error::Result<()> {
    remote::configure(
        store,
        options
            .into_iter()
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
    )
}
