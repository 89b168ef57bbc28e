"""Upload: a finished store to object storage, all or nothing: its manifest comes last."""

from pathlib import Path

from longctx.arguments import a_path, checked, flag
from longctx.data.store.manifest import MANIFEST, Manifest, StoreError
from longctx.paths import local_path
from longctx.remote import RemotePath, any_path

UNFINISHED = "manifest.json.unfinished"
"""Object with the manifest of a store that is being uploaded."""


def check_address(address: Path | str) -> RemotePath:
    """Returns where a store can be uploaded. Raises StoreError for a path of this machine."""
    path = any_path(address)
    if not isinstance(path, RemotePath):
        raise StoreError(
            f"{path} is a path of this machine: give an address such as s3://BUCKET/STORE, or only "
            "--out"
        )
    return path


@checked(StoreError, store=a_path, address=a_path, overwrite=flag)
def upload(store: Path | str, address: Path | str, *, overwrite: bool = False) -> bool:
    """Uploads a store to object storage; an upload that was interrupted goes on. Returns whether
    anything had to be uploaded.

    Raises StoreError if another store is at the address, unless it may be overwritten.
    """
    folder = local_path(store)
    there = check_address(address)
    manifest = Manifest.load(folder)
    content = (folder / MANIFEST).read_bytes()
    there.forget()
    present = _read(there / MANIFEST)
    if present == content:
        return False
    if present is not None and not overwrite:
        raise StoreError(
            f"{there} holds another store: choose another address, or replace it with --overwrite"
        )
    mark = there / UNFINISHED
    goes_on = _read(mark) == content
    if not goes_on:
        _remove_others(there, manifest)
        mark.put_bytes(content)
    for name, size in sorted(manifest.files.items()):
        target = there / name
        is_there = goes_on and target.is_file() and target.state().size == size
        if not is_there:
            target.put(folder / name)
    (there / MANIFEST).put_bytes(content)
    mark.remove()
    there.forget()
    return True


def _remove_others(there: RemotePath, manifest: Manifest) -> None:
    """Removes what another store has left: its manifest first, and files of the names that are
    uploaded, which may have the same sizes."""
    for name in (MANIFEST, UNFINISHED, *manifest.files):
        if (there / name).is_file():
            (there / name).remove()


def _read(file: RemotePath) -> bytes | None:
    if file.is_file():
        return file.read_bytes()
    return None
