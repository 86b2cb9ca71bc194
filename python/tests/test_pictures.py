"""Pictures of odd kinds are as Pillow reads them, or refused: none is wrong in silence."""

import io
import itertools
import struct
import subprocess
import sys

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")

import feedline.numpy as fl
from feedline.errors import ChangedError, ConfigError, Error

import compare

Y, X = np.mgrid[0:45, 0:61]
#: Smooth in a corner and rough elsewhere; sides that are no multiple of a block.
PIXELS = np.stack([X * 4, Y * 5, (X * Y) % 251], -1).astype(np.uint8)
PICTURE = Image.fromarray(PIXELS)


def saved(picture, kind, **settings):
    file = io.BytesIO()
    picture.save(file, kind, **settings)
    return file.getvalue()


@pytest.fixture
def judged(tmp_path):
    """The verdict on a file with these bytes, and its reason."""

    def judge(data):
        (tmp_path / "picture.png").write_bytes(data)
        return compare.picture(tmp_path / "picture.png")

    return judge


def read(tmp_path, data, **settings):
    (tmp_path / "0.jpg").write_bytes(data)
    return next(iter(fl.images(tmp_path, batch_size=1, device="cpu", **settings)))["image"][0]


# --- JPEG: segments and scans -----------------------------------------------------------------------------------------------


def parts(jpeg):
    """The segments before the first scan, and each scan from its header on, with the tables before it."""
    at, header = 2, []
    while jpeg[at + 1] != 0xDA:
        length = 2 + struct.unpack_from(">H", jpeg, at + 2)[0]
        header.append(jpeg[at : at + length])
        at += length
    scans, start = [], at
    while jpeg[at + 1] != 0xD9:
        length = 2 + struct.unpack_from(">H", jpeg, at + 2)[0]
        if jpeg[at + 1] == 0xDA:
            end = at + length
            while jpeg[end] != 0xFF or jpeg[end + 1] == 0 or 0xD0 <= jpeg[end + 1] < 0xD8:
                end += 1
            scans.append(jpeg[start:end])
            start = at = end
        else:
            at += length
    return header, scans


def joined(header, scans):
    return b"\xff\xd8" + b"".join(header) + b"".join(scans) + b"\xff\xd9"


def codes(segments):
    """(class, number) to the codes of a table, by symbol: (bits, length)."""
    tables = {}
    for segment in (segment for segment in segments if segment[1] == 0xC4):
        at = 4
        while at < len(segment):
            which, lengths, at = segment[at], segment[at + 1 : at + 17], at + 17
            code, table = 0, tables.setdefault(divmod(which, 16), {})
            for length, count in enumerate(lengths, 1):
                for _ in range(count):
                    table[segment[at]] = (code, length)
                    code, at = code + 1, at + 1
                code <<= 1
    return tables


