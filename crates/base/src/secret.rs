//! Hides secrets in texts that people see: user names and passwords, queries and keys in URLs, in
//! whatever form.
//!
//! [`hidden`] is applied wherever an error gets its message, path or source, so that no caller can
//! forget it. A URL with a secret is also refused before it is used (`crates/remote/src/url.rs`), so
//! no other code ever gets one.
//!
//! Limits: a secret without a marker (a bare word, except after the path of a web address) is not
//! recognised. Harmless text in such a form is hidden, too.

use std::borrow::Cow;

/// The text that replaces a secret.
const STARS: &str = "***";

/// A value is a secret if its name contains one of these words.
const NAMES: [&str; 14] = [
    "signature",
    "secret",
    "passw",
    "accountkey",
    "account_key",
    "access_key",
    "accesskey",
    "apikey",
    "api_key",
    "security-token",
    "session_token",
    "access_token",
    "auth_token",
    "credential",
];

/// The text, with stars instead of possible secrets.
pub(crate) fn hidden(text: &str) -> Cow<'_, str> {
    if !text.contains(['@', '?', '=', '#']) && !text.contains(":/") {
        return text.into();
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(ends_word).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        out += &of_word(word);
        let gap = after.find(|c| !ends_word(c)).unwrap_or(after.len());
        out += &after[..gap];
        rest = &after[gap..];
    }
    if out == text { text.into() } else { out.into() }
}

fn ends_word(c: char) -> bool {
    c.is_whitespace() || matches!(c, '"' | '\'' | '`' | '<' | '>')
}

fn of_word(word: &str) -> String {
    let (place, query) = at_query(word);
    let mut shown = of_values(&of_user(place));
    if query {
        shown += &word[place.len()..=place.len()];
        shown += STARS;
    }
    shown
}

/// The text before the query or fragment, and whether there is one: `?name=value`, `#name=value`.
pub fn at_query(text: &str) -> (&str, bool) {
    // In a web address, everything from the first `?` or `#` counts.
    if let Some(at) = text.find(['?', '#']).filter(|_| is_web(text)) {
        return (&text[..at], true);
    }
    let is_pair = |rest: &str| {
        let name = rest.find(|c: char| {
            !c.is_ascii_alphanumeric() && !matches!(c, '-' | '_' | '.' | '%' | '[' | ']')
        });
        name.is_some_and(|at| at > 0 && rest[at..].starts_with('='))
    };
    let found = text
        .char_indices()
        .find(|(at, c)| matches!(c, '?' | '#') && is_pair(&text[at + 1..]));
    found.map_or((text, false), |(at, _)| (&text[..at], true))
}

fn is_web(text: &str) -> bool {
    let start = text.get(..8).unwrap_or(text).to_ascii_lowercase();
    start.starts_with("http:/") || start.starts_with("https:/")
}

/// Hides `user:password@`, and a port that is not a number.
fn of_user(text: &str) -> String {
    let start = text.find(":/").map_or(0, |colon| {
        let slashes = text[colon + 1..]
            .bytes()
            .take_while(|byte| *byte == b'/')
            .count();
        colon + 1 + slashes
    });
    let is_url = start > 0;
    let (scheme, rest) = text.split_at(start);
    let host = &rest[..rest.find('/').unwrap_or(rest.len())];
    // A password may contain a slash.
    let odd = host.split_once(':').is_some_and(|(name, port)| {
        !name.starts_with('[')
            && !port.is_empty()
            && !port.bytes().all(|byte| byte.is_ascii_digit())
    });
    if !is_url {
        let at = text
            .rmatch_indices('@')
            .map(|(at, _)| at)
            .find(|at| text[text[..*at].rfind('/').unwrap_or(0)..*at].contains(':'));
        return at.map_or(text.into(), |at| {
            let start = text[..at].rfind('/').map_or(0, |slash| slash + 1);
            format!("{}{STARS}{}", &text[..start], &text[at..])
        });
    }
    // A password of digits, then a slash, looks like a port.
    let odd = odd || is_web(text) && host.contains(':') && rest.contains('@');
    match (
        if odd {
            rest.rfind('@')
        } else {
            host.rfind('@')
        },
        host.find(':'),
    ) {
        (Some(at), _) => format!("{scheme}{STARS}{}", &rest[at..]),
        // For `user:password%40host`.
        (None, Some(colon)) if odd => {
            format!("{scheme}{}{STARS}{}", &rest[..=colon], &rest[host.len()..])
        }
        _ => text.into(),
    }
}

