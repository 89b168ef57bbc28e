"""Distillation on split documents: TRL's DistillationTrainer and GKDTrainer, and classes that extend
supported ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from trl import GRPOTrainer

from longctx.trainers import TrainerError, dynamic_context_parallel, restore
from longctx.trainers.budget import bytes_beside
from longctx.trainers.distillation import distilled
from longctx.trainers.families import AttentionOptions
from longctx.trainers.kinds import Traits, _trl_class, reads_models
from longctx.trainers.planned_call import PlannedCall
from longctx.trainers.refusals import _teacher_problems
from longctx.trainers.step import Planning, StepExchange
from tests.marks import slow_unless
from tests.trainer_cases import (
    LONGEST,
    PROFILE,
    TOKENS_PER_RANK,
    VOCABULARY,
    adapters,
    arguments,
    as_rank,
    model,
    report,
    select_fsdp_on_cpus,
    tokenizer,
)
from tests.trainers.test_trainers import FSDP2, as_trl, trainer
from tests.workers import Workers

TOLERANCES = {"loss": 1e-6, "entropy": 1e-6, "grad_norm": 2e-5}
CPU = torch.device("cpu")
ROWS = 12
"""Rows of a step."""


def prompts(seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of 2 to LONGEST - 20 tokens, half of which begin alike."""
    random = np.random.default_rng(seed)

    def words(number: int) -> list[str]:
        return [f"w{n}" for n in random.integers(0, VOCABULARY - 5, number)]

    beginning = words(23)
    rows = []
    for number in range(3 * ROWS):
        length = LONGEST - 20 if number % 7 == 0 else int(random.integers(2, 13))
        own = words(length)
        if number % 2:
            own = [*beginning, *own[:7]]
        rows.append({"prompt": " ".join(own)})
    return rows


def conversations() -> list[dict[str, Any]]:
    rows = []
    for number, row in enumerate(prompts()):
        answer = " ".join(f"w{(7 * number + 3 * k) % 90}" for k in range(1 + number % 11))
        turns = [("user", row["prompt"]), ("assistant", answer)]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return rows


def teacher(kind: str) -> Any:
    """A wider model that knows something else."""
    import transformers

    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 12,
        "max_position_embeddings": 128,
    }
    if kind == "gemma2":
        made: Any = transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**sizes, final_logit_softcapping=2.0, sliding_window=16)
        )
    else:
        made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    made.get_output_embeddings().weight.data *= 20
    return made


