"""A process that lives on, such as a notebook's: runs, evaluations and exports one after the other,
also after errors.

Nothing of one is left for the next: no group, thread, handler of signals, or model of a folder that
has changed since.
"""

import json
import math
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import longctx
from longctx.cli import main
from longctx.config import load
from longctx.errors import UserError
from longctx.hf.attention import model_inputs
from longctx.hf.attention import prepare as prepare_model
from longctx.hf.linear_costs import linear_costs
from longctx.training.saved.export import export
from longctx.training.stop_signal import StopSignal
from longctx.training.trainer import Trainer
from tests.huggingface_cases import build_model
from tests.marks import slow_unless
from tests.training_cases import SMALL


def settings_of(store: Path, run: Path, *more: str) -> list[str]:
    return [
        *SMALL,
        f"data.store={store}",
        f"train.run_dir={run}",
        "train.steps=2",
        "checkpoint.every=2",
        *more,
    ]


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def nothing_is_left() -> Callable[[], None]:
    """Returns a check that no group and no new thread is left, and that handlers of signals are as
    they are now.

    Threads of tests before this one may end in the meantime.
    """
    threads, handlers = set(threading.enumerate()), handlers_now()

    def check() -> None:
        assert not dist.is_initialized()
        assert set(threading.enumerate()) <= threads
        assert handlers_now() == handlers

    return check


def handlers_now() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


ERRORS: dict[str, tuple[BaseException, int | None]] = {
    "a peer is gone": (RuntimeError("a peer is gone"), 1),
    "no space left": (OSError("no space left"), 2),
    "a document cannot be read": (UserError("a document cannot be read"), 2),
    "interrupted": (KeyboardInterrupt(), None),
    "a bug": (ZeroDivisionError("a bug"), None),
}
"""Errors after the processes have joined, and the exit status; None: the error is raised."""


