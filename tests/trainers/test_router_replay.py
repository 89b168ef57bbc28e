"""Router replay in GRPO and RLOO: experts that computed the old log-probabilities, or that a rollout
brings, are used under any split."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from longctx.trainers import TrainerError, dynamic_context_parallel, restore
from longctx.trainers.expert_replay import RouterReplay
from longctx.trainers.planned_call import KeysOfTokens
from longctx.trainers.rollout_experts import experts_of_rollout, notes_on_replay
from longctx.trainers.rollout_experts import replay_of as replay_for
from longctx.trainers.step import Planning
from tests.marks import slow_unless
from tests.trainer_cases import (
    PROFILE,
    TOKENS_PER_RANK,
    VOCABULARY,
    as_rank,
    model,
    play_with_experts,
    prefer,
    preferences,
    tokenizer,
)
from tests.trainers.test_trainers import FSDP2, trainer
from tests.workers import Workers

ROUTERS, TOP_K, EXPERTS = 2, 2, 4
SPLITS = 24


class ByHand:
    """Replays the routers of a Qwen3 mixture without longctx, in rows as they are.

    Attributes:
        experts: those of the tokens of the next call [rows * tokens, routers, top_k], -1 where
            routers choose; None: they choose everywhere.
        chosen: those of the last call, by router.
    """

    def __init__(self, mixture: Any) -> None:
        self.experts: torch.Tensor | None = None
        self.chosen: dict[int, torch.Tensor] = {}
        inside = getattr(mixture, "get_base_model", lambda: mixture)()  # adapters
        for number, layer in enumerate(inside.model.layers):
            layer.mlp.gate.forward = partial(self._route, number, layer.mlp.gate)

    def _route(self, number: int, gate: Any, hidden: torch.Tensor) -> Any:
        logits = F.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        shares = logits.float().softmax(-1)
        chosen = shares.topk(TOP_K).indices
        if self.experts is not None:
            given = self.experts[:, number]
            chosen = torch.where(given < 0, chosen, given)
        self.chosen[number] = chosen
        weights = shares.gather(1, chosen)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen


def replayed_plainly(mode: str, trainer: Any) -> None:
    """Makes plain GRPO or RLOO replay routers, whose experts it knows by the tokens of a row."""
    by_hand, book, state = ByHand(trainer.model), {}, {"scores": False}
    score, values = (
        trainer._generate_and_score_completions,
        trainer._get_per_token_logps_and_entropies,
    )

    def scoring(inputs: Any) -> Any:
        state["scores"], by_hand.experts = True, None
        output = score(inputs)
        state["scores"] = False
        return output

    def values_of(of: Any, ids: torch.Tensor, mask: torch.Tensor, *given: Any, **named: Any) -> Any:
        off = any(getattr(part, "_disable_adapters", False) for part in of.modules())
        if state["scores"] and (of is not trainer.model or off):
            return values(of, ids, mask, *given, **named)
        known = torch.full((*ids.shape, ROUTERS, TOP_K), -1)
        names = [tuple(row[kept.bool()].tolist()) for row, kept in zip(ids, mask, strict=True)]
        if mode == "R3" or not state["scores"]:
            for row, name in enumerate(names):
                known[row, mask[row].bool()] = book[name]
            by_hand.experts = known.flatten(0, 1)  # kept: layers are recomputed in backward
            return values(of, ids, mask, *given, **named)
        batches = []
        hook = trainer.model.register_forward_hook(
            lambda *_: batches.append(torch.stack([by_hand.chosen[0], by_hand.chosen[1]], 1))
        )
        found = values(of, ids, mask, *given, **named)
        hook.remove()
        chosen = torch.cat(batches).view(*ids.shape, ROUTERS, TOP_K)
        for row, name in enumerate(names):
            book[name] = chosen[row, mask[row].bool()]
        return found

    def rollout(prompts: Any, this: Any) -> Any:
        output = play_with_experts(prompts, this)
        rows = zip(*(output.pop("routed_experts"), output["prompt_ids"]), strict=True)
        for (experts, prompt), completion in zip(rows, output["completion_ids"], strict=True):
            last = np.full((1, ROUTERS, TOP_K), -1)
            book[(*prompt, *completion)] = torch.from_numpy(np.concatenate([experts, last]))
        return output

    trainer._generate_and_score_completions = scoring
    trainer._get_per_token_logps_and_entropies = values_of
    if mode == "R3":
        trainer.rollout_func = rollout


AGAIN = {"num_iterations": 2, "beta": 0.04, "learning_rate": 2.0}
"""Completions are trained twice, with steps that change which experts routers choose."""
CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "old policy": ("GRPO", 2, "R2", AGAIN),
    "old policy, on three": ("GRPO", 3, "R2", AGAIN),
    "old policy, apart": ("GRPO", 2, "R2", {**AGAIN, "budget": {"merge_prefixes": False}}),
    "old policy, recomputed": ("GRPO", 2, "R2", {**AGAIN, "gradient_checkpointing": True}),
    "old policy, sharded": (
        "GRPO",
        2,
        "R2",
        {
            **AGAIN,
            **FSDP2,
            "fsdp_config": {
                "fsdp_version": 2,
                "transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"],
            },
        },
    ),
    "old policy of RLOO": (
        "RLOO",
        2,
        "R2",
        {**AGAIN, "num_generations": 4, "steps_per_generation": 2},
    ),
    "old policy with adapters": ("GRPO", 2, "R2", {**AGAIN, "lora": True, "learning_rate": 50.0}),
    "old policy with an engine": ("GRPO", 2, "R2", {**AGAIN, "use_vllm": True}),
    "rollout": ("GRPO", 2, "R3", {"agent": play_with_experts, "beta": 0.04}),
    "rollout, trained twice": ("GRPO", 3, "R3", {**AGAIN, "agent": play_with_experts}),
    "rollout, recomputed": (
        "GRPO",
        1,
        "R3",
        {"agent": play_with_experts, "gradient_checkpointing": True},
    ),
}
QUICK = ("old policy with adapters",)


@pytest.mark.parametrize("case", slow_unless(lambda case: case in QUICK, CASES))
def test_training_is_that_of_a_plain_replay(workers: Workers, tmp_path: Path, case: str) -> None:
    kind, ranks, mode, options = CASES[case]
    options = {"kind": "qwen3_moe", "router_aux_loss_coef": 0.0, **options}
    budget = {"tokens_per_rank": TOKENS_PER_RANK if ranks > 1 else 120, **options.pop("budget", {})}
    plain_options = {name: value for name, value in options.items() if name not in FSDP2} | {
        "changes": partial(replayed_plainly, mode)
    }
    theirs = workers.run(prefer, ranks, tmp_path / "plain", kind, False, plain_options)
    replaying = options | {"budget": {**budget, "router_replay": mode}}
    ours = workers.run(prefer, ranks, tmp_path / "ours", kind, True, replaying)
    for run, expected in zip(ours, theirs, strict=True):
        assert far(run, expected) < 5e-6
        for mine, plain_entry in zip(run["log"][:-1], expected["log"][:-1], strict=True):
            for name in ("loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean"):
                if name in plain_entry:
                    assert mine[name] == pytest.approx(plain_entry[name], rel=1e-5, abs=1e-6), name
    assert ranks == 1 or max(ours[0]["degrees"]) > 1
    assert ours[0]["trees"] > 0 or not budget.get("merge_prefixes", True)
    choosing = options | {"budget": budget}
    without = workers.run(prefer, ranks, tmp_path / "without", kind, True, choosing)
    assert far(without[0], theirs[0]) > 2e-5, "replay changes nothing that is compared"


def far(run: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of weights."""
    return max(
        float((run["weights"][name] - weight).abs().max())
        for name, weight in expected["weights"].items()
    )


