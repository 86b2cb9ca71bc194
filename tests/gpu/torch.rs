//! Batches in the PyTorch of this machine: DLPack from device memory into a framework that we did
//! not write.
//!
//! `FEEDLINE_WHEEL` names what is imported: a wheel of `python`
//! (`pip wheel ./python`). It is unpacked into the data folder and installed nowhere.
//! Without it, or without PyTorch, this is left out.

use crate::common::noise;
use crate::machine::find;
use crate::section::Ctx;
use crate::watch;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const SCRIPT: &str = include_str!("torch.py");
const RECORD: usize = 4099;

pub fn run(ctx: &Ctx) -> Result<(), String> {
    let Some(python) = find("python3") else {
        ctx.skip("PyTorch", "no python3");
        return Ok(());
    };
    let mut probe = Command::new(&python);
    probe.args([
        "-c",
        "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.is_available())",
    ]);
    let (end, version, tail) = watch::output(probe, ctx.left().min(Duration::from_secs(100)));
    if !end.well() {
        ctx.skip(
            "PyTorch",
            format!(
                "{} {}",
                end.words(),
                tail.last().cloned().unwrap_or_default()
            ),
        );
        return Ok(());
    }
    ctx.note("PyTorch", version.trim());
    match std::env::var_os("FEEDLINE_WHEEL") {
        None => ctx.skip(
            "batches as tensors",
            "FEEDLINE_WHEEL names no wheel of python",
        ),
        Some(_) if !ctx.real() => ctx.skip("batches as tensors", "PyTorch wants a real GPU"),
        Some(wheel) => tensors(ctx, &python, Path::new(&wheel))?,
    }
    Ok(())
}

/// The script says in JSON lines what it found; each becomes a row.
fn tensors(ctx: &Ctx, python: &Path, wheel: &Path) -> Result<(), String> {
    let folder = ctx.folder()?;
    let script = folder.file("look.py");
    let data = folder.file("records.bin");
    let failed = |error: std::io::Error| format!("{}: {error}", folder.path().display());
    std::fs::write(&script, SCRIPT).map_err(failed)?;
    std::fs::write(&data, noise(RECORD * 500, 5)).map_err(failed)?;
    let mut command = Command::new(python);
    command
        .arg(&script)
        .arg(wheel)
        .arg(&data)
        .arg(RECORD.to_string())
        .arg(folder.path());
    let (end, text, tail) = watch::output(command, ctx.left());
    let mut rows = 0;
    for line in text.lines() {
        let Some((what, found)) = line.split_once('\t') else {
            continue;
        };
        rows += 1;
        ctx.check(format!("PyTorch: {what}"), || {
            match found.strip_prefix("ok") {
                Some(words) => Ok(words.trim().to_string()),
                None => Err(found.to_string()),
            }
        });
    }
    ctx.check("PyTorch: the script comes to its end", || {
        if end.well() && rows > 0 {
            Ok(format!("{rows} rows"))
        } else {
            Err(format!("{} {}", end.words(), tail.join(" ")))
        }
    });
    Ok(())
}
