"""Export: writes a checkpoint of a run as a folder that transformers loads, in one process that
never holds the whole model.

The sharded checkpoint is read group by group (a block, an embedding); every group is converted to
transformers' tensors, which are written file by file. The folder is written as OUT.partial and
renamed when all files are on disk. It lists its files, and only these are removed when it is
replaced.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longctx import tokenizer_files
from longctx.data.store.manifest import is_store
from longctx.errors import UserError, brief, shortened
from longctx.hf.lora import ADAPTERS, AdaptedModel, write_adapter
from longctx.hf.lora_options import Lora
from longctx.hf.model import open_checkpoint
from longctx.hf.source import adapted_source, transformers_source
from longctx.hf.vision import VISION_CLASS, class_of, class_of_checkpoint
from longctx.model.checkpoint_files import DESCRIBED, ENDS, CheckpointFiles, PretrainedError
from longctx.model.checkpoint_writer import CheckpointWriter
from longctx.model.decoder import Decoder
from longctx.model.families import expressed
from longctx.model.presets import ModelShape
from longctx.model.pretrained_decoder import NativeSource
from longctx.model.protocol import Model
from longctx.model.translation import canonical
from longctx.own_files import (
    LIST,
    MOVE_AWAY,
    begin_list,
    changed,
    read_list,
    replace,
    that_stay,
    write_list,
)
from longctx.parallel.host_memory import returned_when_freed
from longctx.paths import local_path, no_run
from longctx.safe_yaml import parse, read_text
from longctx.training.saved import checkpoint
from longctx.training.saved.checkpoint import Checkpoint, SavedWeights
from longctx.training.saved.model_folder import beside_weights, model_folder

ROPE = "rope_parameters"
LIMIT = "max_position_embeddings"
MAX_SHARD_BYTES = 5 * 10**9


class ExportError(UserError):
    """Raised if a run cannot be exported, or not to this folder."""


def check_place(out: Path, overwrite: bool) -> None:
    """Raises ExportError unless an export may be written to `out`: its files are looked for, but
    not read."""
    is_empty = out.is_dir() and not any(out.iterdir())
    if is_empty or not os.path.lexists(out):
        return
    if not out.is_dir():
        raise ExportError(f"{out} exists and is not a folder: choose another place")
    listed = read_list(out)
    if listed is None:
        raise ExportError(
            f"{out} exists, was not written by longctx (no {LIST}), and is not replaced: choose "
            "another folder"
        )
    if not overwrite:
        raise ExportError(
            f"{out} exists: choose another folder, or replace it with longctx export --overwrite"
        )


def check_base(base: str | None, out: Path) -> None:
    """Raises ExportError if `out` is the checkpoint `base`, from which a run started."""
    if base is not None and out.is_dir() and Path(base).is_dir() and out.samefile(base):
        raise ExportError(
            f"{out} is the checkpoint that the run started from, and is not replaced: choose "
            "another folder"
        )


def export(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    merge: bool = False,
) -> str:
    """Writes the newest complete checkpoint of a run, or that of `step`, to `out` as a transformers
    checkpoint.

    For a run with LoRA writes the adapters for peft; with `merge` the whole model with merged
    adapters. Returns what is said.

    Weights are written in `dtype`; by default in the dtypes of the checkpoint that the run started
    from, or float32 for new weights. With `overwrite` only what longctx has written to `out` is
    replaced; all else stays there, and is named. Raises ExportError, NotReplaced, CheckpointError
    or NoNativeModel.
    """
    run = local_path(run)
    out = local_path(out)
    check_place(out, overwrite)
    chosen = _find(run, step)
    check_base(_base_of(run), out)
    listed = read_list(out) or {}
    if edited := changed(out, listed):
        raise ExportError(
            f"{out / edited[0]} is not as longctx wrote it, and is not replaced: {MOVE_AWAY}"
        )
    kept = model_folder(run)
    model, source = _build(chosen, kept)
    saved = SavedWeights(chosen.folder)
    if merge and not isinstance(model, AdaptedModel):
        raise ExportError(f"{run} has no adapters to merge: omit --merge")
    place = out.resolve()
    with _folder_beside(place) as partial:
        if isinstance(model, AdaptedModel) and not merge:
            if source is not None and source.config.to_dict().get(
                ROPE
            ) != model.files.config.to_dict().get(ROPE):
                raise ExportError(
                    "the run changes RoPE, which adapters cannot store: use longctx export --merge"
                )
            what = "adapters for peft"
            size = _write_adapters(partial, model, saved, kept)
            files = 1
            length = _with_length(partial, model.files.config, _longest(chosen), adapters=True)
        else:
            writer = CheckpointWriter(partial, _to_write(model, source, dtype), max_shard_bytes)
            _refuse_full(partial, writer.total)
            with returned_when_freed():
                for group in model.groups():
                    writer.write(model.to_checkpoint(_read(model, saved, group)))
            writer.close()
            size = writer.total
            files = len(writer.files)
            what, length = _write_beside(
                partial, model, source=source, saved=chosen, kept=kept, dtype=dtype
            )
        write_list(partial)
        stays = replace(place, made=partial, own=[LIST, *listed])
    count = "1 file" if files == 1 else f"{files} files"
    has_tokenizer = any(out.glob("tokenizer*")) or any(out.glob("vocab.*"))
    tokenizer = "" if has_tokenizer else ", without a tokenizer (the run folder has none)"
    beside = f"; {that_stay(stays)}" if stays else ""
    return (
        f"step {chosen.step} exported to {out}: {what}, {size / 1e9:,.3f} GB in "
        f"{count}{tokenizer}{length}{beside}"
    )


def _base_of(run: Path) -> str | None:
    """Returns the checkpoint that a run started from, as in its settings, which may be gone; None
    for new weights."""
    settings = run / "config.yaml"
    values = parse(read_text(settings)) if settings.is_file() else None
    model = values.get("model") if isinstance(values, dict) else None
    base = model.get("from_pretrained") if isinstance(model, dict) else None
    if isinstance(base, str):
        return base
    return None


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """Yields the empty folder OUT.partial, and removes it if it is still there in the end."""
    partial = out.with_name(out.name + ".partial")
    if partial.exists() and read_list(partial) is None:
        raise ExportError(
            f"{partial}, where the export would be made, was not written by longctx: {MOVE_AWAY}"
        )
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    begin_list(partial)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_adapters(folder: Path, model: AdaptedModel, saved: SavedWeights, kept: Path) -> int:
    """Writes the adapters for peft. Returns the bytes of their weights."""
    trained = saved.read(
        name for name, parameter in model.named_parameters() if parameter.requires_grad
    )
    write_adapter(folder, model, trained)
    tokenizer_files.copy(
        [file for file in beside_weights(kept) if file.name != "config.json"], kept, folder
    )
    _write_generation(folder, kept, model.hf.config, model.spec.vocab_size or 0)
    return sum(tensor.nbytes for tensor in trained.values())


def _read(model: Model, saved: SavedWeights, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Reads whole parameters by name; frozen ones from the base checkpoint, as those of the run do
    not contain them."""
    if not isinstance(model, AdaptedModel):
        return saved.read(names)
    trained = [name for name in names if name.endswith(ADAPTERS)]
    return {
        **saved.read(trained),
        **{name: model.frozen(name) for name in names if name not in trained},
    }


