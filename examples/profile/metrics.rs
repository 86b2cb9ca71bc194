//! Metrics of a run over HTTP: `GET /metrics` on the loopback interface.
//!
//! The port is taken before any long work, so that a conflict fails at once. Without a loader there
//! are no metrics.

use feedline::Loader;
use feedline::profile::{Names, prometheus};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use tiny_http::{Header, Method, Request, Response, Server};

/// The text format of Prometheus.
const FORMAT: &str = "Content-Type: text/plain; version=0.0.4; charset=utf-8";

type Served = Arc<OnceLock<Arc<Loader>>>;

/// A server that runs until dropped.
pub struct Metrics {
    server: Arc<Server>,
    loader: Served,
    thread: Option<JoinHandle<()>>,
}

impl Metrics {
    /// Listens at 127.0.0.1; port 0 picks a free one.
    pub fn listen(port: u16) -> Result<Self, String> {
        let failed = |error: &dyn std::fmt::Display| {
            format!("cannot serve metrics at 127.0.0.1:{port}: {error}")
        };
        let server = Arc::new(Server::http(("127.0.0.1", port)).map_err(|error| failed(&error))?);
        let loader = Served::default();
        let asked = server.clone();
        let served = loader.clone();
        // Failures of a client to receive its answer do not matter.
        let serve = move || {
            asked
                .incoming_requests()
                .for_each(|request| _ = answer(request, &served))
        };
        let thread = std::thread::Builder::new()
            .name("profile-metrics".into())
            .spawn(serve);
        Ok(Self {
            server,
            loader,
            thread: Some(thread.map_err(|error| failed(&error))?),
        })
    }

    pub fn address(&self) -> String {
        format!("http://{}/metrics", self.server.server_addr())
    }

    /// Serves this loader's metrics from now on.
    pub fn serve(&self, loader: &Arc<Loader>) {
        let _ = self.loader.set(loader.clone());
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.server.unblock();
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn answer(request: Request, loader: &Served) -> std::io::Result<()> {
    if request.url() != "/metrics" {
        return request
            .respond(Response::from_string("metrics are at /metrics\n").with_status_code(404));
    }
    if !matches!(request.method(), Method::Get | Method::Head) {
        return request
            .respond(Response::from_string("only GET is supported\n").with_status_code(405));
    }
    let mut response = Response::from_string(loader.get().map_or_else(String::new, |loader| {
        prometheus(&[(Names::new("profile", 0), &loader.snapshot())])
    }));
    if let Ok(format) = FORMAT.parse::<Header>() {
        response.add_header(format);
    }
    request.respond(response)
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline::dataset::Records;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    /// Status line and body.
    fn get(metrics: &Metrics, path: &str) -> (String, String) {
        let mut stream = TcpStream::connect(metrics.server.server_addr().to_ip().unwrap()).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.lines().next().unwrap().into(), body.into())
    }

    #[test]
    fn the_port_is_taken_before_the_loader_exists() {
        let metrics = Metrics::listen(0).unwrap();
        let port = metrics.server.server_addr().to_ip().unwrap().port();
        assert!(
            Metrics::listen(port)
                .map(|_| ())
                .unwrap_err()
                .contains(&port.to_string())
        );
        assert_eq!(
            get(&metrics, "/metrics"),
            ("HTTP/1.1 200 OK".into(), String::new())
        );
        let records = Records::builder(2).open_bytes([7; 100]).unwrap();
        metrics.serve(&Arc::new(
            Loader::builder(records).batch_size(20).build().unwrap(),
        ));
        assert!(
            get(&metrics, "/metrics")
                .1
                .contains("\nfeedline_batches_total{loader=\"profile\",rank=\"0\"} 0\n")
        );
        assert!(get(&metrics, "/").0.contains("404"));
        drop(metrics);
        assert!(
            TcpStream::connect(("127.0.0.1", port)).is_err(),
            "it listens until it is dropped"
        );
    }
}
