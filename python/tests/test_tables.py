"""Tables: columns in the names of folders as other programs write them, Delta and Iceberg. The right rows are those of
pyarrow.dataset, and of the table's own library."""

import datetime as dt
import glob
import json
import os
import urllib.parse

import pytest

import feedline.numpy as fn
from feedline.errors import ConfigError, DecodeError, EmptyError, Error, FingerprintError, UnsupportedError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
ds = pytest.importorskip("pyarrow.dataset")

DAY = dt.date(1970, 1, 1)
#: Columns of keys, outermost first: those that programs write, and the odd ones.
KEYS = {
    "integers": {"l": [3, 4, 3, 5]},
    "negative": {"l": [-3, 0, 7, -2147483648]},
    "wide": {"l": [3_000_000_000, 1, 2, 3]},
    "text": {"l": ["a", "b", "a", "c"]},
    "numbers and text": {"l": ["1", "b", "2", "3"]},
    "odd text": {"l": ["a b", "50%", "x=y", "ü/ñ"]},
    "nulls among integers": {"l": [1, None, 2, 1]},
    "nulls among text": {"l": ["a", None, "b", "a"]},
    "dates": {"l": [dt.date(2024, 1, 2), dt.date(1969, 1, 1)] * 2},
    "nested": {"year": [2024, 2024, 2023, 2023], "month": [1, 2, 1, 12], "lang": ["en", "de", "en", "fr"]},
}


def by_pyarrow(table, keys, folder):
    pq.write_to_dataset(table, folder, partition_cols=keys)


def by_polars(table, keys, folder):
    polars = pytest.importorskip("polars")
    polars.from_arrow(table).write_parquet(folder, partition_by=keys, mkdir=True)


def by_duckdb(table, keys, folder):
    duckdb = pytest.importorskip("duckdb")
    arrow = table  # noqa: F841 - DuckDB finds it by its name.
    names = ", ".join(f'"{key}"' for key in keys)
    duckdb.sql(f"COPY arrow TO '{folder}' (FORMAT parquet, PARTITION_BY ({names}))")


def by_spark(table, keys, folder):
    """As Spark lays files out: what it escapes, a mark of success, and checksums."""
    for row in table.to_pylist():
        inner = folder
        for key in keys:
            value = "__HIVE_DEFAULT_PARTITION__" if row[key] is None else urllib.parse.quote(str(row[key]), safe=" üñ-")
            inner = inner / f"{key}={value}"
        inner.mkdir(parents=True, exist_ok=True)
        name = f"part-{row['id']:05}-x.snappy.parquet"
        pq.write_table(pa.Table.from_pylist([row]).drop_columns(keys), inner / name)
        (inner / f".{name}.crc").write_bytes(b"crc")
    (folder / "_SUCCESS").touch()
    (folder / "_temporary" / "0").mkdir(parents=True)


WRITERS = {"pyarrow": by_pyarrow, "polars": by_polars, "duckdb": by_duckdb, "spark": by_spark}


def plain(value):
    """A value as the loader has it: nulls are 0 or empty, dates are days."""
    return (value - DAY).days if isinstance(value, dt.date) else value


def rows(loader, text=()):
    """The rows by their column `id`."""
    out = {}
    for batch in loader:
        names = [name for name in batch if not name.endswith(".lens")]
        for at in range(len(batch["id"])):
            row = {}
            for name in names:
                value = batch[name][at]
                lens = batch.get(name + ".lens")
                row[name] = value.item() if lens is None else bytes(value[: lens[at]]).decode()
            out[row["id"]] = row
    return [out[number] for number in sorted(out)]


def same(loader, theirs):
    """Compares with a table of pyarrow."""
    kinds = {field.name: "" if pa.types.is_string(field.type) or pa.types.is_large_string(field.type) else 0 for field in theirs.schema}
    wanted = [
        {name: kinds[name] if value is None else plain(value) for name, value in row.items()}
        for row in sorted(theirs.to_pylist(), key=lambda row: row["id"])
    ]
    assert rows(loader) == wanted and wanted


