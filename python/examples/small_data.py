"""Small data sets for the recipes of this folder. They lie in a temporary folder that goes when the program ends."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import http.server
import io
import json
import shutil
import tarfile
import tempfile
import threading
import urllib.parse
from pathlib import Path
from typing import Iterator

import numpy as np
from PIL import Image

COLOURS = {"amber": (230, 150, 40), "green": (60, 170, 70), "indigo": (60, 60, 170), "rose": (220, 70, 120)}


def folder() -> Path:
    """A new folder."""
    path = Path(tempfile.mkdtemp(prefix="feedline-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def picture(label: int, draw: np.random.Generator, height: int = 48, width: int = 48) -> bytes:
    """A JPEG of the colour of its class, under noise."""
    noise = draw.integers(0, 256, (height, width, 3))
    pixels = (3 * np.array(list(COLOURS.values())[label]) + noise) // 4
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def pictures(count: int, seed: int = 1, sizes: list[tuple[int, int]] | None = None) -> Path:
    """A folder with a folder per class: CLASS/NUMBER.jpg."""
    place, draw = folder(), np.random.default_rng(seed)
    for name in COLOURS:
        (place / name).mkdir()
    for number in range(count):
        label = number % len(COLOURS)
        height, width = sizes[draw.integers(len(sizes))] if sizes else (48, 48)
        data = picture(label, draw, height, width)
        (place / list(COLOURS)[label] / f"{number:05}.jpg").write_bytes(data)
    return place


def shards(count: int, per_shard: int) -> Path:
    """A folder of tar shards as WebDataset has them: train-0000.tar with 00000.jpg, 00000.cls and so on."""
    place, draw = folder(), np.random.default_rng(1)
    for shard in range(count):
        with tarfile.open(place / f"train-{shard:04}.tar", "w") as tar:
            for number in range(shard * per_shard, (shard + 1) * per_shard):
                label = number % len(COLOURS)
                for ending, data in (("jpg", picture(label, draw)), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{number:05}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return place


def listing(place: Path, prefix: str) -> bytes:
    """The answer of S3 to ListObjectsV2."""
    entries = ""
    for file in sorted(place.glob(f"{prefix}*")):
        size, time = file.stat().st_size, datetime.datetime.fromtimestamp(int(file.stat().st_mtime), datetime.timezone.utc)
        facts = {"Key": file.name, "LastModified": f"{time:%FT%TZ}", "ETag": f'"{size}"', "Size": size}
        entries += f"<Contents>{''.join(f'<{name}>{value}</{name}>' for name, value in facts.items())}</Contents>"
    return f"<ListBucketResult>{entries}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()


@contextlib.contextmanager
def bucket(place: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves a folder as the bucket `data` of an S3 store on this machine: its address, and the requests so far."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            file = place / path.removeprefix("/data/")
            requests.append(f"{self.command} {self.path}")
            if "list-type=2" in query:
                return self.answer(200, listing(place, urllib.parse.parse_qs(query).get("prefix", [""])[0]))
            if not file.is_file():
                return self.send_error(404)
            data, asked = file.read_bytes(), self.headers.get("Range")
            headers = {"ETag": f'"{len(data)}"', "Last-Modified": self.date_time_string(file.stat().st_mtime)}
            if not asked:
                return self.answer(200, data, headers)
            first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            part = data[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
            self.answer(206, part, headers)

        def answer(self, status: int, data: bytes, headers: dict[str, str] = {}) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *_words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


TEMPLATE = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>
{% endgeneration %}{% else %}{{ message.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def model(texts: list[str]) -> Path:
    """A folder with the tokenizer of a small model, and with its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet))
    place = folder()
    tokenizer.save(str(place / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": TEMPLATE}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def sums(count: int, seed: int = 1) -> list[dict[str, list[dict[str, str]]]]:
    """Conversations about sums."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        messages = [{"role": "system", "content": "Answer in digits."}]
        for a, b in draw.integers(0, 10, (draw.integers(1, 4), 2)):
            messages += [{"role": "user", "content": f"What is {a} and {b}?"}, {"role": "assistant", "content": f"{a + b}"}]
        rows.append({"messages": messages})
    return rows


def json_lines(rows: list[dict[str, object]]) -> Path:
    """A file of JSON lines."""
    path = folder() / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
