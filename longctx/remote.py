"""Remote: files in object storage (`s3://`, `gs://`, `az://`, `hf://`) by fsspec, an optional
package, read in ranges of bytes.

Keys and tokens come from the environment, as the storage's own package reads them; an address with
one in it is refused.
"""

import io
import os
import stat
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any, TypeVar

from longctx.checksums import WAITS_S
from longctx.errors import UserError, brief
from longctx.paths import PathError, expanded, redacted, scheme_of

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub"}
"""Packages that read a storage, by scheme."""
BLOCK = 8 << 20
"""Bytes that are read at once of a file that is read from start to end."""
_CONTENTS = ("ETag", "etag", "blob_id", "oid", "md5Hash", "generation", "version_id")
_TIMES = ("LastModified", "last_modified", "mtime", "created")
_VERSIONS = _CONTENTS + _TIMES
"""What storages call that by which the contents of an object are told apart."""
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
"""Errors that do not pass."""

T = TypeVar("T")


class RemoteError(UserError):
    """A storage that does not answer, or an object that is not there or has changed."""


@dataclass(frozen=True)
class RemoteState:
    """Bytes of an object, and what changes with its contents; a folder has neither."""

    size: int
    version: str
    is_folder: bool = False

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "RemoteState":
        """Returns what a listing says of an object."""
        versions = [str(info[name]) for name in _VERSIONS if info.get(name)]
        is_folder = info["type"] == "directory"
        return cls(int(info["size"] or 0), "".join(versions[:1]), is_folder)


