"""Upload: an export to object storage. A list of its files comes first, by which an interrupted
upload is known as longctx's own; `config.json`, without which nothing loads it, comes last."""

from pathlib import Path

from longctx.own_files import LIST, MOVE_AWAY, list_of, read_list
from longctx.remote import RemotePath, any_path
from longctx.training.saved.export import ExportError

LAST = "config.json"


def check_upload(address: Path | str, *, overwrite: bool) -> RemotePath:
    """Returns where an export can be uploaded. Raises ExportError for a path of this machine, and
    for an address with objects, unless they are of an export that may be replaced."""
    there = any_path(address)
    if not isinstance(there, RemotePath):
        raise ExportError(
            f"{there} is a path of this machine: give an address such as s3://BUCKET/MODEL, or "
            "only OUT"
        )
    there.forget()
    if not there.exists() or not there.files():
        return there
    if read_list(there) is None:
        raise ExportError(
            f"{there} has objects, was not written by longctx (no {LIST}), and is not replaced: "
            "choose another address"
        )
    if not overwrite:
        raise ExportError(
            f"{there} exists: choose another address, or replace it with longctx export --overwrite"
        )
    return there


def upload_export(folder: Path, there: RemotePath) -> None:
    """Uploads an export, in the place of an earlier one. Raises ExportError, and changes nothing,
    if an object of others has the name of a file."""
    before = read_list(there) or {}
    files = read_list(folder) or {}
    names = set(files)
    for name in sorted(names.difference(before)):
        if (there / name).is_file():
            raise ExportError(
                f"{there / name} was not written by longctx, and is not replaced: {MOVE_AWAY}"
            )
    begun = list_of(before | files)
    (there / LIST).put_bytes(begun.encode())
    for name in (LAST, *sorted(before)):
        if (there / name).is_file():
            (there / name).remove()
    for name in sorted(names, key=lambda name: (name == LAST, name)):
        (there / name).put(folder / name)
    (there / LIST).put(folder / LIST)
    there.forget()
