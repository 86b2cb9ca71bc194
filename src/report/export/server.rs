//! A very small HTTP server for metrics: `GET /metrics`, nothing else. The standard library's sockets, three threads.
//!
//! ```text
//! 3 × accept ──► head of the request, ≤ 8 KiB, within 2 s ──► the source's text ──► answer, within 5 s ──► close
//! drop ──► a flag, which every wait looks at each 50 ms, and a connection to itself, which ends accept()
//! ```
//!
//! Limits: so many connections as threads are served at once, others wait in the kernel's queue; a client that is slow on
//! purpose holds a thread for some seconds, never for ever. No TLS, no authentication: it listens on the loopback unless told
//! otherwise. One request per connection. A source that does not return holds its thread; dropping the server then leaves
//! that thread behind after [`PATIENCE`], and with it the port.

use crate::error::{Error, ErrorKind, Result, Stage};
use std::io::{self, ErrorKind as Io, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

const THREADS: usize = 3;
/// The head of a request may be so long.
const HEAD: usize = 8 << 10;
/// The whole head must be there so soon.
const HEAD_TIME: Duration = Duration::from_secs(2);
/// The whole answer must be taken so soon.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// What a client still sends after its answer is read for so long, so that the answer is not lost by a reset.
const LINGER_TIME: Duration = Duration::from_millis(500);
/// How often a wait looks whether the server is to stop.
const TICK: Duration = Duration::from_millis(50);
/// How long a drop waits for the threads.
const PATIENCE: Duration = Duration::from_secs(2);

/// Answers `GET /metrics` until it is dropped.
///
/// ```no_run
/// use feedline::profile::{Snapshot, export::{Names, Server, prometheus}};
///
/// let server = Server::loopback(9400, || prometheus(&[(Names::new("train", 0), &Snapshot::default())]))?;
/// println!("http://{}/metrics", server.address());
/// # Ok::<(), feedline::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "it stops when it is dropped"]
pub struct Server {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// Answers `GET /metrics` at `address` with what `source` returns at that moment. Others in the network can read it when
/// the address is not the loopback's; nothing is encrypted.
///
/// # Errors
///
/// `ErrorKind::Config` when `address` is none or cannot be listened at.
pub fn serve(address: impl ToSocketAddrs, source: impl Fn() -> String + Send + Sync + 'static) -> Result<Server> {
    let listener =
        TcpListener::bind(address).map_err(|error| refused("cannot listen at the metrics address", error))?;
    let address = listener.local_addr().map_err(|error| refused("the metrics socket has no address", error))?;
    let shared = Arc::new(Shared { listener, source: Box::new(source), stop: Arc::default() });
    let mut server = Server { address, stop: shared.stop.clone(), threads: Vec::new() };
    for _ in 0..THREADS {
        let shared = shared.clone();
        let thread = Builder::new().name("feedline-metrics".into()).spawn(move || shared.run());
        // The ones that were started stop with the server.
        server.threads.push(thread.map_err(|error| refused("cannot start a thread for metrics", error))?);
    }
    Ok(server)
}

fn refused(what: &str, error: io::Error) -> Error {
    Error::new(ErrorKind::Config, Stage::Build, what).with_source(error)
}

impl Server {
    /// Answers at 127.0.0.1 only. Port 0 takes a free one; see [`Self::address`].
    ///
    /// # Errors
    ///
    /// Those of [`serve`].
    pub fn loopback(port: u16, source: impl Fn() -> String + Send + Sync + 'static) -> Result<Self> {
        serve((Ipv4Addr::LOCALHOST, port), source)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// An address that reaches it from this machine.
    fn own_address(&self) -> SocketAddr {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
        }
        address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let (address, deadline) = (self.own_address(), Instant::now() + PATIENCE);
        while self.threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < deadline {
            // Ends one accept().
            let _ = TcpStream::connect_timeout(&address, TICK);
            std::thread::sleep(Duration::from_millis(1));
        }
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            let _ = thread.join();
        }
    }
}

struct Shared {
    listener: TcpListener,
    source: Box<dyn Fn() -> String + Send + Sync>,
    stop: Arc<AtomicBool>,
}

impl Shared {
    fn run(&self) {
        while !self.stopped() {
            match self.listener.accept() {
                // What goes wrong with one connection ends that one.
                Ok((stream, _)) if !self.stopped() => drop(self.answer(stream)),
                Ok(_) => {}
                // No descriptors or memory, for now.
                Err(_) => std::thread::sleep(TICK),
            }
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(TICK))?;
        let (status, more, body) = match self.head(&mut stream)? {
            Head::TooLong => ("431 Request Header Fields Too Large", "", String::new()),
            Head::Whole(head) => self.respond(&head),
        };
        let text = format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n{more}Connection: close\r\n\r\n{body}",
            body.len()
        );
        self.send(&mut stream, text.as_bytes())?;
        stream.shutdown(Shutdown::Write)?;
        self.linger(&mut stream)
    }

    /// Status, headers and body for a request.
    fn respond(&self, head: &[u8]) -> (&'static str, &'static str, String) {
        let none = String::new();
        match Request::parse(head) {
            None => ("400 Bad Request", "", none),
            Some(request) if request.path != b"/metrics" => ("404 Not Found", "", none),
            Some(request) if request.method != b"GET" => ("405 Method Not Allowed", "Allow: GET\r\n", none),
            // A panic of the source is reported by the panic hook, and is no reason to stop.
            Some(_) => match catch_unwind(AssertUnwindSafe(&self.source)) {
                Ok(text) => ("200 OK", "", text),
                Err(_) => ("500 Internal Server Error", "", none),
            },
        }
    }

    /// Reads until the empty line.
    fn head(&self, stream: &mut TcpStream) -> io::Result<Head> {
        let deadline = Instant::now() + HEAD_TIME;
        let (mut head, mut part) = (Vec::new(), [0; 1024]);
        loop {
            match self.patiently(deadline, || stream.read(&mut part))? {
                0 => return Err(Io::UnexpectedEof.into()),
                len => head.extend_from_slice(&part[..len]),
            }
            if has_end(&head) {
                return Ok(Head::Whole(head));
            }
            if head.len() > HEAD {
                return Ok(Head::TooLong);
            }
        }
    }

    fn send(&self, stream: &mut TcpStream, mut text: &[u8]) -> io::Result<()> {
        let deadline = Instant::now() + ANSWER_TIME;
        while !text.is_empty() {
            match self.patiently(deadline, || stream.write(text))? {
                0 => return Err(Io::WriteZero.into()),
                len => text = &text[len..],
            }
        }
        Ok(())
    }

    fn linger(&self, stream: &mut TcpStream) -> io::Result<()> {
        let deadline = Instant::now() + LINGER_TIME;
        let mut part = [0; 1024];
        while self.patiently(deadline, || stream.read(&mut part))? > 0 {}
        Ok(())
    }

    /// Tries until it succeeds or fails for good, the deadline passes or the server stops.
    fn patiently(&self, deadline: Instant, mut attempt: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
        loop {
            if self.stopped() || Instant::now() >= deadline {
                return Err(Io::TimedOut.into());
            }
            match attempt() {
                Err(error) if matches!(error.kind(), Io::WouldBlock | Io::TimedOut | Io::Interrupted) => {}
                done => return done,
            }
        }
    }
}

