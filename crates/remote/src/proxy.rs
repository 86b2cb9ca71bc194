//! The proxies of the environment, and which requests go through them.
//!
//! ```text
//! host ─► link-local (metadata of clouds)? NO_PROXY? ─yes─► direct
//!                │ no
//!                └─► http_proxy, https_proxy, all_proxy, in upper case too ─► the proxy, or direct
//! ```
//!
//! The variables mean what they mean to curl; a host in `NO_PROXY` may also have a port. The client
//! library's own support is not used: it would ignore a URL that it cannot use, and would ask a
//! proxy for a machine's own credentials.

use feedline_base::error::{Error, ErrorKind, Result, Stage};
use reqwest::Url;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv6Addr, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Time limit for each step of a query to a proxy.
const PATIENCE: Duration = Duration::from_secs(2);

/// Names of the servers that give a machine its credentials.
const METADATA: [&str; 2] = ["metadata.google.internal", "metadata.goog"];
const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

#[derive(Debug, Default)]
pub(super) struct Proxies {
    http: Option<Proxy>,
    https: Option<Proxy>,
    direct: Vec<DirectHosts>,
}

/// A proxy, and the variable that names it.
#[derive(Clone, Debug)]
pub(super) struct Proxy {
    pub(super) url: Url,
    variable: String,
}

/// An entry of `NO_PROXY`.
#[derive(Debug, PartialEq)]
enum DirectHosts {
    All,
    /// Address, and the number of its leading bits that are compared.
    Net(IpAddr, u32),
    /// Host, with all hosts below it, and perhaps a port.
    Host(String, Option<u16>),
}

