"""The programs of the pages `switching`: both sides of each pair hand out the same batches.

Pairs whose library is not installed are skipped.
"""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

HERE = Path(__file__).resolve().parent
PAGES = "".join(page.read_text() for page in (HERE.parent / "docs" / "switching").glob("*.md"))
PROGRAMS = dict(re.findall(r'```python title="(\w+ \w+)"\n(.*?)```', PAGES, re.S))
PICTURES = 20

import demo


@pytest.fixture
def folder(tmp_path):
    demo.write(tmp_path / "train", per_class=PICTURES // len(demo.COLOURS), size=300)
    return str(tmp_path / "train")


def batches(name, side, **given):
    """The batches of a program, as lists of arrays."""
    space = dict(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(PROGRAMS[f"{name} {side}"], f"switching: {name} {side}", "exec"), space)
        return [[array(part) for part in parts_of(batch)] for batch in space["loader"]]


def parts_of(batch):
    if isinstance(batch, list) and isinstance(batch[0], dict):
        batch = batch[0]
    return [batch[name] for name in sorted(batch)] if isinstance(batch, dict) else batch


def array(part):
    # FFCV uses its memory again.
    return np.array(part)


def same(name, most=0, mean=0.0, **given):
    before, after = (batches(name, side, **given) for side in ("before", "after"))
    assert len(before) == len(after) > 1
    for one, other in zip(before, after, strict=True):
        assert len(one) == len(other)
        for here, there in zip(one, other, strict=True):
            here = here.reshape(there.shape)
            apart = np.abs(here.astype(float) - there.astype(float))
            if mean and there.ndim == 4:
                assert apart.mean() < mean
            else:
                assert here.dtype.kind == there.dtype.kind and apart.max() <= most


def test_torch(folder):
    pytest.importorskip("torchvision")
    same("torch", folder=folder)


class Mine:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.arange(6.0).reshape(2, 3) * index, index % 3


def test_a_dataset_of_ones_own():
    same("dataset", mine=Mine())


def test_webdataset(folder, tmp_path):
    wds = pytest.importorskip("webdataset")
    pytest.importorskip("torchvision")
    pictures = sorted(Path(folder).glob("*/*.png"))
    for shard in range(2):
        with wds.TarWriter(str(tmp_path / f"train-{shard}.tar")) as file:
            for number, path in list(enumerate(pictures))[shard * 10 : shard * 10 + 10]:
                label = sorted(demo.COLOURS).index(path.parent.name)
                file.write({"__key__": f"{number:06}", "png": path.read_bytes(), "cls": str(label).encode()})
    same("webdataset", shards=str(tmp_path / "train-{0..1}.tar"))


def test_streaming(tmp_path):
    streaming = pytest.importorskip("streaming")
    columns = {"x": "ndarray:float32:5", "y": "int64"}
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns=columns) as file:
        for number in range(20):
            file.write({"x": np.arange(5, dtype=np.float32) * number, "y": np.int64(number)})
    same("streaming", mds=str(tmp_path / "mds"))


def test_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"x": [number / 2 for number in range(20)], "y": list(range(20))}
    features = datasets.Features({"x": datasets.Value("float32"), "y": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "data.parquet"))
    same("datasets", parquet=str(tmp_path / "data.parquet"))


def test_arrow(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"x": [[number / 2, 1.0] for number in range(20)], "y": list(range(20))}
    features = datasets.Features({"x": datasets.List(datasets.Value("float32"), length=2), "y": datasets.Value("int64")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved", num_shards=2)
    same("arrow", saved=str(tmp_path / "saved"))


def test_ffcv(folder, tmp_path):
    pytest.importorskip("ffcv")
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    beton = str(tmp_path / "data.beton")
    DatasetWriter(beton, {"image": RGBImageField(write_mode="raw"), "label": IntField()}, num_workers=1).from_indexed_dataset(
        ImageFolder(folder)
    )
    same("ffcv", mean=3.0, folder=folder, beton=beton)


def test_dali(folder):
    pytest.importorskip("nvidia.dali")
    same("dali", most=1, folder=folder)


def write_parquet(path):
    pa = pytest.importorskip("pyarrow")
    columns = {"x": pa.array(np.arange(20) / 2, pa.float32()), "y": np.arange(20)}
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path)


def test_grain(tmp_path):
    pytest.importorskip("grain")
    write_parquet(tmp_path / "data.parquet")
    same("grain", parquet=str(tmp_path / "data.parquet"))


def test_litdata(tmp_path):
    pytest.importorskip("litdata")
    write_parquet(tmp_path / "data.parquet")
    same("litdata", folder=str(tmp_path))


def test_spdl(tmp_path):
    pytest.importorskip("spdl.pipeline")
    for number in range(20):
        np.save(tmp_path / f"{number:02}.npy", np.full((3, 2), number, np.float32))
    same("spdl", folder=str(tmp_path))


def test_every_program_has_its_pair():
    names = {name.split()[0] for name in PROGRAMS}
    assert names == {"torch", "dataset", "webdataset", "streaming", "datasets", "arrow", "ffcv", "dali", "grain", "litdata", "spdl"}
    assert all({f"{name} before", f"{name} after"} <= PROGRAMS.keys() for name in names)
