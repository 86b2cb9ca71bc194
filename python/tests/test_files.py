"""Files as other programs write and read them: the right value is theirs."""

import os

import numpy as np
import pytest

import feedline.numpy as fn
from feedline.errors import ConfigError, DecodeError, EmptyError, Error, NotAFileError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def table(tmp_path):
    """Tokens of any length, texts, bytes and pictures beside numbers."""
    from PIL import Image
    import io

    png = io.BytesIO()
    Image.new("RGB", (96, 96)).save(png, "PNG")
    rows = 64
    columns = {
        "label": list(range(rows)),
        "weight": [0.5 * row for row in range(rows)],
        "input_ids": [list(range(row % 7)) for row in range(rows)],
        "text": ["ä" * (row % 5) for row in range(rows)],
        "blob": [b"x" * (100 * (row % 9)) for row in range(rows)],
        "image": [{"bytes": png.getvalue(), "path": "x"}] * rows,
        "fixed": pa.array([[row, 1] for row in range(rows)], pa.list_(pa.int32(), 2)),
    }
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    return tmp_path / "a.parquet", table


def values(loader):
    """The rows of each field, cut to their lengths, as Python has them."""
    out = {}
    for batch in loader:
        for name in [name for name in batch if not name.endswith(".lens")]:
            array, lens = batch[name], batch.get(name + ".lens")
            rows = [row if lens is None else row[: lens[at]] for at, row in enumerate(array)]
            out.setdefault(name, []).extend(row.tolist() for row in rows)
    return out


def expected(table, name):
    rows = table[name].to_pylist()
    return [list(row.encode() if isinstance(row, str) else row) if isinstance(row, (str, bytes)) else row for row in rows]


@pytest.mark.parametrize(
    "asked",
    [
        {"columns": ["text"]},
        {"columns": ["blob", "label"]},
        {"columns": ["label", "input_ids"], "up_to": 8},
        {"columns": ["weight", "input_ids", "fixed"], "up_to": 8},
        {"columns": ["text", "input_ids"], "up_to": 8},
        {"columns": ["text", "input_ids", "blob"], "up_to": {"input_ids": 6, "text": 100}},
        {"columns": ["fixed", "label"]},
        {"columns": ["input_ids", "label"], "up_to": 8, "image": "image", "size": 84},
    ],
    ids=str,
)
def test_numbers_lists_texts_and_pictures_are_read_together_as_pyarrow_reads_them(table, asked):
    path, table = table
    got = values(fn.parquet(path, batch_size=10, **asked))
    pictures = got.pop("image", None)
    assert ("image" in asked) == (pictures is not None and len(pictures) == table.num_rows)
    assert list(got) == asked["columns"]
    for name in asked["columns"]:
        assert got[name] == expected(table, name), name


def test_lengths_of_texts_are_the_longest_not_the_mean(tmp_path):
    rows = [b"x" * n for n in range(100, 3000, 29)]
    pq.write_table(pa.table({"b": rows, "label": range(100)}), tmp_path / "t.parquet", row_group_size=7)
    shapes = [batch["b"].shape for batch in fn.parquet(tmp_path / "t.parquet", columns=["b", "label"], batch_size=10)]
    assert shapes == [(10, 2971)] * 10
    pq.write_table(pa.table({"lang": ["", ""]}), tmp_path / "t.parquet")
    assert values(fn.parquet(tmp_path / "t.parquet", columns=["lang"])) == {"lang": [[], []]}


