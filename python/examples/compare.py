"""Compares what feedline reads with what Pillow and pyarrow read: `python compare.py FOLDER`.

Whole pictures with Pillow's convert("RGB") (grey of 16 bits: its high 8), columns of Parquet with pyarrow, nulls as 0. Prints
those that differ or that feedline alone refuses, then a table. Exit status 1: some differ. Parquet needs pyarrow.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
from PIL import Image

import feedline.numpy as fl

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    pa = pq = None

PICTURES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp")
EQUAL, WITHIN, DIFFERENT = "equal", "within 5", "different"
HERE, THERE, BOTH = "refused here only", "refused by the reference only", "refused by both"
ALONE = {"batch_size": 1, "shard": None, "device": "cpu", "workers": 1}


def attempt(read: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What a reader returns, or its error on one line."""
    try:
        return read(*arguments), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".replace("\n", " ")


def verdict(ours: Any, right: Any, judge: Callable[[Any, Any], tuple[str, str]]) -> tuple[str, str]:
    """A verdict and its reason on two readings, which are None if refused."""
    if ours is not None and right is not None:
        return judge(ours, right)
    return (HERE if right is not None else THERE if ours is not None else BOTH), ""


def picture_by_pillow(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        if picture.mode.startswith("I"):
            # convert() clips 16 bits, which makes most of them white.
            return np.repeat((np.asarray(picture) >> 8).astype(np.uint8)[..., None], 3, axis=2)
        return np.asarray(picture.convert("RGB"))


def picture_by_feedline(path: Path, size: tuple[int, int]) -> np.ndarray:
    """The whole picture, of this height and width."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(path, Path(folder, "0" + path.suffix))
        return next(iter(fl.images(folder, size=size, **ALONE)))["image"][0].copy()


def judge_pictures(ours: np.ndarray, right: np.ndarray) -> tuple[str, str]:
    off = np.abs(ours.astype(int) - right)
    share = (off.max(-1) > 5).mean()
    words = f"off by at most {off.max()}, {off.mean():.2f} in the mean; {share:.1%} of the pixels by more than 5"
    return (EQUAL if off.max() == 0 else WITHIN if off.max() <= 5 else DIFFERENT), words


def picture(path: Path) -> tuple[str, str]:
    right, _ = attempt(picture_by_pillow, path)
    # Without the right size, any shows an error.
    ours, error = attempt(picture_by_feedline, path, (8, 8) if right is None else right.shape[:2])
    found, words = verdict(ours, right, judge_pictures)
    return found, error or words


def column_by_pyarrow(path: Path, column: str) -> Any:
    """An array of numbers, or a list with an array for each text or list."""
    values = pq.read_table(path, columns=[column]).column(0).combine_chunks()
    values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return [np.frombuffer(value or b"", np.uint8) for value in values.cast(pa.large_binary()).to_pylist()]
    if pa.types.is_nested(kind):
        element = kind.value_type.to_pandas_dtype()
        return [np.array(value or [], element) for value in values.to_pylist()]
    if pa.types.is_temporal(kind):
        values = values.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    return values.fill_null(pa.scalar(0).cast(values.type)).to_numpy(zero_copy_only=False)


def column_by_feedline(path: Path, column: str, longest: int | None) -> Any:
    settings = {**ALONE, "batch_size": 1024, "null_zero": True, "up_to": longest}
    batches = [dict(batch) for batch in fl.parquet(path, columns=[column], **settings)]
    batches = [{name: np.array(values) for name, values in batch.items()} for batch in batches]
    rows = np.concatenate([batch[column] for batch in batches])
    if column + ".lens" not in batches[0]:
        return rows
    lens = np.concatenate([batch[column + ".lens"] for batch in batches])
    return [row[:length] for row, length in zip(rows, lens.tolist())]


def judge_columns(ours: Any, right: Any) -> tuple[str, str]:
    if len(ours) != len(right):
        return DIFFERENT, f"{len(ours)} rows, right are {len(right)}"
    for row, (mine, true) in enumerate(zip(ours, right)):
        if not np.array_equal(mine, true, equal_nan=np.asarray(true).dtype.kind == "f"):
            return DIFFERENT, f"row {row} is {mine}, right is {true}"
    return EQUAL, ""


def columns(path: Path) -> Iterator[tuple[str, str, str]]:
    """Name, verdict and its reason of each column."""
    schema, refused = attempt(pq.read_schema, path)
    for name in [] if schema is None else schema.names:
        right, _ = attempt(column_by_pyarrow, path, name)
        longest = max(1, *map(len, right)) if isinstance(right, list) and right else None
        ours, error = attempt(column_by_feedline, path, name, longest)
        found, words = verdict(ours, right, judge_columns)
        yield f"{path}, column {name}", found, error or words
    if refused:
        yield str(path), BOTH, refused


def things(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Kind, name, verdict and its reason of each picture and column in a folder."""
    for root, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(root, name) for name in sorted(names)):
            if path.suffix.lower() in PICTURES:
                yield "pictures", str(path), *picture(path)
            elif path.suffix.lower() == ".parquet" and pq is not None:
                yield from (("columns", *found) for found in columns(path))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path)
    warnings.simplefilter("ignore")
    table: Counter[tuple[str, str]] = Counter()
    for kind, name, found, words in things(options.parse_args().folder):
        table[kind, found] += 1
        if found in (DIFFERENT, HERE):
            print(f"{found}: {name}: {words}", flush=True)
    for (kind, found), count in sorted(table.items()):
        print(f"{count:8} {kind} {found}")
    return int(any(found == DIFFERENT for _, found in table))


if __name__ == "__main__":
    sys.exit(main())