/// Hides the values of `AccountKey=…;` and the like.
fn of_values(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (number, part) in text.split(';').enumerate() {
        out += if number == 0 { "" } else { ";" };
        match part.split_once('=') {
            Some((name, _)) if is_secret(name) => {
                out += name;
                out += "=";
                out += STARS;
            }
            _ => out += part,
        }
    }
    out
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    NAMES.iter().any(|word| name.contains(word)) || name.ends_with("sig")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Forms of URLs and other names that contain `hunter2`; all occur where people paste them.
    const FORMS: [&str; 49] = [
        "http://user:hunter2@h/x",
        "https://user:hunter2@h/x",
        "HTTP://user:hunter2@h/x",
        "Https://h/x?sig=hunter2",
        "http:/user:hunter2@h/x",
        "http:///user:hunter2@h/x",
        " http://user:hunter2@h/x",
        "\thttp://user:hunter2@h/x",
        "//user:hunter2@h/x",
        "user:hunter2@h/x",
        "https://hunter2@h/x",
        "https://user:hunter2%40h/x",
        "https://user:hunter2%40h:443/x",
        "https://user:SEC/hunter2@h/x",
        "https://user:hunter2@h:443/x",
        "https://h/x?X-Amz-Signature=hunter2",
        "https://h/x?a=1&X-Amz-Signature=hunter2&b=2",
        "https://h/x#access_token=hunter2",
        "h/x?sig=hunter2",
        "/h/x?token=hunter2",
        "x.tar?sv=1&sig=hunter2%3D",
        "s3://KEY:hunter2@bucket/x",
        "S3://b/k?X-Amz-Signature=hunter2",
        "s3://b/k?X-Amz-Signature=hunter2",
        "s3:/KEY:hunter2@b/k",
        "s3a://KEY:hunter2@b/k",
        "s3n://KEY:hunter2@b/k",
        "s3+https://KEY:hunter2@b/k",
        "gs://b/k?x-goog-signature=hunter2",
        "gs://user:hunter2@b/k",
        "az://c/k?sv=1&sig=hunter2",
        "abfss://c@account.dfs.core.windows.net/k?sig=hunter2",
        "wasbs://c@account/k?sig=hunter2",
        "hf://user:hunter2@datasets/x",
        "hf://datasets/x?token=hunter2",
        "ftp://user:hunter2@h/x",
        "sftp://user:hunter2@h/x",
        "hdfs://user:hunter2@h/x",
        "file://user:hunter2@h/x",
        "webdav+s://user:hunter2@h/x",
        "minio.local:9000/b/k?X-Amz-Credential=hunter2",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hunter2==;EndpointSuffix=x",
        "AWS_SECRET_ACCESS_KEY=hunter2",
        "password=hunter2",
        "https://h/x?[sig]=hunter2",
        "https://h/x?dl&token=hunter2",
        "https://h/x?hunter2",
        "https://h/x#hunter2",
        "https://user:1234/hunter2@h/x",
    ];

    #[test]
    fn no_form_of_a_secret_is_shown() {
        for form in FORMS {
            for text in [
                form.to_string(),
                format!("no file matches \"{form}\""),
                format!("{form}: not found; see {form}"),
            ] {
                let shown = hidden(&text);
                assert!(!shown.contains("hunter2"), "{form:?} is shown as {shown:?}");
                assert_eq!(hidden(&shown), shown, "hidden twice");
            }
        }
    }

    #[test]
    fn harmless_names_are_shown() {
        for text in [
            "s3://bucket/train-{000..127}.tar",
            "s3://bucket/part-?/year=2020/x-?.parquet",
            "s3://bucket/a@b/c.tar",
            "https://host:8443/x/y%20z.tar",
            "http://[::1]:80/x",
            "/data/user@host/x.tar",
            "/data/year=2020/month=1/x.parquet",
            "az://container/k",
            "is it whole? use `seed = 7`, or read https://docs.rs/feedline",
            "cuda:0: 12 bytes for a=1, b=2",
        ] {
            assert_eq!(hidden(text), text);
        }
    }
}
