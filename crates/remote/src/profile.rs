//! Profiles of AWS: `~/.aws/credentials`, `~/.aws/config`, and the commands they name
//! (`credential_process`).
//!
//! Limits: [`DEADLINE`] and [`OUTPUT`] for a command. It has no input, and its error output is
//! dropped, since both may hold secrets. It runs in a process group of its own, which is killed as
//! a whole.

use super::credentials::{DEADLINE, Fresh, Source, refused};
use async_trait::async_trait;
use feedline_base::error::{Error, ErrorKind, Result, Stage};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key, AwsCredential};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Maximum bytes of a command's output.
const OUTPUT: usize = 64 << 10;

/// Interval between checks whether a command that has closed its output has ended.
const LOOK: Duration = Duration::from_millis(5);

/// Sources of credentials that are not built in, by the setting that asks for them.
const ELSEWHERE: [&str; 6] = [
    "sso_session",
    "sso_start_url",
    "role_arn",
    "source_profile",
    "credential_source",
    "login_session",
];

/// Where a profile is stored.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    name: String,
    /// Whether the user named it; then it must exist.
    named: bool,
    config: PathBuf,
    credentials: PathBuf,
}

/// The settings of a profile.
#[derive(Default)]
struct ProfileSettings {
    /// Settings of the credentials file.
    keys: BTreeMap<String, String>,
    /// Settings of both files.
    all: BTreeMap<String, String>,
}

impl Profile {
    /// The profile of this name, or of `AWS_PROFILE`, in the files that the environment names.
    pub(super) fn of_env(name: Option<&str>) -> Self {
        let var = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let home = std::env::home_dir().unwrap_or_else(|| "/".into());
        let file = |name: &str, default: &str| match var(name) {
            Some(path) => path
                .strip_prefix("~/")
                .map_or_else(|| PathBuf::from(&path), |rest| home.join(rest)),
            None => home.join(default),
        };
        let name = name.map(str::to_string).or_else(|| var("AWS_PROFILE"));
        Self {
            named: name.is_some(),
            name: name.unwrap_or_else(|| "default".into()),
            config: file("AWS_CONFIG_FILE", ".aws/config"),
            credentials: file("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials"),
        }
    }

    /// Adds region and endpoint where the environment and the user's options have none. Errors:
    /// those of `read`.
    pub(super) fn place(&self, mut builder: AmazonS3Builder) -> Result<AmazonS3Builder> {
        let settings = self.read()?;
        if let Some(region) = settings
            .all
            .get("region")
            .filter(|_| !is_set(&builder, Key::Region))
        {
            builder = builder.with_region(region);
        }
        let has_endpoint = is_set(&builder, Key::Endpoint) || is_set(&builder, Key::S3Endpoint);
        if let Some(endpoint) = settings.all.get("endpoint_url").filter(|_| !has_endpoint) {
            builder = builder.with_endpoint(endpoint);
        }
        Ok(builder)
    }

    /// Whether the profile gives the credentials. The order is that of AWS's command line: keys of
    /// options and environment, web identity, the profile, containers, instance metadata. A profile
    /// that an option names takes precedence.
    ///
    /// Errors: those of `read`; [`ErrorKind::Config`] if it asks for credentials in a way that is
    /// not built in.
    pub(super) fn gives_credentials(
        &self,
        builder: &AmazonS3Builder,
        by_option: bool,
    ) -> Result<bool> {
        let keys = is_set(builder, Key::AccessKeyId) || is_set(builder, Key::SecretAccessKey);
        let web_identity =
            is_set(builder, Key::WebIdentityTokenFile) && is_set(builder, Key::RoleArn);
        Ok((by_option || !keys && !web_identity) && self.has_credentials(&self.read()?)?)
    }

    /// Reads both files. Errors: [`ErrorKind::Config`] for a named profile that is in neither of
    /// them; a file that cannot be read.
    fn read(&self) -> Result<ProfileSettings> {
        let name = self.name.as_str();
        let config = section(&text(&self.config)?, |title| {
            match title.strip_prefix("profile") {
                Some(rest) if rest.starts_with([' ', '\t']) => {
                    rest.trim().trim_matches(['"', '\'']) == name
                }
                _ => title == "default" && name == "default",
            }
        });
        let keys = section(&text(&self.credentials)?, |title| title == name);
        if self.named && config.is_none() && keys.is_none() {
            let message = format!(
                "no profile {name:?} in {} or {}",
                self.config.display(),
                self.credentials.display()
            );
            return Err(Error::new(ErrorKind::Config, Stage::Index, message));
        }
        let keys = keys.unwrap_or_default();
        let all = config
            .unwrap_or_default()
            .into_iter()
            .chain(keys.clone())
            .collect();
        Ok(ProfileSettings { keys, all })
    }