class RemotePath(PosixPath):
    """An object, or a folder of objects, at an address such as s3://bucket/folder/file.

    Every method that is not defined here, and would use a file of this machine, raises RemoteError.
    """

    _known: RemoteState | None = None

    def __str__(self) -> str:
        scheme, colon, rest = super().__str__().partition(":/")
        if colon and scheme in PACKAGES:
            return f"{scheme}://{rest}"
        return super().__str__()

    def __fspath__(self) -> str:
        raise RemoteError(f"{self} is no file of this machine: give a folder, and copy it to there")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (str(self), self._known)

    @property
    def _key(self) -> str:
        return str(self).partition("://")[2]

    def ask(self, question: Callable[[Any], T]) -> T:
        """Returns the answer of the storage's file system, asked again where an error may pass.
        Raises RemoteError naming this path."""
        system = _system(str(self))
        waits = iter(WAITS_S)
        while True:
            try:
                return question(system)
            except FileNotFoundError:
                raise
            except Exception as error:  # of the network, and of any package that reads a storage
                wait = next(waits, None)
                is_final = isinstance(error, _FINAL) or "Credentials" in type(error).__name__
                if wait is None or is_final:
                    said = redacted(f"{type(error).__name__}: {brief(error)}")
                    raise RemoteError(
                        f"{self} cannot be read or written ({said}): check the address, the "
                        "network, and the keys in the environment, and run the command again"
                    ) from None
            time.sleep(wait)

    def state(self, *, fresh: bool = False) -> RemoteState:
        """Returns size and version, as they were when it was listed, or now. Raises
        FileNotFoundError."""
        if self._known is not None and not fresh:
            return self._known

        def look(system: Any) -> RemoteState:
            if fresh:
                system.invalidate_cache(system._parent(self._key))
            return RemoteState.of(system.info(self._key))

        state = self.ask(look)
        self._known = self._known or state
        return state

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        state = self.state()
        kind = stat.S_IFDIR if state.is_folder else stat.S_IFREG
        return os.stat_result((kind | 0o444, 0, 0, 1, 0, 0, state.size, 0, 0, 0))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        try:
            self.state()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.exists() and self.state().is_folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self.exists() and not self.state().is_folder

    def is_symlink(self) -> bool:
        return False

    def resolve(self, strict: bool = False) -> "RemotePath":
        return self

    def absolute(self) -> "RemotePath":
        return self

    def iterdir(self) -> Generator["RemotePath", None, None]:
        for info in self.ask(lambda system: system.ls(self._key, detail=True)):
            if info["name"].rstrip("/") != self._key:
                yield self._found(info)

    def files(self) -> list["RemotePath"]:
        """Returns all objects below."""
        found = self.ask(lambda system: system.find(self._key, detail=True))
        return [self._found(info) for info in found.values()]

    def glob(self, pattern: str, **_: Any) -> Generator["RemotePath", None, None]:
        """Yields the objects below that match a pattern."""
        for file in self.files():
            if pattern == "**/*" or file.relative_to(self).match(pattern):
                yield file

    def _found(self, info: Mapping[str, Any]) -> "RemotePath":
        address = f"{self.parts[0]}//{info['name'].rstrip('/')}"
        path = _restored(address, RemoteState.of(info))
        if str(path) != address:
            raise RemoteError(
                f"{address} has an empty name or a dot between slashes, as no folder has: rename it"
            )
        return path

    def part(self, start: int, stop: int) -> bytes:
        """Returns the bytes from start to stop. Raises RemoteError if the object is shorter."""
        if start == stop:
            return b""

        def get(system: Any) -> bytes:
            content: bytes = system.cat_file(self._key, start=start, end=stop)
            if len(content) != stop - start:
                raise OSError(f"{len(content)} bytes came instead of {stop - start}")
            return content

        try:
            return self.ask(get)
        except (RemoteError, FileNotFoundError):
            self.check_unchanged()
            raise

    def check_unchanged(self) -> None:
        """Raises RemoteError if the object is no longer as it was when it was listed."""
        try:
            is_same = self.state(fresh=True) == self.state()
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise RemoteError(f"{self} changed while it was read: run the command again")

    def open(
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> Any:
        """Opens the object for reading; `buffering` is the number of bytes that are read at
        once."""
        if set(mode) - set("rbt"):
            return super().open(mode)  # which raises
        size = BLOCK
        if buffering > 1:
            size = buffering
        stream = io.BufferedReader(_Ranges(self), size)
        if "b" in mode:
            return stream
        return io.TextIOWrapper(stream, encoding, errors=errors, newline=newline)

    def put(self, file: Path) -> None:
        """Writes the contents of a file of this machine."""
        self.ask(lambda system: system.put_file(str(file), self._key))

    def put_bytes(self, content: bytes) -> None:
        self.ask(lambda system: system.pipe_file(self._key, content))

    def remove(self) -> None:
        self.ask(lambda system: system.rm_file(self._key))

    def forget(self) -> None:
        """Forgets what was listed."""
        self.ask(lambda system: system.invalidate_cache())


def _restored(address: str, known: RemoteState | None) -> RemotePath:
    path = RemotePath(address)
    path._known = known
    return path


def _system(address: str) -> Any:
    """Returns the file system of an address. Raises PathError without the package for it."""
    scheme = scheme_of(address)
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except ImportError as error:
        package = PACKAGES[scheme]
        rule = f"{scheme}:// needs the package {package}, which is not installed ({brief(error)})"
        raise PathError(address, rule, f"pip install {package}") from error


class _Ranges(io.RawIOBase):
    """An object as a stream, of which each read is a request."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._path = path
        self._size = path.state().size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}
        self._place = begin[whence] + place
        return self._place

    def readinto(self, buffer: Any) -> int:
        stop = min(self._place + len(buffer), self._size)
        count = max(0, stop - self._place)
        buffer[:count] = self._path.part(self._place, self._place + count)
        self._place += count
        return count


def any_name(given: Path | str) -> str:
    """Returns what `expanded` does, or the address of a storage. Raises PathError for one that no
    storage here reads, or with a key in it."""
    text = str(given)
    scheme = scheme_of(text)
    if scheme not in PACKAGES:
        return expanded(given)
    address = f"{scheme}://{text.partition(':')[2].strip('/')}"
    if redacted(address) != address:
        rule = "a key or token must not stand in an address, which is written to many places"
        raise PathError(address, rule, "put it into the environment, as the storage's tools do")
    if len(RemotePath(address).parts) < 2:
        raise PathError(address, "it names no bucket", f"write {scheme}://BUCKET/FOLDER")
    _system(address)
    return address


def any_path(given: Path | str) -> Path:
    """Returns a path of this machine or of a storage, see `any_name`."""
    name = any_name(given)
    if scheme_of(name):
        return RemotePath(name)
    return Path(name)