def test_members_of_a_tar_take_the_longest_of_their_kind(tmp_path):
    import io
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for row in range(4):
            for ending, data in (("bin", b"x" * 5000), ("txt", b"y" * row)):
                info = tarfile.TarInfo(f"{row}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    batch = next(iter(fn.webdataset(tmp_path / "a.tar", columns=["bin", "txt"], batch_size=4)))
    assert batch["txt"].shape == (4, 3) and batch["bin"].shape == (4, 5000)


def test_wrong_uses_of_up_to_are_named(table):
    path, _ = table
    for asked, words in [
        ({"columns": ["input_ids"]}, "up_to"),
        ({"columns": ["label"], "up_to": {"label": 3}}, "columns"),
        ({"columns": ["label"], "up_to": {"input_ids": 3}}, "columns does not"),
        ({"columns": ["image", "label"], "image": "image"}, "picture"),
    ]:
        with pytest.raises(ConfigError, match=words) as error:
            next(iter(fn.parquet(path, **asked)))
        assert "::" not in str(error.value)


def test_pictures_have_the_order_and_classes_of_image_folder(tmp_path):
    folder = pytest.importorskip("torchvision.datasets").ImageFolder
    from PIL import Image

    names = ["b/1.png", "b/x/1.PNG", "b/x-y/1.jpg", "b/x y/2.jpeg", "b/x.y/1.png", "b/x0/1.png", "B/z.png", "a b/é.png", "b/a.png"]
    root = tmp_path / "set"
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(root / name, "PNG")
    (tmp_path / "other/n02/deep").mkdir(parents=True)
    Image.new("RGB", (8, 8), (250, 0, 0)).save(tmp_path / "other/n02/deep/1.png")
    (root / "n02").symlink_to(tmp_path / "other/n02")
    (root / "b/link.png").symlink_to(tmp_path / "other/n02/deep/1.png")
    (root / "b/.DS_Store").write_bytes(b"x")
    theirs = folder(root)
    pixels = [np.asarray(image)[0, 0, 0] for image, _ in theirs]
    ours = [(batch["image"][0, 0, 0, 0], batch["label"][0]) for batch in fn.images(root, size=8, batch_size=1)]
    assert ours == list(zip(pixels, [label for _, label in theirs.samples]))


def test_a_link_into_itself_is_an_error(tmp_path):
    from PIL import Image

    (tmp_path / "set/a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "set/a/1.png")
    (tmp_path / "set/a/again").symlink_to(tmp_path / "set")
    with pytest.raises(NotAFileError, match="remove the link"):
        len(fn.images(tmp_path / "set", size=8))


def test_a_folder_of_parquet_is_that_of_pyarrow_or_an_error_that_names_the_rest(tmp_path):
    import pyarrow.dataset as ds

    for number, name in enumerate(["0.parquet", "1.PARQUET", "2.pq", "3.parq", "sub/4.parquet"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"a": [number]}), tmp_path / name)
    with pytest.raises(NotAFileError, match=r"/\*\*"):
        len(fn.parquet(tmp_path))
    theirs = ds.dataset(tmp_path, format="parquet").to_table()["a"].to_pylist()
    assert sorted(values(fn.parquet(tmp_path / "**"))["a"]) == sorted(theirs) == [0, 1, 2, 3, 4]
    os.rename(tmp_path / "sub/4.parquet", tmp_path / "4.parquet")
    loader = fn.parquet(tmp_path)
    assert sorted(values(loader)["a"]) == [0, 1, 2, 3, 4]
    assert "left out: 1 folder" in loader.report()


def test_an_empty_file_among_others_has_no_samples(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "b.parquet")
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    assert values(fn.parquet(files)) == values(fn.parquet(tmp_path)) == {"a": [1]}
    with pytest.raises(EmptyError):
        len(fn.parquet(files[1:]))


def test_bytes_of_other_programs_are_no_tokens(tmp_path):
    import bz2
    import lzma

    tokens = np.arange(1000, dtype=np.uint16).tobytes()
    file = tmp_path / "t.bin"
    for data in [bz2.compress(tokens), lzma.compress(tokens), b"<html><body>404 Not Found</body></html>" * 4, b"word " * 200]:
        file.write_bytes(data + b"\0" * (len(data) % 2))
        with pytest.raises(DecodeError, match="header_bytes=0"):
            len(fn.tokens(file, seq_len=8))
        assert len(fn.tokens(file, seq_len=8, header_bytes=0)) > 0


@pytest.mark.parametrize("kind", [3, 4])
def test_exif_turns_as_pillow_turns(tmp_path, kind):
    from PIL import Image, ImageOps

    picture = Image.fromarray(np.arange(64 * 96 * 3, dtype=np.uint32).reshape(64, 96, 3).astype(np.uint8))
    entry = b"\x12\x01" + bytes([kind, 0]) + b"\x01\0\0\0\x08\0\0\0"
    picture.save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + b"\0\0\0\0", quality=95)
    theirs = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "a.jpg")).convert("RGB"))
    batch = next(iter(fn.images(tmp_path, size=theirs.shape[:2], exif_orientation=True, batch_size=1)))
    assert (batch["image"][0] == theirs).all()