enum Head {
    Whole(Vec<u8>),
    TooLong,
}

/// Whether the empty line after the headers is there, within the limit.
fn has_end(head: &[u8]) -> bool {
    let head = &head[..head.len().min(HEAD)];
    head.windows(4).any(|end| end == b"\r\n\r\n") || head.windows(2).any(|end| end == b"\n\n")
}

/// The first line of a request.
#[derive(Debug, PartialEq, Eq)]
struct Request<'a> {
    method: &'a [u8],
    /// Without the query.
    path: &'a [u8],
}

impl<'a> Request<'a> {
    /// `None` for what is not HTTP/1.x.
    fn parse(head: &'a [u8]) -> Option<Self> {
        let line = head.split(|byte| *byte == b'\n').next()?;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let mut words = line.split(|byte| *byte == b' ');
        let (method, target, version) = (words.next()?, words.next()?, words.next()?);
        let legal = words.next().is_none()
            && !method.is_empty()
            && method.iter().all(u8::is_ascii_uppercase)
            && target.starts_with(b"/")
            && matches!(version, b"HTTP/1.0" | b"HTTP/1.1");
        let path = target.split(|byte| *byte == b'?').next()?;
        legal.then_some(Self { method, path })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    /// Longer than any wait of a test should be.
    const GENEROUS: Duration = Duration::from_secs(60);

    fn server() -> Server {
        Server::loopback(0, || "feedline_up 1\n".to_string()).unwrap()
    }

    fn connect(server: &Server) -> TcpStream {
        let stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(GENEROUS)).unwrap();
        stream
    }

