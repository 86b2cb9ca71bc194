"""JSON lines: fields equal to those of Python's `json`, for files of several writers, plain and compressed."""

import gzip
import json
import random

import numpy as np
import pytest

import feedline.numpy as fn
from feedline.errors import ConfigError, Error

COUNT = 400
COLUMNS = ["text:bytes", "meta.label", "ids:i32:?", "x:f32:3", "score:f64", "ok:bool", '"a.b":bytes', "messages[].content:bytes"]
SETTINGS = {"columns": COLUMNS, "up_to": {"text": 600, "ids": 40, '"a.b"': 60, "messages[].content": 200},
            "elements": {"messages[].content": 4}, "device": "cpu", "shard": None, "batch_size": 32}
LETTERS = 'abc "\\/\n\t\r\b\f\x00\x1f\x7f\x85\u2028é中𝄞😀\ufeff'


def text(draw, most):
    return "".join(draw.choice(LETTERS) for _ in range(draw.randrange(most)))


def samples(count=COUNT, seed=1):
    draw = random.Random(seed)
    for _ in range(count):
        yield {
            "text": text(draw, 100),
            "meta": {"other": [{"label": -1, "text": text(draw, 5)}, {"label": -2, "text": "]}"}], "label": draw.randrange(-(2**63), 2**63)},
            "ids": [draw.randrange(-(2**31), 2**31) for _ in range(draw.randrange(40))],
            "x": [draw.choice([draw.gauss(0, 1), draw.random() * 10 ** draw.randrange(-44, 38), draw.randrange(2**60), -0.0]) for _ in range(3)],
            "score": draw.choice([draw.random() * 10.0 ** draw.randrange(-300, 300), draw.randrange(2**63), -1e-320]),
            "ok": draw.random() < 0.5,
            "a.b": text(draw, 10),
            "messages": [{"role": "user", "content": text(draw, 30), "n": None} for _ in range(draw.randrange(4))],
        }  # fmt: skip


def by_json(path, rows, **settings):
    path.write_text("".join(json.dumps(row, **settings) + "\n" for row in rows), encoding="utf-8", newline="")


def by_orjson(path, rows):
    orjson = pytest.importorskip("orjson")
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))


def by_polars(path, rows):
    pytest.importorskip("polars").DataFrame(rows, strict=False, infer_schema_length=None).write_ndjson(path)


def by_pandas(path, rows):
    frame = pytest.importorskip("pandas").DataFrame(rows)
    frame.to_json(path, orient="records", lines=True, double_precision=15)


WRITERS = {
    "json": by_json,
    "json, UTF-8": lambda path, rows: by_json(path, rows, ensure_ascii=False),
    "json, spaces": lambda path, rows: by_json(path, rows, separators=(" ,\t", "\t: ")),
    "json, CRLF and empty lines": lambda path, rows: path.write_bytes(
        b"\xef\xbb\xbf" + b"\r\n \r\n".join(json.dumps(row).encode() for row in rows) + b"\r\n\r\n"
    ),
    "orjson": by_orjson,
    "polars": by_polars,
    "pandas": by_pandas,
}


def zstd(data):
    pa = pytest.importorskip("pyarrow")
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


#: How a file is compressed: its ending, and whole or in parts.
PACKINGS = {
    "plain": ("", lambda data: data),
    "gzip": (".gz", gzip.compress),
    "zstd": (".zst", zstd),
    "many members": (".gz", lambda data: b"".join(gzip.compress(data[at : at + 999]) for at in range(0, len(data), 999))),
    "many frames": (".zst", lambda data: b"".join(zstd(data[at : at + 5000]) for at in range(0, len(data), 5000))),
}


def rows_of(loader):
    for batch in loader:
        batch = {name: array.copy() for name, array in batch.items()}
        for row in range(len(batch["ok"])):
            yield {name: array[row] for name, array in batch.items()}


