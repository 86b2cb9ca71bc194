"""Figures of the benches: collected as JSON, one file for each figure of a version, and drawn as one page.

    python benches/figures.py collect [--only WORD] [--note TEXT]
    python benches/figures.py page OUT.html

`collect` runs the commands of benches/figures.toml and writes benches/results/VERSION/ID.json, VERSION as in Cargo.toml. `page`
draws all versions, with the spread, the machine's limit and what else was measured beside it. The page fetches nothing. Python
3.11, without other packages.
"""

import argparse
import datetime
import html
import json
import math
import os
import platform
import re
import statistics
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE, RESULTS = ROOT / "benches/figures.toml", ROOT / "benches/results"
TEXTS = ("id", "title", "unit", "command", "date", "commit")
MACHINE = ("cpu", "cores", "memory_gib", "disk", "kernel", "load", "note")
SECONDS = {"s": 1e-9, "ms": 1e-6, "µs": 1e-3, "ns": 1.0}

# Objects of JSON: a result, and a part of it with median, low, high and runs.
Result = dict[str, Any]
Measured = dict[str, Any]

# Collect


def spread(values: list[float]) -> Measured:
    """Median and its 95 % interval by order statistics; below 6 values the extremes. As benches/common has it."""
    values = sorted(values)
    low = max(0, math.floor(len(values) / 2 - 0.98 * math.sqrt(len(values))))
    return {"median": statistics.median(values), "low": values[low], "high": values[-1 - low], "runs": len(values)}


def criterion(home: Path, unit: str, name: str) -> Measured | None:
    """A benchmark by its full id: the median time of one element, or the rate of elements or bytes."""
    for path in home.glob("**/new/benchmark.json"):
        benchmark = json.loads(path.read_text())
        if benchmark["full_id"] != name:
            continue
        estimate = json.loads(path.with_name("estimates.json").read_text())["median"]
        bounds = estimate["confidence_interval"]
        runs = len(json.loads(path.with_name("sample.json").read_text())["times"])
        kind, count = next(iter((benchmark["throughput"] or {"Elements": 1}).items()))
        times = [estimate["point_estimate"], bounds["lower_bound"], bounds["upper_bound"]]
        if unit in SECONDS:
            median, low, high = (SECONDS[unit] * time / (count if kind == "Elements" else 1) for time in times)
        else:
            # Bytes per nanosecond are GB/s.
            median, high, low = ((1 if kind == "Bytes" else 1e9) * count / time for time in times)
        return {"median": median, "low": low, "high": high, "runs": runs}
    return None


def measure(run: Result) -> dict[str, dict[str, Measured]]:
    """The measurements of a command's figures: for each id, by their names in the table."""
    lines: dict[str, Measured] = {}
    values: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "FEEDLINE_FIGURES": "1", "CRITERION_HOME": home}
        for _ in range(run.get("times", 1)):
            done = subprocess.run(run["command"], shell=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode != 0:
                raise SystemExit(f"{run['command']}: exit status {done.returncode}\n{done.stdout}")
            for answer in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
                if "what" in answer:
                    lines[answer.pop("what")] = answer
                    continue
                for key, value in answer.items():
                    values.setdefault(key, []).append(value)
        lines.update({key: spread(series) for key, series in values.items() if isinstance(series[0], int | float)})
        found: dict[str, dict[str, Measured]] = {}
        for figure in run["figure"]:
            names = [figure["value"], *figure.get("limit", {}).values(), *figure.get("peers", {}).values()]
            for name in names:
                unit = figure["unit"]
                known = lines.get(name) or criterion(Path(home), unit, name)
                if not known:
                    raise SystemExit(f"{figure['id']}: {run['command']} gives no {name!r}; correct figures.toml")
                if known.get("unit", unit) != unit:
                    raise SystemExit(f"{figure['id']}: {name!r} is in {known['unit']}, not {unit}; correct figures.toml")
                # Four digits are more than any of these figures is good for.
                rounded = {key: float(f"{known[key]:.4g}") for key in ("median", "low", "high")}
                found.setdefault(figure["id"], {})[name] = {**rounded, "runs": known["runs"]}
    return found


def machine(note: str) -> Result:
    """What this machine is."""
    name = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    device = os.stat(ROOT).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    system = max((mount for mount in mounts if ROOT.is_relative_to(mount[1])), key=lambda mount: len(mount[1]))[2]
    driver = (block / "device/driver").resolve().name if (block / "device/driver").exists() else block.name
    return {
        "cpu": name.group(1) if name else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "disk": f"{driver}, {system}",
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 1),
        "note": note,
    }