class Coefficients:
    """A sequential picture of one scan: for each component the DC value and the coded AC bits of its blocks."""

    def __init__(self, jpeg):
        self.header, (scan,) = parts(jpeg)
        frame = next(segment for segment in self.header if segment[1] == 0xC0)
        height, width, count = struct.unpack_from(">HHB", frame, 5)
        self.ids = [frame[10 + 3 * part] for part in range(count)]
        self.factors = [divmod(frame[11 + 3 * part], 16) for part in range(count)]
        most = [max(side) for side in zip(*self.factors)]
        self.mcus = [-(-height // (8 * most[1])), -(-width // (8 * most[0]))]
        #: Blocks of a component that is coded alone: down, across.
        self.own = [(-(-height * v // (8 * most[1])), -(-width * h // (8 * most[0]))) for h, v in self.factors]
        self.tables, self.which = codes(self.header), [divmod(scan[6 + 2 * part], 16) for part in range(count)]
        start = 2 + struct.unpack_from(">H", scan, 2)[0]
        self.bits = "".join(f"{byte:08b}" for byte in scan[start:].replace(b"\xff\0", b"\xff"))
        self.at = 0
        self.blocks = [{} for _ in range(count)]
        self.read()

    def symbol(self, by_code):
        code, length = 0, 0
        while (code, length) not in by_code:
            code, length, self.at = 2 * code + int(self.bits[self.at]), length + 1, self.at + 1
        return by_code[code, length]

    def read(self):
        inverse = {which: {code: symbol for symbol, code in table.items()} for which, table in self.tables.items()}
        last = [0] * len(self.ids)
        for row, column in itertools.product(*map(range, self.mcus)):
            for part, (h, v) in enumerate(self.factors):
                dc, ac = self.which[part]
                for y, x in itertools.product(range(v), range(h)):
                    size = self.symbol(inverse[0, dc])
                    value = int(self.bits[self.at : self.at + size] or "0", 2)
                    self.at += size
                    last[part] += value if not size or value >> (size - 1) else value - (1 << size) + 1
                    start, index = self.at, 1
                    while index < 64:
                        symbol = self.symbol(inverse[1, ac])
                        self.at += symbol & 15
                        index += 64 if symbol == 0 else (symbol >> 4) + 1
                    self.blocks[part][row * v + y, column * h + x] = (last[part], self.bits[start : self.at])

    def scan(self, members):
        """A scan of these components."""
        if len(members) == 1:
            order = [(members[0], place) for place in itertools.product(*map(range, self.own[members[0]]))]
        else:
            order = [
                (part, (row * self.factors[part][1] + y, column * self.factors[part][0] + x))
                for row, column in itertools.product(*map(range, self.mcus))
                for part in members
                for y, x in itertools.product(range(self.factors[part][1]), range(self.factors[part][0]))
            ]
        bits, last = [], dict.fromkeys(members, 0)
        for part, place in order:
            value, rest = self.blocks[part][place]
            difference, last[part] = value - last[part], value
            size = abs(difference).bit_length()
            code, length = self.tables[0, self.which[part][0]][size]
            low = difference if difference > 0 else difference + (1 << size) - 1
            bits += [f"{code:0{length}b}", f"{low:0{size}b}" if size else "", rest]
        text = "".join(bits)
        text += "1" * (-len(text) % 8)
        coded = int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0")
        selectors = b"".join(bytes([self.ids[part], self.which[part][0] * 16 + self.which[part][1]]) for part in members)
        return struct.pack(">HHB", 0xFFDA, 6 + len(selectors), len(members)) + selectors + b"\0\x3f\0" + coded


ORDERS = ["0 1 2", "0,1,2", "0,2,1", "0 1,2", "0,1 2", "1,0,2", "2,1,0", "1 2,0"]


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_a_sequential_jpeg_in_several_scans_is_right(judged, subsampling):
    for order, side in itertools.product(ORDERS, (61, 48, 17)):
        whole = Coefficients(saved(PICTURE.crop((0, 0, side, 45)), "JPEG", quality=90, subsampling=subsampling))
        scans = [whole.scan([int(part) for part in scan.split()]) for scan in order.split(",")]
        found, words = judged(joined(whole.header, scans))
        assert found == "equal", (order, side, words)


def test_a_cmyk_jpeg_in_several_scans_is_right(judged):
    whole = Coefficients(saved(PICTURE.convert("CMYK"), "JPEG", quality=90))
    for order in ("0 1 2 3", "0,1,2,3", "0 1,2 3", "3,2,1,0", "0,3,1,2"):
        found, words = judged(joined(whole.header, [whole.scan([int(part) for part in scan.split()]) for scan in order.split(",")]))
        assert found == "equal", (order, found, words)


def renamed(header, scans, ids):
    """With other ids of the components."""
    at = next(index for index, segment in enumerate(header) if segment[1] in (0xC0, 0xC2))
    frame, new = bytearray(header[at]), dict(zip(header[at][10::3], ids))
    frame[10::3] = bytes(ids)
    scans = [bytearray(scan) for scan in scans]
    for scan in scans:
        start = scan.index(b"\xff\xda")
        for part in range(scan[start + 4]):
            scan[start + 5 + 2 * part] = new[scan[start + 5 + 2 * part]]
    return [*header[:at], bytes(frame), *header[at + 1 :]], scans


JFIF = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0"


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode, sets", [("RGB", [b"\1\2\3", b"\0\1\2", b"RGB", b"rgb", b"\1\x22\x23", b"\3\2\1"]), ("CMYK", [b"\1\2\3\4", b"CMYK"])])
def test_colours_are_chosen_as_by_libjpeg(judged, progressive, mode, sets):
    header, scans = parts(saved(PICTURE.convert(mode), "JPEG", quality=92, progressive=progressive))
    header = [segment for segment in header if segment[1] not in (0xE0, 0xEE)]
    for ids, jfif, adobe in itertools.product(sets, (False, True), (None, 0, 1, 2)):
        named, coded = renamed(header, scans, ids)
        markers = [JFIF] * jfif + [b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([adobe or 0])] * (adobe is not None)
        found, words = judged(joined(markers + named, coded))
        assert found == "equal", (ids, jfif, adobe, found, words)


@pytest.mark.parametrize("factors", ["31 11 11", "13 11 11", "33 11 11", "21 22 11", "12 21 21", "11 22 11", "41 43 11"])
def test_a_progressive_jpeg_of_other_factors_than_its_scans_have_is_damaged(judged, factors):
    header, scans = parts(saved(PICTURE, "JPEG", progressive=True, subsampling=0))
    at = next(index for index, segment in enumerate(header) if segment[1] == 0xC2)
    frame = bytearray(header[at])
    frame[11::3] = bytes.fromhex(factors)
    found, words = judged(joined([*header[:at], bytes(frame), *header[at + 1 :]], scans))
    assert "damaged JPEG" in words or "more than 10 blocks" in words, (found, words)


def test_a_progressive_jpeg_whose_scans_leave_out_coefficients_is_damaged(tmp_path):
    for mode, least in (("RGB", 10), ("L", 6)):
        header, scans = parts(saved(PICTURE.convert(mode), "JPEG", progressive=True))
        assert len(scans) == least
        for left_out in range(len(scans)):
            cut = joined(header, scans[:left_out] + scans[left_out + 1 :]) if left_out else joined(header, scans[:1])
            with pytest.raises(Error, match="leave out coefficients|needs coefficients that no earlier scan has"):
                read(tmp_path, cut, size=(45, 61))
        assert read(tmp_path, joined(header, scans[:3]), size=(45, 61), strict=False).std() > 10
        assert read(tmp_path, joined(header, scans), size=(45, 61)).shape == (45, 61, 3)


def test_a_restart_marker_more_than_needed_is_taken(judged):
    jpeg = saved(PICTURE, "JPEG", restart_marker_rows=1)
    last = max(jpeg.rfind(bytes([0xFF, 0xD0 + number])) for number in range(8))
    more = jpeg[:-2] + bytes([0xFF, 0xD0 + (jpeg[last + 1] + 1 & 7)]) + b"\xff\xd9"
    assert judged(more)[0] == "equal"
    assert judged(more[:-2] + more[-4:])[0] == "equal"


def test_refusals_say_what_is_wrong(judged):
    jpeg, png = saved(PICTURE, "JPEG"), saved(PICTURE, "PNG")
    assert "CgBI" in judged(png[:8] + b"\0\0\0\4CgBI\x50\0\x20\2\x2b\xd5\xb3\x7f" + png[8:])[1]
    assert "segment db of length 1" in judged(jpeg[:2] + b"\xff\xdb\0\1" + jpeg[2:])[1]
    header, scans = parts(jpeg)
    assert judged(joined([segment for segment in header if segment[1] != 0xC4], scans))[0] == "equal"


# --- GIF, WebP, PNG, BMP ----------------------------------------------------------------------------------------------------


def lzw(indices):
    """Indices of 8 bits in codes of 9, with a clear code before the codes would get longer."""
    bits = "".join(f"{index:09b}"[::-1] if at % 250 else f"{256:09b}"[::-1] + f"{index:09b}"[::-1] for at, index in enumerate(indices))
    bits += f"{257:09b}"[::-1]
    bits += "0" * (-len(bits) % 8)
    coded = bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))
    blocks = [coded[at : at + 255] for at in range(0, len(coded), 255)]
    return b"\x08" + b"".join(bytes([len(block)]) + block for block in blocks) + b"\0"


def gif(frame, shared=64, local=0, transparent=None, disposal=0, interlaced=0, background=0, extension=b"", screen=(61, 45)):
    draw = np.random.default_rng(1)
    flags = lambda colours: 0x80 | (colours.bit_length() - 2) if colours else 0
    colours = lambda count: draw.integers(0, 256, 3 * count).astype(np.uint8).tobytes()
    left, top, width, height = frame
    data = b"GIF89a" + struct.pack("<HHBBB", *screen, flags(shared), background, 0) + colours(shared) + extension
    if transparent is not None or disposal:
        data += struct.pack("<BBBBHBB", 0x21, 0xF9, 4, disposal << 2 | (transparent is not None), 0, transparent or 0, 0)
    data += b"," + struct.pack("<HHHHB", *frame, flags(local) | interlaced << 6) + colours(local)
    return data + lzw(draw.integers(0, local or shared, width * height).tolist()) + b";"


def test_around_a_first_frame_that_is_smaller_than_its_canvas_a_gif_is_as_in_pillow(judged):
    kinds = itertools.product((64, 0), (0, 8), (None, 0, 3, 200), (0, 2), (0, 1), (0, 5))
    for shared, local, transparent, disposal, interlaced, background in kinds:
        if shared or local:
            data = gif((10, 5, 30, 20), shared, local, transparent, disposal, interlaced, background)
            assert judged(data)[0] == "equal", (shared, local, transparent, disposal, interlaced, background)
    for frame in ((0, 0, 61, 45), (50, 40, 30, 20), (0, 0, 80, 90), (70, 60, 10, 10), (0, 20, 61, 10), (60, 44, 1, 1)):
        assert judged(gif(frame))[0] == "equal", frame


def test_unknown_extensions_of_a_gif_are_skipped_and_other_bytes_are_not(judged):
    for extension in (b"\x21\x42\3abc\0", b"\x21\x42\3abc\1d\0", b"\x21\xfe\3abc\0", b"\x21\xff\x0bNETSCAPE2.0\3\1\0\0\0"):
        assert judged(gif((0, 0, 61, 45), extension=extension))[0] == "equal"
    assert "damaged GIF" in judged(gif((0, 0, 61, 45), extension=b"\x42"))[1]


ROUGH = Image.fromarray(np.random.default_rng(0).integers(0, 256, (45, 61, 3)).astype(np.uint8))
CLEAR = Image.merge("RGBA", (*ROUGH.split(), Image.fromarray((X * 4 % 256).astype(np.uint8))))
KINDS = {
    "webp": (ROUGH, {}),
    "webp lossless": (ROUGH, {"lossless": True}),
    "webp alpha": (CLEAR, {}),
    "webp alpha lossless": (CLEAR, {"lossless": True}),
    "png": (ROUGH, {}),
    "png palette": (ROUGH.quantize(64), {}),
    "bmp": (ROUGH, {}),
    "bmp palette": (ROUGH.quantize(64), {}),
    "gif": (ROUGH.quantize(64), {}),
    "jpeg": (ROUGH, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_that_is_cut_is_refused_or_whole(judged, tmp_path, kind):
    picture, settings = KINDS[kind]
    data = saved(picture, kind.split()[0], **settings)
    assert judged(data)[0] == "equal" and judged(data + b"\0more")[0] == "equal"
    whole = read(tmp_path, data, size=(45, 61))
    for cut in (1, 2, 3, 4, 5, 8, 12, 13, 16, 24, 33, 64):
        try:
            left = read(tmp_path, data[:-cut], size=(45, 61))
        except Error:
            continue
        assert np.array_equal(left, whole), cut


@pytest.mark.parametrize("settings", [{"quality": 80}, {"lossless": True}])
@pytest.mark.parametrize("first", [ROUGH, CLEAR])
def test_the_first_frame_of_an_animated_webp_is_as_in_pillow(judged, first, settings):
    small = Image.new("RGBA", first.size)
    small.paste(CLEAR.crop((0, 0, 20, 12)), (16, 8))
    for picture in (first, small):
        assert judged(saved(picture, "WEBP", save_all=True, append_images=[PICTURE], **settings))[0] == "equal"


def test_a_bmp_whose_pixels_begin_within_its_palette_is_refused(judged):
    bmp = bytearray(saved(ROUGH.quantize(64), "BMP"))
    bmp[10:14] = struct.pack("<I", 54)
    assert "palette" in judged(bytes(bmp))[1]


# --- Settings ---------------------------------------------------------------------------------------------------------------


def test_the_largest_picture_is_a_setting(tmp_path):
    picture = saved(Image.new("RGB", (6000, 4000), (9, 8, 7)), "WEBP", lossless=True, method=0, quality=0)
    assert read(tmp_path, picture, size=(4, 6))[0, 0].tolist() == [9, 8, 7]
    with pytest.raises(Error, match="24000000 pixels; the limit is 23999999 .`max_pixels` raises it"):
        read(tmp_path, picture, size=(4, 6), max_pixels=23_999_999)


def test_a_photo_is_turned_on_request(tmp_path):
    for value in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = value
        data = saved(PICTURE, "JPEG", exif=exif)
        turned = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        assert np.array_equal(read(tmp_path, data, size=turned.shape[:2], exif_orientation=True), turned)
        assert np.array_equal(read(tmp_path, data, size=(45, 61)), np.asarray(Image.open(io.BytesIO(data))))


def test_size_of_both_sides_scales_the_whole_picture(tmp_path):
    data = saved(PICTURE, "JPEG")
    assert read(tmp_path, data, size=(20, 30)).shape == (20, 30, 3)
    assert read(tmp_path, data, size=(20, 30), shuffle=1).shape == (20, 30, 3)
    with pytest.raises(Error, match="augment"):
        read(tmp_path, data, size=(20, 30), augment=True)
    with pytest.raises(TypeError, match="height, width"):
        read(tmp_path, data, size="large")


def test_a_folder_is_compared(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.jpg").write_bytes(saved(PICTURE, "JPEG"))
    (tmp_path / "sub" / "b.png").write_bytes(saved(Image.fromarray((X * 300).astype(np.uint16)), "PNG"))
    # Two pixels, and an end: the others are Pillow's first colour, and black here.
    flat = Image.new("P", (4, 2))
    flat.putpalette([255] * 768)
    short = bytearray(saved(flat, "BMP")[:1078] + b"\2\5\0\2\2\1\0\1")
    short[30:38] = struct.pack("<II", 1, 8)
    (tmp_path / "sub" / "c.bmp").write_bytes(short)
    (tmp_path / "c.gif").write_bytes(b"GIF89a")
    table = {"n": [1, 2, None], "t": ["a", "", "ccc"], "l": [[1.5], [], [2.0, 3.0]], "b": [True, False, True]}
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    run = subprocess.run([sys.executable, compare.__file__, tmp_path], capture_output=True, text=True, timeout=120)
    found = dict(reversed(line.split(None, 1)) for line in run.stdout.splitlines() if line.startswith(" "))
    wanted = {"columns equal": "4", "pictures equal": "2", "pictures different": "1", "pictures refused by both": "1"}
    assert found == wanted and run.returncode == 1, run.stdout + run.stderr
    assert f"different: {tmp_path}/sub/c.bmp: off by at most" in run.stdout


# --- buckets ----------------------------------------------------------------------------------------------------------------

BUCKETS = [(40, 40), (52, 32), (32, 52), (64, 24), (24, 64)]
#: (height, width), and the bucket.
SHAPES = [((81, 80), 0), ((50, 33), 1), ((101, 155), 2), ((110, 40), 3), ((77, 300), 4)]


@pytest.fixture
def shapes(tmp_path):
    """Pictures of five shapes, PNG and JPEG."""
    pictures, random = [], np.random.default_rng(7)
    for number in range(30):
        (height, width), _ = SHAPES[number % 5]
        picture = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        kind = "PNG" if number % 2 else "JPEG"
        (tmp_path / f"{number:02}.{kind.lower()}").write_bytes(saved(picture, kind))
        pictures.append(Image.open(tmp_path / f"{number:02}.{kind.lower()}"))
    return tmp_path, pictures, [(picture.height, picture.width) for picture in pictures]


def test_sizes_of_pictures_are_pillows(tmp_path):
    folder, place = tmp_path / "pictures", tmp_path / "sizes"
    folder.mkdir()
    rotated = Image.Exif()
    rotated[0x0112] = 6
    kinds = [{}, {"progressive": True}, {"exif": rotated}, {"format": "PNG"}, {"format": "WEBP"}, {"format": "GIF"}, {"format": "BMP"}]
    for number, kind in enumerate(kinds):
        picture = Image.new("RGB", (20 + number, 30 - number), (90, 120, 150))
        picture.save(folder / f"{number}.jpg", **{"format": "JPEG", **kind})
    for upright in (False, True):
        pictures = [Image.open(folder / f"{number}.jpg") for number in range(len(kinds))]
        pictures = [ImageOps.exif_transpose(picture) for picture in pictures] if upright else pictures
        loader = fl.images(folder, size=8, device="cpu", exif_orientation=upright)
        for _ in range(2):
            sizes = loader.picture_sizes(place.with_suffix(f".{upright}"))
            assert sizes.tolist() == [[picture.height, picture.width] for picture in pictures]
    with pytest.raises(ChangedError, match="sizes of pictures of another field or orientation"):
        loader.picture_sizes(place.with_suffix(".False"))
    with pytest.raises(ConfigError, match="no field `label`; the dataset has image"):
        loader.picture_sizes(place, "label")
    (folder / "8.jpg").write_bytes(b"\xff\xd8\xff and no picture")
    (folder / "9.jpg").write_bytes(b"")
    sizes = fl.images(folder, size=8, device="cpu", max_pixels=9).picture_sizes(place)
    assert sizes[:-2].tolist() == [[picture.height, picture.width] for picture in map(Image.open, sorted(folder.glob("[0-7].jpg")))]
    assert sizes[-2:].tolist() == [[1, 1]] * 2


def test_pictures_fill_the_bucket_of_the_nearest_ratio(shapes):
    path, pictures, sizes = shapes
    settings = {"buckets": BUCKETS, "sizes": sizes, "budget": 8000, "ids": True, "layout": "nhwc", "device": "cpu"}
    for augment in (False, True):
        loader, seen = fl.images(path, shuffle=1, augment=augment, **settings), []
        for batch in loader:
            groups = {SHAPES[number % 5][1] for number in batch["ids"].tolist()}
            height, width = BUCKETS[groups.pop()]
            assert not groups and batch["image"].shape[1:] == (height, width, 3)
            assert 1 <= len(batch["image"]) <= 8000 // (height * width)
            for number, image, geometry in zip(batch["ids"].tolist(), batch["image"], batch["image.geometry"].tolist()):
                picture, (top, left) = pictures[number], geometry[2:4]
                assert geometry[:2] == [picture.height, picture.width] and geometry[4:] == [height, width]
                factor = max(height / picture.height, width / picture.width)
                whole = (max(width, int(picture.width * factor + 1e-9)), max(height, int(picture.height * factor + 1e-9)))
                # Newer versions of Pillow may begin with the height.
                scaled = picture.resize((whole[0], picture.height), Image.Resampling.BILINEAR)
                scaled = scaled.resize(whole, Image.Resampling.BILINEAR)
                right = [scaled, ImageOps.mirror(scaled)] if augment else [scaled]
                right = [np.asarray(one.crop((left, top, left + width, top + height))) for one in right]
                assert any((image == one).all() for one in right), (number, geometry)
                middle = [round((whole[1] - height) / 2), round((whole[0] - width) / 2)]
                assert augment or [top, left] == middle
                seen.append(number)
        assert sorted(seen) == list(range(30)) and len(loader.dataset) == 30


def test_last_batches_of_buckets_are_counted_and_limited(shapes):
    path, _, sizes = shapes
    settings = {"buckets": BUCKETS, "sizes": sizes, "ids": True, "device": "cpu", "batch_size": 1}
    ranks = [fl.images(path, shard=(rank, 4), last_batch_share=1.0, **settings) for rank in range(4)]
    told = [(loader.log()["feedline/epoch_repeated"], loader.snapshot()["epoch"]["repeated"]) for loader in ranks]
    seen = [batch["status"].tolist() for loader in ranks for batch in loader]
    # Six pictures of each size in batches of four.
    assert told == [(10, 10)] * 4 and sum(row == 1 for rows in seen for row in rows) == 10
    assert "repeat 10 (33.33 %) and leave out 0" in ranks[0].report()
    with pytest.raises(Error, match=r"repeats 10 and leaves out 0 \(33.3 %\).*`last_batch=\"mask\"`.*`last_batch_share=0.334`"):
        len(fl.images(path, shard=(0, 4), **settings))


def test_pictures_in_buckets_become_floats(shapes):
    path, _, sizes = shapes
    settings = {"buckets": BUCKETS, "sizes": sizes, "batch_size": 4, "device": "cpu"}
    of_bytes = fl.images(path, layout="nchw", **settings)
    floats = fl.images(path, layout="nchw", dtype="f32", normalize=([0.5], [0.25]), **settings)
    for one, other in zip(of_bytes, floats):
        assert one["image"].shape == other["image"].shape and one["image"].shape[1] == 3
        np.testing.assert_allclose(other["image"], (one["image"] / 255 - 0.5) / 0.25, atol=1e-5)


def test_wrong_buckets_are_refused(shapes):
    path, _, sizes = shapes
    for wrong, words in [
        ({"buckets": BUCKETS}, "buckets need sizes"),
        ({"sizes": sizes, "size": 40}, "sizes are for buckets"),
        ({"buckets": BUCKETS, "sizes": sizes, "size": 40}, "leave out size"),
        ({"buckets": BUCKETS, "sizes": sizes[:7]}, "the groups have 7 samples, but the dataset has 30"),
        ({"buckets": [], "sizes": sizes}, "0 buckets of pictures"),
    ]:
        with pytest.raises(Error, match=words):
            next(iter(fl.images(path, device="cpu", **wrong)))
    with pytest.raises(ValueError, match="say one"):
        fl.images(path, device="cpu", buckets=BUCKETS, sizes=sizes, lengths=[1] * 30)
    with pytest.raises(Error, match="belongs to group 4, but its batch is of group 0"):
        list(fl.images(path, device="cpu", buckets=BUCKETS, sizes=sizes[1:] + sizes[:1], batch_size=2))


@pytest.mark.parametrize("name", ["bilinear", "bicubic", "lanczos"])
def test_pictures_are_scaled_by_the_filter(shapes, name):
    path, pictures, _ = shapes
    for batch in fl.images(path, size=(40, 30), filter=name, ids=True, layout="nhwc", device="cpu"):
        for number, image in zip(batch["ids"].tolist(), batch["image"]):
            # Newer versions of Pillow may begin with the height.
            kind = getattr(Image.Resampling, name.upper())
            right = pictures[number].resize((30, pictures[number].height), kind).resize((30, 40), kind)
            assert (image == np.asarray(right)).all(), number
    with pytest.raises(Error, match='filter "box": there are nearest, bilinear, bicubic and lanczos'):
        len(fl.images(path, size=40, filter="box"))
