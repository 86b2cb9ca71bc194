//! Answers of a server that lies, made of six choices: each product of them is an answer. One is
//! honest.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// How the body is framed, and what of it comes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Framing {
    Length,
    Chunked,
    /// The connection's end is the body's.
    Close,
    /// A `Content-Length` beyond the range, and the connection stays open.
    TooLong,
    /// A `Content-Length` below the range, and that much of it.
    TooShort,
    /// Chunks without a piece in the middle, and a proper end.
    Lost,
    /// Chunks with a piece twice, and a proper end.
    Twice,
    /// As `Twice`, and what is too much comes late.
    TwiceLate,
    /// Chunks with other bytes behind the range.
    Behind,
    /// A right length, and half of the body.
    Cut,
    /// Half of the chunks.
    ChunksCut,
    /// Chunks without a piece in the middle, and no end.
    LostCut,
    /// An HTTP/1.0 server's answer without a length, of which the end is missing.
    Old,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Coding {
    None,
    Identity,
    /// Named, and as long as the range.
    Gzip,
    /// Named, and shorter.
    Brotli,
}

/// What `Content-Range` says; the bytes sent are those asked for, except for `Shifted`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Said {
    Right,
    Shifted,
    OtherTotal,
    NoTotal,
    None,
    Stars,
    TwoRanges,
    Huge,
    Reversed,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Code {
    Right,
    /// 200 for a range.
    Ok,
    /// 206 for what is none.
    Partial,
    /// 500 with a body that does not end.
    Flood,
    /// 503 with a time in `Retry-After`.
    Busy,
    Gone,
    NotSatisfiable,
    /// 200 with a page for people.
    Login,
    NoContent,
    /// 403 to HEAD, and the right answer to GET.
    NoHead,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Timing {
    Prompt,
    /// The head comes after the client's patience.
    Late,
    /// Half of the body, and silence.
    Stall,
    /// One byte after the other.
    Drip,
    /// Many headers before the body.
    Headers,
}

/// The version named. In a listing, `Other` is a page that leads to itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Version {
    Right,
    Other,
    None,
    Empty,
    Weak,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lie {
    pub framing: Framing,
    pub coding: Coding,
    pub said: Said,
    pub code: Code,
    pub timing: Timing,
    pub version: Version,
}

const FRAMINGS: [Framing; 13] = {
    use Framing::*;
    [
        Length, Chunked, Close, TooLong, TooShort, Lost, Twice, TwiceLate, Behind, Cut, ChunksCut,
        LostCut, Old,
    ]
};
const CODINGS: [Coding; 4] = [Coding::None, Coding::Identity, Coding::Gzip, Coding::Brotli];
const SAID: [Said; 9] = {
    use Said::*;
    [
        Right, Shifted, OtherTotal, NoTotal, None, Stars, TwoRanges, Huge, Reversed,
    ]
};
const CODES: [Code; 10] = [
    Code::Right,
    Code::Ok,
    Code::Partial,
    Code::Flood,
    Code::Busy,
    Code::Gone,
    Code::NotSatisfiable,
    Code::Login,
    Code::NoContent,
    Code::NoHead,
];
const TIMINGS: [Timing; 5] = {
    use Timing::*;
    [Prompt, Late, Stall, Drip, Headers]
};
const VERSIONS: [Version; 5] = {
    use Version::*;
    [Right, Other, None, Empty, Weak]
};

impl Lie {
    /// The answer made of the digits of `number`, which are used up. Most choices are the right
    /// one, so that a lie is wrong in one or two ways and seldom in all.
    pub fn of(number: &mut u64) -> Self {
        let mut pick = |count: usize| {
            let rolled = (*number % (2 * count as u64)) as usize;
            *number /= 2 * count as u64;
            // Half of them are honest.
            if rolled < count { rolled } else { 0 }
        };
        Self {
            framing: FRAMINGS[pick(FRAMINGS.len())],
            coding: CODINGS[pick(CODINGS.len())],
            said: SAID[pick(SAID.len())],
            code: CODES[pick(CODES.len())],
            timing: TIMINGS[pick(TIMINGS.len())],
            version: VERSIONS[pick(VERSIONS.len())],
        }
    }

    /// Answers for an object or a listing; false if the connection ends.
    pub fn answer(
        &self,
        bytes: &[u8],
        version: u64,
        range: Option<(u64, u64)>,
        head: bool,
        out: &mut TcpStream,
    ) -> std::io::Result<bool> {
        if self.timing == Timing::Late {
            std::thread::sleep(Duration::from_millis(250));
        }
        let total = bytes.len() as u64;
        let (first, end) = range.map_or((0, total), |(first, end)| {
            (first.min(total), end.min(total))
        });
        let shift = u64::from(self.said == Said::Shifted && first < end);
        let mut body = bytes[(first + shift) as usize..end as usize].to_vec();
        match self.coding {
            Coding::Gzip => body.reverse(),
            Coding::Brotli => body.truncate(body.len() / 2),
            Coding::None | Coding::Identity => {}
        }
        let status = match self.code {
            Code::Right | Code::NoHead if range.is_some() => "206 Partial Content",
            Code::NoHead if head => "403 Forbidden",
            Code::Right | Code::NoHead | Code::Ok | Code::Login => "200 OK",
            Code::Partial => "206 Partial Content",
            Code::Flood => "500 Internal Server Error",
            Code::Busy => "503 Busy\r\nretry-after: Wed, 21 Oct 2015 07:28:00 GMT",
            Code::Gone => "404 Not Found",
            Code::NotSatisfiable => "416 Range Not Satisfiable",
            Code::NoContent => "204 No Content",
        };
        let minor = u8::from(self.framing != Framing::Old);
        let mut start = format!("HTTP/1.{minor} {status}\r\n");
        if self.timing == Timing::Headers {
            let filler = "x".repeat(100);
            (0..90).for_each(|number| start += &format!("x-filler-{number}: {filler}\r\n"));
        }
        start += &self.named(version);
        if range.is_some() {
            start += &self.range(first + shift, end, total);
        }
        match self.coding {
            Coding::None => {}
            Coding::Identity => start += "content-encoding: identity\r\n",
            Coding::Gzip => start += "content-encoding: gzip\r\n",
            Coding::Brotli => start += "content-encoding: br\r\n",
        }
        if self.code == Code::Login {
            start += "content-type: text/html; charset=utf-8\r\n";
            body = b"<html><body>Please log in.</body></html>".to_vec();
        }
        if head || self.code == Code::NoContent {
            if head {
                start += &format!("content-length: {total}\r\n");
            }
            return write!(out, "{start}\r\n").map(|()| true);
        }
        if self.code == Code::Flood {
            write!(out, "{start}transfer-encoding: chunked\r\n\r\n")?;
            let piece = vec![b'x'; 64 << 10];
            for _ in 0..(256 << 20) / piece.len() {
                write!(out, "{:x}\r\n", piece.len())?;
                out.write_all(&piece)?;
                out.write_all(b"\r\n")?;
            }
            return Ok(false);
        }
        self.send(start, &body, out)
    }

    fn named(&self, version: u64) -> String {
        let time = "last-modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n";
        match self.version {
            Version::Right => format!("etag: \"v{version}\"\r\n{time}"),
            Version::Other => format!("etag: \"v{}\"\r\n{time}", version + 1),
            Version::None => String::new(),
            Version::Empty => format!("etag: \"\"\r\n{time}"),
            Version::Weak => format!("etag: W/\"v{version}\"\r\n{time}"),
        }
    }

    fn range(&self, first: u64, end: u64, total: u64) -> String {
        let last = end.max(1) - 1;
        let right = format!("content-range: bytes {first}-{last}/{total}\r\n");
        match self.said {
            Said::Right | Said::Shifted => right,
            Said::OtherTotal => format!("content-range: bytes {first}-{last}/{}\r\n", total + 1),
            Said::NoTotal => format!("content-range: bytes {first}-{last}/*\r\n"),
            Said::None => String::new(),
            Said::Stars => format!("content-range: bytes */{total}\r\n"),
            Said::TwoRanges => format!(
                "{right}content-range: bytes {}-{last}/{total}\r\n",
                first + 1
            ),
            Said::Huge => format!("content-range: bytes {first}-{}/{}\r\n", u64::MAX, u64::MAX),
            Said::Reversed => format!("content-range: bytes {last}-{first}/{total}\r\n"),
        }
    }

    fn send(&self, start: String, body: &[u8], out: &mut TcpStream) -> std::io::Result<bool> {
        use Framing::*;
        let len = body.len();
        let third = len / 3;
        let half = len / 2;
        // The first half has a middle, which is lost or comes twice.
        let first = &body[..half];
        let middle = &body[third..half];
        let second = &body[half..];
        let lost = [&body[..third], second];
        let announced = |count: usize| format!("{start}content-length: {count}\r\n\r\n");
        let closing = format!("{start}connection: close\r\n\r\n");
        let chunked = format!("{start}transfer-encoding: chunked\r\n\r\n");
        let goes_on = match self.framing {
            Length => self.body(&announced(len), &[body], "", out)?,
            TooLong => {
                self.body(&announced(len + 5), &[body], "", out)?;
                wait(out)?
            }
            TooShort => self.body(&announced(half), &[first], "", out)?,
            Cut => self.body(&announced(len), &[first], "", out)?,
            Close => self.body(&closing, &[body], "", out)?,
            Old => self.body(&format!("{start}\r\n"), &[first], "", out)?,
            Chunked => self.chunks(&chunked, &[body], true, out)?,
            Lost => self.chunks(&chunked, &lost, true, out)?,
            Twice => self.chunks(&chunked, &[first, middle, second], true, out)?,
            TwiceLate => {
                let (most, late) = second.split_at(second.len() - middle.len());
                self.chunks(&chunked, &[first, middle, most], false, out)?;
                std::thread::sleep(Duration::from_millis(150));
                self.chunks("", &[late], true, out)?
            }
            Behind => self.chunks(&chunked, &[body, b"behind"], true, out)?,
            ChunksCut => self.chunks(&chunked, &[first], false, out)?,
            LostCut => self.chunks(&chunked, &lost, false, out)?,
        };
        Ok(goes_on && !matches!(self.framing, Close | Old | Cut | ChunksCut | LostCut))
    }

    fn chunks(
        &self,
        start: &str,
        pieces: &[&[u8]],
        ends: bool,
        out: &mut TcpStream,
    ) -> std::io::Result<bool> {
        let mut framed = Vec::new();
        for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
            framed.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
            framed.extend_from_slice(piece);
            framed.extend_from_slice(b"\r\n");
        }
        self.body(start, &[&framed], if ends { "0\r\n\r\n" } else { "" }, out)
    }

    fn body(
        &self,
        start: &str,
        pieces: &[&[u8]],
        end: &str,
        out: &mut TcpStream,
    ) -> std::io::Result<bool> {
        out.write_all(start.as_bytes())?;
        for piece in pieces {
            match self.timing {
                Timing::Stall => {
                    out.write_all(&piece[..piece.len() / 2])?;
                    return wait(out);
                }
                Timing::Drip => {
                    // Slower than the least rate, and never silent.
                    for byte in piece.iter().take(100) {
                        out.write_all(std::slice::from_ref(byte))?;
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    return Ok(false);
                }
                _ => out.write_all(piece)?,
            }
        }
        out.write_all(end.as_bytes()).map(|()| true)
    }
}

/// Until the client gives up.
pub fn wait(out: &mut TcpStream) -> std::io::Result<bool> {
    let _ = out.read(&mut [0]);
    Ok(false)
}