def test_a_list_of_pictures_is_named_and_no_refused_column_is_offered(tmp_path):
    import re
    from decimal import Decimal

    pair = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        "label": list(range(4)),
        "images": pa.array([[{"bytes": b"x", "path": "p"}]] * 4, pa.list_(pair)),
        "price": [Decimal("1.50")] * 4,
        "both": [{"a": 1, "b": [[1]]}] * 4,
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")

    def open_by(**asked):
        return values(fn.parquet(tmp_path / "a.parquet", **asked))

    for asked in [{}, {"columns": ["images"]}, {"image": "images"}, {"columns": ["images.list.element.bytes"]}]:
        with pytest.raises(ConfigError, match=r"give it with `elements`; choose other columns with `columns`"):
            open_by(**asked)
    for asked in ["nothing", "both"]:
        with pytest.raises(ConfigError) as error:
            open_by(columns=[asked])
        offered = re.search(r"(?:there are|one of its columns:) ([^:]*)", str(error.value))[1].split(", ")
        assert offered == (["both.a"] if asked == "both" else ["label", "both.a"])
        assert list(open_by(columns=offered)) == offered


def test_an_archive_with_bytes_behind_it_or_folders_is_read_as_numpy_reads_it(tmp_path):
    import io
    import zipfile

    array, plain, folder, npy = np.arange(24.0).reshape(4, 6), io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(plain, x=array)
    np.save(npy, array)
    with zipfile.ZipFile(folder, "w") as archive:
        archive.writestr("sub/", b"")
        archive.writestr("x.npy", npy.getvalue())
    file = tmp_path / "a.npz"
    for data in [folder.getvalue(), *(plain.getvalue() + behind for behind in (b"", b"\n", b"\0" * 512, b"x" * 70_000))]:
        file.write_bytes(data)
        try:
            theirs = np.load(file)["x"]
        except (zipfile.BadZipFile, ValueError):
            theirs = None
        if theirs is None:
            with pytest.raises(Error):
                len(fn.npz(file))
        else:
            assert (next(iter(fn.npz(file)))["x"][0] == theirs).all()


def test_tokens_of_another_width_are_found_by_the_vocabulary(tmp_path):
    ids = np.random.default_rng(0).integers(0, 50257, 10_000)

    def read(**settings):
        return np.concatenate([batch["tokens"] for batch in fn.tokens(tmp_path / "t.bin", seq_len=100, **settings)]).ravel()

    for kind in ("u16", "u32", "i64"):
        ids.astype({"u16": "<u2", "u32": "<u4", "i64": "<i8"}[kind]).tofile(tmp_path / "t.bin")
        assert (read(token=kind, vocabulary=50257) == ids).all()
        for other in {"u16", "u32", "i64"} - {kind}:
            with pytest.raises(DecodeError, match="vocabulary=50257|every second"):
                read(token=other, vocabulary=50257)
        with pytest.raises(DecodeError, match=f"token {ids.max()}, but .vocabulary={ids.max()}. ends the ids at {ids.max() - 1}"):
            read(token=kind, vocabulary=int(ids.max()))
    with pytest.raises(ConfigError, match="1 to 2.16 ids"):
        read(token="u16", vocabulary=100_278)