def replayer(folder: Path, replaying: bool = True, **budget: Any) -> Any:
    """A GRPO trainer of a mixture, with router replay."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    mixture = model("qwen3_moe")
    mixture.config.output_router_logits = False
    made = GRPOTrainer(
        mixture,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder),
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=16,
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=datasets.Dataset.from_list(preferences("GRPO")),
        processing_class=tokenizer(),
    )
    budget = {"tokens_per_rank": TOKENS_PER_RANK, "router_replay": "R2", **budget}
    if replaying:
        dynamic_context_parallel(made, profile=PROFILE, **budget)
    return made


def drawn(random: np.random.Generator) -> tuple[list[int], np.ndarray]:
    """Tokens of a row, and experts of each; some are the router's own."""
    length = int(random.choice([1, 2, 3, 7, 13, 31, 40]))
    ids = random.integers(0, VOCABULARY, length)
    first = random.integers(0, EXPERTS, (length, ROUTERS))
    experts = np.stack([first, (first + random.integers(1, EXPERTS, first.shape)) % EXPERTS], -1)
    experts[random.random(length) < 0.1] = -1
    return ids.tolist(), experts


def batch_of(rows: list[tuple[list[int], np.ndarray]], on_left: int) -> tuple[torch.Tensor, ...]:
    """Token ids, mask and experts of rows, padded; `on_left` columns of padding come first."""
    longest = on_left + max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    experts = torch.full((*ids.shape, ROUTERS * TOP_K), -1)
    for row, (tokens, chosen) in enumerate(rows):
        span = slice(on_left, on_left + len(tokens))
        ids[row, span], mask[row, span] = torch.tensor(tokens), 1
        experts[row, span] = torch.from_numpy(chosen).flatten(1)
    return ids, mask, experts


