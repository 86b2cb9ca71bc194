//! Credentials that end in mid-run: they are renewed, or one typed error names their origin. Each
//! test is a process of its own with an environment of AWS.

use super::remote::{COUNT, RECORD, is_read, opened, server, status};
use crate::common::got::Got;
use crate::common::server::Server;
use crate::common::{Dir, assert_error, here, in_child, process, run};
use feedline::{Error, ErrorKind, Loader, Order, Result};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Prints credentials, by the number of runs before: `KEY-0`, then `KEY-1`; `$seconds` to their
/// end.
const COMMAND: &str = r#"
runs=$(cat runs 2>/dev/null | wc -l)
echo run >> runs
echo do-not-show-me >&2
[ "$runs" -lt "$limit" ] || exit 7
end=$(date -u -d "+$seconds seconds" +%Y-%m-%dT%H:%M:%SZ)
echo "{\"Version\":1,\"AccessKeyId\":\"KEY-$runs\",\"SecretAccessKey\":\"do-not-show-me\",\"SessionToken\":\"do-not-show-me\",\"Expiration\":\"$end\"}"
"#;

/// Runs the test again in a process whose profile `train` has the command, which works `limit`
/// times. In that process: its folder.
fn in_home(test: &str, seconds: u32, limit: u32, variables: &[(&str, &str)]) -> Option<PathBuf> {
    if let Some(home) = in_child() {
        return Some(home);
    }
    let dir = Dir::new();
    let home = dir.path("");
    let at = home.display();
    let script = format!("cd '{at}'; seconds={seconds}; limit={limit}\n{COMMAND}");
    let script = dir.write("command", script.as_bytes());
    let script = script.display();
    let line = format!("credential_process = /bin/sh '{script}' do-not-show-me");
    let config = dir.write("config", format!("[profile train]\n{line}\n").as_bytes());
    let mut command = process(test, &home);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
        command.env_remove(name);
    }
    command.env("AWS_CONFIG_FILE", config);
    command.env("AWS_SHARED_CREDENTIALS_FILE", dir.path("none"));
    command.env("AWS_PROFILE", "train");
    command.envs(variables.iter().copied()).env("HOME", &home);
    run(command);
    None
}

fn runs(home: &Path) -> usize {
    let text = std::fs::read_to_string(home.join("runs"));
    text.unwrap_or_default().lines().count()
}

struct Run {
    server: Server,
    bytes: Vec<u8>,
}

impl Run {
    fn new() -> Self {
        let (server, bytes) = server();
        Self { server, bytes }
    }

    fn loader(&self, name: &str, options: &[(&str, &str)]) -> Result<Loader> {
        let records = opened(&(self.server.try_s3(name, options)? + "/a.bin"))?;
        let builder = Loader::builder(records).order(Order::shuffled(5));
        builder.batch_size(4).tuning(|t| t.depth(4)).build()
    }

    fn epoch(&self, loader: &Loader) -> Result<()> {
        let mut found = vec![0; RECORD * COUNT];
        for got in Got::try_epoch(loader, 0)? {
            for (id, record) in got.ids.iter().zip(got.fields[0].bytes.chunks(RECORD)) {
                found[*id as usize * RECORD..][..RECORD].copy_from_slice(record);
            }
        }
        assert_eq!(found, self.bytes);
        Ok(())
    }

    /// The keys of requests since the last look.
    fn keys(&self) -> Vec<String> {
        let log = self.server.take_log().into_iter();
        let mut keys: Vec<_> = log.filter_map(|request| request.key).collect();
        keys.dedup();
        keys
    }
}

fn names_the_command(error: &Error) {
    let words = "credential_process \"/bin/sh\" of profile \"train\" ended with exit status: 7";
    assert_error(error, ErrorKind::Permission, &[words, "a.bin"]);
    let said = format!("{error} {error:?}");
    assert!(!said.contains("do-not-show-me"), "{said}");
}

#[test]
fn credentials_that_the_store_calls_expired_are_renewed_once() {
    let Some(home) = in_home(&here!(), 3600, 9, &[]) else {
        return;
    };
    let run = Run::new();
    let loader = run.loader("", &[]).unwrap();
    run.epoch(&loader).unwrap();
    assert_eq!((run.keys(), runs(&home)), (vec!["KEY-0".to_string()], 1));
    run.server.script(|request| {
        (request.key.as_deref() == Some("KEY-0")).then(|| status(403, "ExpiredToken"))
    });
    run.epoch(&loader).unwrap();
    assert_eq!(run.keys().last().unwrap(), "KEY-1");
    assert_eq!(runs(&home), 2);
}

