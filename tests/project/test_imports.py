"""The direction of imports, read from the sources, and that no modules import each other in a
circle.

Also who may touch process groups, torch.distributed and the environment, so that these stay in one
place each.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PARTS = {
    "longctx.attention": ROOT / "attention",
    "longctx.data": ROOT / "data",
    "longctx": ROOT / "longctx",
}

CORE = {
    "errors",
    "arguments",
    "paths",
    "own_files",
    "checksums",
    "remote",
    "units",
    "tokenizer_files",
    "pointers",
}
CORE |= {"planning", "attention", "data", "model", "hf", "config", "parallel"}
MAY_IMPORT = {
    "errors": set(),
    "safe_yaml": {"errors"},
    "arguments": {"errors"},
    "paths": {"errors"},
    "checksums": set(),
    "remote": {"errors", "paths", "checksums"},
    "own_files": {"errors", "checksums"},
    "units": set(),
    "tokenizer_files": {"errors"},
    "pointers": set(),
    "planning": {"errors", "arguments", "paths", "safe_yaml"},
    "attention": {"errors", "arguments", "planning"},
    "data": {
        "errors",
        "arguments",
        "paths",
        "own_files",
        "checksums",
        "remote",
        "tokenizer_files",
        "pointers",
        "planning",
    },
    "model": {
        "errors",
        "paths",
        "own_files",
        "tokenizer_files",
        "pointers",
        "planning",
        "attention",
    },
    "hf": {"errors", "arguments", "tokenizer_files", "planning", "attention", "model"},
    "config": {
        "errors",
        "arguments",
        "paths",
        "remote",
        "safe_yaml",
        "units",
        "planning",
        "model",
        "hf",
    },
    "parallel": {"errors", "units", "planning", "attention", "data", "model"},
    "training": CORE | {"safe_yaml"},
    "memory": CORE | {"training"},
    "evaluation": CORE | {"training"},
    "calibration": CORE | {"training"},
    "plots": {"errors", "units", "planning"},
    "comparison": CORE | {"training", "memory", "plots"},
    "trainers": CORE | {"training", "memory", "safe_yaml"},
    "check": set(),
    "report": CORE | {"training"},
    "start": CORE | {"training", "memory", "report"},
    "commands": CORE
    | {"training", "memory", "evaluation", "calibration", "plots", "comparison", "start", "check"}
    | {"safe_yaml", "trainers"},
    "cli": {"errors", "commands", "parallel"},
    "__main__": {"cli"},
}
"""Room → the other rooms that it may import."""

BOTH_WAYS = {("longctx.attention", "longctx.attention.kernels")}
"""Folders that import each other: the ring calls kernels, which read its segments."""


def sources() -> Iterator[tuple[str, Path]]:
    """Every module's dotted name and file; the links longctx/attention and longctx/data are not
    followed, and templates are data."""
    for package, folder in PARTS.items():
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder).with_suffix("")
            if package == "longctx" and relative.parts[0] in ("attention", "data"):
                continue
            if package == "longctx" and relative.parts[:2] == ("check", "templates"):
                continue
            name = ".".join([package, *(part for part in relative.parts if part != "__init__")])
            yield name, path


MODULES = dict(sources())


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def imports(name: str) -> set[str]:
    """Every module that `name` imports, anywhere in its code; `from a import b` counts as both a
    and a.b."""
    found: set[str] = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = _imported_from(node, by=name)
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def _imported_from(node: ast.ImportFrom, by: str) -> str:
    """Full name of the module; longctx.check, a wheel of its own, imports its own ones
    relatively."""
    if part(by) == "check" and node.level == 1:
        assert node.module is not None, f"{by} imports . as a whole: name the module"
        return f"longctx.check.{node.module}"
    assert node.level == 0, f"{by} imports relatively: write the full name"
    assert node.module is not None
    return node.module


def modules_used(name: str) -> set[str]:
    """Modules of longctx that `name` imports; `from longctx.a import b` does not count as longctx.a
    if it names longctx.a.b."""
    used = imports(name) & set(MODULES) - {name}
    return {module for module in used if not any(other.startswith(f"{module}.") for other in used)}


def folder(name: str) -> str:
    """The folder of a module; a module right in longctx/ is one of its own."""
    is_folder = name.count(".") < 2 or any(other.startswith(f"{name}.") for other in MODULES)
    return name if is_folder else name.rpartition(".")[0]


def part(name: str) -> str | None:
    """The part that a module of longctx belongs to; None for longctx itself."""
    return name.split(".")[1] if name.count(".") else None


def users_of(*names: str) -> set[str]:
    """Modules that use one of these names or attributes, in whatever way they imported it."""
    users = set()
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if _name(node) in names:
                users.add(module)
    return users


def _name(node: ast.AST) -> str | None:
    """What a name, an attribute or an imported name is called."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.name if isinstance(node, ast.alias) else None


def test_imports_point_one_way() -> None:
    wrong = []
    for name in filter(part, MODULES):
        own = part(name)
        assert own in MAY_IMPORT, f"{own} is a new part: say in MAY_IMPORT what it may import"
        used = {other for module in imports(name) if module in MODULES and (other := part(module))}
        wrong += [
            f"{name} may not import {other}" for other in sorted(used - MAY_IMPORT[own] - {own})
        ]
    assert not wrong