    /// What comes back for these bytes, sent as they are.
    fn ask(server: &Server, request: &[u8]) -> String {
        let mut stream = connect(server);
        stream.write_all(request).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn the_source_is_asked_for_each_request() {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        let server =
            Server::loopback(0, move || format!("asked {}\n", counted.fetch_add(1, Ordering::Relaxed))).unwrap();
        assert_ne!(server.address().port(), 0);
        assert!(server.address().ip().is_loopback());
        for n in 0..10 {
            let answer = ask(&server, b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n");
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert_eq!(body, format!("asked {n}\n"));
            assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
            assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{head}");
            assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
        }
    }

    #[test]
    fn only_get_of_metrics_is_answered() {
        let server = server();
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(HEAD));
        let table: [(&[u8], &str); 10] = [
            (b"GET /metrics HTTP/1.0\r\n\r\n", "200"),
            (b"GET /metrics?debug=1 HTTP/1.1\n\n", "200"),
            (b"GET / HTTP/1.1\r\n\r\n", "404"),
            (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", "404"),
            (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "405"),
            (b"HEAD /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET /metrics HTTP/2\r\n\r\n", "400"),
            (b"\xff\x00\r\n\r\n", "400"),
            (b"\n\n", "400"),
            (long.as_bytes(), "431"),
        ];
        for (request, status) in table {
            let answer = ask(&server, request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer} for {}", request.escape_ascii());
        }
    }

    #[test]
    fn clients_that_send_and_take_nothing_do_not_keep_others_out() {
        let server = server();
        let slow: Vec<TcpStream> = (0..2 * THREADS)
            .map(|_| {
                let mut stream = connect(&server);
                stream.write_all(b"GET /met").unwrap();
                stream
            })
            .collect();
        assert!(ask(&server, b"GET /metrics HTTP/1.1\r\n\r\n").ends_with("feedline_up 1\n"));
        drop(slow);
    }

    #[test]
    fn a_source_that_panics_is_an_answer() {
        let server = Server::loopback(0, || panic!("as asked")).unwrap();
        for _ in 0..2 * THREADS {
            assert!(ask(&server, b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 500 "));
        }
    }

    #[test]
    fn a_dropped_server_is_gone_with_its_threads_and_its_port_free() {
        let alive = Arc::new(());
        for address in ["127.0.0.1:0", "0.0.0.0:0"] {
            let source = alive.clone();
            let server = serve(address, move || format!("{source:?}")).unwrap();
            let address = server.own_address();
            // One in the middle of its request.
            let mut stream = connect(&server);
            stream.write_all(b"GET").unwrap();
            drop(server);
            assert_eq!(Arc::strong_count(&alive), 1, "the threads hold the source no more");
            assert!(TcpStream::connect(address).is_err());
            let _ = TcpListener::bind(address).unwrap_or_else(|error| panic!("{address}: {error}"));
        }
    }

    #[test]
    fn a_source_that_hangs_does_not_hang_the_drop() {
        let (release, hang) = mpsc::channel::<()>();
        let (entered, inside) = mpsc::channel();
        let hang = std::sync::Mutex::new(hang);
        let server = Server::loopback(0, move || {
            let _ = entered.send(());
            let _ = hang.lock().map(|hang| hang.recv());
            String::new()
        });
        let server = server.unwrap();
        let mut stream = connect(&server);
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        inside.recv_timeout(GENEROUS).unwrap();
        drop(server);
        drop(release);
    }

    #[test]
    fn an_address_that_is_taken_is_an_error_that_names_the_cause() {
        let first = server();
        let error = serve(first.address(), String::new).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("in use"), "{error}");
        assert!(serve("not an address", String::new).is_err());
    }

    proptest! {
        #[test]
        fn garbage_is_no_request(head in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(b"GET /metrics HTTP/1.1\r\n".to_vec())], 0..60)) {
            let naive = std::str::from_utf8(&head).ok().and_then(|text| {
                let line = text.split('\n').next()?;
                let line = line.strip_suffix('\r').unwrap_or(line);
                let words: Vec<&str> = line.split(' ').collect();
                let [method, target, "HTTP/1.0" | "HTTP/1.1"] = words[..] else { return None };
                let upper = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
                (upper && target.starts_with('/')).then(|| target.split('?').next().unwrap().len())
            });
            let got = Request::parse(&head).map(|request| request.path.len());
            // What follows the first line, or the target, may be no text.
            prop_assert!(got == naive || std::str::from_utf8(&head).is_err());
        }
    }
}
