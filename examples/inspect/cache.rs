//! What a local cache of objects holds.

use clap::Args;
use feedline::storage::{Cache, CacheEntry};
use indicatif::HumanBytes;
use serde_json::json;
use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

/// Prints what a local cache holds: objects, versions, blocks, last uses.
#[derive(Args)]
pub struct CacheArgs {
    /// Folder of the cache
    dir: PathBuf,
    /// Read all blocks and compare their checksums; damaged ones are fetched again when they are used
    #[arg(long)]
    verify: bool,
    /// Remove objects that no process reads, used longest ago first, until the folder holds at most this: 100GiB, 2TB
    #[arg(long, value_name = "BYTES", value_parser = size)]
    trim: Option<u64>,
    /// Print JSON, with all objects
    #[arg(long)]
    json: bool,
    /// Maximum number of objects to list, those with most bytes first
    #[arg(long, default_value_t = 100)]
    listed: usize,
}

pub fn run(args: &CacheArgs) -> Result<ExitCode, Box<dyn Error>> {
    let cache = Cache::at(&args.dir);
    let before = cache.entries()?;
    let damaged = if args.verify { Some(verify(&cache, &before)?) } else { None };
    let freed = args.trim.map(|bytes| cache.trim(bytes)).transpose()?;
    let mut entries = if freed.is_some() || args.verify { cache.entries()? } else { before };
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.bytes));
    let damaged: Option<Vec<_>> = damaged.map(|errors| errors.iter().map(ToString::to_string).collect());
    match args.json {
        true => print_json(&args.dir, &entries, damaged.as_deref(), freed)?,
        false => print_table(args, &entries, damaged.as_deref(), freed)?,
    }
    let held: u64 = entries.iter().map(|entry| entry.bytes).sum();
    if let Some(limit) = args.trim.filter(|limit| held > *limit) {
        eprintln!("{} are more than {}: processes read the rest", HumanBytes(held), HumanBytes(limit));
    }
    Ok(ExitCode::from(if damaged.is_none_or(|damaged| damaged.is_empty()) { 0 } else { 2 }))
}

fn verify(cache: &Cache, entries: &[CacheEntry]) -> feedline::Result<Vec<feedline::Error>> {
    // Blocks have one size but for the last of an object.
    let kept = entries.iter().map(|entry| entry.len.min(entry.bytes)).sum();
    let bar = crate::progress(kept);
    let damaged = cache.verify(|bytes| {
        bar.set_position(bytes);
        ControlFlow::Continue(())
    });
    bar.finish_and_clear();
    damaged
}

/// Bytes of the file system: all, free.
fn disk(dir: &Path) -> std::io::Result<(u64, u64)> {
    let disk = rustix::fs::statvfs(dir)?;
    Ok((disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize))
}

fn print_table(
    CacheArgs { dir, listed, .. }: &CacheArgs,
    entries: &[CacheEntry],
    damaged: Option<&[String]>,
    freed: Option<u64>,
) -> Result<(), Box<dyn Error>> {
    let (all, free) = disk(dir)?;
    let held: u64 = entries.iter().map(|entry| entry.bytes).sum();
    say!("cache     {}", dir.display());
    say!("objects   {}, {}", entries.len(), HumanBytes(held));
    say!("disk      {}, {} free", HumanBytes(all), HumanBytes(free));
    for damaged in damaged.unwrap_or_default() {
        say!("damaged   {damaged}");
    }
    if let Some(damaged) = damaged {
        say!("verified  {} damaged", damaged.len());
    }
    if let Some(freed) = freed {
        say!("trimmed   {} freed", HumanBytes(freed));
    }
    if !entries.is_empty() {
        say!(
            "{:>11} {:>11} {:>11}  {:<9} {:<6}  {:<16}  object",
            "on disk",
            "length",
            "blocks",
            "last use",
            "",
            "version"
        );
    }
    for entry in entries.iter().take(*listed) {
        say!(
            "{:>11} {:>11} {:>11}  {:<9} {:<6}  {:<16}  {}",
            HumanBytes(entry.bytes).to_string(),
            HumanBytes(entry.len).to_string(),
            format!("{}/{}", entry.whole, entry.blocks),
            ago(entry.used.elapsed().unwrap_or_default()),
            if entry.in_use { "in use" } else { "" },
            entry.version.chars().take(16).collect::<String>(),
            if entry.url.is_empty() { "(left by a crash)" } else { &entry.url },
        );
    }
    if entries.len() > *listed {
        say!("… and {} more: --listed, --json", entries.len() - listed);
    }
    Ok(())
}

fn print_json(
    dir: &Path,
    entries: &[CacheEntry],
    damaged: Option<&[String]>,
    freed: Option<u64>,
) -> Result<(), Box<dyn Error>> {
    let (all, free) = disk(dir)?;
    let objects: Vec<_> = (entries.iter())
        .map(|entry| {
            json!({
                "url": entry.url,
                "version": entry.version,
                "len": entry.len,
                "bytes": entry.bytes,
                "blocks": entry.blocks,
                "whole": entry.whole,
                "used": entry.used.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs()),
                "in_use": entry.in_use,
                "path": entry.path,
            })
        })
        .collect();
    let held: u64 = entries.iter().map(|entry| entry.bytes).sum();
    let answer = json!({
        "dir": dir,
        "bytes": held,
        "disk": { "bytes": all, "free": free },
        "damaged": damaged,
        "freed": freed,
        "objects": objects,
    });
    say!("{}", serde_json::to_string_pretty(&answer)?);
    Ok(())
}

fn ago(since: Duration) -> String {
    match since.as_secs() {
        seconds @ ..120 => format!("{seconds} s"),
        seconds @ ..7_200 => format!("{} min", seconds / 60),
        seconds @ ..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

/// Parser of arguments: a number of bytes with an optional unit.
fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no number of bytes: write 107374182400, 100GiB or 100GB");
    let digits = text.len() - text.trim_start_matches(|letter: char| letter.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let scale: u64 = match unit.trim() {
        "" | "B" => 1,
        "kB" => 1000,
        "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "TiB" => 1 << 40,
        _ => return Err(wrong()),
    };
    number.parse::<u64>().ok().and_then(|number| number.checked_mul(scale)).ok_or_else(wrong)
}
