"""Delta and Iceberg tables: their own library reads the log, the loader reads the files.

    table ──log──► files of one snapshot, with values that the files do not store ──► the setting `table` of source "parquet"

Refused, by name: deletion vectors, deletes, column mapping and renamed columns, other formats than Parquet, and features of a
table that its reader must know and this one does not. Files are in the order of their paths, whatever the log's order is.
"""

from __future__ import annotations

import datetime
import importlib
import os
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence
from urllib.parse import unquote

from . import _settings
from .errors import ConfigError, UnsupportedError

#: Types of partition values: the type here, and what makes a value of theirs one of ours.
_COMMON: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "boolean": ("bool", bool),
    "long": ("i64", int),
    "float": ("f32", float),
    "double": ("f64", float),
    "date": ("i32", lambda day: day if isinstance(day, int) else (day - datetime.date(1970, 1, 1)).days),
    "string": ("text", str),
}
_DELTA = _COMMON | {"byte": ("i8", int), "short": ("i16", int), "integer": ("i32", int)}
_ICEBERG = _COMMON | {"int": ("i32", int)}
#: Features of Delta tables that change nothing for a reader of the files that the log names.
_KNOWN = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "columnMapping", "deletionVectors"}

#: Name, type, and a value for each file.
Column = tuple[str, str, list[Any]]
Table = dict[str, Any]