def completions_of(prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
    """Stands for sampling: completions that depend on prompts alone."""
    made = []
    for ids in prompt_ids:
        length = 1 + sum(ids) % 11
        made.append([10 + (sum(ids) + 7 * k * k) % 90 for k in range(length)])
    return made


def distil(folder: Path, kind: str, dynamic: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Trains with a trainer that distils; steps have the same rows on any number of ranks."""
    import datasets
    import trl
    from trl.experimental import gkd

    ranks, options = as_rank(), dict(options)
    if "fsdp" in options:
        select_fsdp_on_cpus()
    lora, of, taught_by = (
        options.pop("lora", False),
        options.pop("kind", "qwen2"),
        options.pop("teacher", "qwen2"),
    )
    budget = options.pop("budget", {"tokens_per_rank": TOKENS_PER_RANK if ranks > 1 else 120})
    evaluates = options.pop("evaluates", False)
    given = arguments(folder, ranks, 1, max_steps=3, eval_strategy="no", optim="sgd")
    given |= {"learning_rate": 0.1, "include_num_input_tokens_seen": "no", "max_grad_norm": 0.0}
    accumulation = options.get("gradient_accumulation_steps", 1)
    given["per_device_train_batch_size"] = ROWS // ranks // accumulation
    given["per_device_eval_batch_size"] = ROWS // ranks
    of_student = model(of)
    of_student.get_output_embeddings().weight.data *= 20
    if kind == "GKD":
        made: Any = gkd.GKDTrainer
        args: Any = gkd.GKDConfig(**{**given, "max_length": 128, "lmbda": 0.0, **options})
        data = conversations()
    else:
        del given["remove_unused_columns"]
        made = trl.DistillationTrainer
        args = trl.DistillationConfig(**{**given, "max_completion_length": 12, **options})
        data = prompts()
    ours = made(
        model=of_student,
        teacher_model=teacher(taught_by),
        args=args,
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(),
        peft_config=adapters(lora),
    )
    if kind == "GKD":
        ours.generate_on_policy_outputs = generated
    else:
        ours._generate_single_turn = completions_of
    if dynamic:
        dynamic_context_parallel(ours, profile=PROFILE, **budget)
    ours.train()
    evaluated = ours.evaluate(ours.train_dataset)["eval_loss"] if evaluates else 0.0
    found = report(ours) | {"evaluated": evaluated}
    if dynamic:
        restore(ours)
    return found


def generated(_: Any, inputs: Any, __: Any) -> Any:
    """Stands for sampling in GKD: two tokens after each prompt."""
    ids, mask = inputs["prompts"], inputs["prompt_attention_mask"]
    more = 10 + (ids * mask).sum(1, keepdim=True) % torch.tensor([[83, 79]])
    both = torch.cat([ids, more], 1)
    both_masks = torch.cat([mask, torch.ones_like(more)], 1)
    labels = torch.cat([torch.full_like(ids, -100), more], 1)
    return both, both_masks, labels


SHARDED = {
    **FSDP2,
    "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "reverse": ("Distillation", 2, {"evaluates": True}),
    "reverse on three": ("Distillation", 3, {}),
    "forward": ("Distillation", 1, {"beta": 0.0}),
    "between": ("Distillation", 2, {"beta": 0.3, "temperature": 0.7}),
    "bounded logits": ("Distillation", 2, {"beta": 0.5, "teacher": "gemma2"}),
    "adapters": ("Distillation", 2, {"beta": 0.5, "lora": True}),
    "sharded": ("Distillation", 2, {"beta": 0.5, **SHARDED}),
    "sharded, with adapters": ("Distillation", 3, {"lora": True, **SHARDED}),
    "recomputed": ("Distillation", 2, {"gradient_checkpointing": True}),
    "not recomputed": ("Distillation", 2, {"gradient_checkpointing": False}),
    "batches": ("Distillation", 2, {"gradient_accumulation_steps": 3}),
    "apart": (
        "Distillation",
        2,
        {"budget": {"tokens_per_rank": TOKENS_PER_RANK, "merge_prefixes": False}},
    ),
    "mixture": ("Distillation", 2, {"kind": "qwen3_moe"}),
    "GKD": ("GKD", 2, {"evaluates": True}),
    "GKD forward": ("GKD", 3, {"beta": 0.0}),
    "GKD reverse": ("GKD", 1, {"beta": 1.0}),
    "GKD with adapters": ("GKD", 2, {"lora": True}),
    "GKD sharded": ("GKD", 2, SHARDED),
    "GKD of own completions": ("GKD", 2, {"lmbda": 1.0}),
}
QUICK = ("sharded, with adapters", "GKD")


@pytest.mark.parametrize("case", slow_unless(lambda case: case in QUICK, CASES))
def test_distillation_is_that_of_plain_trl(workers: Workers, tmp_path: Path, case: str) -> None:
    """One process, with the rows of all. What TRL takes as a mean of means of ranks or batches is
    compared with as many ranks, and so is GKD, whose loss it divides by their number, too."""
    kind, ranks, options = CASES[case]
    plain_options = {
        name: value for name, value in options.items() if name not in ("budget", *FSDP2)
    }
    means_of_ranks = {"evaluates", "gradient_accumulation_steps"} & options.keys()
    alone = ranks if kind == "GKD" or means_of_ranks else 1
    theirs = workers.run(distil, alone, tmp_path / "plain", kind, False, plain_options)[0]
    ours = workers.run(distil, ranks, tmp_path / "ours", kind, True, options)
    assert ranks == 1 or max(ours[0]["degrees"]) > 1
    merges = options.get("budget", {}).get("merge_prefixes", True)
    assert (ours[0]["trees"] > 0) == merges
    assert ours[0]["micro_batches"] > 1
    for run in ours:
        assert run["evaluated"] == pytest.approx(theirs["evaluated"], rel=1e-6)
        for mine, plain_entry in zip(run["log"], theirs["log"], strict=True):
            for name in TOLERANCES.keys() & plain_entry.keys():
                assert mine[name] == pytest.approx(plain_entry[name], rel=TOLERANCES[name]), name
        for name, weight in theirs["weights"].items():
            assert float((run["weights"][name] - weight).abs().max()) < 2e-6, name
    first = dict(model(options.get("kind", "qwen2")).named_parameters())
    moved = [
        not torch.equal(weight, first.get(name))
        for name, weight in ours[0]["weights"].items()
        if name in first
    ]
    assert "lora" in options or any(moved)


# --- what is refused, and classes that extend supported ones


def distiller(folder: Path, **changes: Any) -> Any:
    """A trainer that TRL takes for one that distils."""
    ours = trainer(folder)
    as_trl("DistillationTrainer")(ours)
    ours.teacher_model = teacher("qwen2")
    for name, value in changes.items():
        setattr(ours, name, value)
    return ours


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_model": None}, "has no teacher_model, whose calls are planned with the student"),
        ({"compute_metrics": print}, "compute_metrics gets no logits of a divergence from a teac"),
    ],
)
def test_divergences_that_cannot_be_planned_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(
            distiller(tmp_path, **changes), tokens_per_rank=200, profile=PROFILE
        )


def test_weights_of_a_teacher_take_memory_of_a_gpu(tmp_path: Path) -> None:
    """On a CPU the free memory is what it leaves."""
    ours = distiller(tmp_path)
    sizes = []
    for device in ("cuda", "cpu"):
        args = SimpleNamespace(device=torch.device(device))
        traits: Any = SimpleNamespace(trainer=ours, args=args)
        sizes.append(bytes_beside(traits))
    assert sizes == [4 * sum(each.numel() for each in ours.teacher_model.parameters()), 0]


def test_images_beside_a_teacher_are_refused() -> None:
    ours = SimpleNamespace(teacher_model=1, compute_metrics=None)
    traits: Any = SimpleNamespace(trainer=ours, images=True, trl_class="DistillationTrainer")
    assert [*_teacher_problems(traits)] == [
        "student and teacher read images, whose divergence is not planned: use models of text"
    ]


@pytest.mark.parametrize(
    ("scale", "module", "message"),
    [
        (3.0, "torch", "logits of Qwen2ForCausalLM or its teacher are not those of their last hid"),
        (1.0, "peft.tuners", "head of the student has adapters, which a divergence from hidden"),
    ],
)
def test_heads_that_are_no_matrix_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float, module: str, message: str
) -> None:
    """TRL's `GKDTrainer` itself would compute them."""
    from trl.experimental.gkd import GKDTrainer

    ours = distiller(tmp_path, beta=0.5)
    ours.generalized_jsd_loss = GKDTrainer.generalized_jsd_loss
    head = ours.model.lm_head
    own = head.forward
    head.forward = lambda hidden: scale * own(hidden)
    monkeypatch.setattr(type(head), "__module__", module)
    traits: Any = Traits(ours, False)
    traits.trl_class = "GKDTrainer"
    exchange = StepExchange(Planning(PROFILE, 200), AttentionOptions(CPU))
    with pytest.raises(TrainerError, match=message):
        distilled(traits, PlannedCall(exchange))


def test_classes_that_read_no_more_than_those_they_extend_are_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.experimental.gmpo import GMPOTrainer
    from trl.experimental.gold import GOLDTrainer
    from trl.experimental.server_distillation import ServerDistillationTrainer

    assert not reads_models(GMPOTrainer)
    found = {}
    for kind in (GMPOTrainer, GOLDTrainer, ServerDistillationTrainer, ReadsLogits, CallsModel):
        ours = trainer(tmp_path)
        ours.__class__ = kind
        if kind in (ReadsLogits, CallsModel):
            assert issubclass(kind, GRPOTrainer)
            monkeypatch.setattr(kind, "__module__", "trl.experimental.more")
        found[kind.__name__] = _trl_class(ours)
    assert found.pop("GMPOTrainer") == "GRPOTrainer"
    assert all(name == supported for name, supported in found.items()) and len(found) == 4


class ReadsLogits(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return self.outputs_of(model, inputs).logits.sum()


class CallsModel(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return model(**inputs).loss
