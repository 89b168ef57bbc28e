"""The work of encoders of images: that which torch counts, in plans and in the utilisation."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from longctx.hf.vision import VISION_FAMILIES, ImagePlace, tower_spec
from longctx.model.presets import PRESETS
from longctx.planning.cost.rounds import plan_score
from longctx.planning.cost.spec import Matrix, ModelSpec
from longctx.planning.cost.tower import EncodingTimes, TowerSpec, TowerSpeed
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.image_work import ImageWork, spread_images
from longctx.planning.plan import Plan
from longctx.planning.planners import static
from longctx.planning.planners.planner import make_plan
from longctx.trainers.image_shares import Places, encoding_ranks
from tests import vision_cases

FREE = HardwareProfile.from_dict(
    {
        "linear_s_per_token": 1e-6,
        "attention_s_per_token2": 1e-12,
        "attention_efficiency": [[1, 1.0]],
        "kv_bytes_per_token": 1,
        "intra_node_bytes_per_s": 1e15,
        "inter_node_bytes_per_s": 1e15,
        "ranks_per_node": 8,
        "latency_s": 0.0,
        "overlap": 1.0,
        "launch_s": 0.0,
        "step_s": 0.0,
    }
)
"""A profile on which little but the linear work takes time."""


def summed(value: Any) -> Any:
    return value.sum() if isinstance(value, torch.Tensor) else sum(map(summed, value or ()))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_operations_are_those_that_torch_counts(tmp_path: Path, family: str) -> None:
    folder = vision_cases.save_model(tmp_path, family)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    places = vision_cases.places_of(family)
    for trained in (True, False):
        model.requires_grad_(trained)
        for document, number in ((0, 0), (0, 2), (3, 0), (4, 0)):
            with FlopCounterMode(display=False) as counter:
                out = model.base_model.get_image_features(
                    **vision_cases.pixels(family, [(document, number)]), return_dict=True
                )
                total = summed(out.pooler_output) + summed(getattr(out, "deepstack_features", None))
                if trained:
                    total.backward()
            place = places[document][number]
            assert (
                tower_spec(model).flops(place.tokens, place.grid, float(trained))
                == counter.get_total_flops()
            )


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_gradients_of_inputs_alone_are_about_half(tmp_path: Path, family: str) -> None:
    """As with adapters: something before the blocks is trained, and no matrix."""
    model = AutoModelForImageTextToText.from_pretrained(
        vision_cases.save_model(tmp_path, family), attn_implementation="eager"
    )
    trained = {
        "llava": "class_embedding",
        "gemma3": "patch_embedding.bias",
        "qwen3_vl": "patch_embed.proj.bias",
    }
    for name, weight in model.eval().named_parameters():
        weight.requires_grad_(name.endswith(trained.get(family, "blocks.0.norm1.weight")))
    with FlopCounterMode(display=False) as counter:
        out = model.base_model.get_image_features(
            **vision_cases.pixels(family, [(0, 0)]), return_dict=True
        )
        (summed(out.pooler_output) + summed(getattr(out, "deepstack_features", None))).backward()
    place, spec = vision_cases.places_of(family)[0][0], tower_spec(model)
    found = spec.flops(place.tokens, place.grid, adapted_spec().tower_backward)
    assert 0.8 * counter.get_total_flops() < found < counter.get_total_flops()


def adapted_spec() -> ModelSpec:
    layer = PRESETS["tiny"].spec.layers[0]
    layer = replace(layer, matrices=(*layer.matrices, Matrix(1, 8, role="adapter")))
    return replace(PRESETS["tiny"].spec, layers=(layer,), tower_parameters=100, tower_adapters=10)


TOWER = TowerSpec(
    patch_weights=400, block_weights=9000, token_weights=12000, blocks=2, width=32, merge=2
)
PER_TOKEN = 6 * 20000
"""Operations of a language model per token."""
SPEED = TowerSpeed(TOWER, 1.0, FREE.linear_s_per_token / PER_TOKEN)


def operations(plan: Plan, images: Places, tower: TowerSpeed = SPEED) -> list[list[float]]:
    """Returns the operations of every rank in every micro-batch, images on the ranks that encode
    them."""
    made, per_token = [], FREE.linear_s_per_token / tower.s_per_flop
    for number, placements in enumerate(plan.micro_batches):
        ranks = [per_token * plan.layout(number, rank).tokens for rank in range(plan.ranks)]
        held = {place.document: place for place in placements if place.document in images}
        for (document, image), rank in encoding_ranks(held, images).items():
            place = images[document][image]
            ranks[rank] += tower.work(place.tokens, place.grid).flops
        made.append(ranks)
    return made


def imbalance(ranks: list[list[float]]) -> float:
    """Returns the operations of the busiest rank of every micro-batch, relative to the mean of all
    ranks."""
    return sum(map(max, ranks)) * len(ranks[0]) / sum(map(sum, ranks))


def test_a_document_full_of_images_is_balanced_by_its_work() -> None:
    """The slowest ranks compute 1.13 times the mean instead of 1.63 times; ten images on four ranks
    cannot be even."""
    lengths = [1000, *[250] * 28]
    images = {0: [ImagePlace(start, 96, (1, 16, 24)) for start in range(0, 960, 96)]}
    given = {
        document: [(place.tokens, place.grid) for place in places]
        for document, places in images.items()
    }
    plans = [
        make_plan(lengths, ranks=4, tokens_per_rank=4000, profile=FREE, images=given, tower=t)
        for t in (None, SPEED)
    ]
    without, counted = (imbalance(operations(plan, images)) for plan in plans)
    assert counted < 1.15 < 1.5 < without


def test_times_of_a_ring_are_those_of_the_ranks_that_encode() -> None:
    draw = random.Random(3)
    for _ in range(200):
        works = [
            ImageWork(draw.choice([64, 100, 100, 300]), 0, draw.randint(1, 99))
            for _ in range(draw.randint(1, 9))
        ]
        degree, encoding = draw.randint(1, 12), EncodingTimes({3: works})
        times = Counter[int]()
        for work, rank in zip(
            works,
            spread_images([w.patches for w in works], [range(degree)] * len(works)),
            strict=True,
        ):
            times[rank] += work.time_ns
        assert encoding.ring_ns(np.arange(6), np.int64(degree)).tolist() == [
            0,
            0,
            0,
            max(times.values()),
            0,
            0,
        ]


def test_images_leave_few_static_degrees_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that did not count images would skip none of 64 degrees, and planning would take many
    times as long."""
    tried = []
    own = static.pack_static
    monkeypatch.setattr(
        static,
        "pack_static",
        lambda step, degree, below: tried.append(degree) or own(step, degree, below),
    )
    draw = random.Random(7)
    images = {
        n: [(tokens, (1, 4, tokens)) for tokens in draw.choices(range(20, 100), k=10)]
        for n in range(100)
    }
    lengths = [sum(tokens for tokens, _ in found) + 100 for found in images.values()]
    plan = make_plan(
        lengths, ranks=64, tokens_per_rank=8000, profile=FREE, images=images, tower=SPEED
    )
    assert len(tried) <= 8, (tried, plan.winner)


