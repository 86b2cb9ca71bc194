"""Several pictures in a row: lists and pairs in Parquet and tar. Files by pyarrow and tarfile, pixels by Pillow."""

import io
import re
import tarfile

import numpy as np
import pytest

import feedline.numpy as fn
from feedline.errors import ConfigError, DecodeError, Error, ShapeError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")
WIDTH, HEIGHT = 40, 30
WHOLE = {"size": (HEIGHT, WIDTH), "batch_size": 5}


def png(seed, width=WIDTH, height=HEIGHT, kind="PNG"):
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


LISTS = [[png(row * 10 + k, kind="JPEG" if k else "PNG") for k in range(row % 4)] for row in range(13)]
ONES = [[png(row)] for row in range(13)]
PAIR = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def structs(rows):
    return pa.array([[{"bytes": data, "path": "x.png"} for data in row] for row in rows], pa.list_(PAIR))


def parquet(path, **columns):
    columns = {"label": list(range(13)), **columns}
    pq.write_table(pa.table(columns), path, row_group_size=5)
    return path


def tar(path, samples):
    """Members of each sample, as pairs of ending and bytes."""
    with tarfile.open(path, "w") as archive:
        for key, members in enumerate(samples):
            for ending, data in members:
                info = tarfile.TarInfo(f"folder/k{key:02}.{ending}")
                # Writes an extension header, as most programs do.
                info.mtime, info.size = 1234.5, len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def rows(loader, name):
    """The lists of each row; what is behind them must be zero."""
    for batch in loader:
        for row, count, label in zip(batch[name], batch[f"{name}.lens"], batch["label"]):
            assert not row[count:].any()
            yield int(label), row[:count]


@pytest.mark.parametrize("settings", [{}, {"shuffle": 3, "window": 2}])
@pytest.mark.parametrize("kind", ["structs", "binary", "large", "one", "plain", "tar", "tar10"])
def test_a_list_of_pictures_has_the_pixels_of_pillow(tmp_path, kind, settings):
    lists = ONES if kind == "one" else LISTS
    if kind.startswith("tar"):
        settings = {name: value for name, value in settings.items() if name != "window"}
        frames = 12 if kind == "tar10" else 4
        lists = [[png(row * 20 + k) for k in range(1 + row % frames)] for row in range(13)]
        members = [
            # In the order of a folder: 0, 1, 10, 11, 2.
            sorted([("cls", str(row).encode())] + [(f"frames.{k}.png", data) for k, data in enumerate(pictures)])
            for row, pictures in enumerate(lists)
        ]
        path = tar(tmp_path / "a.tar", members)
        name, most = "image", frames
        loader = fn.webdataset(path, image="frames.*.png", columns=["cls"], elements=most, **WHOLE, **settings)
    else:
        arrays = {"binary": pa.list_(pa.binary()), "large": pa.large_list(pa.large_binary())}
        images = pa.array(lists, arrays[kind]) if kind in arrays else structs(lists)
        path = parquet(tmp_path / "a.parquet", images=images)
        if kind == "plain":
            pq.write_table(pq.read_table(path), path, use_dictionary=False, data_page_version="2.0", compression="zstd")
        name, most = "images", 3
        loader = fn.parquet(path, image="images", columns=["label"], elements=most, **WHOLE, **settings)
    assert (name, "u8", (most, HEIGHT, WIDTH, 3)) in loader.spec()
    seen = dict(rows(loader, name))
    assert sorted(seen) == list(range(13))
    for label, row in seen.items():
        assert [len(row)] == [len(lists[label])]
        for got, data in zip(row, lists[label]):
            assert (got == pixels(data)).all()


def test_values_and_layout_are_made_for_each_picture(tmp_path):
    path = parquet(tmp_path / "a.parquet", images=structs(LISTS))
    settings = {"dtype": "f32", "layout": "nchw", "normalize": (0.5, 0.25), **WHOLE}
    for label, row in rows(fn.parquet(path, image="images", columns=["label"], elements=3, **settings), "images"):
        for got, data in zip(row, LISTS[label]):
            expected = (pixels(data) / np.float32(255) - 0.5) / 0.25
            np.testing.assert_allclose(got, expected.transpose(2, 0, 1), atol=1e-5)


def test_texts_have_their_sizes(tmp_path):
    texts = [["ä" * k + str(row) for k in range(row % 4)] for row in range(13)]
    path = parquet(tmp_path / "a.parquet", texts=texts)
    loader = fn.parquet(path, columns=["texts", "label"], elements={"texts": 3}, up_to={"texts": 9}, batch_size=5)
    for batch in loader:
        assert batch["texts"].shape[1:] == (3, 9) and batch["texts.sizes"].dtype == np.int64
        for label, row, sizes, count in zip(*(batch[name] for name in ["label", "texts", "texts.sizes", "texts.lens"])):
            got = [bytes(text[:size]).decode() for text, size in zip(row[:count], sizes)]
            assert got == texts[label]