#[test]
fn credentials_that_stay_refused_are_one_error_after_one_renewal() {
    let Some(home) = in_home(&here!(), 3600, 99, &[]) else {
        return;
    };
    let run = Run::new();
    let loader = run.loader("", &[]).unwrap();
    run.server
        .script(|request| is_read(request).then(|| status(403, "ExpiredToken")));
    let error = run.epoch(&loader).unwrap_err();
    let words = "403 (request id REQ-1) ExpiredToken; check the credentials";
    assert_error(&error, ErrorKind::Permission, &[words]);
    // One for the requests in flight, and one for each that began with the renewed ones.
    assert!((2..=1 + 4).contains(&runs(&home)), "{} runs", runs(&home));
}

#[test]
fn a_command_that_fails_is_an_error_once_the_old_credentials_end() {
    let Some(home) = in_home(&here!(), 5, 1, &[]) else {
        return;
    };
    let run = Run::new();
    let started = Instant::now();
    let loader = run.loader("", &[]).unwrap();
    let error = loop {
        match run.epoch(&loader) {
            Ok(()) => assert!(started.elapsed() < Duration::from_secs(60)),
            Err(error) => break error,
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    // Times of the command are whole seconds.
    let took = started.elapsed();
    assert!(took > Duration::from_secs(3), "{took:?}");
    names_the_command(&error);
    assert!(runs(&home) >= 2);
}

#[test]
fn a_command_that_never_works_is_an_error_of_the_first_open() {
    let Some(_) = in_home(&here!(), 5, 0, &[]) else {
        return;
    };
    names_the_command(&Run::new().loader("", &[]).err().unwrap());
}

#[test]
fn keys_of_the_environment_go_before_a_profile_that_no_option_names() {
    let keys = [
        ("AWS_ACCESS_KEY_ID", "ENV"),
        ("AWS_SECRET_ACCESS_KEY", "do-not-show-me"),
    ];
    let Some(home) = in_home(&here!(), 3600, 9, &keys) else {
        return;
    };
    let run = Run::new();
    run.epoch(&run.loader("", &[]).unwrap()).unwrap();
    assert_eq!((run.keys(), runs(&home)), (vec!["ENV".to_string()], 0));
    let loader = run.loader("-2", &[("profile", "train")]).unwrap();
    run.epoch(&loader).unwrap();
    assert_eq!((run.keys(), runs(&home)), (vec!["KEY-0".to_string()], 1));
    let error = run.loader("-3", &[("profile", "absent")]).err().unwrap();
    assert_error(&error, ErrorKind::Config, &["no profile \"absent\""]);
}

#[test]
fn credentials_of_a_container_are_renewed_too() {
    let Some(home) = in_home(&here!(), 3600, 9, &[("AWS_PROFILE", "")]) else {
        return;
    };
    let run = Run::new();
    let json = |key: &str| {
        let secret =
            r#""SecretAccessKey":"s","Token":"do-not-show-me","Expiration":"2199-01-01T00:00:00Z""#;
        let text = format!("{{\"AccessKeyId\":\"{key}\",{secret}}}");
        run.server.put("bucket/pod", text.into_bytes());
    };
    json("POD-1");
    std::fs::write(home.join("token"), "do-not-show-me").unwrap();
    let uri = format!("{}/bucket/pod", run.server.endpoint());
    let token = home.join("token");
    let token = token.to_str().unwrap();
    let options = [
        ("container_credentials_full_uri", uri.as_str()),
        ("container_authorization_token_file", token),
    ];
    let loader = run.loader("", &options).unwrap();
    run.epoch(&loader).unwrap();
    assert_eq!((run.keys(), runs(&home)), (vec!["POD-1".to_string()], 0));
    json("POD-2");
    run.server.script(|request| {
        (request.key.as_deref() == Some("POD-1")).then(|| status(403, "ExpiredToken"))
    });
    run.epoch(&loader).unwrap();
    assert_eq!(run.keys().last().unwrap(), "POD-2");
    // The server of credentials fails.
    run.server.script(|request| match request.path.as_str() {
        "/bucket/pod" => Some(status(403, "do-not-show-me")),
        _ => Some(status(403, "ExpiredToken")),
    });
    let error = run.epoch(&loader).unwrap_err();
    assert_error(
        &error,
        ErrorKind::Permission,
        &["no credentials found", "403"],
    );
    let said = format!("{error} {error:?}");
    assert!(!said.contains("do-not-show-me"), "{said}");
}