def splits(folder: Path, seeds: list[int]) -> list[dict[str, float]]:
    """Errors of replayed calls under random splits, against rows one by one without longctx."""
    ranks = as_rank()
    rank = dist.get_rank()
    ours = {merges: replayer(folder, merge_prefixes=merges) for merges in (True, False)}
    plain = model("qwen3_moe")
    plain.config.output_router_logits = False
    by_hand = ByHand(plain)
    errors = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        made = ours[bool(seed % 2)]
        prompt = drawn(random)
        mine: list[tuple[list[int], np.ndarray]] = []
        for holder in range(ranks):
            for number in range(int(random.integers(1, 5))):
                ids, experts = drawn(random)
                if number % 2:
                    ids = [*prompt[0], *ids]
                    experts = np.concatenate([prompt[1], experts])
                if holder == rank:
                    mine.append((ids, experts))
        degree = int(random.integers(1, ranks + 1))
        free = seed % 3 == 0
        made.dynamic.planning = Planning(
            PROFILE,
            int(random.integers(82, 200)),
            mode="auto" if free else "static",
            degree=None if free else degree,
        )
        (
            made.model.gradient_checkpointing_enable
            if seed % 4 == 0
            else made.model.gradient_checkpointing_disable
        )()
        made.model.train()
        replay = made.dynamic.riders[-1]
        ids, mask, experts = batch_of(mine, on_left=seed % 3)
        seen: list[bool] = []
        hooks = [
            layer.mlp.experts.register_forward_pre_hook(
                partial(are_chosen, replay, number=number, seen=seen)
            )
            for number, layer in enumerate(made.model.model.layers)
        ]
        replay.given, replay.kept = experts.to(torch.int16), []
        made.model.zero_grad()
        found, *_ = made._get_per_token_logps_and_entropies(made.model, ids, mask, ids.shape[1] - 1)
        for hook in hooks:
            hook.remove()
        kept = replay.kept[0].long()
        replay.given = replay.kept = None
        weights = torch.from_numpy(random.normal(size=(8, 200))).float()[
            : len(ids), : found.shape[1]
        ]
        (found * weights).sum().backward()
        replay.begin_with(None)
        plain.zero_grad()
        expected = torch.zeros_like(found)
        chosen = torch.full_like(experts, -1)
        for row, (tokens, given) in enumerate(mine):
            by_hand.experts = torch.from_numpy(given)
            logits = plain(torch.tensor([tokens])).logits[0, :-1]
            likelihoods = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
            at = mask[row].nonzero()[:, 0]
            expected = expected.index_put((torch.tensor(row), at[1:] - 1), likelihoods)
            chosen[row, at] = torch.stack([by_hand.chosen[0], by_hand.chosen[1]], 1).flatten(1)
        (expected * weights).sum().backward()
        errors.append(
            {
                "values": largest(found - expected),
                "experts": float((kept != chosen)[mask.bool()].sum()),
                "seen": float(not all(seen) or not seen),
                "gradients": gradient_error(made.model, plain),
                "degree": max(made.dynamic.plans[-1].degrees),
                "trees": len(made.dynamic.plans[-1].trees),
                "micro_batches": len(made.dynamic.plans[-1].micro_batches),
            }
        )
    for made in ours.values():
        restore(made)
    return errors