def hive(folder):
    """The table as pyarrow reads it; where it refuses a key that is also stored: the stored columns."""
    try:
        return ds.dataset(folder, format="parquet", partitioning="hive").to_table()
    except pa.ArrowTypeError:
        return ds.dataset(folder, format="parquet").to_table()


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("case", KEYS)
def test_folders_with_keys_are_those_of_pyarrow(tmp_path, writer, case):
    keys = KEYS[case]
    table = pa.table({"id": list(range(4)), **keys, "s": ["w", "xx", "", "ü"]})
    WRITERS[writer](table, list(keys), folder := tmp_path / "d")
    theirs = hive(folder)
    for path in (folder, folder / "**"):
        same(fn.parquet(path, null_zero=True, batch_size=3), theirs)
    if "nulls" in case and "l" not in pq.read_schema(next(folder.rglob("*.parquet"))).names:
        with pytest.raises(DecodeError, match="column `l` has no value in 1 of .*null_zero=True"):
            fn.parquet(folder)
    key = list(keys)[-1]
    assert set(next(iter(fn.parquet(folder, columns=[key, "id"], null_zero=True)))) >= {key, "id"}


def test_columns_of_some_files_are_refused_or_told(tmp_path):
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [2], "w": [1]}), tmp_path / "b.parquet")
    assert ds.dataset(tmp_path, format="parquet").schema.names == ["id"]
    loader = fn.parquet(tmp_path)
    assert [row["id"] for row in rows(loader)] == [1, 2]
    assert "`w`, which the first file does not have" in loader.report()
    with pytest.raises(Error, match="no column `w`") as caught:
        fn.parquet(tmp_path, columns=["id", "w"])
    assert "a.parquet" in str(caught.value)


# Delta


@pytest.fixture
def delta(tmp_path):
    """A table of several versions: appends, an overwrite, and partitions of odd names."""
    deltalake = pytest.importorskip("deltalake")

    def write(first, count, mode="append", **columns):
        ids = list(range(first, first + count))
        names = ["a b", "50%", "ü/=", None]
        days = [None if number % 5 == 4 else DAY + dt.timedelta(number - 3) for number in ids]
        data = {"id": ids, "l": [names[number % 4] for number in ids], "d": days, **columns}
        deltalake.write_deltalake(path, pa.table(data), mode=mode, partition_by=["l", "d"])

    path = str(tmp_path / "a table")
    for first in range(0, 40, 10):
        write(first, 10)
    write(100, 10, "overwrite")
    write(110, 10)
    return path, deltalake.DeltaTable, write


def test_versions_of_a_delta_table_are_those_of_its_library(delta):
    path, DeltaTable, _ = delta
    for version in (0, 2, 3, 4, None):
        theirs = DeltaTable(path, version=version).to_pyarrow_table()
        same(fn.delta(path, version, null_zero=True, batch_size=7), theirs)
        same(fn.delta(DeltaTable(path), version, null_zero=True), theirs)
    with pytest.raises(DecodeError, match="column `l` has no value in"):
        fn.delta(path)
    assert {"id"} == set(next(iter(fn.delta(path, columns=["id"]))))


def test_a_state_names_the_versions_of_a_delta_table(delta):
    path, _, write = delta
    loader = fn.delta(path, columns=["id"], batch_size=4, shuffle=1, window=2)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    assert "version 5" in loader.report() and state["snapshot"].endswith("version 5")
    same_version = fn.delta(path, 5, columns=["id"], batch_size=4, shuffle=1, window=2)
    same_version.load_state_dict(state)
    write(120, 2)
    other = fn.delta(path, columns=["id"], batch_size=4, shuffle=1, window=2)
    with pytest.raises(FingerprintError, match="version 5, the loader reads .* version 6"):
        other.load_state_dict(state)


