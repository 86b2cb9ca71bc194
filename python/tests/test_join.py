"""Labels, captions and latents that are kept apart: the right row is that of csv, pandas, pyarrow and tarfile."""

import csv
import io
import tarfile

import numpy as np
import pytest

import feedline.numpy as fl
from feedline.errors import ConfigError, DecodeError, EmptyError

Image = pytest.importorskip("PIL.Image")

COUNT = 100


def name(number):
    return f"{number:03}" + [".jpg", ", left.jpg", ' "b".jpg', " ü.jpg"][number % 4]


@pytest.fixture
def folder(tmp_path):
    """Pictures of one grey each: twice their number."""
    (tmp_path / "train").mkdir()
    for number in range(COUNT):
        Image.new("RGB", (16, 16), (2 * number,) * 3).save(tmp_path / "train" / name(number), "JPEG")
    return tmp_path / "train"


def numbers(images):
    """The numbers of pictures."""
    return np.rint(images.reshape(len(images), -1).mean(1) / 2).astype(int).tolist()


def rows(loader, *names):
    """(number of the picture, values of the fields) of each sample."""
    out = []
    for batch in loader:
        columns = []
        for column in names:
            lens = batch.get(column + ".lens")
            values = batch[column] if lens is None else [bytes(row[:n]).decode() for row, n in zip(batch[column], lens)]
            columns.append([value.item() if hasattr(value, "item") and value.ndim == 0 else value for value in values])
        out.extend(zip(numbers(batch["image"]), *columns))
    return out


def write(path, table, header, encoding="utf-8-sig", **how):
    with open(path, "w", encoding=encoding, newline="") as file:
        csv.writer(file, **how).writerows([header, *table])
    return path


@pytest.fixture
def labels(folder):
    """In another order, two rows too many, two too few, with a mark and CRLF."""
    order = np.random.default_rng(5).permutation(np.arange(2, COUNT + 2)).tolist()
    table = [(name(number), 7 * number, f"no, {number}\n\"ü\"") for number in order]
    return write(folder.parent / "metadata.csv", table, ["file_name", "label", "caption"])


def test_pictures_get_their_rows_and_misses_are_told(folder, labels):
    settings = {"size": 16, "batch_size": 8, "shuffle": 3, "augment": False, "join": labels}
    with pytest.raises(ConfigError) as error:
        next(iter(fl.images(folder, **settings)))
    told = str(error.value)
    assert "2 samples without a row" in told and "2 rows without a sample" in told and 'missing="skip"' in told
    assert all(f"{number:03}" in told for number in (0, 1, COUNT, COUNT + 1))
    loader = fl.images(folder, missing="skip", **settings)
    got = rows(loader, "label", "caption")
    assert sorted(got) == [(number, 7 * number, f"no, {number}\n\"ü\"") for number in range(2, COUNT)]
    assert "2 samples without a row" in loader.report() and "by key" in loader.report()


def test_tables_are_those_of_pandas(folder, labels):
    pandas = pytest.importorskip("pandas")
    theirs = pandas.read_csv(labels).set_index("file_name")
    for kind, path in (("csv", folder.parent / "again.csv"), ("parquet", folder.parent / "again.parquet")):
        frame = theirs.assign(weight=theirs.label / 8).reset_index()
        frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
        got = rows(fl.images(folder, size=16, join=path, missing="skip", join_columns=["weight", "label"]), "weight", "label")
        assert len(got) == COUNT - 2
        for number, weight, label in got:
            right = theirs.loc[name(number)]
            assert (weight, label) == (right.label / 8, right.label)


def test_parquet_of_pyarrow_has_embeddings_and_texts(folder):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    order = list(reversed(range(COUNT)))
    table = {
        "id": order,
        "emb": pa.array([[number, 0.5] for number in order], pa.list_(pa.float32(), 2)),
        "caption": ["ü" * (number % 5) for number in order],
    }
    (folder / "ids").mkdir()
    for number in range(COUNT):
        (folder / name(number)).rename(folder / "ids" / f"{number}.jpg")
    pq.write_table(pa.table(table), folder.parent / "emb.parquet", row_group_size=7)
    settings = {"size": 16, "join": folder.parent / "emb.parquet", "key": "id"}
    for batch in fl.images(folder / "**", **settings):
        assert numbers(batch["image"]) == batch["emb"][:, 0].astype(int).tolist()
    got = rows(fl.images(folder / "**", join_columns=["caption"], **settings), "caption")
    assert sorted(got) == [(number, "ü" * (number % 5)) for number in range(COUNT)]


