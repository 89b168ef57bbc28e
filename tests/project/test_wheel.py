"""The wheel: holds every module of the tree under the right name, nothing else at its top, and
works where it is installed."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.project.test_imports import MODULES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built, without network, from a copy of the files that git knows or would add."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        source, target = repository / name, folder / "source" / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(folder / "source"),
    ]
    process = subprocess.run(build, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "installed"
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(target)]
    install = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    subprocess.run(install, check=True)
    return target


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_it_holds_every_module_and_nothing_else(wheel: Path, repository: Path) -> None:
    """Also the type marker, the profiles and the licence."""
    expected = {
        f"{name.replace('.', '/')}/__init__.py"
        if path.name == "__init__.py"
        else f"{name.replace('.', '/')}.py"
        for name, path in MODULES.items()
    }
    expected |= {
        str(path.relative_to(repository))
        for path in repository.glob("longctx/check/templates/*.py")
    }
    found = names(wheel)
    assert {name for name in found if name.endswith(".py")} == expected
    profiles = {
        str(path.relative_to(repository))
        for path in repository.glob("longctx/planning/profiles/*.yaml")
    }
    assert profiles and {"longctx/py.typed", *profiles} <= found
    assert any(name.endswith("/licenses/LICENSE") for name in found)
    assert {name.split("/")[0] for name in found} == {
        "longctx",
        wheel.name.split("-py3")[0] + ".dist-info",
    }


def test_installed_it_is_imported_from_where_it_is(installed: Path, tmp_path: Path) -> None:
    """It knows its command and its profiles."""
    modules = ["longctx.attention", "longctx.data", "longctx.planning.hardware_profile"]
    code = (
        f"import {', '.join(modules)}; "
        f"print({', '.join(f'{module}.__file__' for module in modules)}, sep='\\n'); "
    )
    code += "longctx.planning.hardware_profile.HardwareProfile.load('h100-nvlink-ib')"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert all(Path(line).is_relative_to(installed) for line in process.stdout.split())
    command = [str(installed / "bin" / "longctx"), "--version"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.stdout.startswith("longctx "), process.stderr


def test_the_registrys_package_installed_over_it_is_noticed(wheel: Path, tmp_path: Path) -> None:
    """That package has the same import name: pip lets its files replace ours without a word."""
    for name in names(wheel):
        zipfile.ZipFile(wheel).extract(name, tmp_path)
    command, environment = (
        [sys.executable, "-m", "longctx", "plan", "--help"],
        {**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    alone = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    other = tmp_path / "longctx-0.3.2.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.4\nName: longctx\nVersion: 0.3.2\n")
    (other / "RECORD").write_text("longctx/eval/cli.py,,\n")
    elsewhere = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert elsewhere.returncode == 0, "its files lie beside ours"
    (other / "RECORD").write_text("longctx/__init__.py,sha256=0,935\n")
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 2
    assert (
        "another program, longctx 0.3.2 of the package registry, is installed over this one"
        in process.stderr
    )
    assert "pip uninstall longctx longctx-train, then pip install ." in process.stderr
