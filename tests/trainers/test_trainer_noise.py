"""Dropout and NEFTune in trainers: plain training's with the same masks, and the same numbers
however documents are split."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch

from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.trainers import dynamic_context_parallel, restore
from longctx.trainers.documents import Document
from longctx.trainers.noise import Noise
from longctx.trainers.planned_call import PlannedCall
from tests.trainer_cases import LONGEST, PROFILE, finetune, model, prefer
from tests.trainers.test_trainers import assert_equal, trainer
from tests.workers import Workers

ALPHA = 40.0
SETTINGS = {"lora": 0.3, "neftune_noise_alpha": ALPHA, "num_train_epochs": 1}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"gradient_checkpointing": True}),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(2, {"padding_free": True, "eval_strategy": "no"}, marks=pytest.mark.slow),
    ],
    ids=["recomputed", "three ranks", "packed"],
)
def test_numbers_do_not_depend_on_how_documents_are_split(
    workers: Workers, tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    (one,) = workers.run(finetune, 1, tmp_path / "one", 1, True, SETTINGS | options)
    runs = workers.run(finetune, ranks, tmp_path / "split", 1, True, SETTINGS | options)
    assert max(runs[0]["degrees"]) >= 2
    assert_equal(runs, one)
    (without,) = workers.run(
        finetune,
        1,
        tmp_path / "without",
        1,
        True,
        {"lora": True, "max_steps": 1, "eval_strategy": "no"},
    )
    assert abs(without["log"][0]["loss"] - one["log"][0]["loss"]) > 1e-4


def test_plain_training_with_the_same_masks_and_noise(tmp_path: Path) -> None:
    """Loss and gradients of packed documents are those of plain transformers that takes them one by
    one."""
    lengths = (30, 7, 19)
    adapters = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.4, init_lora_weights=False
    )
    made = peft.get_peft_model(model(), adapters)
    plain = copy.deepcopy(made).train()
    ours = trainer(tmp_path, of=made, neftune_noise_alpha=ALPHA)
    dynamic_context_parallel(ours, tokens_per_rank=100, profile=PROFILE)
    assert ours.neftune_noise_alpha is None
    embedding, masks, noises = made.get_input_embeddings(), {}, []
    embedding.register_forward_hook(
        lambda _, ids, output: noises.append(output - embedding.weight[ids[0]])
    )
    for name, module in made.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(
                lambda _, given, output, name=name: masks.update({name: output[0] != 0})
            )
    random = np.random.default_rng(0)
    ids = [random.integers(0, 128, length) for length in lengths]
    step = ours.dynamic.plan_and_exchange(
        [[Document(each, np.append(each[1:], -100)) for each in ids]]
    )
    (batch,) = step.micro_batches
    loss = made.train()(**ours.dynamic.inputs(made, batch)).loss
    loss.backward()
    expected = torch.zeros(())
    assert (
        0.5
        < torch.stack(
            [mask.double().mean() for mask in masks.values() if mask.shape[1] == 32]
        ).mean()
        < 0.7
    )
    for shard in batch.layout.shards:
        rows, document = (
            slice(shard.offset, shard.offset + shard.tokens),
            torch.from_numpy(ids[shard.document]),
        )
        noise, largest = noises[0][0, rows], ALPHA / (shard.length * 32) ** 0.5
        assert noise.abs().max() <= largest and noise.std() == pytest.approx(
            largest / 3**0.5, rel=0.1
        )
        hooks = [
            plain.get_input_embeddings().register_forward_hook(
                lambda _, __, output, noise=noise: output + noise
            )
        ]
        for name, module in plain.named_modules():
            if name in masks:
                given = masks[name][rows] / (1 - module.p)
                hooks.append(
                    module.register_forward_hook(
                        lambda _, inputs, output, given=given: inputs[0] * given
                    )
                )
        own = (
            plain(input_ids=document[None], labels=document[None]).loss
            * (len(document) - 1)
            / step.targets
        )
        own.backward()
        expected = expected + own.detach()
        for hook in hooks:
            hook.remove()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = {
        name: each.grad for name, each in plain.named_parameters() if each.grad is not None
    }
    assert gradients
    for name, each in made.named_parameters():
        if name in gradients:
            torch.testing.assert_close(each.grad, gradients[name], rtol=1e-4, atol=1e-5)
    restore(ours)
    assert ours.neftune_noise_alpha == ALPHA and "forward" not in vars(embedding)


def test_trainers_of_sequences_compute_parts_again_with_the_same_masks(
    workers: Workers, tmp_path: Path
) -> None:
    """Whole micro-batches, or layers of one whose graph is kept, after other calls of the model."""
    options = {"lora": 0.3, "disable_dropout": False, "gradient_checkpointing": True}
    budgets = [{"tokens_per_rank": 200}, {"tokens_per_rank": 8 * LONGEST}]
    logs = []
    for number, budget in enumerate(budgets):
        (run,) = workers.run(
            prefer, 1, tmp_path / str(number), "KTO", True, options | {"budget": budget}
        )
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in run["log"][:-1]])
    assert len(logs[0]) == 3
    assert logs[0] == [pytest.approx(each, rel=1e-5) for each in logs[1]]


def test_layers_are_computed_again_with_the_masks_of_their_own_call(tmp_path: Path) -> None:
    """Of two calls of a model before backward, the first one is not given the masks of the
    second."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 128, 20)
    document = Document(ids, np.append(ids[1:], -100))
    mask = torch.ones(1, len(ids))
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        adapters = peft.LoraConfig(r=4, lora_dropout=0.5, init_lora_weights=False)
        made = peft.get_peft_model(model(), adapters).train()
        if recomputed:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        ours = trainer(tmp_path, of=made)
        dynamic_context_parallel(ours, tokens_per_rank=100, profile=PROFILE)
        planned = PlannedCall(ours.dynamic)

        def compute(batch: Any, call: int, made: Any = made, ours: Any = ours) -> torch.Tensor:
            logits: torch.Tensor = made(**ours.dynamic.inputs(made, batch, call)).logits[0]
            return logits

        first, second = (planned.values_of(lambda: [document], mask, compute) for _ in range(2))
        assert not torch.allclose(first, second), "calls have masks of their own"
        first.square().sum().backward()
        found = [weight.grad for weight in made.parameters() if weight.grad is not None]
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
        restore(ours)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def test_evaluations_make_no_numbers() -> None:
    layout = SimpleNamespace(tokens=4, shards=())
    state = SimpleNamespace(global_step=3)
    args = SimpleNamespace(seed=1, device=torch.device("cpu"))
    evaluated = SimpleNamespace(training=False)
    noise = Noise(SimpleNamespace(args=args, state=state, model=evaluated))
    noise.begin(SimpleNamespace(layout=layout), 0)
    assert noise.rows.shape == (2, 0)
    evaluated.training = True
    noise.begin(SimpleNamespace(layout=layout), 0)
    assert noise.rows.shape == (2, 4)


