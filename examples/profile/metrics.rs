//! The metrics of a run by HTTP. The port is taken before anything that takes long, so that one that is in use is heard of at
//! once; until there is a loader, there are no metrics.

use feedline::Loader;
use feedline::profile::export::{self, Names, Server};
use std::sync::{Arc, OnceLock};

pub struct Metrics {
    server: Server,
    loader: Arc<OnceLock<Arc<Loader>>>,
}

impl Metrics {
    /// Listens at 127.0.0.1; 0 takes a free port.
    pub fn listen(port: u16) -> feedline::Result<Self> {
        let loader: Arc<OnceLock<Arc<Loader>>> = Arc::default();
        let served = loader.clone();
        let text = move || match served.get() {
            Some(loader) => export::prometheus(&[(Names::new("profile", 0), &loader.snapshot())]),
            None => String::new(),
        };
        Ok(Self { server: Server::loopback(port, text)?, loader })
    }

    pub fn address(&self) -> String {
        format!("http://{}/metrics", self.server.address())
    }

    /// From now on they are those of this loader.
    pub fn serve(&self, loader: &Arc<Loader>) {
        let _ = self.loader.set(loader.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use feedline::dataset::Records;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    fn get(metrics: &Metrics) -> String {
        let mut stream = TcpStream::connect(metrics.server.address()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
        text.split_once("\r\n\r\n").unwrap().1.into()
    }

    #[test]
    fn a_port_is_taken_before_there_is_a_loader_and_in_use_for_the_next() {
        let metrics = Metrics::listen(0).unwrap();
        assert!(Metrics::listen(metrics.server.address().port()).is_err());
        assert_eq!(get(&metrics), "");
        let records = Records::builder(2).open_bytes([7; 100]).unwrap();
        metrics.serve(&Arc::new(Loader::builder(records).batch_size(20).build().unwrap()));
        assert!(get(&metrics).contains("feedline_"));
    }
}
