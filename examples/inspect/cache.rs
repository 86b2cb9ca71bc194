//! What a local cache of objects holds.

use clap::Args;
use feedline::storage::{Cache, CacheEntry};
use indicatif::{HumanBytes, HumanDuration};
use serde_json::json;
use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

/// Prints what a local cache holds: objects, versions, blocks, last uses.
#[derive(Args)]
pub struct CacheArgs {
    /// Folder of the cache
    dir: PathBuf,
    /// Read all blocks and compare their checksums; damaged ones are fetched again when they are
    /// used
    #[arg(long)]
    verify: bool,
    /// Remove objects that no process reads, used longest ago first, until the folder holds at most
    /// this: 100GiB, 2TB
    #[arg(long, value_name = "BYTES", value_parser = crate::source::size)]
    trim: Option<u64>,
    /// Print JSON, with all objects; the table has the 100 with most bytes
    #[arg(long)]
    json: bool,
}

/// Maximum number of objects in the table.
const LISTED: usize = 100;

pub fn run(args: &CacheArgs) -> Result<ExitCode, Box<dyn Error>> {
    let cache = Cache::at(&args.dir);
    let before = cache.entries()?;
    let damaged = if args.verify {
        Some(verify(&cache, &before)?)
    } else {
        None
    };
    let freed = args.trim.map(|bytes| cache.trim(bytes)).transpose()?;
    let mut entries = if freed.is_some() || args.verify {
        cache.entries()?
    } else {
        before
    };
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.bytes));
    let damaged: Option<Vec<_>> =
        damaged.map(|errors| errors.iter().map(ToString::to_string).collect());
    match args.json {
        true => print_json(&args.dir, &entries, damaged.as_deref(), freed)?,
        false => print_table(&args.dir, &entries, damaged.as_deref(), freed)?,
    }
    let held: u64 = entries.iter().map(|entry| entry.bytes).sum();
    if let Some(limit) = args.trim.filter(|limit| held > *limit) {
        eprintln!(
            "{} are more than {}: processes read the rest",
            HumanBytes(held),
            HumanBytes(limit)
        );
    }
    Ok(ExitCode::from(
        if damaged.is_none_or(|damaged| damaged.is_empty()) {
            0
        } else {
            2
        },
    ))
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
    dir: &Path,
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
        say!("    on disk      length      blocks  last use          version           object");
    }
    for entry in entries.iter().take(LISTED) {
        say!(
            "{:>11} {:>11} {:>11}  {:<9} {:<6}  {:<16}  {}",
            HumanBytes(entry.bytes).to_string(),
            HumanBytes(entry.len).to_string(),
            format!("{}/{}", entry.whole, entry.blocks),
            format!(
                "{:#}",
                HumanDuration(entry.used.elapsed().unwrap_or_default())
            ),
            if entry.in_use { "in use" } else { "" },
            entry.version.chars().take(16).collect::<String>(),
            if entry.url.is_empty() {
                "(left by a crash)"
            } else {
                &entry.url
            },
        );
    }
    if entries.len() > LISTED {
        say!("… and {} more: --json", entries.len() - LISTED);
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
