"""The report of a loader, or of a loop over another one, as HTML, for notebooks."""

from __future__ import annotations

from html import escape
from typing import Any

# Readable on a light and on a dark page: own background, and the same text colour in every bar.
GOOD, BAD, OTHER, IDLE = "#2a9d8f", "#e76f51", "#457b9d", "#c9ced6"
STYLE = "font:13px/1.5 system-ui,sans-serif;color:#1d2733;background:#fff;border:1px solid #d5dae1;padding:12px;max-width:760px"


Parts = list[tuple[str, float, str]]


def page(report: str, verdict: dict[str, Any], snapshot: dict[str, Any]) -> str:
    """The verdict, a bar for each stage, and the report."""
    return _page(report, verdict, _stages(snapshot))


def observed(report: str, verdict: dict[str, Any], snapshot: dict[str, Any]) -> str:
    """The same of a loop over another loader: a bar for the loop and each worker."""
    return _page(report, verdict, _observed_stages(snapshot))


def _page(report: str, verdict: dict[str, Any], stages: list[tuple[str, Parts]]) -> str:
    bars = "".join(_bar(name, parts) for name, parts in stages)
    hints = "".join(f"<li>{escape(text)}</li>" for text in (advice["text"] for advice in verdict["advice"]))
    return (
        f'<div style="{STYLE}"><div style="font-size:16px;margin:0 0 8px"><b>{escape(verdict["headline"])}</b></div>'
        f'<table style="border-collapse:collapse;width:100%;font:inherit">{bars}</table>'
        f'<ul style="margin:8px 0;padding-left:20px">{hints}</ul>'
        f"<details><summary>Report</summary><pre style=\"overflow-x:auto;color:inherit;background:none\">{escape(report)}</pre></details></div>"
    )


def _shown(stages: list[tuple[str, Parts]]) -> list[tuple[str, Parts]]:
    return [(name, parts) for name, parts in stages if sum(time for _, time, _ in parts) > 0]


def _observed_stages(snapshot: dict[str, Any]) -> list[tuple[str, Parts]]:
    """What the loop and each worker did with their time: (words, amount, colour)."""
    loop = snapshot["loop"]
    stages: list[tuple[str, Parts]] = [
        (
            "your loop",
            [
                ("works", loop["steady_ns"] - loop["waited_ns"], GOOD),
                ("waits for batches", loop["waited_ns"], BAD),
                ("epochs start", loop["starts_ns"], OTHER),
            ],
        )
    ]
    if gpu := snapshot["gpu"]:
        stages.append(("GPU stream", [("busy", gpu["span_ns"] - gpu["idle_ns"], GOOD), ("idle", gpu["idle_ns"], BAD)]))
    for worker in snapshot["workers"]:
        places = worker["places"]
        files, other = places["storage"] + places["network_storage"], places["pipe"] + places["lock"] + places["sleep"] + places["other"] + places["unknown"]
        parts = [("computes", places["running"], GOOD), ("reads files", files, BAD), ("waits at sockets", places["network"], BAD)]
        stages.append((f"worker {worker['number']}", [*parts, ("waits", other, OTHER), ("has no task", places["tasks"], IDLE)]))
    machine = snapshot["machine"]
    if machine["busy_ns"] is not None:
        ours = machine["process_ns"] + sum(
            worker["cpu_ns"] * machine["watched_ns"] / max(1, worker["watched_ns"]) for worker in snapshot["workers"]
        )
        busy = max(machine["busy_ns"], ours)
        idle = max(0, machine["cores"] * machine["watched_ns"] - busy)
        parts = [("this job", ours, GOOD), ("other programs", busy - ours, BAD), ("idle", idle, IDLE)]
        stages.append((f"{machine['cores']} cores", parts))
    return _shown(stages)


def _stages(snapshot: dict[str, Any]) -> list[tuple[str, Parts]]:
    """What each stage did with its time: (words, nanoseconds, colour)."""
    consumer, decode, slots = snapshot["consumer"], snapshot["decode"], snapshot["slots"]
    stages: list[tuple[str, Parts]] = [
        ("your loop", [("works", consumer["user_ns"], GOOD), ("waits for batches", consumer["waited_ns"], BAD)])
    ]
    if gpu := consumer.get("gpu"):
        starved, late = gpu["starved_ns"], gpu["late_ns"]
        rest = max(0, gpu["span_ns"] - starved - late)
        # More than 1 % of the steps have no known end: then nobody knows how much of the time the stream was busy.
        known = 100 * gpu["unmarked_steps"] <= gpu["steps"]
        parts = [("busy", rest, GOOD)] if known else [("busy, or your code", rest, IDLE)]
        stages.append(("GPU stream", [*parts, ("waits for batches", starved, BAD), ("your code", late, OTHER)]))
    others = decode["workers"] * snapshot["steady_ns"] - decode["busy_ns"] - decode["starved_ns"] - decode["ahead_ns"]
    workers = [
        ("work", decode["busy_ns"], GOOD),
        ("wait for samples", decode["starved_ns"], BAD),
        ("no batch to fill", decode["ahead_ns"], OTHER),
        ("other", max(0, others), IDLE),
    ]
    stages.append((f"{decode['workers']} decode workers", workers))
    held = [("full", "full_ns", GOOD), ("with you", "held_ns", OTHER), ("being filled", "filling_ns", BAD), ("free", "free_ns", IDLE)]
    stages.append((f"{slots['count']} batch slots", [(words, slots[key], colour) for words, key, colour in held]))
    return _shown(stages)


def _bar(name: str, parts: Parts) -> str:
    total = sum(time for _, time, _ in parts)
    cells = ""
    for words, time, colour in parts:
        share = 100 * time / total
        text = f"{words} {share:.0f} %" if share >= 18 else ""
        style = f"width:{share:.2f}%;background:{colour};overflow:hidden;white-space:nowrap;text-align:center;color:#10181f"
        cells += f'<div title="{escape(words)}: {share:.1f} %" style="{style}">{escape(text)}</div>' if share > 0 else ""
    label = f'<td style="text-align:left;white-space:nowrap;padding:2px 10px 2px 0">{escape(name)}</td>'
    return f'<tr>{label}<td style="width:100%;padding:2px 0"><div style="display:flex;height:20px">{cells}</div></td></tr>'