def test_columns_that_a_delta_table_got_later_are_refused_or_null(tmp_path):
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(tmp_path, pa.table({"id": [1, 2]}))
    more = pa.table({"id": [3], "w": [7]})
    deltalake.write_deltalake(tmp_path, more, mode="append", schema_mode="merge")
    with pytest.raises(DecodeError, match="column `w` has no value in 1 of 2 files"):
        fn.delta(tmp_path)
    same(fn.delta(tmp_path, null_zero=True), deltalake.DeltaTable(tmp_path).to_pyarrow_table())


def log(path, version, *actions):
    """Writes a commit by hand, as a program does whose features deltalake cannot write."""
    file = os.path.join(path, "_delta_log", f"{version:020}.json")
    with open(file, "w") as out:
        out.write("\n".join(map(json.dumps, actions)))


def test_what_a_delta_table_has_beyond_files_is_refused_by_name(tmp_path):
    deltalake = pytest.importorskip("deltalake")
    vectors, mapped, wide = (str(tmp_path / name) for name in ("vectors", "mapped", "wide"))
    for path in (vectors, mapped, wide):
        deltalake.write_deltalake(path, pa.table({"id": [1, 2, 3]}))
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}

    def feature(name):
        return {"protocol": protocol | {"readerFeatures": [name], "writerFeatures": [name]}}

    with open(os.path.join(vectors, "_delta_log", f"{0:020}.json")) as first:
        add = next(action for line in first if (action := json.loads(line)).get("add"))["add"]
    # The second row is deleted: a bitmap in the log itself, in Z85.
    inline = "^Bg9^0rr910000000000iXQKl0rr91000005c8Xg0rr91"
    vector = {"storageType": "i", "pathOrInlineDv": inline, "sizeInBytes": 34, "cardinality": 1}
    log(vectors, 1, feature("deletionVectors"))
    # deltalake's own reader refuses the feature even where no file has a vector.
    same(fn.delta(vectors), pa.table({"id": [1, 2, 3]}))
    log(vectors, 2, {"remove": {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}}, {"add": add | {"deletionVector": vector}})
    with pytest.raises(UnsupportedError, match="version 2: 1 files have deletion vectors"):
        fn.delta(vectors)
    same(fn.delta(vectors, 1), pa.table({"id": [1, 2, 3]}))

    with open(os.path.join(mapped, "_delta_log", f"{0:020}.json")) as first:
        meta = next(action for line in first if (action := json.loads(line)).get("metaData"))["metaData"]
    log(mapped, 1, {"metaData": meta | {"configuration": {"delta.columnMapping.mode": "name"}}}, feature("columnMapping"))
    log(wide, 1, feature("typeWidening"))
    for path, words in ((mapped, "column mapping"), (wide, "typeWidening")):
        with pytest.raises(Exception, match=f"(?i){words}"):
            fn.delta(path)


def test_values_of_the_log_count_for_partitions_that_are_stored_too(tmp_path):
    deltalake = pytest.importorskip("deltalake")
    path = str(tmp_path / "t")
    deltalake.write_deltalake(path, pa.table({"id": [1, 2], "k": [5, 5]}), partition_by=["k"])
    (file,) = glob.glob(f"{path}/k=5/*.parquet")
    pq.write_table(pa.table({"id": [1, 2], "k": [4, 6]}), file, write_statistics=False)
    assert rows(fn.delta(path)) == [{"id": 1, "k": 5}, {"id": 2, "k": 5}]
    with pytest.raises(ConfigError, match="this folder is a Delta table.*open it with `delta`"):
        fn.parquet(path)


# Iceberg


@pytest.fixture
def iceberg(tmp_path):
    catalog = pytest.importorskip("pyiceberg.catalog.sql").SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/w h")
    catalog.create_namespace("n")
    return catalog


