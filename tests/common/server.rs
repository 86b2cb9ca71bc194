//! A server on loopback for tests: HTTP with ranges, and listings as of S3. It follows a script of
//! faults.

use super::lie::{Lie, Version, wait};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a server does in place of a right answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// Closes the connection without an answer.
    Close,
    /// Resets the connection after this many bytes of the body.
    Reset(usize),
    /// Promises the whole range, sends this many bytes of it, and closes.
    Cut(usize),
    /// Sends this many bytes with a matching `Content-Length`, for a `Content-Range` of all.
    Short(usize),
    /// Sends the range and more, in chunks without a length.
    Long,
    /// Sends the bytes of another range, and says so.
    OtherRange,
    /// Sends the range, announces more, and sends nothing more.
    Announced,
    /// Answers 200 with the whole object.
    Whole,
    /// Answers 200 with the range, and names it.
    OkRange,
    /// Answers 200 with the range, and names another.
    OkOtherRange,
    /// Sends nothing more after this many bytes of the body.
    Stall(usize),
    /// This status, with a `Retry-After` in seconds and a code of S3.
    Status(u16, Option<u64>, &'static str),
    /// An answer that names another version.
    OtherVersion,
    /// An answer that names no version.
    NoVersion,
    /// Answers HEAD without the length.
    NoLength,
    /// Sends one byte at a time.
    Trickle,
    /// The right answer, later.
    Delay(Duration),
    /// The right answer, with this header too.
    With(&'static str),
    /// Answers 403 without a body, by a clock of 2024.
    Skewed,
    /// Answers 302 with this `Location`.
    Redirect(String),
    /// An answer that is wrong in several ways.
    Lie(Lie),
}

/// Header of a store's answers.
const ID: &str = "x-amz-request-id: REQ-1\r\n";

/// Credentials of a store, which no message may show.
const KEYS: [(&str, &str); 2] = [
    ("access_key_id", "key"),
    ("secret_access_key", "do-not-show-me"),
];

/// One request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Number of requests before.
    pub number: u64,
    pub method: String,
    pub path: String,
    pub range: Option<(u64, u64)>,
    /// The access key of the signature.
    pub key: Option<String>,
}

type Script = Box<dyn FnMut(&Request) -> Option<Fault> + Send>;

/// Bytes and version.
type Object = (Arc<Vec<u8>>, u64);

#[derive(Default)]
struct Inner {
    objects: Mutex<BTreeMap<String, Object>>,
    script: Mutex<Option<Script>>,
    requests: AtomicU64,
    log: Mutex<Vec<Request>>,
    stop: AtomicBool,
}

/// A running server; it stops when dropped.
pub struct Server {
    inner: Arc<Inner>,
    port: u16,
}