def same(row, right):
    """Whether a row has the values that Python's `json` gives."""
    def bytes_of(name):
        return bytes(row[name][: row[name + ".lens"]])

    contents = [message["content"].encode() for message in right["messages"]]
    name = "messages[].content"
    pairs = zip(row[name], row[name + ".sizes"], strict=True)
    found = [bytes(text[:size]) for text, size in pairs][: row[name + ".lens"]]
    return (
        bytes_of("text") == right["text"].encode()
        and bytes_of('"a.b"') == right["a.b"].encode()
        and row["meta.label"] == right["meta"]["label"]
        and row["ids"][: row["ids.lens"]].tolist() == right["ids"]
        and row["x"].tobytes() == np.array(right["x"], np.float64).astype(np.float32).tobytes()
        and row["score"] == right["score"]
        and row["ok"] == right["ok"]
        and found == contents
    )


@pytest.mark.parametrize("writer", WRITERS)
def test_rows_are_those_of_pythons_json(tmp_path, writer):
    plain = tmp_path / "plain.jsonl"
    WRITERS[writer](plain, list(samples()))
    data = plain.read_bytes()
    lines = data.decode("utf-8-sig").split("\n")
    right = [json.loads(line) for line in lines if line.strip()]
    assert len(right) == COUNT
    for name, (ending, pack) in PACKINGS.items():
        path = tmp_path / f"{name}.jsonl{ending}"
        path.write_bytes(pack(data))
        found = list(rows_of(fn.jsonl(path, **SETTINGS)))
        assert len(found) == COUNT, name
        wrong = [at for at, (row, other) in enumerate(zip(found, right)) if not same(row, other)]
        assert not wrong, (name, wrong[:5])


def test_a_global_shuffle_resumes_and_packs(tmp_path):
    path, rows = tmp_path / "a.jsonl", list(samples())
    by_json(path, rows)
    loader = fn.jsonl(path, shuffle=7, **SETTINGS)
    seen = [int(label) for batch in loader for label in batch["meta.label"]]
    assert sorted(seen) == sorted(row["meta"]["label"] for row in rows) and seen != [row["meta"]["label"] for row in rows]
    again = fn.jsonl(path, shuffle=7, **SETTINGS)
    for _, batch in zip(range(3), again, strict=False):
        pass
    other = fn.jsonl(path, shuffle=7, **SETTINGS)
    other.load_state_dict(again.state_dict())
    assert [int(label) for batch in other for label in batch["meta.label"]] == seen[96:]
    packed = {"tokens": 64, "bins": tmp_path / "bins", "copy": tmp_path / "copy", "longer": "split"}
    loader = fn.jsonl(path, columns=["ids:i32:?"], packed=packed, device="cpu", shard=None, batch_size=4)
    tokens = np.concatenate([batch["ids"].ravel().copy() for batch in loader])
    assert np.sort(tokens[tokens != 0]).tolist() == sorted(token for row in rows for token in row["ids"] if token)
    loader = fn.jsonl(path, columns=["ids:i32:?"], up_to=40, lengths_file=tmp_path / "lengths", device="cpu", shard=None)
    assert list(loader.lengths("ids")) == [len(row["ids"]) for row in rows]


def test_errors_name_the_file_the_line_and_the_byte(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n":1}\n\n{"n":"x"}\n{"n":2}\n')
    with pytest.raises(Error, match=r"n: a string where a whole number is expected; `NAME:bytes` reads it.*a\.jsonl member=line 3 offset=14"):
        list(fn.jsonl(path, columns=["n"], device="cpu", shard=None))
    path.write_bytes(b'{"n":1}\n{"n":2')
    with pytest.raises(Error, match=r"line 2: the line ends where ',' or '}' is expected"):
        fn.jsonl(path, columns=["n"])
    path.write_bytes(b'{"n":1}\n{"m":2}\n')
    with pytest.raises(Error, match='n is missing; the object has "m"; `missing_zero=True` reads it as zeros'):
        list(fn.jsonl(path, columns=["n"], device="cpu", shard=None))
    (batch,) = fn.jsonl(path, columns=["n"], missing_zero=True, device="cpu", shard=None, batch_size=2)
    assert batch["n"].tolist() == [1, 0]
    with pytest.raises(ConfigError, match="its most texts, is missing"):
        fn.jsonl(path, columns=["n[]:bytes"])
    for begin, what in [(b"[{", "one JSON list"), (b"{\n", "several lines"), (b"\x1f\x8b", r"not end in \.gz"), (b"\xff\xfe{\0", "UTF-16")]:
        path.write_bytes(begin + b'"a": 1}\n')
        with pytest.raises(Error, match=what):
            fn.jsonl(path)