def test_frames_of_a_row_and_pictures_of_a_pair_share_one_crop(tmp_path):
    same = [[png(row)] * 3 for row in range(13)]
    firsts = [row[0] for row in same]
    pairs = parquet(tmp_path / "p.parquet", left=firsts, right=firsts)
    clips = parquet(tmp_path / "c.parquet", images=structs(same))
    members = [[("left.png", data), ("right.png", data), ("cls", b"%d" % row)] for row, data in enumerate(firsts)]
    shard = tar(tmp_path / "a.tar", members)
    settings = {"size": 16, "shuffle": 5, "batch_size": 5}
    both = {"image": ["left", "right"], "columns": ["label"]}
    for loader in [
        fn.parquet(pairs, **both, window=2, **settings),
        fn.webdataset(shard, image=["left.png", "right.png"], columns=["cls"], **settings),
        fn.parquet(clips, image="images", columns=["label"], elements=3, window=2, **settings),
    ]:
        for batch in loader:
            if "images" in batch:
                first, *others = batch["images"].transpose(1, 0, 2, 3, 4)
            else:
                left, right = (name for name in batch if name.startswith(("left", "right")))
                first, others = batch[left], [batch[right]]
            assert all((first == other).all() for other in others)
            for label, got in zip(batch["label"], first):
                assert not (got == pixels(firsts[label])[7:23, 12:28]).all()


def test_a_bad_list_or_pair_is_an_error_or_substituted(tmp_path):
    halves = [png(row, WIDTH // 2, HEIGHT // 2) for row in range(13)]
    images = pa.array(LISTS, pa.list_(pa.binary()))
    path = parquet(tmp_path / "a.parquet", images=images, left=[row[0] for row in ONES], right=halves)
    long = {"image": "images", "columns": ["label"], "elements": 2, **WHOLE}
    with pytest.raises(ShapeError, match=r"list `images` has 3 elements, the limit is 2 \(raise it with `elements`\)") as error:
        list(fn.parquet(path, **long))
    assert "sample=3" in str(error.value)
    loader = fn.parquet(path, **long, substitute=3)
    assert sum(len(batch["label"]) for batch in loader) >= 13
    assert sorted(bad["sample"] for bad in loader.bad_samples()) == [3, 7, 11]
    pair = {"image": ["left", "right"], "columns": ["label"], "batch_size": 5}
    with pytest.raises(ShapeError, match="pictures of 40x30 and 20x15 pixels in one sample"):
        list(fn.parquet(path, **pair, size=16, augment=True))
    assert len(list(fn.parquet(path, **pair, size=16))) == 3
    cut = [[row[0], row[0][:60]] for row in ONES]
    path = parquet(tmp_path / "b.parquet", images=pa.array(cut, pa.list_(pa.binary())))
    with pytest.raises(DecodeError, match="element 1: "):
        list(fn.parquet(path, **long))


def test_damaged_clips_and_pairs_are_named(tmp_path):
    data = png(0)
    for members, image, words in [
        ([("frames.0.png", data), ("frames.2.png", data)], "frames.*.png", "2 members but no number 1"),
        ([("cls", b"1")], "frames.*.png", "no member that ends in frames.*.png"),
        ([("left.png", data)], ["left.png", "right.png"], "no member that ends in right.png"),
    ]:
        shard = tar(tmp_path / f"{len(list(tmp_path.iterdir()))}.tar", [members])
        elements = {} if isinstance(image, list) else {"elements": 4}
        with pytest.raises(Error, match=re.escape(words)):
            len(fn.webdataset(shard, image=image, **elements, **WHOLE))


def test_a_list_is_refused_with_a_way_out(tmp_path):
    path = parquet(tmp_path / "a.parquet", images=structs(LISTS), texts=[["x"]] * 13)
    shard = tar(tmp_path / "a.tar", [[("frames.0.png", png(0)), ("cls", b"0")]])
    for of, settings, words in [
        ("parquet", {"image": "images"}, "give it with `elements`; choose other columns with `columns`"),
        ("parquet", {"image": "images", "elements": {"image": 3}}, "elements names \"image\", image and columns do not"),
        ("parquet", {"columns": ["texts"], "elements": 3}, "elements is a number for image, which is missing"),
        ("parquet", {"columns": ["texts"], "elements": {"texts": 3}}, "the most bytes of an element, is missing"),
        ("parquet", {"columns": ["label"], "elements": {"label": 3}}, "`elements` is for lists of byte arrays"),
        ("parquet", {"image": "images", "elements": 3, "patches": (8, 9)}, "lists of pictures have one size"),
        ("webdataset", {"image": "frames.*.png"}, "is of a list: give the maximum number of elements with `elements`"),
        ("webdataset", {"image": "png", "elements": 3}, "elements is for members with numbers"),
        ("images", {"elements": 3}, "elements is for source tar, jsonl, parquet, not"),
    ]:
        size = {"size": 8} if "image" in settings and "patches" not in settings else {}
        with pytest.raises((ConfigError, TypeError), match=re.escape(words)):
            len(getattr(fn, of)(shard if of == "webdataset" else path, **settings, **size))


def test_torch_gets_one_tensor_of_all_elements(tmp_path):
    torch = pytest.importorskip("torch")
    import feedline.torch as fl

    path = parquet(tmp_path / "a.parquet", images=structs(LISTS))
    settings = {"size": 16, "layout": "nchw", "dtype": "f32", "batch_size": 4, "device": "cpu"}
    batch = next(iter(fl.parquet(path, image="images", columns=["label"], elements=3, **settings)))
    assert batch["images"].shape == (4, 3, 3, 16, 16) and batch["images"].dtype == torch.float32
    assert batch["images.lens"].tolist() == [0, 1, 2, 3]