def collect(args: argparse.Namespace) -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True)
    folder = args.results / version
    folder.mkdir(parents=True, exist_ok=True)
    for run in tomllib.loads(args.table.read_text())["run"]:
        if not any(args.only in figure["id"] for figure in run["figure"]):
            continue
        here = machine(args.note)
        found = measure(run)
        for figure in run["figure"]:
            own = found[figure["id"]]
            peers = [{"name": name, **own[source]} for name, source in figure.get("peers", {}).items()]
            limits = [{"name": name, **own[source]} for name, source in figure.get("limit", {}).items()]
            result = {
                **{key: figure[key] for key in ("id", "title", "unit", "better")},
                "value": own[figure["value"]],
                "limit": limits[0] if limits else None,
                "peers": peers,
                "command": run["command"].strip(),
                "machine": here,
                "date": datetime.date.today().isoformat(),
                "commit": commit.stdout.strip(),
            }
            path = folder / f"{figure['id']}.json"
            path.write_text(json.dumps(check(path, result), indent=2, ensure_ascii=False) + "\n")
            print(f"{path}: {number(result['value']['median'])} {result['unit']}", flush=True)


# Check


def check(path: Path, result: Result) -> Result:
    """The result, if it has all that the page needs."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise SystemExit(f"{path}: {what}; collect it again by benches/figures.py")

    need(isinstance(result, dict), "not an object")
    for key in (*TEXTS, "better", "value", "limit", "peers", "machine"):
        need(key in result, f"{key!r} is missing")
    need(all(isinstance(result[key], str) and result[key] for key in TEXTS), f"{', '.join(TEXTS)} are texts")
    need(result["id"] == path.stem, f"the id is {result['id']!r}, the file's name another")
    need(result["better"] in ("higher", "lower"), f"'better' is {result['better']!r}, not 'higher' or 'lower'")
    need(isinstance(result["machine"], dict) and set(result["machine"]) == set(MACHINE), f"'machine' has {', '.join(MACHINE)}")
    need(isinstance(result["peers"], list), "'peers' is a list")
    others = [*result["peers"], *([] if result["limit"] is None else [result["limit"]])]
    need(all(isinstance(other, dict) and isinstance(other.get("name"), str) for other in others), "a peer or limit has no 'name'")
    for part in (result["value"], *others):
        values = [part.get(key) for key in ("low", "median", "high", "runs")] if isinstance(part, dict) else [None]
        numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value) and value >= 0]
        is_whole = len(numbers) == 4 and numbers[3] >= 1
        need(is_whole and numbers[:3] == sorted(numbers[:3]), f"no median with low, high and runs: {part}")
    return result


def order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def load(results: Path, table: Path) -> dict[str, dict[str, Result]]:
    """All figures by version and id, the newest version first. The newest has every figure of the table."""
    folders = [path for path in results.iterdir() if path.is_dir()]
    for folder in folders:
        if not re.fullmatch(r"\d+\.\d+\.\d+", folder.name):
            raise SystemExit(f"{folder}: not the name of a version; call it as 0.1.0")
    versions: dict[str, dict[str, Result]] = {}
    for folder in sorted(folders, key=lambda folder: order(folder.name), reverse=True):
        versions[folder.name] = {}
        for path in sorted(folder.glob("*.json")):
            try:
                result = check(path, json.loads(path.read_text()))
            except ValueError as error:
                raise SystemExit(f"{path}: broken JSON: {error}; collect it again by benches/figures.py") from None
            for other in versions.values():
                if any(other.get(path.stem, result)[key] != result[key] for key in ("unit", "better")):
                    raise SystemExit(f"{path}: another 'unit' or 'better' than in a later version; give the new figure a new id")
            versions[folder.name][path.stem] = result
    if not versions:
        raise SystemExit(f"{results}: no folder of a version; make one by benches/figures.py collect")
    newest = next(iter(versions))
    for figure in (figure for run in tomllib.loads(table.read_text())["run"] for figure in run["figure"]):
        if figure["id"] not in versions[newest]:
            path = results / newest / f"{figure['id']}.json"
            raise SystemExit(f"{path}: missing; collect it, or take {figure['id']!r} out of {table}")
    return versions


# Page

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --dim: #59626d; --line: #d5dae0; --own: #1f6feb; --past: #93b8ef;
  --peer: #a3abb5; --limit: #b3470f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e7eaee; --dim: #a2abb6; --line: #363d46; --own: #5b9bff;
  --past: #34588f; --peer: #6d7681; --limit: #ff9d5c; } }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--paper); color: var(--ink); }
body { font: 1rem/1.5 system-ui, sans-serif; }
main { display: grid; gap: 1.5rem; margin-top: 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr)); }
section { border-top: 2px solid var(--line); padding-top: .5rem; min-width: 0; }
h1, h2 { line-height: 1.25; } h2 { font-size: 1.05rem; margin: .25rem 0; } p + h2 { margin-top: 1.5rem; } p { margin: .25rem 0; }
ul { padding-left: 1.2rem; margin-top: .25rem; } a { color: var(--own); }
.dim, summary, th { color: var(--dim); } .dim, details { font-size: .875rem; } summary { cursor: pointer; }
pre { margin: .5rem 0; font: .8125rem/1.4 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .15rem .5rem .15rem 0; vertical-align: top; }
td + td { font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; max-width: 30rem; overflow: visible; font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .own { fill: var(--own); } svg .past { fill: var(--past); } svg .peer { fill: var(--peer); }
svg .tick { fill: var(--dim); font-size: 11px; }
svg path { fill: none; } svg .band { fill: var(--limit); opacity: .2; }
svg .grid { stroke: var(--line); } svg .whisker { stroke: var(--ink); stroke-width: 1.5; }
svg .limit { stroke: var(--limit); stroke-width: 2.5; stroke-dasharray: 5 2; }
svg text.limit { stroke: none; fill: var(--limit); }
"""
WIDTH, ROW = 368, 40