impl Server {
    pub fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let inner = Arc::new(Inner::default());
        let shared = inner.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.stop.load(Ordering::Relaxed) {
                    return;
                }
                let shared = shared.clone();
                std::thread::spawn(move || drop(shared.serve(stream)));
            }
        });
        Self { inner, port }
    }

    /// A server with the files of a folder, and of its folders, under `bucket/`.
    pub fn of(folder: &Path) -> Self {
        let server = Self::new();
        server.add_folder(folder, "bucket");
        server
    }

    fn add_folder(&self, folder: &Path, name: &str) {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let name = format!("{name}/{}", entry.file_name().to_str().unwrap());
            match entry.path().is_dir() {
                true => self.add_folder(&entry.path(), &name),
                false => self.put(&name, std::fs::read(entry.path()).unwrap()),
            }
        }
    }

    /// Adds or replaces an object.
    pub fn put(&self, name: &str, bytes: Vec<u8>) {
        let mut objects = self.inner.objects.lock().unwrap();
        let version = objects.get(name).map_or(1, |(_, version)| version + 1);
        objects.insert(name.into(), (Arc::new(bytes), version));
    }

    pub fn remove(&self, name: &str) {
        self.inner.objects.lock().unwrap().remove(name);
    }

    /// Removes all objects, the faults and the log.
    pub fn clear(&self) {
        self.inner.objects.lock().unwrap().clear();
        *self.inner.script.lock().unwrap() = None;
        self.take_log();
    }

    /// `http://127.0.0.1:PORT/bucket/name`.
    pub fn http(&self, name: &str) -> String {
        format!("http://127.0.0.1:{}/bucket/{name}", self.port)
    }

    /// `s3://bucket-PORT/name`, configured for this server. The bucket is one of its own, since
    /// stores belong to the process.
    pub fn s3(&self, name: &str) -> String {
        format!("{}/{name}", self.keyed_s3("", &[]))
    }

    /// Another name of the bucket, with credentials and these options.
    pub fn keyed_s3(&self, name: &str, options: &[(&str, &str)]) -> String {
        self.try_s3(name, &[&KEYS[..], options].concat()).unwrap()
    }

    /// `s3://bucket-PORT-name`, another name of the bucket, with these options for credentials.
    pub fn try_s3(&self, name: &str, options: &[(&str, &str)]) -> feedline::Result<String> {
        let bucket = format!("s3://bucket-{}{name}", self.port);
        let endpoint = self.endpoint();
        let place = [("endpoint", endpoint.as_str()), ("region", "here")];
        feedline::storage::configure(&bucket, place.iter().chain(options).copied())?;
        Ok(bucket)
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Sets the faults of later requests.
    pub fn script(&self, script: impl FnMut(&Request) -> Option<Fault> + Send + 'static) {
        *self.inner.script.lock().unwrap() = Some(Box::new(script));
    }

    /// Number of requests so far.
    pub fn requests(&self) -> u64 {
        self.inner.requests.load(Ordering::Relaxed)
    }

    /// Requests so far, and forgets them.
    pub fn take_log(&self) -> Vec<Request> {
        std::mem::take(&mut *self.inner.log.lock().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

struct Head {
    method: String,
    path: String,
    query: String,
    headers: BTreeMap<String, String>,
}

fn head_of(reader: &mut impl BufRead) -> std::io::Result<Option<Head>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let method = words.next().unwrap_or("").to_string();
    let target = words.next().unwrap_or("").to_string();
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(':') else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_string());
    }
    Ok(Some(Head {
        method,
        path: decoded(path),
        query: query.into(),
        headers,
    }))
}

fn decoded(text: &str) -> String {
    let mut out = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        match byte {
            b'%' => {
                let digits = [bytes.next().unwrap_or(b'0'), bytes.next().unwrap_or(b'0')];
                out.push(u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap());
            }
            byte => out.push(byte),
        }
    }
    String::from_utf8(out).unwrap()
}

/// Sends a head that announces `len` bytes, then these bytes; the connection goes on.
fn send(out: &mut TcpStream, head: &str, len: usize, bytes: &[u8]) -> std::io::Result<bool> {
    write!(out, "{head}content-length: {len}\r\n\r\n")?;
    out.write_all(bytes)?;
    Ok(true)
}

/// A store's answer of a status alone.
fn refuse(out: &mut TcpStream, status: &str) -> std::io::Result<bool> {
    send(out, &format!("HTTP/1.1 {status}\r\n{ID}"), 0, b"")
}

