"""Pictures at their own resolution: grids as by transformers, patches as cut from Pillow's picture."""

import random

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

import feedline.numpy as fl
from feedline.errors import ConfigError


def folder(path, sizes, noise=False):
    for number, (width, height) in enumerate(sizes):
        picture = Image.new("RGB", (width, height), (90, 120, 150))
        if noise:
            picture = Image.fromarray(np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8))
        picture.save(path / f"{number:05}.png", compress_level=1)
    return path


def only(path, **settings):
    (batch,) = fl.images(path, device="cpu", **settings)
    return batch


def grids(path, **settings):
    loader = fl.images(path, device="cpu", batch_size=64, **settings)
    return [tuple(map(int, grid)) for batch in loader for grid in batch["image.grid"]]


def some_sizes(count, longest):
    rng = random.Random(count)
    return [tuple(int(2 ** rng.uniform(0, np.log2(longest))) for _ in "wh") for _ in range(count)]


def test_grids_are_those_of_siglip2_naflex(tmp_path):
    theirs = pytest.importorskip("transformers.models.siglip2.image_processing_siglip2").get_image_size_for_max_num_patches
    sizes = some_sizes(1500, 500)
    folder(tmp_path, sizes)
    for size, most in [(16, 256), (14, 61)]:
        expected = [tuple(side // size for side in theirs(h, w, size, most)) for w, h in sizes]
        assert grids(tmp_path, patches=(size, most), enlarge=True) == expected
        # Without enlargement, a picture that fits has its own size.
        own = [(-(-h // size), -(-w // size)) for w, h in sizes]
        fits = [grid if grid[0] * grid[1] <= most else larger for grid, larger in zip(own, expected)]
        assert fits != expected
        assert grids(tmp_path, patches=(size, most)) == fits


def test_grids_of_merged_patches_are_those_of_qwen2_vl(tmp_path):
    theirs = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl").smart_resize
    size, merge, least, most = 14, 2, 4, 256

    def expected(w, h):
        sides = theirs(h, w, size * merge, min_pixels=least * size**2, max_pixels=most * size**2)
        return tuple(side // size for side in sides)

    # Theirs exceeds its budget for strips with a ratio above `most / merge**2`.
    sizes = [(w, h) for w, h in some_sizes(1500, 500) if max(w, h) <= 64 * min(w, h)]
    assert len(sizes) > 1000
    assert grids(folder(tmp_path, sizes), patches=(size, most), merge=(merge, least)) == [expected(*size) for size in sizes]


@pytest.mark.parametrize("merge", [None, (2, 4)])
def test_patches_are_cut_from_the_picture_that_pillow_scales(tmp_path, merge):
    sizes = [(97, 61), (320, 200), (16, 16), (5, 3), (640, 17), (33, 480)]
    folder(tmp_path, sizes, noise=True)
    batch = only(tmp_path, patches=(16, 40), merge=merge, batch_size=len(sizes))
    lens = batch["image.lens"].astype(int)
    assert batch["image"].shape == (len(sizes), 40, 768) and list(batch["image.positions.lens"]) == list(lens)
    # As rows without padding: what attention of varying lengths takes.
    cu_seqlens = np.concatenate([[0], np.cumsum(lens)])
    flat = batch["image"][np.arange(40) < lens[:, None]]
    assert len(flat) == cu_seqlens[-1] and not batch["image"][np.arange(40) >= lens[:, None]].any()
    block = merge[0] if merge else 1
    for number, (width, height) in enumerate(sizes):
        rows, columns = map(int, batch["image.grid"][number])
        assert tuple(batch["image.size"][number]) == (height, width)
        # Width first: newer versions of Pillow choose, and round otherwise.
        picture = Image.open(tmp_path / f"{number:05}.png").resize((columns * 16, height), Image.Resampling.BILINEAR)
        picture = picture.resize((columns * 16, rows * 16), Image.Resampling.BILINEAR)
        cut = np.asarray(picture).reshape(rows // block, block, 16, columns // block, block, 16, 3)
        cut = cut.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, 768)
        assert np.array_equal(flat[cu_seqlens[number] : cu_seqlens[number + 1]], cut)
        place = np.moveaxis(np.indices((rows, columns)), 0, -1).reshape(rows // block, block, columns // block, block, 2)
        place = place.transpose(0, 2, 1, 3, 4).reshape(-1, 2)
        assert np.array_equal(batch["image.positions"][number][: lens[number]], place)


def test_batches_stay_within_a_budget_of_patches(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    folder(pictures, some_sizes(200, 300))
    settings = {"patches": (16, 64), "device": "cpu"}
    sizes = fl.images(pictures, **settings).picture_sizes(tmp_path / "sizes")
    both = ["image", "image.positions"]
    loader = fl.images(pictures, sizes=sizes, bounds=8, trim=both, budget=256, shuffle=1, ids=True, **settings)
    seen, widths = [], set()
    for batch in loader:
        rows, width = batch["image"].shape[:2]
        assert rows * width <= 256 and batch["image.positions"].shape[:2] == (rows, width)
        assert batch["image.lens"].max() <= width
        seen, widths = seen + batch["ids"].tolist(), widths | {width}
    assert sorted(seen) == list(range(200)) and 2 <= len(widths) <= 8
    with pytest.raises(ValueError, match="lengths and sizes are two kinds of groups"):
        fl.images(pictures, sizes=sizes, lengths=[1] * 200, **settings)


def test_floats_and_planes_are_made_of_the_same_bytes(tmp_path):
    folder(tmp_path, [(97, 61), (16, 16)], noise=True)
    bytes_ = only(tmp_path, patches=(16, 40), batch_size=2)
    mean, std = (0.5, 0.25, 0.125), (0.5, 0.5, 0.25)
    floats = only(tmp_path, patches=(16, 40), batch_size=2, dtype="f32", normalize=(mean, std), layout="nchw")
    pixels = bytes_["image"].reshape(2, 40, 16, 16, 3).astype(np.float32) / np.float32(255)
    expected = np.moveaxis((pixels - np.float32(mean)) / np.float32(std), -1, 2).reshape(2, 40, 768)
    there = np.arange(40) < bytes_["image.lens"][:, None]
    assert np.array_equal(floats["image"], np.where(there[..., None], expected, np.float32(0)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"patches": (16, 256), "size": 224}, "leave out size"),
        ({"size": 224, "merge": (2, 4)}, "enlarge and merge are for patches"),
        ({"patches": (16, 256), "merge": (2, 4), "enlarge": True}, "leave out enlarge"),
        ({"patches": (16, 256), "dtype": "f32", "normalize": ([0, 0], [1, 1])}, "2 values for 3 channels"),
        ({"patches": (16, 0)}, "at most 0 patches of 16 pixels"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, words):
    with pytest.raises(ConfigError, match=words):
        only(folder(tmp_path, [(9, 9)]), batch_size=1, **settings)
