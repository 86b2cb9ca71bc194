"""One small dataset of each format, some of several cache blocks: data.py FOLDER

Needs numpy, pyarrow, google-crc32c and Pillow. MDS, TFRecord, Megatron and safetensors are written byte by byte.
"""

import io
import json
import os
import struct
import sys
import tarfile

import google_crc32c
import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

rng = np.random.default_rng(1)


def write(name, *parts):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "wb") as file:
        for part in parts:
            file.write(part)


def records():
    write("records.bin", rng.bytes(60 * 1_000_003))


def tokens():
    write("tokens.bin", rng.bytes(2 * 65_536 * 100))


def megatron():
    lengths = rng.integers(1_000, 60_000, 200).astype("<i4")
    starts = 2 * np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8")]).astype("<i8")
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(documents))
    write("text.idx", header, lengths, starts, documents)
    write("text.bin", rng.bytes(2 * int(lengths.sum())))


def arrays():
    np.save("rows.npy", rng.integers(0, 256, (100, 90_001), dtype=np.uint8))
    for k in range(20):
        np.savez(f"pair-{k:02}.npz", x=rng.integers(0, 256, (5, 50_000), dtype=np.uint8), y=np.int64(k))


def safetensors():
    rows = rng.integers(0, 256, (100, 70_000), dtype=np.uint8)
    header = {"rows": {"dtype": "U8", "shape": rows.shape, "data_offsets": [0, rows.nbytes]}}
    text = json.dumps(header).encode()
    write("rows.safetensors", struct.pack("<Q", len(text)), text, rows)


def tar():
    for shard in range(4):
        with tarfile.open(f"train-{shard:04}.tar", "w") as out:
            for sample in range(50):
                member = tarfile.TarInfo(f"{shard:02}{sample:04}.bin")
                member.size = int(rng.integers(100_000, 200_000))
                out.addfile(member, io.BytesIO(rng.bytes(member.size)))


def tfrecord():
    def masked(data):
        crc = google_crc32c.value(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    for shard in range(2):
        payloads = [rng.bytes(int(size)) for size in rng.integers(50_000, 150_000, 50)]
        lengths = [struct.pack("<Q", len(payload)) for payload in payloads]
        parts = [part for length, payload in zip(lengths, payloads)
                 for part in (length, masked(length), payload, masked(payload))]
        write(f"part-{shard:05}.tfrecord", *parts)


def mds():
    shards = []
    for shard in range(3):
        rows = []
        for sample in range(40):
            payload = rng.bytes(int(rng.integers(50_000, 150_000)))
            rows.append(struct.pack("<I", len(payload)) + struct.pack("<q", 40 * shard + sample) + payload)
        start = 4 + 4 * (len(rows) + 1)
        offsets = start + np.cumsum([0] + [len(row) for row in rows])
        name = f"shard.{shard:05}.mds"
        write(f"mds/{name}", struct.pack("<I", len(rows)), offsets.astype("<u4"), *rows)
        shards.append({
            "column_encodings": ["bytes", "int"], "column_names": ["data", "k"], "column_sizes": [None, 8],
            "compression": None, "format": "mds", "hashes": [], "samples": len(rows), "size_limit": 1 << 26,
            "version": 2, "zip_data": None,
            "raw_data": {"basename": name, "bytes": int(offsets[-1]), "hashes": {}},
        })
    write("mds/index.json", json.dumps({"shards": shards, "version": 2}).encode())


def images():
    for k in range(40):
        small = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8))
        out = io.BytesIO()
        small.resize((320, 240)).save(out, "JPEG")
        write(f"images/{'cat' if k % 2 else 'dog'}/{k:03}.jpg", out.getvalue())


def parquet():
    for part in range(2):
        columns = {f"f{k}": rng.normal(size=200_000).astype(np.float32) for k in range(8)}
        pyarrow.parquet.write_table(pyarrow.table(columns), f"part-{part}.parquet", row_group_size=25_000)


os.chdir(sys.argv[1])
for make in (records, tokens, megatron, arrays, safetensors, tar, tfrecord, mds, images, parquet):
    make()
