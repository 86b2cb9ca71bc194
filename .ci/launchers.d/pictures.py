"""Pictures for an offline job: pictures.py FOLDER TASKS. Three for each task, of 20 classes; one in 500 is damaged."""

import io
import pathlib
import sys

import numpy
from PIL import Image

folder, tasks = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rng = numpy.random.default_rng(0)
kinds = []
for _ in range(40):
    coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=numpy.uint8)).resize((640, 480))
    out = io.BytesIO()
    coarse.save(out, "JPEG", quality=int(rng.integers(60, 95)))
    kinds.append(out.getvalue())
for number in range(3 * tasks):
    # A comment of its own makes each one unique.
    data = kinds[number % len(kinds)]
    data = data[:2] + b"\xff\xfe\x00\x0a" + number.to_bytes(8, "big") + data[2:]
    if number % 500 == 123:
        data = data[: len(data) // 2]
    place = folder / f"class{number % 20:02}" / f"{number:07}.jpg"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