def _find(run: Path, step: int | None) -> Checkpoint:
    if not run.is_dir():
        raise ExportError(no_run(run))
    if not checkpoint.is_run(run):
        if is_store(run):
            what = "a store of documents"
        else:
            what = "not a run folder: it has no checkpoints"
        what = "a transformers checkpoint already" if (run / "config.json").is_file() else what
        raise ExportError(f"{run} is {what}: give the train.run_dir of a run")
    saved, damaged = checkpoint.newest(run) if step is None else checkpoint.of_step(run, step)
    if saved is None:
        if step is None:
            what = "no complete checkpoint"
        else:
            what = f"no complete checkpoint of step {step}"
        steps = ", ".join(map(str, checkpoint.steps(run)))
        if steps:
            way_out = f"steps with complete checkpoints: {steps}"
        else:
            way_out = "set checkpoint.every and train again"
        raise ExportError(f"{run} has {what}{checkpoint.because(damaged)}: {way_out}")
    if problem := saved.damage():
        raise ExportError(
            f"{saved.folder} is damaged ({problem}): longctx export --step N exports another "
            "checkpoint"
        )
    return saved


def _build(saved: Checkpoint, kept: Path) -> tuple[Model, CheckpointFiles | None]:
    """Returns the model of a checkpoint without values, and the transformers checkpoint that the
    run started from, if any."""
    described = saved.state["model"]
    source = None
    if (kept / DESCRIBED).is_file():
        source = CheckpointFiles.open(str(kept))
    if source is not None and "lora" in described:
        return _adapted(described), source
    with torch.device("meta"):
        if "transformers" in described:
            if source is None:
                raise ExportError(
                    f"{kept}, the config of the model, is missing: restore config.json and "
                    f"{DESCRIBED} there"
                )
            return transformers_source(source).build(), source
        shape = ModelShape.model_validate(described)
        if source is None:
            return Decoder(shape), None
        native = NativeSource(source)
        if native.shape != canonical(shape):
            raise ExportError(
                f"{saved.folder} does not match the model of {kept}/config.json: restore the files "
                "of this run"
            )
        return native.build(), source


