"""Export as transformers checkpoints: bit by bit if untouched, with equal logits if trained, in
bounded files."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from longctx.cli import main
from longctx.commands.export import parse_size
from longctx.config import Config
from longctx.data.records.tokenizer import Tokenizer
from longctx.errors import UserError
from longctx.model.checkpoint_files import INDEX, CheckpointFiles
from longctx.model.checkpoint_writer import CheckpointWriter
from longctx.model.decoder import Decoder
from longctx.model.presets import ModelShape
from longctx.own_files import LIST
from longctx.report import how_to_export
from longctx.training.saved import checkpoint
from longctx.training.saved.checkpoint import SavedWeights
from longctx.training.saved.checkpoint_io import CheckpointError
from longctx.training.saved.export import ExportError, export
from tests.export_cases import untouched
from tests.huggingface_cases import build_model
from tests.marks import slow_unless
from tests.native_cases import attention_of
from tests.training_cases import SMALL, train_then_save
from tests.workers import Workers

FAMILIES = (
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text mixtral qwen3_moe gpt2 gpt_neox phi "
    "phi3 cohere olmo2 starcoder2"
)
KINDS = [*FAMILIES.split(), "deepseek_v3", "gpt_oss"]
SECOND = "additional_chat_templates/tools.jinja"
NATIVE = ["llama", "qwen2", "qwen3", "mistral", "phi3"]
WAYS = {
    "transformers": [],
    "native": ["parallel.tensor_parallel_size=2"],
    "pipeline": ["parallel.pipeline_parallel_size=2"],
}
"""Of two ranks that run a checkpoint: transformers' code, and the native decoder with split
matrices or layers."""
RUNS = [*(f"transformers/{kind}" for kind in KINDS), *(f"native/{kind}" for kind in NATIVE)]
RUNS += ["pipeline/llama", "pipeline/qwen2"]
QUICK = ["transformers/mixtral", "transformers/gpt2", "transformers/deepseek_v3"]
QUICK += ["native/qwen3", "native/phi3", "pipeline/qwen2"]


RunOf = Callable[[str], Path]


def train(
    capfd: pytest.CaptureFixture[str], settings: list[str], *arguments: str, status: int = 0
) -> str:
    """Runs `longctx train` with settings `key=value`. Returns what it prints."""
    capfd.readouterr()
    assert main(["train", *(f"--{setting}" for setting in settings), *arguments]) == status
    printed = capfd.readouterr()
    return printed.err if status else printed.out


def save_source(folder: Path, **settings: Any) -> None:
    """Writes a checkpoint in bfloat16 of the type that names the folder, with all files besides the
    weights."""
    kind = folder.name
    build_model(kind, "eager", bos_token_id=None, eos_token_id=1, **settings).to(
        torch.bfloat16
    ).save_pretrained(folder)
    if kind == "deepseek_v3":  # transformers reads and writes a part of it in float32
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(
            folder
        )
    (folder / "additional_chat_templates").mkdir()
    texts = {
        "tokenizer.json": Tokenizer.bytes().text,
        "chat_template.jinja": "{{ messages }}",
        "trainer_state.json": "{}",
        SECOND: "{{ tools }}",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, as they are needed."""
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def run_of(
    workers: Workers, store: Path, sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunOf:
    """Returns the folder of a run of RUNS on two ranks, which saves what it has loaded."""
    folder = tmp_path_factory.mktemp("runs")

    def made(run: str) -> Path:
        way, kind = run.split("/")
        if not (sources / kind).exists():
            save_source(sources / kind)
        if not (folder / run).exists():
            workers.run(untouched, 2, store, [sources / kind], folder / way, WAYS[way])
        return folder / run

    return made


def contents(folder: Path) -> dict[str, torch.Tensor]:
    files = CheckpointFiles.open(str(folder))
    return {name: files.read(name) for name in files.files}


@pytest.mark.parametrize("run", slow_unless(lambda run: run in QUICK, RUNS))
def test_an_untouched_checkpoint_comes_out_bit_by_bit(
    tmp_path: Path, sources: Path, run_of: RunOf, run: str
) -> None:
    """Names and dtypes are those that transformers writes; other files of the source are
    unchanged."""
    folder, source = run_of(run), sources / Path(run).name
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    plain.save_pretrained(tmp_path / "theirs")
    assert re.search(
        r" in \d+ files$", export(folder, tmp_path / "ours", max_shard_bytes=20_000)
    ), "with a tokenizer"
    theirs, ours = contents(tmp_path / "theirs"), contents(tmp_path / "ours")
    assert {name: tensor.dtype for name, tensor in ours.items()} == {
        name: tensor.dtype for name, tensor in theirs.items()
    }
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        SECOND,
    ):
        assert (tmp_path / "ours" / name).read_bytes() == (source / name).read_bytes()
    extra = {file.name for file in (tmp_path / "ours").iterdir()} - {
        file.name for file in source.iterdir()
    }
    assert all(name.endswith(".safetensors") or name in (INDEX, LIST) for name in extra)
    assert not (tmp_path / "ours" / "trainer_state.json").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    tokens = torch.arange(40)[None] % 60
    assert torch.equal(again.eval()(tokens).logits, plain.eval()(tokens).logits)


