"""Exports in object storage have the files of those on this machine, and replace nothing else."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from longctx.cli import main
from longctx.own_files import LIST, read_list, write_list
from longctx.remote import RemotePath, any_path
from longctx.training.saved.export import ExportError
from longctx.training.saved.upload import check_upload, upload_export
from tests.remote_cases import BUCKET, put, s3_server

RUN = Path(__file__).parents[1] / "recorded_run"


@pytest.fixture(autouse=True)
def server() -> Iterator[None]:
    with s3_server():
        yield


def objects(address: str) -> dict[str, bytes]:
    there = any_path(address)
    there.forget()
    return {file.relative_to(there).as_posix(): file.read_bytes() for file in there.files()}


def files(folder: Path) -> dict[str, bytes]:
    names = [*(read_list(folder) or ()), LIST]
    return {name: (folder / name).read_bytes() for name in names}


def an_export(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{folder.name} {name}")
    write_list(folder)
    return folder


def test_a_run_is_exported_and_uploaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    address = f"s3://{BUCKET}/model"
    command = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--upload", address]
    assert main(command) == 0
    assert f"{address}: uploaded" in capsys.readouterr().out
    assert objects(address) == files(tmp_path / "out")
    assert "config.json" in objects(address)
    shutil.rmtree(tmp_path / "out")
    assert main(command) == 2
    assert "replace it with longctx export --overwrite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "refused before anything is made"
    assert main([*command, "--overwrite"]) == 0


def test_an_earlier_export_is_replaced_whole(tmp_path: Path) -> None:
    address = f"s3://{BUCKET}/model"
    there = check_upload(address, overwrite=False)
    upload_export(an_export(tmp_path / "a", ["config.json", "model-1.st", "x/y.json"]), there)
    put(f"{address}/mine.txt", b"mine")
    assert {"mine.txt": b"mine", **files(tmp_path / "a")} == objects(address)
    second = an_export(tmp_path / "b", ["config.json", "model.st"])
    upload_export(second, check_upload(address, overwrite=True))
    assert {"mine.txt": b"mine", **files(second)} == objects(address)


def interrupt_upload(folder: Path, address: str, *, overwrite: bool) -> None:
    """Uploads an export, and stops before its z.json."""
    write = RemotePath.put

    def stop(self: RemotePath, file: Path) -> None:
        if self.name == "z.json":
            raise KeyboardInterrupt
        write(self, file)

    there = check_upload(address, overwrite=overwrite)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RemotePath, "put", stop)
        with pytest.raises(KeyboardInterrupt):
            upload_export(folder, there)


def test_an_interrupted_upload_is_no_model(tmp_path: Path) -> None:
    address = f"s3://{BUCKET}/model"
    folder = an_export(tmp_path / "a", ["a.json", "config.json", "model.st", "z.json"])
    upload_export(folder, check_upload(address, overwrite=False))
    interrupt_upload(folder, address, overwrite=True)
    assert "config.json" not in objects(address)
    upload_export(folder, check_upload(address, overwrite=True))
    assert objects(address) == files(folder)


def test_a_first_upload_that_was_interrupted_is_replaced(tmp_path: Path) -> None:
    address = f"s3://{BUCKET}/model"
    folder = an_export(tmp_path / "a", ["config.json", "model.st", "z.json"])
    interrupt_upload(folder, address, overwrite=False)
    other = an_export(tmp_path / "b", ["config.json"])
    upload_export(other, check_upload(address, overwrite=True))
    assert objects(address) == files(other), "nothing is left of the first"


def test_an_object_of_others_is_not_replaced(tmp_path: Path) -> None:
    address = f"s3://{BUCKET}/model"
    first = an_export(tmp_path / "a", ["config.json"])
    upload_export(first, check_upload(address, overwrite=False))
    put(f"{address}/README.md", b"mine")
    second = an_export(tmp_path / "b", ["config.json", "README.md"])
    with pytest.raises(ExportError, match=r"README\.md was not written by longctx"):
        upload_export(second, check_upload(address, overwrite=True))
    assert objects(address) == {"README.md": b"mine", **files(first)}


def test_what_others_have_written_stays(tmp_path: Path) -> None:
    put(f"s3://{BUCKET}/data/file", b"mine")
    with pytest.raises(ExportError, match="was not written by longctx"):
        check_upload(f"s3://{BUCKET}/data", overwrite=True)
    with pytest.raises(ExportError, match="is a path of this machine"):
        check_upload(tmp_path, overwrite=True)
