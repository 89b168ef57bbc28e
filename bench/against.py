"""Benchmark of what longctx gains on 8 GPUs over the ways to train that people have today, by the
cost model: `longctx compare --against` on every length mix, with documents of up to three lengths.

    python bench/against.py      # some minutes

An 8B model on 8 H100s, 16 steps of 1,000,000 tokens: a row of 131,072 tokens for each rank holds
them. Documents are drawn from a mix, and longer ones are split, for all ways alike, so that TRL
cuts none; the last one of a step is cut. Writes OUT.csv, a line for each way and setting. Seconds are per million tokens.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial

from harness import Table, command, facts, options
from longctx.comparison.against import AgainstRow, Job, compare_with
from longctx.comparison.mixes import load_mix, mix_names
from longctx.comparison.room import Room
from longctx.comparison.steps import fit
from longctx.comparison.ways import Way, read_ways
from longctx.training.described import sharded_preset_profile

PROFILE = "h100-nvlink-ib"
RANKS = 8
TOKENS_PER_RANK = 16384
STEP_TOKENS = 1_000_000
STEPS = 16
MOST_TOKENS = (32768, 65536, 131072)
"""Tokens of the longest documents, by setting."""
WAYS = "trl-packing,batch-rebalance,padding:4,megatron"


@dataclass(frozen=True)
class Setting:
    """Documents of a mix, of which those of more than `most_tokens` tokens are split."""

    mix: str
    most_tokens: int


def settings(mixes: Sequence[str]) -> list[Setting]:
    """Returns all settings, in the order of the table."""
    return [Setting(mix, most) for mix, most in itertools.product(mixes, MOST_TOKENS)]


def draw_steps(setting: Setting, steps: int) -> tuple[tuple[int, ...], ...]:
    """Draws the documents of every step, and cuts the last one so that it has its tokens."""
    mix = load_mix(setting.mix)
    most_documents = round(4 * STEP_TOKENS / mix.mean)
    drawn = []
    for seed in range(steps):
        documents: list[int] = []
        left = STEP_TOKENS
        for length in mix.draw(most_documents, seed):
            documents.append(min(length, left))
            left -= documents[-1]
            if not left:
                break
        drawn.append(fit(documents, setting.most_tokens))
    return tuple(drawn)


def measure(setting: Setting, steps: int, ways: Sequence[Way]) -> list[AgainstRow]:
    """Compares longctx with the ways on the documents of a setting."""
    sharded = partial(
        sharded_preset_profile, PROFILE, None, domain=RANKS, tokens_per_rank=TOKENS_PER_RANK
    )
    job = Job(
        steps=draw_steps(setting, steps),
        longest=setting.most_tokens,
        ranks=RANKS,
        tokens_per_rank=TOKENS_PER_RANK,
        profile=sharded().profile,
        whole_profile=sharded(reshard_after="step").profile,
        room=Room.of(PROFILE, None, RANKS),
    )
    return compare_with(ways, job)


def main() -> None:
    parser = options(__doc__, "against")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    about = facts("longctx", "numpy") | {"profile": PROFILE, "steps": str(given.steps)}
    about["command"] = command()
    of_row = [field.name for field in fields(AgainstRow)]
    columns = ["mix", "most_tokens_of_a_document", *of_row]
    table = Table(given.out.with_suffix(".csv"), columns, about, overwrite=True)
    wanted = settings(mix_names())
    for number, setting in enumerate(wanted, 1):
        print(f"{number} of {len(wanted)}: {setting}", file=sys.stderr)
        for row in measure(setting, given.steps, read_ways(WAYS)):
            named = {"mix": setting.mix, "most_tokens_of_a_document": setting.most_tokens}
            table.append(named | asdict(row))


if __name__ == "__main__":
    main()