@pytest.mark.parametrize("probability", [0.3, 0.7])
def test_as_many_numbers_are_dropped_as_asked(probability: float) -> None:
    """By the numbers of tokens, never by torch's generator."""
    noise: Any = Noise.__new__(Noise)
    noise.rows = torch.stack([torch.arange(1, 401) * 0x9E3779B97F4A7C15 % 2**62, torch.ones(400)])
    noise.rows = noise.rows.long()
    dropped = noise._dropped(3, None, torch.nn.Dropout(probability), torch.ones(400, 50))
    share = float((dropped == 0).double().mean())
    assert abs(share - probability) < 0.02
    assert dropped.max() == pytest.approx(1 / (1 - probability))


def test_numbers_are_uniform_and_independent() -> None:
    lengths, seen = [3000, 1000, 96], []
    args = SimpleNamespace(seed=1, device=torch.device("cpu"))
    for ranks in (1, 4):
        plan = make_plan(
            lengths,
            ranks=ranks,
            tokens_per_rank=4096 // ranks,
            profile=HardwareProfile.load("cpu-2core"),
        )
        whole = torch.zeros(2, 4096, 512, dtype=torch.int32)
        for rank in range(ranks):
            for number in range(len(plan.micro_batches)):
                layout = plan.layout(number, rank)
                state = SimpleNamespace(global_step=3)
                trained = SimpleNamespace(training=True)
                noise = Noise(SimpleNamespace(args=args, state=state, model=trained))
                noise.begin(SimpleNamespace(layout=layout), 0)
                starts = [0, 3000, 4000]
                for salt in (0, 1):
                    numbers = noise._numbers(
                        2 * salt + 12345677, torch.zeros(1, max(1, layout.tokens), 512)
                    )
                    for shard in layout.shards:
                        places = (
                            np.r_[slice(*shard.head), slice(*shard.tail)] + starts[shard.document]
                        )
                        whole[salt, places] = numbers[0, shard.offset : shard.offset + shard.tokens]
        seen.append(whole)
    assert torch.equal(*seen)
    values = seen[0].double() / 2**31
    assert abs(values.mean()) < 2e-3 and abs(values.var() - 1 / 3) < 2e-3
    dropped = ((values < -0.8).double() - 0.1) / 0.3
    for axis in (1, 2):  # the sum over independent numbers has their variance
        assert dropped.sum(axis).var() / values.shape[axis] == pytest.approx(1, abs=0.1)
    assert (
        abs((dropped[0] * dropped[1]).mean()) < 4e-3
        and abs((dropped[:, 1:] * dropped[:, :-1]).mean()) < 4e-3
    )
