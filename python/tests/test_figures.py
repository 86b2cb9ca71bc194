"""The page of figures: made of results by version, refused by the name of a file that is wrong."""

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = Path(__file__).resolve().parents[2] / "benches"
MACHINE = {"cpu": "a CPU", "cores": 2, "memory_gib": 8, "disk": "ext4", "kernel": "6.1", "load": 0.5, "note": "shared <machine>"}
TABLE = '[[run]]\ncommand = "{command}"\n{times}' + "".join(
    f'[[run.figure]]\nid = "{name}"\ntitle = "{name}"\nunit = "GB/s"\nbetter = "higher"\nvalue = "rate"\n' for name in ("reads", "tokens")
)

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="benches/figures.py needs Python 3.11")


def measured(median):
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median, "runs": 9}


def result(name, median, **other):
    peers = [{"name": "another & loader", **measured(2.0)}]
    texts = {"id": name, "title": f"title of {name}", "unit": "GB/s", "better": "higher", "command": f"cargo bench {name}"}
    parts = {"value": measured(median), "limit": {"name": "pread", **measured(9.0)}, "peers": peers, "machine": MACHINE}
    return {**texts, **parts, "date": "2026-11-30", "commit": "0123abcd", **other}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "figures.toml").write_text(TABLE.format(command="true", times=""))
    for version, median in [("0.9.0", 4.0), ("0.10.0", 6.0)]:
        for name in ("reads", "tokens"):
            write(tmp_path, version, name, result(name, median if name == "reads" else 5.0))
    return tmp_path


def write(folder, version, name, content):
    path = folder / "results" / version / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def run(folder, *words):
    places = ["--results", folder / "results", "--table", folder / "figures.toml"]
    return subprocess.run([sys.executable, BENCHES / "figures.py", *words, *places], capture_output=True, text=True)


def page(folder):
    done = run(folder, "page", folder / "page.html")
    assert done.returncode == 0, done.stderr
    return (folder / "page.html").read_text()


def refused(folder):
    done = run(folder, "page", folder / "page.html")
    assert done.returncode == 1 and not (folder / "page.html").exists()
    return done.stderr


def test_a_page_of_two_versions_says_what_changed(folder):
    text = page(folder)
    assert text.count("<svg") == 2 and text.index("feedline 0.10.0") < text.index("feedline 0.9.0")
    assert "title of reads</a>: better, 1.50\u00a0× of 0.9.0" in text and "title of tokens</a>: no change shown" in text
    for part in ("another &amp; loader", "limit 9: pread", "shared &lt;machine&gt;", "cargo bench reads", "<td>3.6 to 4.4</td>"):
        assert part in text, part


def test_versions_on_different_machines_are_not_compared(folder):
    write(folder, "0.9.0", "reads", result("reads", 4.0, machine={**MACHINE, "cores": 8}))
    assert "not compared" in page(folder)


def test_the_page_of_the_repository_is_made(tmp_path):
    out = tmp_path / "page.html"
    subprocess.run([sys.executable, BENCHES / "figures.py", "page", out], check=True)
    assert "<svg" in out.read_text()


def test_the_page_fetches_nothing(folder):
    class Parser(html.parser.HTMLParser):
        tags, links = set(), []

        def handle_starttag(self, tag, attrs):
            self.tags.add(tag)
            self.links += [value for name, value in attrs if name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster")]

    text = page(folder)
    Parser().feed(text)
    assert not Parser.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert Parser.links and all(link.startswith("#") for link in Parser.links)
    assert not re.search(r"url\(|@import|https?:|//", text)


WRONG = [
    ("{", "broken JSON"),
    ("[]", "not an object"),
    ({"machine": ...}, "'machine' is missing"),
    ({"command": ""}, "command"),
    ({"better": "more"}, "'better' is 'more'"),
    ({"value": {**measured(4.0), "low": 5.0}}, "no median with low, high and runs"),
    ({"limit": {"name": "fio", **measured(float("nan"))}}, "no median with low, high and runs"),
    ({"id": "other"}, "the id is 'other'"),
    ({"unit": "s"}, "another 'unit'"),
]


@pytest.mark.parametrize("wrong, words", WRONG)
def test_a_wrong_result_is_named(folder, wrong, words):
    if isinstance(wrong, dict):
        wrong = {key: value for key, value in {**result("reads", 4.0), **wrong}.items() if value is not ...}
    path = write(folder, "0.9.0", "reads", wrong)
    said = refused(folder)
    assert said.startswith(f"{path}: ") and words in said, said


def test_a_missing_figure_is_named(folder):
    missing = folder / "results/0.10.0/tokens.json"
    missing.unlink()
    assert refused(folder).startswith(f"{missing}: missing")


def test_a_folder_that_is_no_version_is_named(folder):
    (folder / "results/latest").mkdir()
    assert refused(folder).startswith(f"{folder / 'results/latest'}: ")


def test_results_of_a_command_are_collected(folder):
    line = r"""printf '%s\\n' 'noise' '{\"what\": \"rate\", \"unit\": \"GB/s\", \"median\": 2.00004, \"low\": 1.5, \"high\": 3, \"runs\": 7}'"""
    (folder / "figures.toml").write_text(TABLE.format(command=line, times=""))
    done = run(folder, "collect", "--note", "in a test")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.split(": ")[0])
    made = json.loads(path.read_text())
    assert (made["value"], made["machine"]["note"]) == ({"median": 2.0, "low": 1.5, "high": 3.0, "runs": 7}, "in a test")


def test_a_command_that_prints_its_keys_is_run_several_times(folder):
    (folder / "figures.toml").write_text(TABLE.format(command=r"""echo '{\"rate\": 4, \"reader\": \"pread\"}'""", times="times = 3\n"))
    done = run(folder, "collect")
    assert done.returncode == 0, done.stderr
    made = json.loads(Path(done.stdout.split(": ")[0]).read_text())
    assert made["value"] == {"median": 4.0, "low": 4.0, "high": 4.0, "runs": 3}


def test_a_measurement_that_a_command_does_not_give_is_named(folder):
    done = run(folder, "collect")
    assert done.returncode == 1 and "true gives no 'rate'" in done.stderr