def largest(values: torch.Tensor) -> float:
    """The largest of absolute values; rows of one token have none."""
    return float(values.abs().max()) if values.numel() else 0.0


def are_chosen(replay: Any, _: Any, given: Any, *, number: int, seen: list[bool]) -> None:
    """Notes whether the experts that compute are those that a router says it has chosen."""
    seen.append(torch.equal(given[1], replay.chosen[number]))


def gradient_error(ours: Any, plain: Any) -> float:
    """The difference of gradients, summed over ranks, by the norm of those of the plain model."""
    difference, norm = torch.zeros(()), torch.zeros(())
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        both = torch.stack(
            [torch.zeros_like(each) if each.grad is None else each.grad for each in (mine, theirs)]
        )
        dist.all_reduce(both)
        difference += (both[0] - both[1]).square().sum()
        norm += both[1].square().sum()
    return float((difference / norm).sqrt()) if difference else 0.0


@pytest.mark.parametrize("ranks", slow_unless(lambda ranks: ranks == 2, [1, 2, 3]))
def test_experts_are_those_given_under_any_split(
    workers: Workers, tmp_path: Path, ranks: int
) -> None:
    seeds = list(range(SPLITS * ranks, SPLITS * (ranks + 1)))
    found = workers.run(splits, ranks, tmp_path, seeds, timeout_s=200)
    for errors in found:
        assert len(errors) == SPLITS
        for each in errors:
            assert each["experts"] == each["seen"] == 0, each
            assert each["values"] < 1e-5 and each["gradients"] < 1e-5, each
    assert ranks == 1 or {each["degree"] for each in found[0]} >= set(range(1, ranks + 1))
    assert any(each["trees"] for each in found[0])
    assert ranks == 1 or any(each["micro_batches"] > 1 for each in found[0])


def test_prefixes_are_shared_where_tokens_and_experts_are_equal() -> None:
    rows = [np.array([5, 6, 7]), np.array([5, 6, 8]), np.array([5])]
    numbers = torch.tensor([[0, 1], [2, 3], [0, 1], [0, 1], [3, 2], [0, 1], [0, 1]]).int()
    keys = KeysOfTokens(rows, numbers)
    first, second, third = keys.by_row
    assert first[0] == second[0] == third[0] and first[1] != second[1] and first[2] != second[2]
    everything = np.concatenate(keys.by_row)
    assert keys.tokens_of(everything).tolist() == np.concatenate(rows).tolist()
    assert torch.equal(keys.numbers_of(everything), numbers)


# --- what is refused


def traits_of(of: Any, **more: Any) -> Any:
    args = SimpleNamespace(device=torch.device("cpu"), gradient_accumulation_steps=1, **more)
    trainer = SimpleNamespace(_generate_and_score_completions=None, rollout_func=print)
    return SimpleNamespace(trainer=trainer, kind="token_values", model=of, args=args)


def traits_of_rloo() -> Any:
    traits = traits_of(None)
    del traits.trainer.rollout_func
    return traits


def replay_of(of: Any, mode: Any = "R2") -> RouterReplay:
    replay = replay_for(traits_of(of), mode)
    assert replay is not None
    return replay


def mixture_of(kind: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
    }
    if kind == "DeepseekV3":
        sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 12}
        sizes |= {"qk_rope_head_dim": 8, "first_k_dense_replace": 1, "num_local_experts": 8}
        sizes |= {"n_group": 2, "topk_group": 1}
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**sizes)
    )


def test_routers_of_groups_with_a_bias(tmp_path: Path) -> None:
    """Layers before the first mixture have none, and engines return them, too."""
    mixture = mixture_of("DeepseekV3")
    for layer in mixture.model.layers[1:]:
        torch.nn.init.normal_(layer.mlp.gate.weight)
        layer.mlp.gate.e_score_correction_bias.normal_()
    replay = replay_of(mixture, "R3")
    assert replay.routers.places == [1, 2] and replay.routers.layers == 3
    assert (replay.top_k, replay.count) == (2, 8)
    given = np.arange(5 * 3 * 2).reshape(5, 3, 2) % 8
    output = {"prompt_ids": [[1, 2]], "completion_ids": [[3, 4, 5, 6]], "routed_experts": [given]}
    (row,) = experts_of_rollout(output, replay)
    assert row[:5].tolist() == given[:, 1:].reshape(5, 4).tolist() and (row[5] == -1).all()


