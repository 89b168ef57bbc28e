"""An S3 server on this machine (moto), with faults, that counts the bytes it sends."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECRET = "do-not-tell-anyone"
BUCKET = "bucket"


class Storage:
    """The server as a WSGI application; `fault(path)` returns what happens to a request of an
    object: "slow", "503", "cut" or "" (nothing)."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self._inner = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self.sent: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.faults = 0
        self.fault: Any = lambda path: ""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()

    def reset(self) -> None:
        self.sent.clear()
        self.requests.clear()
        self.faults = 0
        self.fault = lambda path: ""

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"].removeprefix(f"/{BUCKET}/")
        method = environ["REQUEST_METHOD"]
        is_object = method == "GET" and path != environ["PATH_INFO"] and bool(path)
        self.requests[f"{method} {path}"] += 1
        what = self.fault(path) if is_object else ""
        self.faults += what != ""
        if what == "slow":
            time.sleep(0.3)
        if what == "503":
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        body = b"".join(self._inner(environ, start_response))
        if is_object:
            self.sent[path] += len(body)
        if what == "cut":
            return self._cut(body)
        return [body]

    def _cut(self, body: bytes) -> Iterator[bytes]:
        yield body[: len(body) // 2]
        raise ConnectionResetError("cut by the test")

    def every(self, number: int, what: str) -> None:
        """Lets every so manieth request of an object have a fault."""
        count = Counter[str]()

        def fault(path: str) -> str:
            count["all"] += 1
            return what if count["all"] % number == 0 else ""

        self.fault = fault


@contextmanager
def s3_server() -> Iterator[Storage]:
    """A server with an empty bucket, and an environment in which it is found."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    import s3fs
    from moto.s3.models import s3_backends

    storage = Storage()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", storage.address)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        s3fs.S3FileSystem.clear_instance_cache()
        s3_backends.reset()
        s3fs.S3FileSystem().mkdir(BUCKET)
        yield storage
        s3fs.S3FileSystem.clear_instance_cache()
    storage.stop()


def upload(folder: Path, to: str) -> int:
    """Puts all files of a folder into the storage, without asking its server. Returns their
    bytes."""
    size = 0
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            content = file.read_bytes()
            put(f"{to}/{file.relative_to(folder).as_posix()}", content)
            size += len(content)
    return size


def put(address: str, content: bytes) -> None:
    """Puts an object into the storage, without asking its server."""
    import s3fs
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    bucket, _, key = address.removeprefix("s3://").partition("/")
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, key, content)
    s3fs.S3FileSystem().invalidate_cache()


def secrets_in(folder: Path) -> list[str]:
    """Returns the files below a folder in which the key stands."""
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    return [str(file) for file in files if SECRET.encode() in file.read_bytes()]