def _library(name: str, install: str, of: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{of} tables are read with {install}: pip install {install!r}") from error


def _refused(table: str, what: str) -> UnsupportedError:
    return UnsupportedError(f"{table}: {what}")


def _names(fields: Iterable[Any], before: str = "") -> Iterator[str]:
    """The columns of a schema of Delta or Iceberg; those in structures have dotted names."""
    for field in fields:
        kind = field.field_type if hasattr(field, "field_type") else field.type
        if type(kind).__name__ == "StructType":
            yield from _names(kind.fields, f"{before}{field.name}.")
        else:
            yield before + field.name


def _table(files: Sequence[str], columns: Sequence[Column], snapshot: str) -> Table:
    order = sorted(range(len(files)), key=files.__getitem__)
    sorted_columns = [(name, kind, [values[at] for at in order]) for name, kind, values in columns]
    return {"files": [files[at] for at in order], "columns": sorted_columns, "snapshot": snapshot, "ids": [], "mapped": []}


def _texts(given: Any) -> list[str]:
    """A name, or several."""
    return [given] if isinstance(given, str) else [str(name) for name in (() if given is None else given)]


def settings(read: Callable[..., tuple[Table, list[str]]], table: Any, version: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of source "parquet" for a version of a table: its files, and all its columns unless some are named."""
    packed = given.get("packed")
    fields = (given.get("columns"), given.get("image"), (packed or {}).get("field"))
    named = [name for names in fields for name in _texts(names)]
    found, names = read(table, version, named or None)
    roots = {name.split(".")[0] for name in names}
    if missing := [name for name in named if name.split(".")[0] not in roots]:
        raise ConfigError(f"{found['snapshot']}: no column {missing[0]!r}; there are {', '.join(names)}")
    columns = {} if named or packed is not None else {"columns": names}
    return {**given, **columns, "table": found}


def delta(table: Any, version: int | None, columns: Sequence[str] | None) -> tuple[Table, list[str]]:
    """The files of a version of a Delta table, and the names of all its columns."""
    library = _library("deltalake", "deltalake", "Delta")
    version = None if version is None else _settings.whole("version", version)
    if not isinstance(table, (str, os.PathLike, library.DeltaTable)):
        raise TypeError(f"table={table!r}: give the path of a Delta table, or a DeltaTable")
    if isinstance(table, (str, os.PathLike)):
        table = library.DeltaTable(os.fspath(table), version=version)
    elif version is not None and version != table.version():
        table = library.DeltaTable(table.table_uri, version=version, storage_options=table._storage_options)
    metadata = table.metadata()
    snapshot = f"Delta table {metadata.id}, version {table.version()}"
    _check_delta(table, metadata, snapshot)
    root = table.table_uri.rstrip("/") + "/"
    root = unquote(root.removeprefix("file://")) if root.startswith("file://") else root
    actions = table.get_add_actions(flatten=True)
    paths = [unquote(value.as_py()) for value in actions["path"]]
    files = [_place(path if "://" in path or path.startswith("/") else root + path) for path in paths]
    types = {field.name: str(getattr(field.type, "type", field.type)) for field in table.schema().fields}
    values = []
    for name in metadata.partition_columns:
        if types[name] in _DELTA:
            kind, of = _DELTA[types[name]]
            given = (value.as_py() for value in actions[f"partition.{name}"])
            values.append((name, kind, [None if value is None else of(value) for value in given]))
        elif columns is None or name in columns:
            raise _refused(snapshot, f"partition column {name!r} has the type {types[name]}: choose other columns by `columns`")
    return _table(files, values, snapshot), list(_names(table.schema().fields))


def _check_delta(table: Any, metadata: Any, snapshot: str) -> None:
    protocol = table.protocol()
    unknown = set(protocol.reader_features or ()) - _KNOWN
    if protocol.min_reader_version > 3 or unknown:
        needs = ", ".join(sorted(unknown)) or f"version {protocol.min_reader_version}"
        raise _refused(snapshot, f"its readers must know {needs}, which this one does not")
    mapping = metadata.configuration.get("delta.columnMapping.mode", "none")
    if mapping != "none":
        raise _refused(snapshot, f"column mapping ({mapping}): columns have other names in the files")
    if "deletionVectors" not in (protocol.reader_features or ()):
        return
    if deleted := sum(batch.num_rows for batch in table.deletion_vectors()):
        raise _refused(
            snapshot,
            f"{deleted} files have deletion vectors, whose rows are deleted but still there: rewrite them (Spark: REORG TABLE … "
            "APPLY (PURGE)), or open a version before",
        )


def _place(address: str) -> str:
    """The address of a file as the loader takes it."""
    for scheme, of in (("file://", ""), ("file:", ""), ("s3a://", "s3://"), ("s3n://", "s3://")):
        if address.startswith(scheme):
            return of + address[len(scheme) :]
    return address


def iceberg(table: Any, snapshot_id: int | None, columns: Sequence[str] | None) -> tuple[Table, list[str]]:
    """The files of a snapshot of an Iceberg table, and the names of all its columns."""
    library = _library("pyiceberg.table", "pyiceberg[pyarrow]", "Iceberg")
    snapshot_id = None if snapshot_id is None else _settings.whole("snapshot_id", snapshot_id)
    if isinstance(table, (str, os.PathLike)):
        table = library.StaticTable.from_metadata(os.fspath(table))
    if not isinstance(table, library.Table):
        raise TypeError(f"table={table!r}: give a Table of pyiceberg, or the path of a metadata file")
    current = table.metadata.current_snapshot_id
    number = current if snapshot_id is None else snapshot_id
    snapshot = f"Iceberg table {table.metadata.table_uuid}, snapshot {number}"
    if snapshot_id is not None and table.snapshot_by_id(snapshot_id) is None:
        raise ConfigError(f"{snapshot}: there is no such snapshot")
    scan = table.scan(snapshot_id=snapshot_id)
    schema = scan.projection()
    tasks = list(scan.plan_files()) if number is not None else []
    _check_iceberg(schema, tasks, snapshot, columns)
    files = [_place(task.file.file_path) for task in tasks]
    found = _table(files, _identities(table, schema, tasks), snapshot)
    # Files name their columns as the table did when they were written: the ids tell which column it is.
    found["ids"] = [(name, field.field_id) for name, field in _chosen(schema, columns)]
    # Files that were added to the table may have no ids.
    if (mapping := table.name_mapping()) is not None:
        found["mapped"] = list(_mapped(mapping.root))
    return found, list(_names(schema.fields))


def _mapped(fields: Iterable[Any], before: str = "") -> Iterator[tuple[str, int]]:
    """The id of each name that columns have had, in Iceberg's name mapping."""
    for field in fields:
        for name in field.names:
            if field.field_id is not None:
                yield before + name, field.field_id
            yield from _mapped(field.fields, f"{before}{name}.")


def _chosen(schema: Any, columns: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """The columns that are read, by name; those of a chosen structure are its fields."""
    for name in _names(schema.fields):
        if columns is None or any(name == chosen or name.startswith(f"{chosen}.") for chosen in columns):
            yield name, schema.find_field(name)


def _check_iceberg(schema: Any, tasks: list[Any], snapshot: str, columns: Sequence[str] | None) -> None:
    if deleted := sum(bool(task.delete_files) for task in tasks):
        what = f"{deleted} files have deletes, whose rows are deleted but still there: rewrite the files (Spark: CALL rewrite_data_files)"
        raise _refused(snapshot, what)
    if others := {str(task.file.file_format).rsplit(".", 1)[-1] for task in tasks} - {"PARQUET"}:
        raise _refused(snapshot, f"files of the format {', '.join(sorted(others))}: only Parquet is read")
    for name, field in _chosen(schema, columns):
        if getattr(field, "initial_default", None) is not None:
            raise _refused(snapshot, f"column {name!r} has a default for older files: choose other columns by `columns`")


def _identities(table: Any, schema: Any, tasks: list[Any]) -> list[Column]:
    """Values of the partitions that are those of a column, for files that do not store it."""
    found: dict[str, Column] = {}
    specs = table.metadata.specs()
    for at, task in enumerate(tasks):
        for place, field in enumerate(specs[task.file.spec_id].fields):
            if str(field.transform) != "identity" or field.source_id not in schema.field_ids:
                continue
            name = schema.find_column_name(field.source_id)
            kind = _ICEBERG.get(str(schema.find_type(field.source_id)))
            if kind is None or "." in name:
                continue
            column = found.setdefault(name, (name, kind[0], [None] * len(tasks)))
            value = task.file.partition[place]
            column[2][at] = None if value is None else kind[1](value)
    return list(found.values())