def test_routers_that_are_given_a_bias_by_their_layer() -> None:
    """Experts are those of the trained model before it was trained."""
    mixture = mixture_of("MiniMaxM2").float()
    for layer in mixture.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight)
        layer.mlp.e_score_correction_bias.normal_()
    replay = replay_of(mixture)
    assert (replay.top_k, replay.routers.name) == (2, "MiniMaxM2TopKRouter")
    with replay.used_by(mixture):
        _, before = replay._tried(mixture)
        for layer in mixture.model.layers:
            layer.mlp.e_score_correction_bias.neg_()
        _, after = replay._tried(mixture)
        _, replayed = replay._tried(mixture, before)
    assert torch.equal(replayed, before)
    assert not torch.equal(after, before)


def test_a_replay_that_changes_nothing_is_said() -> None:
    (note,) = notes_on_replay(traits_of(None))
    assert "changes nothing: completions are trained once" in note
    assert not [*notes_on_replay(traits_of(None, num_iterations=2))]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Phimoe", r"routers of PhimoeForCausalLM \(PhimoeTopKRouter\) do not choose experts by"),
        ("Llama4", r"routers of Llama4ForCausalLM \(Llama4Router\) cannot be replayed"),
        ("Llama", "LlamaForCausalLM has no experts that routers choose: omit router_replay"),
    ],
)
def test_models_whose_routers_cannot_be_replayed_are_refused(kind: str, message: str) -> None:
    if kind == "Llama4":
        import transformers

        config = transformers.Llama4TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            intermediate_size_mlp=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=8,
            num_local_experts=4,
        )
        made: Any = transformers.Llama4ForCausalLM(config)
    else:
        made = mixture_of(kind)
    with pytest.raises(TrainerError, match=message):
        replay_of(made)


def test_experts_with_two_routers_are_refused() -> None:
    mixture = model("qwen3_moe")
    mixture.model.layers[1].mlp.gate_of_others = mixture.model.layers[0].mlp.gate
    with pytest.raises(TrainerError, match="MoeBlock has 2 routers beside its experts, but one"):
        replay_of(mixture)


def test_trainers_without_old_likelihoods_or_rollouts_are_refused(tmp_path: Path) -> None:
    ours = trainer(tmp_path, of=model("qwen3_moe"))
    ours.model.config.output_router_logits = False
    with pytest.raises(TrainerError, match="router_replay is 'R2', but Trainer computes no old"):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE, router_replay="R2")
    with pytest.raises(TrainerError, match="router_replay is 'R4': must be 'R2' or 'R3'"):
        dynamic_context_parallel(ours, router_replay="R4")  # type: ignore[arg-type]
    with pytest.raises(TrainerError, match="no rollout brings routed_experts: give GRPOTrainer"):
        replay_for(traits_of_rloo(), "R3")


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "rollout_func returns no routed_experts, which router_replay='R3' needs"),
        (np.zeros((5, 2)), r"routed_experts of \[5, 2\] do not fit 2 layers, 2 of them"),
        (np.zeros((5, 3, 2)), r"of \[5, 3, 2\] do not fit 2 layers, 2 of them with 2 experts"),
        (np.zeros((4, 2, 2)), "routed_experts has 4 tokens, but prompt and completion 6"),
        (np.full((5, 2, 2), 4), "routed_experts has 0 to 4, but the model has 4 experts"),
    ],
)
def test_experts_of_other_models_are_refused(experts: Any, message: str) -> None:
    output = {"prompt_ids": [[1, 2]], "completion_ids": [[3, 4, 5, 6]]}
    output["routed_experts"] = None if experts is None else [experts]
    with pytest.raises(TrainerError, match=message):
        experts_of_rollout(output, replay_of(model("qwen3_moe"), "R3"))