    fn has_credentials(&self, settings: &ProfileSettings) -> Result<bool> {
        let has = |name: &&str| settings.all.contains_key(*name);
        if [
            "aws_access_key_id",
            "aws_secret_access_key",
            "credential_process",
        ]
        .iter()
        .any(has)
        {
            return Ok(true);
        }
        let Some(setting) = ELSEWHERE.iter().find(|name| has(name)) else {
            return Ok(false);
        };
        let name = &self.name;
        let message = format!(
            "profile {name:?} uses {setting}, which is not built in; name another \
             profile, with the line `credential_process = aws configure \
             export-credentials --profile {name} --format process`"
        );
        Err(Error::new(ErrorKind::Config, Stage::Index, message))
    }

    /// Credentials of these settings. Errors: [`ErrorKind::Permission`], with the profile and the
    /// command.
    fn credentials(&self, settings: &ProfileSettings) -> Result<Fresh<AwsCredential>> {
        self.plain(self.first_of(settings)?)
    }

    /// Removes line ends after values. Errors: a control character, which no header may contain.
    fn plain(&self, Fresh { value, life }: Fresh<AwsCredential>) -> Result<Fresh<AwsCredential>> {
        let trimmed = |text: &String| text.trim().to_string();
        let key_id = trimmed(&value.key_id);
        let secret_key = trimmed(&value.secret_key);
        let token = value.token.as_ref().map(trimmed);
        if [Some(&key_id), token.as_ref()]
            .into_iter()
            .flatten()
            .any(|text| text.contains(char::is_control))
        {
            return Err(refused(format!(
                "profile {:?} gives a key or token with a control character",
                self.name
            )));
        }
        Ok(Fresh {
            value: Arc::new(AwsCredential {
                key_id,
                secret_key,
                token,
            }),
            life,
        })
    }

    fn first_of(&self, settings: &ProfileSettings) -> Result<Fresh<AwsCredential>> {
        // The order of AWS's own tools: keys of the credentials file, the command, keys of the
        // other file.
        if let Some(found) = self.keys(&settings.keys)? {
            return Ok(Fresh::new(found, None));
        }
        if let Some(line) = settings.all.get("credential_process") {
            return self.run(line, DEADLINE);
        }
        match self.keys(&settings.all)? {
            Some(found) => Ok(Fresh::new(found, None)),
            None => Err(refused(format!(
                "profile {:?} has no credentials",
                self.name
            ))),
        }
    }

    fn keys(&self, settings: &BTreeMap<String, String>) -> Result<Option<AwsCredential>> {
        let value = |name: &str| settings.get(name).cloned();
        match (value("aws_access_key_id"), value("aws_secret_access_key")) {
            (Some(key_id), Some(secret_key)) => Ok(Some(AwsCredential {
                key_id,
                secret_key,
                token: value("aws_session_token"),
            })),
            (None, None) => Ok(None),
            (key, _) => {
                let missing = if key.is_some() {
                    "aws_secret_access_key"
                } else {
                    "aws_access_key_id"
                };
                Err(refused(format!("profile {:?} lacks {missing}", self.name)))
            }
        }
    }

    /// Runs the profile's command for credentials.
    fn run(&self, line: &str, deadline: Duration) -> Result<Fresh<AwsCredential>> {
        let words = words(line);
        // Its arguments may be secrets.
        let program = words.first().cloned().unwrap_or_default();
        let failed = |what: &str| {
            refused(format!(
                "credential_process {program:?} of profile {:?} {what}",
                self.name
            ))
        };
        let output = output(&words, deadline).map_err(|what| failed(&what))?;
        let printed: Printed = serde_json::from_slice(&output).map_err(|_| {
            failed(
                "did not print the JSON of credentials, with Version, AccessKeyId, \
                 SecretAccessKey",
            )
        })?;
        if printed.version != 1 {
            return Err(failed(&format!(
                "printed version {}; only version 1 is supported",
                printed.version
            )));
        }
        let end = printed
            .expiration
            .map(|end| chrono::DateTime::parse_from_rfc3339(&end));
        let end = end
            .transpose()
            .map_err(|_| failed("printed an Expiration that is not an ISO 8601 time"))?;
        let left = end.map(|end| {
            SystemTime::from(end)
                .duration_since(SystemTime::now())
                .unwrap_or_default()
        });
        if left == Some(Duration::ZERO) {
            return Err(failed("printed credentials that have expired"));
        }
        let key_id = printed.access_key_id;
        let secret_key = printed.secret_access_key;
        let token = printed.session_token;
        Ok(Fresh::new(
            AwsCredential {
                key_id,
                secret_key,
                token,
            },
            left,
        ))
    }
}