impl Inner {
    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut out = stream;
        while let Some(head) = head_of(&mut reader)? {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let range = head.headers.get("range").and_then(|range| {
                let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
                Some((first.parse().ok()?, last.parse::<u64>().ok()? + 1))
            });
            let number = self.requests.fetch_add(1, Ordering::Relaxed);
            let signature = head
                .headers
                .get("authorization")
                .and_then(|text| text.split_once("Credential="));
            let key = signature.and_then(|(_, rest)| Some(rest.split_once('/')?.0.to_string()));
            let request = Request {
                number,
                method: head.method.clone(),
                path: head.path.clone(),
                range,
                key,
            };
            let mut script = self.script.lock().unwrap();
            let fault = script.as_mut().and_then(|script| script(&request));
            drop(script);
            self.log.lock().unwrap().push(request);
            if !self.answer(&head, range, fault, &mut out)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Answers one request; false if the connection ends.
    fn answer(
        &self,
        head: &Head,
        range: Option<(u64, u64)>,
        fault: Option<Fault>,
        out: &mut TcpStream,
    ) -> std::io::Result<bool> {
        if let Some(Fault::Lie(lie)) = &fault {
            return self.lie(head, range, lie, out);
        }
        match fault.clone() {
            Some(Fault::Close) => return Ok(false),
            Some(Fault::Delay(delay)) => std::thread::sleep(delay),
            Some(Fault::Status(status, retry_after, code)) => {
                // As some stores do, it repeats what it was sent.
                let said = format!("{:?} {}", head.headers, head.query);
                let body = format!("<Error><Code>{code}</Code><Message>{said}</Message></Error>");
                let after =
                    retry_after.map_or(String::new(), |after| format!("retry-after: {after}\r\n"));
                let start = format!("HTTP/1.1 {status} X\r\n{ID}{after}");
                let sent = if head.method == "HEAD" { "" } else { &body };
                return send(out, &start, body.len(), sent.as_bytes());
            }
            Some(Fault::Skewed) => {
                let start = "HTTP/1.1 403 X\r\ndate: Mon, 01 Jan 2024 00:00:00 GMT\r\n";
                return send(out, start, 0, b"");
            }
            Some(Fault::Redirect(to)) => {
                return refuse(out, &format!("302 Found\r\nlocation: {to}"));
            }
            _ => {}
        }
        if head.query.contains("list-type=2") {
            let body = self.listing(head, false);
            return send(out, "HTTP/1.1 200 OK\r\n", body.len(), body.as_bytes());
        }
        let Some((bytes, mut version)) = self.object(head) else {
            return refuse(out, "404 Not Found");
        };
        let wanted = head.headers.get("if-match");
        if wanted.is_some_and(|etag| *etag != format!("\"v{version}\"")) {
            return refuse(out, "412 Precondition Failed");
        }
        if fault == Some(Fault::OtherVersion) {
            version += 1;
        }
        let common = match fault {
            Some(Fault::NoVersion) => ID.to_string(),
            Some(Fault::With(header)) => format!("{ID}etag: \"v{version}\"\r\n{header}\r\n"),
            _ => format!(
                "{ID}etag: \"v{version}\"\r\nlast-modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n"
            ),
        };
        let ok = format!("HTTP/1.1 200 OK\r\n{common}");
        if head.method == "HEAD" {
            let known = fault != Some(Fault::NoLength);
            return send(out, &ok, if known { bytes.len() } else { 0 }, b"");
        }
        let Some((first, last)) = range.filter(|_| fault != Some(Fault::Whole)) else {
            return send(out, &ok, bytes.len(), &bytes);
        };
        let total = bytes.len() as u64;
        if first >= total {
            return refuse(out, "416 Range Not Satisfiable");
        }
        let last = last.min(total);
        let body = &bytes[first as usize..last as usize];
        let said = match fault {
            Some(Fault::OtherRange | Fault::OkOtherRange) => {
                format!("bytes {}-{}/{total}", first + 1, last)
            }
            _ => format!("bytes {first}-{}/{total}", last - 1),
        };
        let status = match fault {
            Some(Fault::OkRange | Fault::OkOtherRange) => "200 OK",
            _ => "206 Partial Content",
        };
        let start = format!("HTTP/1.1 {status}\r\n{common}content-range: {said}\r\n");
        let sent = |count: usize| &body[..count.min(body.len())];
        match fault {
            Some(Fault::Reset(count)) => {
                send(out, &start, body.len(), sent(count))?;
                // Unread bytes and a zero linger make the kernel send RST.
                rustix::net::sockopt::set_socket_linger(&*out, Some(Duration::ZERO))?;
                Ok(false)
            }
            Some(Fault::Cut(count)) => {
                send(out, &start, body.len(), sent(count))?;
                Ok(false)
            }
            Some(Fault::Short(count)) => send(out, &start, sent(count).len(), sent(count)),
            Some(Fault::Long) => {
                let len = body.len() + 7;
                write!(out, "{start}transfer-encoding: chunked\r\n\r\n{len:x}\r\n")?;
                out.write_all(body)?;
                out.write_all(b"garbage\r\n0\r\n\r\n")?;
                Ok(true)
            }
            Some(Fault::Announced) => {
                send(out, &start, body.len() + 5, body)?;
                wait(out)
            }
            Some(Fault::Stall(count)) => {
                send(out, &start, body.len(), sent(count))?;
                wait(out)
            }
            Some(Fault::Trickle) => {
                send(out, &start, body.len(), b"")?;
                body.chunks(1.max(body.len() / 50)).try_for_each(|piece| {
                    std::thread::sleep(Duration::from_millis(2));
                    out.write_all(piece)
                })?;
                Ok(true)
            }
            _ => send(out, &start, body.len(), body),
        }
    }

    /// The object that a request names. A bucket of S3 has the port in its name.
    fn object(&self, head: &Head) -> Option<Object> {
        let name = head.path.trim_start_matches('/');
        let name = match name.split_once('/') {
            Some((bucket, key)) if bucket.starts_with("bucket-") => format!("bucket/{key}"),
            _ => name.to_string(),
        };
        self.objects.lock().unwrap().get(&name).cloned()
    }

    /// Answers with a lie; false if the connection ends.
    fn lie(
        &self,
        head: &Head,
        range: Option<(u64, u64)>,
        lie: &Lie,
        out: &mut TcpStream,
    ) -> std::io::Result<bool> {
        let lists = head.query.contains("list-type=2");
        let listing = || self.listing(head, lie.version == Version::Other);
        let object = match lists {
            true => Some((Arc::new(listing().into_bytes()), 1)),
            false => self.object(head),
        };
        let Some((bytes, version)) = object else {
            return send(out, "HTTP/1.1 404 Not Found\r\n", 0, b"");
        };
        let range = range.filter(|_| !lists);
        lie.answer(&bytes, version, range, head.method == "HEAD", out)
    }

    /// A page of at most 1,000 keys; with `again`, one that leads to itself.
    fn listing(&self, head: &Head, again: bool) -> String {
        let value = |name: &str| {
            let found = head
                .query
                .split('&')
                .find_map(|pair| pair.strip_prefix(&format!("{name}=")));
            found.map(|text| decoded(&text.replace('+', " ")))
        };
        let prefix = value("prefix").unwrap_or_default();
        let after = value("continuation-token").unwrap_or_default();
        let delimiter = value("delimiter").unwrap_or_default();
        let mut keys = String::new();
        let mut folders = Vec::new();
        let mut next = None;
        let objects = self.objects.lock().unwrap();
        let mut count = 0;
        for (name, (bytes, version)) in objects.iter() {
            let key = name.strip_prefix("bucket/").unwrap_or("");
            if !key.starts_with(&prefix) || key <= after.as_str() {
                continue;
            }
            if !delimiter.is_empty() && key[prefix.len()..].contains(&delimiter) {
                let folder =
                    &key[..prefix.len() + key[prefix.len()..].find(&delimiter).unwrap() + 1];
                if folders.last().is_none_or(|last| last != folder) {
                    folders.push(folder.to_string());
                }
                continue;
            }
            if count == 1000 {
                break;
            }
            count += 1;
            next = Some(key.to_string());
            keys += &format!(
                "<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>&quot;v{version}\
                 &quot;</ETag><Size>{}</Size></Contents>",
                bytes.len()
            );
        }
        let token = |token: &str| format!("<NextContinuationToken>{token}</NextContinuationToken>");
        let more = match (again, count == 1000) {
            (true, _) => token("again"),
            (false, true) => token(&next.unwrap_or_default()),
            (false, false) => String::new(),
        };
        let folders: String = folders
            .iter()
            .map(|folder| format!("<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>"))
            .collect();
        format!(
            "<ListBucketResult><IsTruncated>{}</IsTruncated>{keys}{folders}{more}</ListBucketResult>",
            count == 1000 || again
        )
    }
}