def test_an_export_needs_no_source(tmp_path: Path, sources: Path, run_of: RunOf) -> None:
    """And converts to another dtype if requested."""
    native, by_transformers = run_of("native/qwen3"), run_of("transformers/qwen3")
    moved = sources.with_name("moved")
    sources.rename(moved)
    try:
        export(native, tmp_path / "native", dtype=torch.float32)
        export(by_transformers, tmp_path / "theirs", dtype=torch.float32)
    finally:
        moved.rename(sources)
    ours, theirs, source = (
        contents(tmp_path / "native"),
        contents(tmp_path / "theirs"),
        contents(sources / "qwen3"),
    )
    assert ours.keys() == theirs.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(ours[name], tensor.float()) and torch.equal(theirs[name], tensor.float())
    assert json.loads((tmp_path / "native/config.json").read_text())["dtype"] == "float32"


LENGTHENED = {
    "as it was": ([], 526, {"rope_type": "default", "rope_theta": 1e4}),
    "base": (["model.rope_theta=50000.0"], 526, {"rope_type": "default", "rope_theta": 5e4}),
    "factor": (
        ["model.rope_scaling.rope_type=linear", "model.rope_scaling.factor=2"],
        526,
        {"rope_type": "linear", "factor": 2.0},
    ),
    "adapters": (["lora.rank=4"], 526, {"rope_type": "default", "rope_theta": 1e4}),
    "enough": (
        ["model.rope_scaling.rope_type=linear", "model.rope_scaling.factor=32"],
        2048,
        {"rope_type": "linear", "factor": 32.0},
    ),
}
"""Settings with which documents of up to 526 tokens train a checkpoint for 64; length and RoPE of
the export."""


@pytest.mark.parametrize("case", LENGTHENED)
def test_an_export_is_as_long_as_what_was_trained(
    workers: Workers, store: Path, tmp_path: Path, case: str
) -> None:
    """Engines cut at the limits of config.json and of the tokenizer."""
    settings, length, rope = LENGTHENED[case]
    save_source(tmp_path / "llama", max_position_embeddings=64)
    (tmp_path / "llama/tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    workers.run(
        untouched,
        1,
        store,
        [tmp_path / "llama"],
        tmp_path / "runs",
        ["batch.tokens_per_rank=750", *settings],
    )
    if case == "adapters":
        said = export(tmp_path / "runs/llama", tmp_path / "adapters")
        assert (
            "the base ends at 64 tokens (max_position_embeddings), documents had up to 526: "
            "--merge writes 526" in said
        )
    done = export(tmp_path / "runs/llama", tmp_path / "out", merge=case == "adapters")
    raised = (
        r"max_position_embeddings (64|128) → 526, the longest document trained; "
        if length == 526
        else ""
    )
    assert re.search(rf" 1 file; {raised}model_max_length of the tokenizer → 526$", done)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (
        config.max_position_embeddings == length and rope.items() <= config.rope_parameters.items()
    )
    assert (
        json.loads((tmp_path / "out/tokenizer_config.json").read_text())["model_max_length"] == 526
    )