def number(value: float) -> str:
    """Four digits at most."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def interval(measured: Measured) -> str:
    return f"{number(measured['low'])} to {number(measured['high'])}"


def is_same_machine(one: Result, other: Result) -> bool:
    return all(one["machine"][key] == other["machine"][key] for key in ("cpu", "cores", "memory_gib", "disk"))


def rows(history: dict[str, Result]) -> list[tuple[str, str, Measured, Measured | None]]:
    """Of the plot, from above: name, class, measurement, limit of the same run. The newest version first, then its peers."""
    (_, newest), *_ = history.items()
    out: list[tuple[str, str, Measured, Measured | None]] = []
    for version, result in history.items():
        other = "" if is_same_machine(result, newest) else " (another machine)"
        out.append((f"feedline {version}{other}", "past" if out else "own", result["value"], result["limit"]))
    return out + [(peer["name"], "peer", peer, newest["limit"]) for peer in newest["peers"]]


def plot(history: dict[str, Result]) -> str:
    """A bar per version and peer from zero, its interval as a whisker, the limit as a dashed line."""
    (_, newest), *_ = history.items()
    bars = rows(history)
    most = 1.04 * max(part["high"] for _, _, value, limit in bars for part in (value, limit or value)) or 1.0
    step = next(s for s in (m * 10 ** math.floor(math.log10(most) - 1) for m in (1, 2, 5, 10, 20, 50)) if most / s <= 5)

    def x(value: float) -> float:
        return 1 + (WIDTH - 2) * value / most

    height = ROW * len(bars) + 4
    out = [f'<path class="grid" d="M{x(0):.1f} 0V{height}"/>']
    for k in range(1, int(most / step) + 1):
        out.append(f'<path class="grid" d="M{x(k * step):.1f} 0V{height}"/>')
        out.append(f'<text class="tick" x="{x(k * step):.1f}" y="{height + 13}" text-anchor="middle">{number(k * step)}</text>')
    for place, (name, kind, value, limit) in enumerate(bars):
        top = place * ROW
        low, high, end = x(value["low"]), x(value["high"]), x(value["median"])
        out.append(f'<rect class="{kind}" x="{x(0):.1f}" y="{top + 21}" width="{end - x(0):.1f}" height="15"/>')
        if limit:
            start, wide = x(limit["low"]), x(limit["high"]) - x(limit["low"])
            out.append(f'<rect class="band" x="{start:.1f}" y="{top + 19}" width="{wide:.1f}" height="{ROW - 20}"/>')
            out.append(f'<path class="limit" d="M{x(limit["median"]):.1f} {top + 19}v{ROW - 20}"/>')
        out.append(f'<path class="whisker" d="M{low:.1f} {top + 24}v9m0 -4.5H{high:.1f}m0 -4.5v9"/>')
        out.append(f'<text x="4" y="{top + 16}">{html.escape(name)}</text>')
        out.append(f'<text x="{WIDTH - 4}" y="{top + 16}" text-anchor="end" font-weight="600">{number(value["median"])}</text>')
    if newest["limit"]:
        words = f"limit {number(newest['limit']['median'])}: {newest['limit']['name']}"
        out.append(f'<path class="limit" d="M4 {height + 27}h22"/>')
        out.append(f'<text class="limit" x="32" y="{height + 31}">{html.escape(words)}</text>')
    said = "; ".join(f"{name}: {number(value['median'])} {newest['unit']}" for name, _, value, _ in bars)
    label = html.escape(f"{newest['title']}. {said}. The table below has all numbers.")
    box = f"0 0 {WIDTH} {height + (38 if newest['limit'] else 18)}"
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(out)}</svg>'


def change(history: dict[str, Result]) -> str | None:
    """What the newest version changed, in words."""
    (_, newest), *before = history.items()
    if not before:
        return None
    old, past = before[0]
    if not is_same_machine(newest, past):
        return f"not compared: {old} was measured on another machine"
    mine, theirs = newest["value"], past["value"]
    is_apart = mine["low"] > theirs["high"] or mine["high"] < theirs["low"]
    if not is_apart or theirs["median"] == 0:
        return f"no change shown since {old}"
    is_better = (mine["median"] > theirs["median"]) == (newest["better"] == "higher")
    return f"{'better' if is_better else 'worse'}, {mine['median'] / theirs['median']:.2f}\u00a0× of {old}"


def about(here: Result) -> str:
    """The machine in words."""
    words = f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB, {here['disk']}, kernel {here['kernel']}"
    return html.escape(f"{words}; {here['note']}" if here["note"] else words)


def section(figure: str, history: dict[str, Result], newest: str) -> str:
    (version, latest), *_ = history.items()
    lines = []
    for name, result in history.items():
        others = [(f"limit: {result['limit']['name']}", result["limit"])] if result["limit"] else []
        others += [(peer["name"], peer) for peer in result["peers"]]
        for what, measured in [("feedline", result["value"]), *others]:
            cells = (name, what, number(measured["median"]), interval(measured), measured["runs"])
            lines.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    words = ("version", "what", html.escape(latest["unit"]), "from, to", "runs")
    heads = "".join(f'<th scope="col">{word}</th>' for word in words)
    past = [f"{name}: {result['date']}, commit {html.escape(result['commit'])}, load {result['machine']['load']} when it began; "
            f"{about(result['machine'])}." for name, result in history.items()]
    news = change(history) if version == newest else f"not measured any more since {version}"
    return f"""<section id="{figure}">