def test_snapshots_of_an_iceberg_table_are_those_of_its_library(iceberg):
    def data(first, count):
        ids = list(range(first, first + count))
        return pa.table({"id": ids, "l": [["a b", "ü/=", None][number % 3] for number in ids]})

    whole, partitioned = (iceberg.create_table(name, schema=data(0, 1).schema) for name in ("n.t", "n.p"))
    with partitioned.update_spec() as update:
        update.add_identity("l")
    for table in (whole, partitioned):
        with pytest.raises(EmptyError, match="Iceberg table"):
            fn.iceberg(table)
        for first in range(0, 30, 10):
            table.append(data(first, 10))
        table.overwrite(data(100, 7))
        table.append(data(110, 3))
        for snapshot in [one.snapshot_id for one in table.metadata.snapshots] + [None]:
            theirs = table.scan(snapshot_id=snapshot).to_arrow()
            if len(theirs):
                same(fn.iceberg(table, snapshot, null_zero=True), theirs)
        same(fn.iceberg(table.metadata_location.removeprefix("file://"), null_zero=True), table.scan().to_arrow())
        loader = fn.iceberg(table, columns=["id"], batch_size=2)
        next(iter(loader))
        state = loader.state_dict()
        old = fn.iceberg(table, table.metadata.snapshots[0].snapshot_id, columns=["id"], batch_size=2)
        with pytest.raises(FingerprintError, match="the state is of Iceberg table .* the loader reads Iceberg table"):
            old.load_state_dict(state)


def test_renamed_and_later_columns_of_an_iceberg_table_are_refused(iceberg):
    from pyiceberg.types import LongType

    table = iceberg.create_table("n.t", schema=pa.schema([("id", pa.int64()), ("x", pa.int64())]))
    table.append(pa.table({"id": [1], "x": [2]}))
    with table.update_schema() as update:
        update.add_column("w", LongType())
    table.append(pa.table({"id": [3], "x": [4], "w": [5]}))
    with pytest.raises(DecodeError, match="column `w` has no value in 1 of 2 files"):
        fn.iceberg(table)
    same(fn.iceberg(table, null_zero=True), table.scan().to_arrow())
    with table.update_schema() as update:
        update.rename_column("x", "y")
    with pytest.raises(UnsupportedError, match="column `y` has the id 2 in the table and is `x` in this file"):
        fn.iceberg(table, null_zero=True)
    same(fn.iceberg(table, columns=["id"]), table.scan(selected_fields=("id",)).to_arrow())
    with table.update_schema() as update:
        update.delete_column("y")
    with table.update_schema() as update:
        update.add_column("x", LongType())
    # Another column of an old name: only the ids in the files tell.
    with pytest.raises(UnsupportedError, match="column `x` has the id 4 in the table and has the id 2 in this file"):
        fn.iceberg(table, null_zero=True)


def test_files_without_ids_have_those_of_their_names(iceberg, tmp_path):
    # Such as files that other programs wrote and `add_files` put into the table.
    rows = pa.table({"id": [1, 2], "x": [3, 4], "s": [{"a": 5}, {"a": 6}]})
    table = iceberg.create_table("n.t", schema=rows.schema)
    table.append(rows)
    pq.write_table(rows.set_column(0, "id", [[3, 4]]), tmp_path / "added.parquet")
    table.add_files([f"{tmp_path}/added.parquet"])
    same(fn.iceberg(table), table.scan().to_arrow().flatten())
    with table.update_schema() as update:
        update.rename_column("x", "y")
    with pytest.raises(UnsupportedError, match="column `y` has the id 2 in the table and is `x` in this file"):
        fn.iceberg(table)
    same(fn.iceberg(table, columns=["id"]), table.scan(selected_fields=("id",)).to_arrow())


@pytest.mark.parametrize("given", [None, 3, ["a", "b"], object()])
def test_what_is_no_table_is_refused(given):
    pytest.importorskip("deltalake")
    pytest.importorskip("pyiceberg")
    for open_table in (fn.delta, fn.iceberg):
        with pytest.raises(TypeError, match="give "):
            open_table(given)
    for number in (True, -1, "1", 1.5):
        with pytest.raises((TypeError, ValueError), match="version .* give a whole number from 0"):
            fn.delta("t", number)
        with pytest.raises((TypeError, ValueError), match="snapshot_id .* give a whole number from 0"):
            fn.iceberg("t", number)