def add(tar, member, data):
    info = tarfile.TarInfo(member)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def test_two_sets_of_shards_and_a_csv_are_read_together(folder, tmp_path):
    long = "sub/" * 40
    with tarfile.open(tmp_path / "a-0.tar", "w") as one, tarfile.open(tmp_path / "a-1.tar", "w") as two:
        for number in range(COUNT):
            add(one if number < 30 else two, f"{long}{number}.jpg", (folder / name(number)).read_bytes())
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        for number in reversed(range(COUNT)):
            add(tar, f"{long}{number}.lat", np.float32([number, -number]).tobytes())
    table = [(f"{number}.jpg", number % 3) for number in range(COUNT)]
    write(tmp_path / "labels.csv", table, ["file_name", "label"], "utf-8", lineterminator="\n")
    got = []
    loader = fl.webdataset(tmp_path / "a-{0,1}.tar", size=16, join=tmp_path / "b.tar", join_columns=["lat:f32:2"], shuffle=1, augment=False)
    for batch in loader:
        assert numbers(batch["image"]) == batch["lat"][:, 0].astype(int).tolist()
        got += numbers(batch["image"])
    assert sorted(got) == list(range(COUNT))
    got = rows(fl.webdataset(tmp_path / "a-*.tar", size=16, join=[tmp_path / "labels.csv"]), "label")
    assert got == [(number, number % 3) for number in range(COUNT)]


def test_a_state_resumes_in_the_same_table_alone(folder, labels):
    settings = {"size": 16, "batch_size": 8, "shuffle": 3, "join": labels, "missing": "skip"}
    loader = fl.images(folder, **settings)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch["label"].tolist() for batch in batches]
    again = fl.images(folder, **settings)
    again.load_state_dict(state)
    assert [batch["label"].tolist() for batch in again] == rest
    text = labels.read_text("utf-8")
    labels.write_text(text.replace(",70,", ",71,"), "utf-8")
    with pytest.raises(Exception, match="dataset changed"):
        fl.images(folder, **settings).load_state_dict(state)


WRONG = [
    ({"join": "labels.csv", "key": "name"}, ConfigError, "no column"),
    ({"join": "labels.csv", "join_columns": ["x"]}, ConfigError, "no column"),
    ({"join": "labels.csv", "missing": "drop"}, ConfigError, '"error" and "skip"'),
    ({"join": "labels.txt"}, ConfigError, ".csv, .tsv, .parquet or .tar"),
    ({"join": "labels.tar"}, ConfigError, "join_columns"),
    ({"join": "labels.tar", "key": "file_name"}, ConfigError, "keys of their own"),
    ({"join": ["labels.csv", "labels.csv"], "join_columns": ["label"]}, ConfigError, "one path"),
    ({"join": ["labels.csv", "labels.csv"]}, ConfigError, "both sides of the join have a field"),
    ({"missing": "skip"}, ConfigError, "give join"),
    ({"key": "file_name"}, ConfigError, "give join"),
    ({"join": 5}, TypeError, "give a path"),
    ({"join_columns": [1]}, TypeError, "join_columns"),
    ({"join": "twice.csv"}, ConfigError, "occurs twice.*line 2.*line 4"),
    ({"join": "empty.csv"}, EmptyError, "header"),
    ({"join": "header.csv"}, EmptyError, "without rows"),
    ({"join": "hole.csv"}, DecodeError, "line 3.*label"),
    ({"join": "none.csv"}, ConfigError, "no sample of"),
]


@pytest.mark.parametrize("settings, kind, words", WRONG, ids=str)
def test_a_wrong_join_is_told_in_words_of_python(tmp_path, settings, kind, words):
    (tmp_path / "set").mkdir()
    for file in ("a", "b"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"set/{file}.png")
    tables = {
        "labels": [("a.png", 1), ("b.png", 2)],
        "twice": [("a.png", 1), ("b.png", 2), ("a.png", 3)],
        "header": [],
        "hole": [("a.png", 1), ("b.png", "")],
        "none": [("c.png", 1)],
    }
    for table, content in tables.items():
        write(tmp_path / f"{table}.csv", content, ["file_name", "label"])
    (tmp_path / "empty.csv").write_bytes(b"")
    if isinstance(join := settings.get("join"), (str, list)):
        settings = {**settings, "join": [tmp_path / path for path in join] if isinstance(join, list) else tmp_path / join}
    with pytest.raises(kind, match=f"(?s){words}") as error:
        next(iter(fl.images(tmp_path / "set", size=8, **settings)))
    assert "::" not in str(error.value) and "`Table" not in str(error.value)


def test_other_sources_have_no_names(tmp_path):
    np.zeros(64, np.uint8).tofile(tmp_path / "records.bin")
    with pytest.raises(ConfigError, match="join is for source images, tar"):
        fl.records(tmp_path / "records.bin", record_bytes=8, join="labels.csv")