@pytest.mark.parametrize("mode", ["auto", "static", "bins"])
def test_predicted_times_are_at_least_those_of_the_ranks_and_of_the_bound(mode: str) -> None:
    draw = random.Random(5)
    for _ in range(6):
        lengths = [draw.randint(200, 3000) for _ in range(14)]
        grids = [(1, 2 * draw.randint(1, 9), 2 * draw.randint(1, 9)) for _ in range(30)]
        images: dict[int, list[ImagePlace]] = {}
        for grid in grids:
            document = draw.randrange(8)
            before = images.setdefault(document, [])
            start = before[-1].start + before[-1].tokens if before else 0
            if start + 81 < lengths[document]:
                before.append(ImagePlace(start, grid[1] * grid[2] // 4, grid))
        given = {
            document: [(place.tokens, place.grid) for place in places]
            for document, places in images.items()
            if places
        }
        plan = make_plan(
            lengths,
            ranks=6,
            tokens_per_rank=1500,
            profile=FREE,
            mode=mode,
            images=given,
            tower=SPEED,
        )
        assert plan_score(plan).makespan_ns / 1e9 == plan.makespan_s >= plan.lower_bound_s
        slowest = sum(map(max, operations(plan, images)))
        assert slowest * SPEED.s_per_flop <= plan.makespan_s * (1 + 1e-9)
        without = make_plan(lengths, ranks=6, tokens_per_rank=1500, profile=FREE, mode=mode)
        assert plan.lower_bound_s > without.lower_bound_s and plan.hash != without.hash
