//! Profiles and commands, from files of their own.

use super::*;

const SECRET: &str = "do-not-show-me";

/// A folder with both files, removed at the end.
struct Home(PathBuf);

impl Home {
    fn new(config: &str, credentials: &str) -> Self {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let dir =
            std::env::temp_dir().join(format!("feedline-profile-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("config"), config).unwrap();
        std::fs::write(dir.join("credentials"), credentials).unwrap();
        Self(dir)
    }

    fn profile(&self, name: &str) -> Profile {
        let file = |name| self.0.join(name);
        Profile {
            name: name.into(),
            named: true,
            config: file("config"),
            credentials: file("credentials"),
        }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn got(profile: &Profile) -> Result<Fresh<AwsCredential>> {
    profile.credentials(&profile.read()?)
}

fn key_of(fresh: Result<Fresh<AwsCredential>>) -> String {
    fresh.unwrap().value.key_id.clone()
}

#[test]
fn both_files_make_a_profile_and_the_credentials_file_wins() {
    let home = Home::new(
        "# a comment\n[default]\nregion = here\n\n[profile two \
         words]\nregion=there\naws_access_key_id = CONFIG\naws_secret_access_key = \
         s\ns3 =\n  region = nested\n[ profile \"quoted\" ]\nEndpoint_Url = \
         http://e\naws_access_key_id = K\n[other]\nregion = nowhere\n",
        "[two words]\naws_access_key_id = KEYS\naws_secret_access_key = \
         a=b/c+d==\naws_session_token = t\n[default]\n",
    );
    let default = home.profile("default");
    let two = home.profile("two words");
    let quoted = home.profile("quoted");
    let region = |profile: &Profile| profile.read().unwrap().all.get("region").cloned();
    assert_eq!(
        (region(&default).as_deref(), region(&two).as_deref()),
        (Some("here"), Some("there"))
    );
    assert_eq!(quoted.read().unwrap().all["endpoint_url"], "http://e");
    let found = got(&two).unwrap();
    assert_eq!(
        (found.value.key_id.as_str(), found.value.secret_key.as_str()),
        ("KEYS", "a=b/c+d==")
    );
    assert_eq!(
        (found.value.token.as_deref(), found.life),
        (Some("t"), None)
    );
    let said = got(&quoted).err().unwrap().to_string();
    assert!(
        said.contains("profile \"quoted\" lacks aws_secret_access_key"),
        "{said}"
    );
    // A section of the config file needs the word `profile`.
    let error = home.profile("other").read().err().unwrap();
    assert!(
        error.kind() == ErrorKind::Config && error.to_string().contains("no profile \"other\" in"),
        "{error}"
    );
    let missing = Profile {
        named: false,
        config: "/no/such".into(),
        ..home.profile("default")
    };
    assert!(!missing.has_credentials(&missing.read().unwrap()).unwrap());
}

#[test]
fn options_and_environment_go_before_a_profile_and_web_identity_too() {
    let home = Home::new(
        "[profile p]\nregion = there\nendpoint_url = http://e\ncredential_process = x\n",
        "",
    );
    let profile = home.profile("p");
    let builder = AmazonS3Builder::new;
    let keys = builder()
        .with_access_key_id("k")
        .with_secret_access_key("s")
        .with_region("here");
    let web = builder()
        .with_config(Key::WebIdentityTokenFile, "/t")
        .with_config(Key::RoleArn, "r");
    for (builder, by_option, gives) in [
        (builder(), false, true),
        (keys.clone(), false, false),
        (web.clone(), false, false),
        (keys.clone(), true, true),
    ] {
        assert_eq!(
            profile.gives_credentials(&builder, by_option).unwrap(),
            gives
        );
    }
    let place = |builder: AmazonS3Builder| {
        let placed = profile.place(builder).unwrap();
        [Key::Region, Key::Endpoint].map(|key| placed.get_config_value(&key).unwrap_or_default())
    };
    assert_eq!(place(web), ["there", "http://e"]);
    assert_eq!(place(keys), ["here", "http://e"]);
    let special = place(builder().with_config(Key::S3Endpoint, "http://mine"));
    assert_eq!(special, ["there", ""]);
}

#[test]
fn other_ways_to_credentials_are_an_error_with_the_way_out() {
    for setting in ELSEWHERE {
        let home = Home::new(&format!("[profile p]\n{setting} = {SECRET}\n"), "");
        let error = home
            .profile("p")
            .gives_credentials(&AmazonS3Builder::new(), false)
            .unwrap_err();
        let said = error.to_string();
        assert!(
            error.kind() == ErrorKind::Config && said.contains(setting) && !said.contains(SECRET),
            "{said}"
        );
        assert!(
            said.contains("aws configure export-credentials --profile p --format process"),
            "{said}"
        );
        // Where keys are found earlier, the profile's way does not matter.
        let keys = AmazonS3Builder::new()
            .with_access_key_id("k")
            .with_secret_access_key("s");
        assert!(!home.profile("p").gives_credentials(&keys, false).unwrap());
    }
}

#[test]
fn a_command_is_split_as_a_shell_splits_words() {
    for (line, right) in [
        ("a b  c", vec!["a", "b", "c"]),
        (
            "\"/path with/space\" 'it''s' \"say \\\"x\\\" \\n\"",
            vec!["/path with/space", "its", "say \"x\" \\n"],
        ),
        ("a\\ b '' \"\" ", vec!["a b", "", ""]),
        (
            "'single \\ \"quotes\"' $HOME ~ *",
            vec!["single \\ \"quotes\"", "$HOME", "~", "*"],
        ),
        ("  ", vec![]),
    ] {
        assert_eq!(words(line), right, "{line}");
    }
}

/// A profile whose command runs this script.
fn scripted(script: &str) -> (Home, Profile) {
    let home = Home::new("", "");
    std::fs::write(home.0.join("script"), script).unwrap();
    let line = format!(
        "/bin/sh \"{}\" --password {SECRET}",
        home.0.join("script").display()
    );
    std::fs::write(
        home.0.join("config"),
        format!("[profile p]\ncredential_process = {line}\n"),
    )
    .unwrap();
    let profile = home.profile("p");
    (home, profile)
}

#[test]
fn a_command_gives_credentials_with_their_end() {
    let json = r#"{"Version": 1, "AccessKeyId": "K", "SecretAccessKey": "s", "SessionToken": "t", "More": 1"#;
    let (_home, profile) = scripted(&format!("echo '{json}}}'"));
    let found = got(&profile).unwrap();
    assert_eq!(
        (
            found.value.key_id.as_str(),
            found.value.token.as_deref(),
            found.life
        ),
        ("K", Some("t"), None)
    );
    let (_home, profile) = scripted(&format!(
        "echo '{json}, \"Expiration\": \"2199-01-02T03:04:05.5+01:00\"}}'"
    ));
    let (left, due) = got(&profile).unwrap().life.unwrap();
    assert!(
        left > Duration::from_secs(100 * 365 * 86400) && left - due == Duration::from_secs(600),
        "{left:?}"
    );
    // Keys of the credentials file go before the command, those of the config file after it.
    let (home, profile) = scripted(&format!("echo '{json}}}'"));
    let keys = |key: &str| format!("aws_access_key_id = {key}\naws_secret_access_key = s\n");
    let config = std::fs::read_to_string(home.0.join("config")).unwrap();
    std::fs::write(home.0.join("config"), config + &keys("CONFIG")).unwrap();
    assert_eq!(key_of(got(&profile)), "K");
    std::fs::write(home.0.join("credentials"), format!("[p]\n{}", keys("KEYS"))).unwrap();
    assert_eq!(key_of(got(&profile)), "KEYS");
}

#[test]
fn a_command_that_fails_is_an_error_that_names_it_without_a_secret() {
    for (script, words) in [
        (
            "echo do-not-show-me >&2; exit 3",
            "ended with exit status: 3; run it by hand",
        ),
        ("echo do-not-show-me", "did not print the JSON"),
        (
            "echo '{\"Version\": \"do-not-show-me\"}'",
            "did not print the JSON",
        ),
        (
            "echo '{\"Version\":2,\"AccessKeyId\":\"K\",\"SecretAccessKey\":\"do-not-show-me\"}'",
            "printed version 2",
        ),
        (
            "echo \
             '{\"Version\":1,\"AccessKeyId\":\"K\",\"SecretAccessKey\":\"s\",\"Expiration\":\"do-not-show-me\"}'",
            "is not an ISO 8601 time",
        ),
        (
            "echo \
             '{\"Version\":1,\"AccessKeyId\":\"K\",\"SecretAccessKey\":\"s\",\"Expiration\":\"2020-01-01T00:00:00Z\"}'",
            "have expired",
        ),
        ("yes do-not-show-me", "printed more than 65536 bytes"),
        ("kill -9 $$", "signal: 9"),
    ] {
        let (_home, profile) = scripted(script);
        let error = got(&profile).err().unwrap();
        let said = format!("{error} {error:?}");
        assert_eq!(error.kind(), ErrorKind::Permission, "{said}");
        assert!(
            said.contains(words) && !said.contains(SECRET),
            "{script}: {said}"
        );
        assert!(
            said.contains("credential_process \"/bin/sh\" of profile \"p\""),
            "{said}"
        );
    }
    let said = home_with("/no/such/program x");
    assert!(
        said.contains("\"/no/such/program\" of profile \"p\" cannot start"),
        "{said}"
    );
    assert!(home_with("''").contains("cannot start"));
}

fn home_with(line: &str) -> String {
    let home = Home::new(&format!("[profile p]\ncredential_process = {line}\n"), "");
    got(&home.profile("p")).err().unwrap().to_string()
}

#[test]
fn a_command_is_killed_at_the_deadline_with_all_that_it_started() {
    // The first ends while its child holds the output; the second closes its output and stays.
    for script in [
        "sleep 600 & echo $! > \"$0.pid\"",
        "echo $$ > \"$0.pid\"; exec sleep 600 >&-",
    ] {
        let (home, profile) = scripted(script);
        let started = Instant::now();
        let settings = profile.read().unwrap();
        let said = profile
            .run(&settings.all["credential_process"], Duration::from_secs(1))
            .err()
            .unwrap()
            .to_string();
        assert!(said.contains("was killed after 1s"), "{said}");
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "{:?}",
            started.elapsed()
        );
        let pid = std::fs::read_to_string(home.0.join("script.pid")).unwrap();
        let stat = format!("/proc/{}/stat", pid.trim());
        // Its new parent may not have looked at it yet.
        let is_gone = || std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
        while !is_gone() {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "{script}: still there"
            );
            std::thread::sleep(LOOK);
        }
    }
}