def _adapted(described: dict[str, Any]) -> Model:
    """Returns the model of a run with LoRA, with frozen weights from the base checkpoint of the
    run.

    Raises ExportError if the base checkpoint is missing or has changed.
    """
    values = described["lora"]
    given: dict[str, Any] = {
        each.name: values[each.name] for each in fields(Lora) if each.name in values
    }
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    lora = Lora(**given)
    try:
        base = open_checkpoint(values["base"])
    except PretrainedError as error:
        raise ExportError(
            f"the base weights in {values['base']} cannot be read ({error}): restore them"
        ) from error
    if base.fingerprint != values["base_fingerprint"]:
        raise ExportError(
            f"{values['base']} has changed since the adapters were trained: restore the original "
            "base weights"
        )
    with torch.device("meta"):
        return adapted_source(base, lora, "float32").build()


def _to_write(
    model: Model, source: CheckpointFiles | None, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Returns the tensors of the export without values: in `dtype`, by default as in the checkpoint
    `source`."""
    tensors: dict[str, torch.Tensor] = {}
    empty = {name: value.to("meta") for name, value in model.state_dict().items()}
    for group in model.groups():
        for name, tensor in model.to_checkpoint({name: empty[name] for name in group}).items():
            stored = tensor.dtype if source is None else source.dtype_of(name)
            written = dtype if dtype is not None and stored.is_floating_point else stored
            tensors[name] = torch.empty(tensor.shape, dtype=written, device="meta")
    return tensors


def _refuse_full(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ExportError(
            f"{folder.parent} has {free / 1e9:,.1f} GB free, but the weights need "
            f"{size / 1e9:,.1f} GB: free disk space"
        )


def _write_beside(
    folder: Path,
    model: Model,
    source: CheckpointFiles | None,
    saved: Checkpoint,
    kept: Path,
    dtype: torch.dtype | None,
) -> tuple[str, str]:
    """Writes config, generation config, tokenizer and chat template. Returns the class and what
    `_with_length` says."""
    tokenizer_files.copy(beside_weights(kept), kept, folder)
    changed: dict[str, Any] = {}
    if source is None:
        assert isinstance(model, Decoder)
        family, config = expressed(model.shape, _longest(saved), _end_of_document(kept))
        architecture = family.architecture
        changed["dtype"] = "float32"
        config.save_pretrained(folder)
    else:
        config = source.config
        architecture = model.architecture
    length = _with_length(folder, config, _longest(saved))
    changed["architectures"] = [architecture]
    if dtype is not None:
        changed["dtype"] = str(dtype).removeprefix("torch.")
    _change(folder / "config.json", changed)
    _write_generation(folder, kept, config, model.spec.vocab_size or 0)
    return architecture, length


def _longest(saved: Checkpoint) -> int:
    """Returns the tokens of the longest document that was trained, of all stores."""
    data = saved.state["data"]
    return int(np.max(data.get("longest", data["max_length"])))


def _with_length(folder: Path, config: Any, longest: int, *, adapters: bool = False) -> str:
    """Raises the lengths at which engines cut, in config and tokenizer, to the `longest` document.
    Returns what is said.

    RoPE whose frequencies depend on the length in the config (dynamic, longrope) has trained
    nothing longer. `adapters` have no config of their own.
    """
    text = config.get_text_config()
    said = ""
    limit = getattr(text, LIMIT, None) or longest
    if longest > limit and adapters:
        said = (
            f"; the base ends at {limit:,} tokens ({LIMIT}), documents had up to {longest:,}: "
            f"--merge writes {longest:,}"
        )
    elif longest > limit:
        setattr(text, LIMIT, longest)
        config.save_pretrained(folder)
        said = f"; {LIMIT} {limit:,} → {longest:,}, the longest document trained"
    tokenizer = folder / "tokenizer_config.json"
    if (
        tokenizer.is_file()
        and json.loads(tokenizer.read_text("utf-8")).get("model_max_length", longest) < longest
    ):
        _change(tokenizer, {"model_max_length": longest})
        said += f"; model_max_length of the tokenizer → {longest:,}"
    return said


def _write_generation(folder: Path, kept: Path, config: Any, vocabulary: int) -> None:
    """Writes the generation config if there is none, and adds the tokens that were trained as ends
    to those that stop it."""
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not file.is_file():
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    try:
        trained = json.loads((kept / ENDS).read_text("utf-8")) if (kept / ENDS).is_file() else []
        old = json.loads(file.read_text("utf-8")).get("eos_token_id")
        if isinstance(old, list):
            ends = [*old]
        else:
            ends = [] if old is None else [old]
        new = [end for end in trained if end not in ends and end < vocabulary]
    except (ValueError, TypeError, AttributeError) as error:
        raise ExportError(
            f"{ENDS} or {file.name} in {kept} is damaged: {brief(error)}; remove the damaged file"
        ) from error
    if new:
        _change(file, {"eos_token_id": [*ends, *new]})


def _change(file: Path, changed: dict[str, Any]) -> None:
    """Sets keys of a JSON file; leaves the file unchanged if they are set already."""
    content = json.loads(file.read_text("utf-8"))
    if any(content.get(key) != value for key, value in changed.items()):
        file.write_text(json.dumps({**content, **changed}, indent=2) + "\n", "utf-8")


def _end_of_document(kept: Path) -> int | None:
    """Returns the id of the token that ends a document, None without a tokenizer."""
    if not (kept / "tokenizer_config.json").is_file() or not (kept / "tokenizer.json").is_file():
        return None
    from tokenizers import Tokenizer

    try:
        token = json.loads((kept / "tokenizer_config.json").read_text("utf-8")).get("eos_token")
        name = token["content"] if isinstance(token, dict) else token
        number: int | None = (
            None
            if name is None
            else Tokenizer.from_file(str(kept / "tokenizer.json")).token_to_id(name)
        )
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(
            f"tokenizer.json or tokenizer_config.json in {kept} is damaged "
            f"({shortened(str(error), 200)}): copy them from another run on the same store, or "
            "delete both to export without a tokenizer"
        ) from error
    return number


def how_to_load(folder: Path) -> str:
    """Returns the call that loads an exported folder."""
    if (folder / "adapter_config.json").is_file():
        adapters = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        base = adapters["base_model_name_or_path"]
        if class_of_checkpoint(Path(base)) == VISION_CLASS:
            base = f"{VISION_CLASS}.from_pretrained({base!r})"
            return (
                f"load with peft: PeftModel.from_pretrained({base}, {str(folder)!r}); or merge: "
                "longctx export RUN OUT --merge"
            )
        return (
            f"load with peft: AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}); "
            "or merge: longctx export RUN OUT --merge"
        )
    config = json.loads((folder / "config.json").read_text("utf-8"))
    return (
        "load with transformers: "
        f"{class_of(config.get('model_type', ''))}.from_pretrained({str(folder)!r})"
    )