LLAMA3 = [
    "model.rope_scaling.rope_type=llama3",
    "model.rope_scaling.factor=2",
    "model.rope_scaling.original_max_position_embeddings=100",
]
NEW = {
    "llama3, pipeline": (2, [*LLAMA3, "parallel.pipeline_parallel_size=2"], "LlamaForCausalLM"),
    "ntk": (
        2,
        [
            "model.rope_scaling.rope_type=ntk",
            "model.rope_scaling.factor=2",
            "model.overrides.tie_word_embeddings=false",
        ],
        "LlamaForCausalLM",
    ),
    "qwen3": (
        2,
        [
            "model.overrides.qk_norm=true",
            "model.overrides.sliding_window=50",
            "model.overrides.full_attention_every=2",
        ],
        "Qwen3ForCausalLM",
    ),
    "qwen2, tensor parallel": (
        2,
        ["parallel.tensor_parallel_size=2", "model.overrides.qkv_bias=true"],
        "Qwen2ForCausalLM",
    ),
    "mixtral": (
        2,
        ["model.overrides.num_experts=4", "parallel.expert_parallel_size=2"],
        "MixtralForCausalLM",
    ),
}


@pytest.mark.parametrize(
    "name", slow_unless(lambda name: name in ("mixtral", "qwen2, tensor parallel"), NEW)
)
def test_new_weights_come_out_as_a_family_of_transformers(
    workers: Workers, store: Path, tmp_path: Path, name: str
) -> None:
    ranks, settings, architecture = NEW[name]
    workers.run(train_then_save, ranks, store, tmp_path / "run", ["train.steps=2", *settings], 2)
    done = export(tmp_path / "run", tmp_path / "out")
    assert (
        f"step 2 exported to {tmp_path / 'out'}: {architecture}, " in done and " in 1 file" in done
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    assert type(model).__name__ == architecture and model.dtype == torch.float32
    found, _ = checkpoint.newest(tmp_path / "run")
    assert found is not None
    ours = Decoder(ModelShape.model_validate(found.state["model"]))
    saved = SavedWeights(found.folder)
    for group in ours.groups():
        ours.load_state_dict(saved.read(group), strict=False)
    tokens = torch.randint(0, 257, (150,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(tokens, torch.arange(150), attention_of(ours, 150))
        torch.testing.assert_close(
            model.eval()(tokens[None]).logits[0], logits, rtol=1e-4, atol=1e-5
        )
    assert model.config.max_position_embeddings == 526, "the longest document trained"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.decode(tokenizer.encode("def f(x):\n    return x")) == "def f(x):\n    return x"
    )
    assert (
        tokenizer.eos_token_id
        == model.config.eos_token_id
        == model.generation_config.eos_token_id
        == 256
    )
    with torch.no_grad():
        assert model.generate(tokens[None, :20], max_new_tokens=3, do_sample=False).shape[1] <= 23


def test_a_shape_without_family_is_refused(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The end of the run says so too, instead of a command that fails."""
    settings = [*SMALL, f"data.store={store}", f"train.run_dir={tmp_path / 'run'}", "train.steps=2"]
    printed = train(
        capfd, [*settings, "model.overrides.qk_norm=true", "model.overrides.qkv_bias=true"]
    )
    assert re.search(
        r"  export       not possible: no supported family of .* \(qwen2 lacks qk_norm True\)",
        printed,
    )
    command = f"longctx export {Config().train.run_dir} OUT"
    assert how_to_export(Config()) == command
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert how_to_export(Config()) == command, "also where transformers is not installed"
    monkeypatch.undo()
    with pytest.raises(
        ValueError, match=r"no supported family of transformers .* \(qwen2 lacks qk_norm True\)"
    ):
        export(tmp_path / "run", tmp_path / "out")
    assert {file.name for file in tmp_path.iterdir()} == {"run"}


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    """Also of odd sizes and mixed dtypes, written in any order."""
    tensors = {
        "b": torch.randn(3, dtype=torch.bfloat16),
        "a": torch.randn(5, 2),
        "c.long": torch.arange(3),
        "scalar": torch.tensor(2.5, dtype=torch.float16),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    (tmp_path / "ours").mkdir()
    without_values = {name: tensor.to("meta") for name, tensor in tensors.items()}
    writer = CheckpointWriter(tmp_path / "ours", without_values, 10**6)
    for name in reversed(tensors):
        writer.write({name: tensors[name]})
    writer.close()
    ours = (tmp_path / "ours/model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()


def test_files_are_not_larger_than_requested(tmp_path: Path) -> None:
    """One tensor above the limit has a file of its own, the first."""
    planned = {
        f"t{n}": torch.empty(size, device="meta") for n, size in enumerate((10, 10, 30, 5, 4))
    }
    writer = CheckpointWriter(tmp_path, planned, max_shard_bytes=80)
    writer.write(
        {name: torch.full(tensor.shape, float(name[1])) for name, tensor in planned.items()}
    )
    writer.close()
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * 59
    files = [index["weight_map"][name] for name in planned]
    assert files == [f"model-0000{n}-of-00003.safetensors" for n in (2, 2, 1, 3, 3)], (
        "one above the limit has a file of its own"
    )
    assert all((tensor == int(name[1])).all() for name, tensor in contents_of(tmp_path).items())


def contents_of(folder: Path) -> dict[str, torch.Tensor]:
    (folder / "config.json").write_text("{}")
    return contents(folder)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("700", 700), ("2kb", 2000)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5 apples"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--max-shard-size is .*: must be a number with KB"):
        parse_size(text)


def test_the_errors_of_runs_that_cannot_be_exported(
    tmp_path: Path, run_of: RunOf, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    run = tmp_path / "run"
    shutil.copytree(run_of("native/llama"), run, symlinks=True)
    with pytest.raises(ExportError, match=r"run folder .* not found"):
        export(tmp_path / "nowhere", out)
    with pytest.raises(ExportError, match="is not a run folder: it has no checkpoints"):
        export(tmp_path, out)
    with pytest.raises(ExportError, match="is a transformers checkpoint already"):
        export(run_of("native/llama") / "model", out)
    with pytest.raises(
        ExportError,
        match="has no complete checkpoint of step 7: steps with complete checkpoints: 0",
    ):
        export(run, out, step=7)
    out.mkdir()
    (out / "config.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(ExportError, match=r"was not written by longctx .* and is not replaced"):
            export(run, out, overwrite=overwrite)
    (out / "config.json").unlink()
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    with pytest.raises(
        ExportError, match=r"has no complete checkpoint: set checkpoint.every and train again"
    ):
        export(tmp_path / "begun", out)
    assert main(["export", str(run), str(out), "--step", "0", "--max-shard-size", "30KB"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"step 0 exported to {out}: LlamaForCausalLM, 0.000 GB in ")
    assert said[1] == f"load with transformers: AutoModelForCausalLM.from_pretrained('{out}')"
    before = contents(out)
    assert main(["export", str(run), str(out)]) == 2
    assert (
        f"{out} exists: choose another folder, or replace it with longctx export --overwrite"
        in capsys.readouterr().err
    )
    assert main(["export", str(run), str(out), "--overwrite", "--dtype", "float32"]) == 0
    assert len(list(out.glob("*.safetensors"))) == 1 and contents(out).keys() == before.keys()
    with pytest.raises(
        CheckpointError, match=r"has no model\.wings: it is not a checkpoint of the whole model"
    ):
        SavedWeights(checkpoint.newest(run)[0].folder).read(["model.wings"])
    config = json.loads((run / "model/config.json").read_text())
    (run / "model/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(ExportError, match=r"does not match the model of .*config\.json"):
        export(run, tmp_path / "other")


def test_only_what_longctx_wrote_is_replaced(
    tmp_path: Path, run_of: RunOf, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of other people stay and are named; what they have changed, or put in the way, is
    refused and stays."""
    run, out = run_of("native/llama"), tmp_path / "out"
    export(run, out)
    (out / "notes.txt").write_text("mine")
    (out / "eval" / "nothing").mkdir(parents=True)
    (out / "eval" / "scores.json").write_text("{}")
    (out / "link").symlink_to(out / "eval")
    said = export(run, out, overwrite=True)
    assert said.endswith(
        "eval/nothing, eval/scores.json, link and 1 more: not written by longctx, left there"
    )
    assert (out / "notes.txt").read_text() == "mine" and (out / "eval" / "nothing").is_dir()
    assert (out / "eval" / "scores.json").is_file() and (out / "link").is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]
    config = out / "config.json"
    config.write_text(config.read_text().replace("llama", "mamba"))
    with pytest.raises(UserError, match=r"config\.json is not as longctx wrote it"):
        export(run, out, overwrite=True)
    assert "mamba" in config.read_text()


def test_files_in_the_way_of_an_export_stay(tmp_path: Path, run_of: RunOf) -> None:
    run, out = run_of("native/llama"), tmp_path / "out"
    export(run, out, max_shard_bytes=20_000)
    one = out / "model.safetensors"
    one.write_text("another model")
    with pytest.raises(UserError, match=r"model\.safetensors was not written by longctx"):
        export(run, out, overwrite=True)
    assert one.read_text() == "another model" and CheckpointFiles.open(str(out)).has_values
    one.unlink()
    beside = tmp_path / "out.partial"
    beside.mkdir()
    (beside / "thesis.tex").write_text("mine")
    with pytest.raises(ExportError, match=r"out\.partial.* was not written by longctx"):
        export(run, out, overwrite=True)
    assert (beside / "thesis.tex").read_text() == "mine"


def test_an_export_takes_an_empty_folder_or_a_link(tmp_path: Path, run_of: RunOf) -> None:
    run = run_of("native/llama")
    (tmp_path / "disk" / "out").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
    export(run, tmp_path / "out")
    export(run, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "out" / "config.json").is_file()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match="is not a folder"):
        export(run, tmp_path / "file", overwrite=True)


def test_the_base_of_a_run_is_never_replaced(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not even one that longctx has exported."""
    base, run = tmp_path / "base", tmp_path / "run"
    first = [*SMALL, f"data.store={store}", f"train.run_dir={tmp_path / 'first'}", "train.steps=1"]
    train(capfd, [*first, f"checkpoint.export={base}"])
    settings = [
        f"model.from_pretrained={base}",
        f"data.store={store}",
        f"train.run_dir={run}",
        "train.steps=1",
    ]
    settings += ["log.tensorboard=false", "batch.global_tokens=100"]
    refused = train(capfd, [*settings, f"checkpoint.export={base}"], status=2)
    assert "is the checkpoint that the run started from, and is not replaced" in refused
    train(capfd, settings)
    before = sorted((file.name, file.stat().st_mtime_ns) for file in base.iterdir())
    with pytest.raises(
        ExportError, match="is the checkpoint that the run started from, and is not replaced"
    ):
        export(run, base, overwrite=True)
    assert sorted((file.name, file.stat().st_mtime_ns) for file in base.iterdir()) == before


def test_a_run_that_fails_midway_leaves_nothing(
    tmp_path: Path, run_of: RunOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, tensors: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(CheckpointWriter, "write", fail)
    with pytest.raises(OSError, match="no space left"):
        export(run_of("native/llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_run_exports_at_its_end(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And prints where everything is; starting a finished run again does not change the export."""
    run, out = tmp_path / "run", tmp_path / "out"
    settings = [
        *SMALL,
        f"data.store={store}",
        f"train.run_dir={run}",
        f"checkpoint.export={out}",
        "train.steps=2",
    ]
    printed = train(capfd, settings)
    assert f"  checkpoint   {run / 'latest'}\n  metrics      {run / 'metrics.jsonl'}\n" in printed
    speeds = re.search(
        r"finished step 2; mean over the run: (\S+) tokens/s, (\S+) per rank, (\S+) s per step",
        printed,
    )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(step["step_time_s"] for step in steps)
    assert (
        speeds
        and speeds[1]
        == speeds[2]
        == f"{sum(step['tokens'] for step in steps) / seconds / 1000:.1f}k"
    )
    lines = printed.splitlines()[-2:]
    assert lines[0].startswith(f"step 2 exported to {out}: LlamaForCausalLM")
    assert "from_pretrained" in lines[1] and "from new weights" in printed
    transformers.AutoModelForCausalLM.from_pretrained(out)
    assert f"{out} exists and was not written again" in train(capfd, settings, "--resume")
    assert f"{out} exists" in train(capfd, settings, "--resume", "--train.steps", "3", status=2)