@pytest.mark.parametrize("where", ["_queue", pytest.param("save", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", slow_unless(lambda name: name in ("a peer is gone", "interrupted"), ERRORS)
)
def test_a_run_after_one_that_failed(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    error, status = ERRORS[name]
    check = nothing_is_left()
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, where, failing(error))
        config = load(None, settings_of(store, tmp_path / "failed"))
        if status is None:
            with pytest.raises(type(error)):
                longctx.train(config)
        else:
            assert longctx.train(config) == status
    check()
    assert longctx.train(load(None, settings_of(store, tmp_path / "run"))) == 0
    check()


@pytest.mark.slow
def test_a_run_that_is_not_finite_leaves_nothing(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check = nothing_is_left()
    diverging = settings_of(
        store, tmp_path / "run", "optimizer.learning_rate=1e30", "train.steps=8"
    )
    assert longctx.train(load(None, [*diverging, "optimizer.warmup_steps=0"])) == 2
    assert "gradient norm is nan" in capfd.readouterr().err
    check()


def test_runs_evaluations_and_exports_one_after_the_other(store: Path, tmp_path: Path) -> None:
    """The second run is the first one again, bit by bit."""
    check = nothing_is_left()
    runs = [tmp_path / name for name in ("one", "two")]
    for run in runs:
        assert longctx.train(load(None, settings_of(store, run))) == 0
        check()
        assert main(["eval", str(run), "--store", str(store), "--documents", "2"]) == 0
        check()
        export(run, run / "export")
        check()
    assert losses_of(runs[0]) == losses_of(runs[1])
    assert main(["eval", str(runs[0]), "--store", str(tmp_path)]) == 2
    check()
    settings = [f"--{setting}" for setting in settings_of(store, runs[0])]
    assert (
        main(["measure", *settings, "--modes", "auto,static:1", "--steps", "1", "--warmup", "0"])
        == 0
    )
    check()


def test_a_group_of_somebody_else_is_refused_and_kept(store: Path, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="has a process group already"):
            longctx.train(load(None, settings_of(store, tmp_path / "run")))
        assert main(["eval", str(tmp_path / "run"), "--store", str(store)]) == 2
        assert dist.is_initialized(), "it is not ours to end"
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_run_in_a_thread(store: Path, tmp_path: Path) -> None:
    """Python lets only the main thread handle signals."""
    statuses: list[int] = []
    config = load(None, settings_of(store, tmp_path / "run"))
    thread = threading.Thread(target=lambda: statuses.append(longctx.train(config)))
    thread.start()
    thread.join(120)
    assert statuses == [0]


def test_signals_do_what_they_did_before() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        with StopSignal.installed(interrupts=True) as stop:
            signal.raise_signal(signal.SIGTERM)
        assert stop.received and received == []
        signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def trained_from(base: Path, store: Path, run: Path, *more: str) -> float:
    """Returns the first loss of a run from a checkpoint."""
    start = [
        f"model.from_pretrained={base}",
        f"data.store={store}",
        f"train.run_dir={run}",
        "data.max_length=1500",
    ]
    more = ("train.steps=1", "batch.global_tokens=4000", "log.tensorboard=false", *more)
    assert longctx.train(load(None, [*start, *more])) == 0
    return losses_of(run)[0]


@pytest.mark.parametrize("way", slow_unless(lambda way: False, ["transformers", "native", "lora"]))
def test_a_checkpoint_that_has_changed_is_read_again(store: Path, tmp_path: Path, way: str) -> None:
    """As a new process does: RoPE edited in config.json, then other weights under the same names
    and sizes."""
    base = tmp_path / "base"
    model = build_model("llama", "eager", vocab_size=300)
    model.save_pretrained(base)
    chosen = {"lora": ["lora.rank=2"], "native": ["model.implementation=native"]}.get(way, [])
    losses = [trained_from(base, store, tmp_path / "a", *chosen)]
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 100
    (base / "config.json").write_text(json.dumps(config))
    losses.append(trained_from(base, store, tmp_path / "b", *chosen))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3)
    model.config.rope_parameters = config["rope_parameters"]
    model.save_pretrained(base)
    losses.append(trained_from(base, store, tmp_path / "c", *chosen))
    assert len(set(losses)) == 3
    other = tmp_path / "other"
    transformers.AutoModelForCausalLM.from_pretrained(base).save_pretrained(other)
    assert math.isclose(
        trained_from(other, store, tmp_path / "d", *chosen), losses[2], rel_tol=1e-6
    )


def test_costs_of_linear_layers_with_weights_of_the_same_shapes() -> None:
    """Heads twice as many and half as wide take other time: shapes of weights do not tell."""
    costs = []
    for heads, size in ((2, 16), (4, 8)):
        config = transformers.Qwen3NextConfig(
            hidden_size=32,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=heads,
            linear_key_head_dim=size,
            linear_num_value_heads=4,
            linear_value_head_dim=8,
            intermediate_size=32,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
        )
        module = transformers.models.qwen3_next.modeling_qwen3_next
        layer = module.Qwen3NextGatedDeltaNet(config, 0)
        costs.append(linear_costs(layer, type(layer), 32))
    assert costs[0] != costs[1]


def test_a_forward_that_is_interrupted_leaves_other_models_their_packing() -> None:
    """Torch calls no hook after Ctrl-C: every other packed model of the process mixed its documents
    from then on."""
    prepared = build_model("llama", "eager")
    plain = build_model("llama", "sdpa")
    plain.load_state_dict(prepared.state_dict())
    prepare_model(prepared)
    plan = longctx.make_plan(
        [5, 7], ranks=1, tokens_per_rank=64, profile=longctx.HardwareProfile.load("cpu-2core")
    )
    (batch,), _ = longctx.pack_documents(plan, 0, [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]])
    inputs = model_inputs(prepared, batch)
    row = {
        "input_ids": inputs["input_ids"],
        "position_ids": inputs["position_ids"],
        "use_cache": False,
    }
    with torch.no_grad():
        wanted = plain(**row).logits
        assert (prepared(**inputs).logits - wanted).abs().max() < 1e-5
        ending = prepared.model.layers[0].register_forward_pre_hook(failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            prepared(**inputs)
        ending.remove()
        assert torch.equal(plain(**row).logits, wanted)
        assert (prepared(**inputs).logits - wanted).abs().max() < 1e-5
