"""A small folder of pictures that a small model can learn: `python demo.py FOLDER`.

Each class has a colour, under noise. Written with the standard library alone.
"""

import random
import struct
import sys
import zlib
from pathlib import Path

COLOURS = {"amber": (230, 150, 40), "green": (60, 170, 70), "indigo": (60, 60, 170), "rose": (220, 70, 120)}


def png(pixels, width, height):
    """The bytes of a PNG file of RGB pixels, row after row."""
    rows = b"".join(b"\0" + pixels[row * width * 3 : (row + 1) * width * 3] for row in range(height))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def write(folder, per_class=64, size=40, seed=1):
    """Writes folder/CLASS/NUMBER.png."""
    draw = random.Random(seed)
    for name, colour in COLOURS.items():
        place = Path(folder) / name
        place.mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            noise = draw.randbytes(size * size * 3)
            pixels = bytes((3 * colour[at % 3] + value) // 4 for at, value in enumerate(noise))
            (place / f"{number:04}.png").write_bytes(png(pixels, size, size))


if __name__ == "__main__":
    write(sys.argv[1])
