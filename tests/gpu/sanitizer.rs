//! NVIDIA's compute-sanitizer over a short conformance: this program starts itself below each of
//! its tools.

use crate::machine::find;
use crate::section::Ctx;
use crate::watch;
use std::path::Path;
use std::process::Command;

const TOOLS: [&str; 3] = ["memcheck", "racecheck", "synccheck"];

pub fn run(ctx: &Ctx) -> Result<(), String> {
    if !ctx.real() {
        ctx.skip("compute-sanitizer", "it wants a real GPU");
        return Ok(());
    }
    let Some(sanitizer) = find("compute-sanitizer") else {
        ctx.skip(
            "compute-sanitizer",
            "not found on the path, nor where CUDA puts it",
        );
        return Ok(());
    };
    for (done, tool) in TOOLS.into_iter().enumerate() {
        // Equal parts of what is left.
        let limit = ctx.left() / (TOOLS.len() - done) as u32;
        if limit.as_secs() < 10 {
            ctx.skip(tool, "no time is left: raise --seconds");
            continue;
        }
        let (end, text, tail) = watch::output(command(ctx, &sanitizer, tool)?, limit);
        if matches!(end, watch::End::Late) {
            ctx.skip(tool, format!("not done in {} s", limit.as_secs()));
            continue;
        }
        let text = text + &tail.join("\n");
        match errors(&text) {
            // It does not run here, which says nothing about us.
            None => ctx.skip(
                tool,
                format!("no summary, {}: {}", end.words(), first_lines(&text)),
            ),
            Some(0) if end.well() => ctx.check(tool, || Ok("0 errors".into())),
            Some(count) => {
                ctx.check(tool, || {
                    Err(format!(
                        "{count} errors, {}: {}",
                        end.words(),
                        first_lines(&text)
                    ))
                });
            }
        }
    }
    Ok(())
}

fn command(ctx: &Ctx, sanitizer: &Path, tool: &str) -> Result<Command, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(sanitizer);
    command
        .args(["--tool", tool, "--error-exitcode", "86"])
        .arg(own);
    command.args([
        "--section",
        "conformance",
        "--quick",
        "--driver",
        ctx.driver.name(),
        "--limit",
        "600",
    ]);
    command.arg("--dir").arg(&ctx.dir);
    Ok(command)
}

/// Errors that the tools' summaries count; `None`: there is no summary.
fn errors(text: &str) -> Option<u64> {
    let number = |line: &str, after: &str| {
        let rest = line.split_once(after)?.1.trim_start();
        rest.split(|c: char| !c.is_ascii_digit())
            .next()?
            .parse::<u64>()
            .ok()
    };
    text.lines()
        .filter_map(|line| {
            number(line, "ERROR SUMMARY:").or_else(|| number(line, "RACECHECK SUMMARY:"))
        })
        .reduce(|sum, more| sum.saturating_add(more))
}

/// What the tool said first, and what of ours failed.
fn first_lines(text: &str) -> String {
    let told = text
        .lines()
        .filter(|line| line.starts_with("=========") || line.contains("\"failed\""));
    told.take(12)
        .map(|line| line.trim_start_matches('=').trim())
        .collect::<Vec<_>>()
        .join(" | ")
}

/// What must hold of this file.
pub fn check_yourself() -> Result<(), String> {
    let cases = [
        ("x\n========= ERROR SUMMARY: 0 errors\n", Some(0)),
        ("========= ERROR SUMMARY: 12 errors\n", Some(12)),
        (
            "========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)",
            Some(3),
        ),
        ("========= COMPUTE-SANITIZER\n", None),
    ];
    match cases
        .into_iter()
        .find(|(text, right)| errors(text) != *right)
    {
        Some((text, right)) => Err(format!(
            "{text:?} has {:?} errors, not {right:?}",
            errors(text)
        )),
        None => Ok(()),
    }
}