def test_no_two_folders_import_each_other() -> None:
    """Modules right in longctx/ count as a folder each. A folder around another one is a folder
    like any other."""
    pairs = {
        (folder(name), folder(other))
        for name in MODULES
        if part(name)
        for other in modules_used(name)
    }
    both = {pair for pair in pairs if pair[0] != pair[1] and pair[::-1] in pairs}
    allowed = {
        pair for around, inside in BOTH_WAYS for pair in ((around, inside), (inside, around))
    }
    assert both == allowed


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside of functions and for types alone count as well. A package that re-exports its
    own modules may."""
    order = TopologicalSorter({name: modules_used(name) for name in MODULES})
    try:
        order.prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' → '.join(error.args[1])}")


def test_planning_needs_only_numpy() -> None:
    """And PyYAML, by longctx.safe_yaml."""
    names = [name for name in MODULES if part(name) == "planning"]
    outside = {
        module.split(".")[0] for name in names for module in imports(name)
    } - sys.stdlib_module_names
    assert outside == {"longctx", "numpy"}


def test_importing_it_leaves_torch_and_data_sets_out() -> None:
    """`import longctx` and plans leave out pydantic too: tests/project/test_public.py."""
    code = "import sys, longctx.planning.plan, longctx.cli, longctx.config; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "longctx.config" in loaded and not {"torch", "datasets"} & set(loaded)


LIGHT = [name for name in MODULES if part(name) in ("attention", "planning", "errors")] + [
    "longctx.data.packing"
]
"""What somebody with a trainer of their own imports."""


def test_the_parts_for_other_trainers_need_nothing_of_ours() -> None:
    """Only torch, numpy and pyyaml: not the trainer's dependencies, and no extras. A kernel's
    library may be missing."""
    blocked = (
        "triton pydantic datasets pyarrow tokenizers matplotlib tensorboard rich "
        "transformers flash_attn megatron scipy pandas"
    )
    code = f"""
import importlib, sys
for name in {blocked.split()}:
    sys.modules[name] = None
for name in {[name for name in LIGHT if "triton" not in name and "merge_device" not in name]}:
    importlib.import_module(name)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_the_check_of_a_step_needs_nothing_of_ours() -> None:
    """Its folder is a wheel of its own, in which its modules have other full names; where Python
    runs in it, as for `python -m pip install .`, none hides a module of the standard library."""
    names = [name for name in MODULES if part(name) == "check"]
    assert not {name.rpartition(".")[2] for name in names} & sys.stdlib_module_names
    for name in names:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported = [str(node.module)]
            else:
                imported = []
            for module in imported:
                assert module.partition(".")[0] != "longctx", f"{name} imports {module}"
    outside = {
        module.partition(".")[0] for name in names for module in imports(name)
    } - sys.stdlib_module_names
    assert outside == {"longctx", "torch", "transformers", "peft", "pytest"}


def test_the_model_knows_nothing_of_processes() -> None:
    for name in MODULES:
        if part(name) == "model":
            assert not {
                module for module in imports(name) if module.startswith("torch.distributed")
            }, name
    assert not {user for user in users_of("distributed", "dist") if part(user) == "model"}


def test_only_the_mesh_makes_process_groups() -> None:
    """But for the group inside a trainer of transformers, whose processes accelerate has joined, or
    of one to check."""
    makers = {"longctx.parallel.mesh", "longctx.trainers.groups", "longctx.check.command"}
    assert (
        users_of("init_process_group", "new_group", "new_subgroups", "init_device_mesh") <= makers
    )


def test_the_environment_is_read_in_one_place() -> None:
    """Setting a variable for a library that takes a setting in no other way is not reading it."""
    readers = set()
    for name in users_of("environ", "getenv"):
        nodes = list(ast.walk(tree(name)))
        set_only = [
            node.value
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        ]
        set_only += [
            node.value
            for node in nodes
            if isinstance(node, ast.Attribute) and node.attr == "setdefault"
        ]
        uses = [
            node
            for node in nodes
            if isinstance(node, (ast.Attribute, ast.Name, ast.alias)) and node not in set_only
        ]
        if any(_name(node) in ("environ", "getenv") for node in uses):
            readers.add(name)
    passing_on = {"longctx.check.pytest_plugin", "longctx.check.command"}
    assert (
        readers
        <= {f"longctx.parallel.{module}" for module in ("environment", "device", "mesh", "meeting")}
        | passing_on
    )


def test_bare_names_of_the_top_folders_are_refused() -> None:
    code = "\n".join(
        f"try: import {name}\nexcept ImportError as error: print(error)"
        for name in ("attention", "data")
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in ("attention", "data"):
        assert f"import this package as `longctx.{name}`" in process.stdout


def test_the_wheel_lists_every_folder_of_modules() -> None:
    """tests/project/test_wheel.py builds it."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"][
        "packages"
    ]
    folders = {
        name if path.name == "__init__.py" else name.rpartition(".")[0]
        for name, path in MODULES.items()
    }
    assert sorted(listed) == sorted(
        folders | {"longctx.planning.profiles", "longctx.comparison.mixes"}
    ), "two have files alone"