<h2>{html.escape(latest["title"])}</h2>
<p class="dim">{html.escape(latest["unit"])}, {latest["better"]} is better{f"; {html.escape(news)}" if news else ""}</p>
{plot(history)}
<pre>{html.escape(latest["command"])}</pre>
<details><summary>Table, machine and date</summary>
<table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>
<p>{"</p><p>".join(past)}</p></details>
</section>"""


def page(args: argparse.Namespace) -> None:
    versions = load(args.results, args.table)
    newest, *before = versions
    ids = dict.fromkeys(figure["id"] for run in tomllib.loads(args.table.read_text())["run"] for figure in run["figure"])
    ids.update(dict.fromkeys(figure for results in versions.values() for figure in results))
    histories = {figure: {name: results[figure] for name, results in versions.items() if figure in results} for figure in ids}
    machines = dict.fromkeys(about(result["machine"]) for result in versions[newest].values())
    loads = [result["machine"]["load"] for result in versions[newest].values()]
    if before:
        items = []
        for figure, history in histories.items():
            if newest in history:
                words = html.escape(change(history) or "new")
                items.append(f'<li><a href="#{figure}">{html.escape(history[newest]["title"])}</a>: {words}</li>')
        news = f"<h2>What {newest} changed</h2>\n<ul>{''.join(items)}</ul>"
    else:
        news = f"<p>{newest} is the first version with figures: nothing to compare with.</p>"
    text = f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>feedline: figures</title>
<style>{STYLE}</style></head>
<body>
<h1>feedline: figures</h1>
<p>Bars are medians. Whiskers are the 95 % interval of the median; below 6 runs, the least and the greatest. A dashed line
in a band, its interval, is the limit: what the machine itself does, measured in the same run. A change is shown where the
intervals are apart.</p>
<p>{newest} on {"</p><p>and on ".join(machines)}. Load when the runs began: {min(loads)} to {max(loads)}.</p>
{news}
<main>
{chr(10).join(section(figure, history, newest) for figure, history in histories.items())}
</main>
</body>
</html>
"""
    args.out.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    collecting, drawing = verbs.add_parser("collect"), verbs.add_parser("page")
    for verb in (collecting, drawing):
        verb.add_argument("--results", type=Path, default=RESULTS)
        verb.add_argument("--table", type=Path, default=TABLE)
    collecting.add_argument("--only", default="", help="runs with a figure whose id has this word")
    collecting.add_argument("--note", default="", help="what else there is to say of the machine")
    drawing.add_argument("out", type=Path)
    args = parser.parse_args()
    {"collect": collect, "page": page}[args.verb](args)


if __name__ == "__main__":
    main()