impl Proxies {
    /// Errors: [`ErrorKind::Config`] for a proxy that cannot be used.
    pub(super) fn of_env() -> Result<Self> {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(value: impl Fn(&str) -> Option<String>) -> Result<Self> {
        // A CGI program gets `HTTP_PROXY` from whoever sends a header `Proxy`.
        if value("REQUEST_METHOD").is_some() {
            return Ok(Self::default());
        }
        let first = |names: &[&str]| {
            let set = names
                .iter()
                .filter_map(|name| Some((name.to_string(), value(name)?.trim().to_string())));
            set.into_iter().find(|(_, value)| !value.is_empty())
        };
        let proxy = |names: &[&str]| {
            first(names)
                .map(|(name, value)| Proxy::parse(name, &value))
                .transpose()
        };
        let direct = first(&["NO_PROXY", "no_proxy"])
            .map(|(_, value)| value)
            .unwrap_or_default();
        Ok(Self {
            http: proxy(&["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])?,
            https: proxy(&["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"])?,
            direct: direct
                .split([',', ' ', '\t'])
                .filter(|entry| !entry.is_empty())
                .map(DirectHosts::parse)
                .collect(),
        })
    }

    /// The proxy of a request to `url`.
    pub(super) fn proxy_of(&self, url: &Url) -> Option<&Proxy> {
        let proxy = if url.scheme() == "https" {
            &self.https
        } else {
            &self.http
        }
        .as_ref()?;
        let host = url
            .host_str()?
            .trim_matches(['[', ']'])
            .trim_end_matches('.')
            .to_ascii_lowercase();
        let is_own = match host.parse() {
            Ok(IpAddr::V4(address)) => address.is_link_local(),
            Ok(IpAddr::V6(address)) => address == METADATA_V6 || address.is_unicast_link_local(),
            Err(_) => METADATA.contains(&host.as_str()),
        };
        let is_direct = is_own
            || self
                .direct
                .iter()
                .any(|entry| entry.holds(&host, url.port_or_known_default()));
        (!is_direct).then_some(proxy)
    }
}

impl Proxy {
    fn parse(variable: String, value: &str) -> Result<Self> {
        let bad = |what: &str| {
            let message = format!(
                "{variable} {what}; give the proxy as http://host:port, or unset the variable"
            );
            Err(Error::new(ErrorKind::Config, Stage::Index, message))
        };
        let text = if value.contains("://") {
            value.to_string()
        } else {
            format!("http://{value}")
        };
        match Url::parse(&text) {
            Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => {
                Ok(Self { url, variable })
            }
            Ok(url) if url.has_host() => bad(&format!(
                "asks for a proxy of the kind {}://, which is not supported",
                url.scheme()
            )),
            // The URL may contain a password.
            _ => bad("is not the URL of a proxy"),
        }
    }

    /// `http://host:3128 (HTTP_PROXY)`, without a password.
    pub(super) fn name(&self) -> String {
        let port = self
            .url
            .port()
            .map_or(String::new(), |port| format!(":{port}"));
        format!(
            "{}://{}{port} ({})",
            self.url.scheme(),
            self.url.host_str().unwrap_or_default(),
            self.variable
        )
    }

    /// Asks a proxy for a tunnel to a server. Returns the status if the proxy refuses it, which the
    /// client library does not report. Also `None` for a proxy that needs TLS or a user name.
    pub(super) fn refusal(&self, to: &Url) -> Option<u16> {
        if self.url.scheme() != "http" || !self.url.username().is_empty() {
            return None;
        }
        let place = (
            self.url.host_str()?.trim_matches(['[', ']']),
            self.url.port_or_known_default()?,
        );
        let mut stream =
            TcpStream::connect_timeout(&place.to_socket_addrs().ok()?.next()?, PATIENCE).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let server = format!("{}:{}", to.host_str()?, to.port_or_known_default()?);
        write!(
            stream,
            "CONNECT {server} HTTP/1.1\r\nHost: {server}\r\n\r\n"
        )
        .ok()?;
        let mut line = String::new();
        BufReader::new(std::io::Read::take(stream, 1024))
            .read_line(&mut line)
            .ok()?;
        let status = line
            .strip_prefix("HTTP/1.")?
            .split_ascii_whitespace()
            .nth(1)?
            .parse()
            .ok()?;
        (!(200..300).contains(&status)).then_some(status)
    }
}

impl DirectHosts {
    fn parse(entry: &str) -> Self {
        let entry = entry.to_ascii_lowercase();
        if entry == "*" {
            return Self::All;
        }
        let (address, bits) = entry
            .split_once('/')
            .map_or((entry.as_str(), None), |(net, bits)| {
                (net, bits.parse().ok())
            });
        if let Ok(address) = address.trim_matches(['[', ']']).parse::<IpAddr>() {
            let all = if address.is_ipv4() { 32 } else { 128 };
            return Self::Net(address, bits.unwrap_or(all).min(all));
        }
        let (host, port) = match entry
            .rsplit_once(':')
            .map(|(host, port)| (host, port.parse()))
        {
            Some((host, Ok(port))) => (host, Some(port)),
            _ => (entry.as_str(), None),
        };
        Self::Host(
            host.trim_start_matches("*.")
                .trim_matches(['.', '[', ']'])
                .into(),
            port,
        )
    }

    /// Whether the entry covers this host, in lower case, and this port.
    fn holds(&self, host: &str, port: Option<u16>) -> bool {
        match self {
            Self::All => true,
            Self::Net(net, bits) => match (net, host.parse()) {
                (IpAddr::V4(net), Ok(IpAddr::V4(is))) => {
                    (net.to_bits() ^ is.to_bits()).leading_zeros() >= *bits
                }
                (IpAddr::V6(net), Ok(IpAddr::V6(is))) => {
                    (net.to_bits() ^ is.to_bits()).leading_zeros() >= *bits
                }
                _ => false,
            },
            Self::Host(own, own_port) => {
                let below = host
                    .strip_suffix(own.as_str())
                    .is_some_and(|start| start.is_empty() || start.ends_with('.'));
                below && (own_port.is_none() || *own_port == port)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Proxies> {
        Proxies::of(|name| {
            variables
                .iter()
                .find(|(own, _)| *own == name)
                .map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn no_proxy_names_hosts_nets_ports_and_all() {
        for (entries, url, direct) in [
            ("*", "http://10.0.0.1/x", true),
            ("*", "http://store.example/x", true),
            ("10.0.0.0/8", "http://10.9.9.9/x", true),
            ("10.0.0.0/8", "http://11.0.0.1/x", false),
            ("10.0.0.1:90", "http://10.0.0.1:90/x", true),
            ("10.0.0.1:90", "http://10.0.0.1:91/x", false),
            ("::1", "http://[::1]:8/x", true),
            ("a.b, .example other", "http://store.EXAMPLE/x", true),
            ("example", "http://notexample/x", false),
            ("*.example:80", "http://store.example/x", true),
            ("", "http://localhost/x", false),
            ("", "http://169.254.169.254/latest/api/token", true),
            ("", "http://169.254.170.2/v2", true),
            ("", "http://metadata.google.internal/x", true),
            ("", "http://[fd00:ec2::254]/x", true),
        ] {
            let proxies = of(&[("http_proxy", "p:3128"), ("NO_PROXY", entries)]).unwrap();
            let found = proxies.proxy_of(&url.parse().unwrap());
            assert_eq!(found.is_none(), direct, "{entries} {url}");
            assert!(found.is_none_or(|proxy| proxy.name() == "http://p:3128 (http_proxy)"));
        }
    }

    #[test]
    fn a_proxy_is_used_or_refused_by_its_variable() {
        let to =
            |proxies: &Proxies, url: &str| proxies.proxy_of(&url.parse().unwrap()).map(Proxy::name);
        let all = of(&[
            ("ALL_PROXY", "http://user:secret@p"),
            ("HTTPS_PROXY", " "),
            ("https_proxy", "https://q:1"),
        ])
        .unwrap();
        assert_eq!(to(&all, "http://h/x").unwrap(), "http://p (ALL_PROXY)");
        assert_eq!(
            to(&all, "https://h/x").unwrap(),
            "https://q:1 (https_proxy)"
        );
        assert_eq!(
            to(
                &of(&[("REQUEST_METHOD", "GET"), ("HTTP_PROXY", "p")]).unwrap(),
                "http://h/x"
            ),
            None
        );
        for value in [
            "socks5://user:secret@h:1",
            "http://",
            "http://user:secret@h:notaport",
            "::secret",
        ] {
            let error = of(&[("HTTPS_PROXY", value)]).unwrap_err();
            assert!(
                error.kind() == ErrorKind::Config && error.message().starts_with("HTTPS_PROXY "),
                "{error}"
            );
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