#[async_trait]
impl Source<AwsCredential> for Profile {
    /// Reads the files again: another program may renew the keys in them.
    async fn get(&self, _: bool) -> Result<Fresh<AwsCredential>> {
        let profile = self.clone();
        let got = tokio::task::spawn_blocking(move || profile.credentials(&profile.read()?)).await;
        got.unwrap_or_else(|_| Err(refused("reading a profile panicked")))
    }
}

fn is_set(builder: &AmazonS3Builder, key: Key) -> bool {
    builder.get_config_value(&key).is_some()
}

/// The file's text; empty if there is none.
fn text(path: &Path) -> Result<String> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => {
            let message = "the profiles of AWS cannot be read";
            Err(Error::os(Stage::Index, message, error).with_path(path))
        }
    }
}

/// The settings of the sections whose title `is_it` accepts; later ones win.
fn section(text: &str, is_it: impl Fn(&str) -> bool) -> Option<BTreeMap<String, String>> {
    let mut found = None;
    let mut here = false;
    for line in text.lines() {
        if let Some(title) = line.trim().strip_prefix('[') {
            here = title
                .split_once(']')
                .is_some_and(|(title, _)| is_it(title.trim()));
            if here {
                found.get_or_insert_with(BTreeMap::new);
            }
        } else if here && !line.starts_with([' ', '\t', '#', ';']) {
            // An indented line belongs to a nested setting, such as `s3 =`.
            if let (Some(found), Some((name, value))) = (&mut found, line.split_once('=')) {
                found.insert(name.trim().to_ascii_lowercase(), value.trim().to_string());
            }
        }
    }
    found.map(|found| {
        found
            .into_iter()
            .filter(|(_, value)| !value.is_empty())
            .collect()
    })
}

/// Splits a command into words: quotes and backslashes as in a POSIX shell, no other shell syntax.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = None::<String>;
    let mut quote = None;
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, ' ' | '\t') => words.extend(word.take()),
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (Some(open), c) if c == open => quote = None,
            (None, '\\') => word.get_or_insert_default().extend(chars.next()),
            (Some('"'), '\\') if matches!(chars.peek(), Some('"' | '\\')) => {
                word.get_or_insert_default().extend(chars.next());
            }
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

/// Runs a command and returns its output. Errors: how it failed.
fn output(words: &[String], deadline: Duration) -> Result<Vec<u8>, String> {
    let Some((program, arguments)) = words.split_first() else {
        return Err("is empty".into());
    };
    let end = Instant::now() + deadline;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0);
    let mut child = command
        .spawn()
        .map_err(|error| format!("cannot start: {error}"))?;
    let output = printed(&mut child, end);
    let status = if matches!(output, Ok(Some(_))) {
        ended(&mut child, end)
    } else {
        None
    };
    // Once its end was seen, its process id may belong to another process.
    if status.is_none() {
        // Processes that it started may hold its output open, so the whole group is killed.
        if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = child.wait();
    }
    match (output?, status) {
        (Some(output), Some(status)) if status.success() => Ok(output),
        (Some(_), Some(status)) => Err(format!("ended with {status}; run it by hand to see why")),
        _ => Err(format!("was killed after {deadline:?}")),
    }
}

/// All output of a process; `None` at the deadline.
fn printed(child: &mut Child, end: Instant) -> Result<Option<Vec<u8>>, String> {
    let mut output = Vec::new();
    let mut buffer = [0; 4096];
    let lost = |error: std::io::Error| format!("cannot be read: {error}");
    let Some(mut pipe) = child.stdout.take() else {
        return Ok(None);
    };
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Ok(None),
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(lost(error.into())),
            Ok(_) => {}
        }
        match pipe.read(&mut buffer).map_err(lost)? {
            0 => return Ok(Some(output)),
            count => output.extend_from_slice(&buffer[..count]),
        }
        if output.len() > OUTPUT {
            return Err(format!("printed more than {OUTPUT} bytes"));
        }
    }
}

/// The process's exit status; `None` at the deadline.
fn ended(child: &mut Child, end: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(None) if Instant::now() < end => std::thread::sleep(LOOK),
            status => return status.ok()?,
        }
    }
}

#[cfg(test)]
mod tests;
