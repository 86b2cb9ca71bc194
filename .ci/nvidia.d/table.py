"""A table of checks, and the status that it gives."""

import pathlib
import sys

PLACE = pathlib.Path(sys.argv[1])
SPECS = [spec.split("==") for spec in sys.argv[2:]]
ROOT = pathlib.Path(__file__).resolve().parents[2]
_failed = 0


def row(verdict, what, result=""):
    """Prints a row; `verdict` is ok, FAILED, skipped, or note for what is only told."""
    global _failed
    _failed += verdict == "FAILED"
    print(f"{verdict:8} {what:58} {result}", flush=True)


def check(good, what, result=""):
    row("ok" if good else "FAILED", what, result)
    return good


def finish():
    sys.exit(1 if _failed else 0)


def folders(package):
    """Versions of a package and where they are installed."""
    return [(version, PLACE / f"{name}-{version}") for name, version in SPECS if name in (package, package + "-cu12")]


def find(folder, pattern):
    """The only file below `folder` of that name."""
    found = sorted(folder.rglob(pattern))
    if not found:
        sys.exit(f"{folder} has no {pattern}")
    return found[0]
