"""Files of rollouts: every format gives the same rollouts, groups stay whole, and a run on them can be continued."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.cli import main
from longctx.data.corpus import open_corpus
from longctx.data.group_sampler import GroupSampler
from longctx.data.readers import CorpusError
from longctx.data.rollout_records import RolloutReader
from longctx.data.rollout_store import RolloutStore
from longctx.data.sampler import SamplerError
from longctx.data.tokenizer import Tokenizer
from longctx.errors import UserError
from tests.data_cases import write_jsonl
from tests.rollout_cases import first_step_twice, one_by_one, records, run, settings_in, write
from tests.template_cases import FAMILIES
from tests.workers import Workers

BYTES = RolloutReader(Tokenizer.bytes())


def read(path: Path, *made: dict[str, Any], reader: RolloutReader = BYTES) -> RolloutStore:
    return RolloutStore.read_from(write_jsonl(path / "r.jsonl", made) if made else path, reader, scaled=True)


def test_every_format_gives_the_same_rollouts(tmp_path: Path) -> None:
    import datasets

    made = records()
    several, single = read(tmp_path, *made), read(tmp_path, *one_by_one(made))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), tmp_path / "r.parquet")
    datasets.Dataset.from_list(one_by_one(made)).save_to_disk(str(tmp_path / "saved"))
    for other in (single, read(tmp_path / "r.parquet"), read(tmp_path / "saved")):
        assert other.fingerprint == several.fingerprint and (other.groups == several.groups).all()
    assert several.groups.tolist() == [group for group, record in enumerate(made) for _ in record["completions"]]
    assert several.name(1).endswith("r.jsonl:1, completion 1") and single.name(1).endswith("r.jsonl:2")
    tokens, trained = several.tokens(0, 0, int(several.lengths[0]))
    begin = len(made[0]["prompt"])
    assert tokens.tolist() == made[0]["prompt"] + made[0]["completions"][0]
    assert not trained[:begin].any() and trained[begin:].tolist() == list(map(bool, made[0]["masks"][0]))
    assert several.trained_tokens.tolist() == [sum(mask) for record in made for mask in record["masks"]]
    rewards = np.array(made[0]["rewards"])
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    assert several.rollouts.advantages[: len(wanted)] == pytest.approx(wanted)
    changed = [{**made[0], "rewards": [9.0, *made[0]["rewards"][1:]]}, *made[1:]]
    assert read(tmp_path, *changed).fingerprint != several.fingerprint


def test_groups_by_name_or_by_prompt(tmp_path: Path) -> None:
    made = [{"prompt": [1 + number % 2], "completion": [3], "reward": number} for number in range(6)]
    assert read(tmp_path, *made).groups.tolist() == [0, 1] * 3
    named = [{**record, "group": f"g{number // 2}"} for number, record in enumerate(made)]
    assert read(tmp_path, *named).groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert read(tmp_path, *({**record, "source": "x"} for record in made)).unused == {"source": 6}


def test_texts_are_tokenized_and_ended(tmp_path: Path) -> None:
    reader = RolloutReader(Tokenizer.bytes(), np.array([7]))
    texts = {"prompt": "ab", "completions": ["c", "d<|endoftext|>"], "rewards": [0, 1]}
    rollouts = read(tmp_path, texts, reader=reader).rollouts
    assert [tokens.tolist() for tokens in rollouts.prompts] == [[7, 97, 98]] * 2
    assert [tokens.tolist() for tokens in rollouts.completions] == [[99, 256], [100, 256]]


def test_of_messages_what_the_model_wrote_is_learned(tmp_path: Path) -> None:
    folder = FAMILIES["SmolLM2"].save(tmp_path)
    answer = [
        {"role": "assistant", "content": "first call"},
        {"role": "user", "content": "the result"},
        {"role": "assistant", "content": "second call"},
    ]
    made = {"prompt": [{"role": "user", "content": "a question"}], "completions": [answer, answer[:1]], "rewards": [0, 1]}
    reader = RolloutReader.of_checkpoint(str(folder))
    rollouts, tokenizer = read(tmp_path, made, reader=reader).rollouts, reader.tokenizer
    assert "a question" in tokenizer.decode(rollouts.prompts[0])
    assert tokenizer.decode(rollouts.prompts[0]).endswith("<|im_start|>assistant\n")
    long, short = (tokenizer.decode(tokens[mask]) for tokens, mask in zip(rollouts.completions, rollouts.learned, strict=True))
    assert long.replace("<|im_end|>", "") == "first callsecond call" and short.startswith("first call")
    assert "the result" in tokenizer.decode(rollouts.completions[0])
    with pytest.raises(UserError, match="no checkpoint gives a chat template"):
        read(tmp_path, made)


GOOD = {"prompt": [1, 2], "completions": [[3], [4, 5]], "rewards": [0.0, 1.0]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rewards missing": ({"rewards": None}, "r.jsonl:2: there are neither rewards nor advantages"),
    "rewards not finite": ({"rewards": [0.0, float("nan")]}, "r.jsonl:2, completion 1: rewards are not finite"),
    "fewer rewards": ({"rewards": [0.0]}, "`rewards` must be a list, of one for each"),
    "no numbers": ({"rewards": [None, {}]}, "r.jsonl:2: `reward` must be numbers"),
    "several rewards": ({"rewards": [[1.0], [2.0]]}, "`reward` must be one number"),
    "a group of one": ({"completions": [[3]], "rewards": [1.0]}, "r.jsonl:2, completion 0: are alone in their group"),
    "a mask without a token": ({"masks": [[0], [1, 1]]}, "r.jsonl:2, completion 0: masks have no token"),
    "half a mask": ({"masks": [[0.5], [1, 1]]}, "`mask` must be 0 or 1"),
    "lengths": ({"masks": [[1], [1]]}, "r.jsonl:2, completion 1: masks have another length"),
    "some have": ({"old_logps": [[-1.0], [-1.0, -2.0]]}, "r.jsonl:1, completion 0 has no `old_logps`, but .*r.jsonl:2"),
    "names of one": ({"reward": 1.0}, "`reward` does not go with `completions`"),
    "both": ({"completion": [1]}, "`completion` does not go with `completions`"),
    "two names": ({"prompt_ids": [1]}, "`prompt_ids` and another key mean `prompt`"),
    "no prompt": ({"prompt": None}, "r.jsonl:2: rollouts need `prompt`"),
    "an empty prompt": ({"prompt": []}, "r.jsonl:2, completion 0, .*: prompts are empty"),
    "kinds": ({"completions": ["a", "b"]}, "r.jsonl:2: prompt and completion must both be"),
    "unknown": ({"prompt": [1, "a"]}, "r.jsonl:2: prompt and completion must both be"),
    "an id": ({"prompt": [1, 999]}, "r.jsonl:2, completion 0 has token 999, but the tokenizer has 257"),
    "numbers of texts": (
        {"prompt": "a", "completions": ["b", "c"], "masks": [[1], [1]]},
        "`mask` has a number for each token, but texts are tokenized again: give token ids",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_records_are_refused_with_their_place(tmp_path: Path, name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        read(tmp_path, GOOD, {**GOOD, **changes})


def test_sources_without_rollouts_are_refused(tmp_path: Path) -> None:
    for suffix, text, message in ((".txt", "a", "r.txt is a text"), (".jsonl", "\n", "has no rollouts")):
        (file := tmp_path / f"r{suffix}").write_text(text)
        with pytest.raises(UserError, match=message):
            BYTES.read(open_corpus(str(file)))


SIZES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=12)


@given(sizes=SIZES, tokens=st.integers(1, 300), seed=st.integers(0, 9), longest=st.integers(1, 45), steps=st.integers(0, 5))
def test_groups_are_whole_and_in_every_epoch_once(
    sizes: list[list[int]], tokens: int, seed: int, longest: int, steps: int
) -> None:
    pairs = sorted((place, group, length) for group, lengths in enumerate(sizes) for place, length in enumerate(lengths))
    lengths, groups = (np.array([pair[column] for pair in pairs], np.int64) for column in (2, 1))  # groups interleave
    kept = {group: sum(length <= longest for length in each) for group, each in enumerate(sizes)}

    def make(long_documents: str = "drop") -> GroupSampler:
        options: dict[str, Any] = {"max_length": longest, "long_documents": long_documents}
        return GroupSampler(lengths, groups, global_tokens=tokens, seed=seed, **options)

    if (lengths > longest).any():
        with pytest.raises(SamplerError, match="never split" if seed % 2 else "set data.long_documents to drop, raise"):
            make("split" if seed % 2 else "error")
    if not any(kept.values()):
        with pytest.raises(SamplerError, match="no rollout is left"):
            make()
        return
    running, cursor, taken = make(), 0, []
    while cursor < running.pieces or len(taken) <= steps:
        pieces, cursor = running.step(cursor)
        last = groups[pieces[-1].document]
        rest = sum(piece.length for piece in pieces[: -kept[int(last)]])
        assert rest < tokens <= sum(piece.length for piece in pieces)
        taken.append((pieces, cursor))
    one_by_one = [piece for pieces, _ in taken for piece in pieces]
    first = Counter(piece.document for piece in one_by_one if piece.epoch == 0)
    assert first == Counter(np.flatnonzero(lengths <= longest).tolist())
    together = [int(groups[piece.document]) for piece in one_by_one]
    while together:
        size = kept[together[0]]
        assert set(together[:size]) == {together[0]}
        together = together[size:]
    assert running.dropped == (lengths > longest).sum() and running.longest == lengths[lengths <= longest].max()
    fresh, before = make(), taken[steps - 1][1] if steps else 0
    assert fresh.step(before) == taken[steps] and fresh.cursor(fresh.state(before)) == before


def test_a_run_goes_on_bit_by_bit_on_any_number_of_ranks(workers: Workers, tmp_path: Path) -> None:
    def of(name: str, ranks: int, *parts: int) -> list[list[dict[str, Any]]]:
        (folder := tmp_path / name).mkdir()
        write(folder, records())
        settings = settings_in(folder)
        return [workers.run(run, ranks, folder, settings, steps, bool(place)) for place, steps in enumerate(parts)]

    ((whole, other),) = of("whole", 2, 4)
    (first, _), (second, _) = of("parts", 2, 2, 2)
    assert whole["done"] == first["done"] + second["done"] == other["done"]
    assert all(torch.equal(weight, second["weights"][name]) for name, weight in whole["weights"].items())
    ((alone,),) = of("alone", 1, 4)
    rest = workers.run(run, 1, tmp_path / "parts", settings_in(tmp_path / "parts"), 2, True)[0]["done"]
    fifth = workers.run(run, 2, tmp_path / "whole", settings_in(tmp_path / "whole"), 2, True)[0]["done"]
    for (documents, *numbers), (theirs, *others) in zip([*whole["done"], *fifth], [*alone["done"], *rest], strict=True):
        assert documents == theirs and numbers == pytest.approx(others, rel=1e-4, abs=1e-6)
    assert any(loss for _, loss, *_ in whole["done"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_step_is_that_of_the_rollouts_in_memory(workers: Workers, tmp_path: Path, ranks: int) -> None:
    settings = [*write(tmp_path, records()), "data.max_length=200", "batch.tokens_per_rank=200"]
    for memory, by_file in workers.run(first_step_twice, ranks, tmp_path, settings):
        assert memory == by_file and by_file[1] > 0


def test_rollouts_dropped_for_their_length_count_in_their_group(tmp_path: Path) -> None:
    made = {"prompt": [1], "completions": [[2], [3], [4] * 50], "rewards": [0.0, 0.0, 3.0]}
    store = read(tmp_path, made)
    sampler = GroupSampler(store.lengths, store.groups, global_tokens=1, seed=0, max_length=10, long_documents="drop")
    pieces, _ = sampler.step(0)
    rollouts = store.rollouts_of(pieces)
    assert [len(tokens) for tokens in rollouts.completions] == [1, 1]
    assert rollouts.advantages == pytest.approx([-1 / (3**0.5)] * 2, rel=1e-3)


def arguments(folder: Path, settings: list[str]) -> list[str]:
    small = ["model.preset=tiny", "model.num_hidden_layers=1", f"train.run_dir={folder / 'run'}", "log.tensorboard=false"]
    return ["train", *(f"--{each}" for each in (*settings, *small) if each != "data.store=null")]


def test_the_command_trains_and_says_what_is_not_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = arguments(tmp_path, [*write(tmp_path, [{**record, "source": "x"} for record in records()]), "train.steps=2"])
    assert main([*words, "--dry-run"]) == 0
    assert "rollouts.jsonl" in capfd.readouterr().out
    assert main(words) == 0
    said = capfd.readouterr().out
    assert "rollouts of 9 groups (not used: source in 9 records)" in said and "finished step 2" in said
    model = tmp_path / "run" / "model"
    assert (model / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert main([*words, "--resume", "--train.steps=3"]) == 0
    another = [*arguments(tmp_path / "b", write(tmp_path, records(5))), "--train.steps=5", "--continue", str(tmp_path / "run")]
    assert main(another) == 0
    said = capfd.readouterr()
    assert "of 5 groups" in said.out and "step 4 loss" in said.out and "policy gradients mostly take 1e-6" in said.err
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(GOOD))
    assert main([*words, "--resume", "--train.steps=4"]) == 2
    assert "or its data.rollouts" in capfd.readouterr().err


def test_a_misspelt_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"rollouts need `prompt`, .* but there is only promt, completions, rewards"):
        read(tmp_path, {"promt": [1], "completions": [[1], [2]], "rewards": [0, 1]})


def test_a_divergence_without_a_reference_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path, [*write(tmp_path, records()), "policy.kl=0.1"])) == 2
    assert "has no reference_logps" in capfd.readouterr().err


def test_a_policy_loss_without_rollouts_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for extra in ([], ["--dry-run"]):
        assert main([*arguments(tmp_path, ["policy.loss=grpo"]), *extra]) == 2
        assert "policy.loss is grpo, but data.rollouts is null" in capfd.readouterr().err


def test_epochs_are_passes_over_all_groups(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = arguments(tmp_path, [*(one for one in write(tmp_path, records()) if "train.steps" not in one), "train.epochs=2"])
    assert main(words) == 0
    store = read(tmp_path, *records())
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    tokens = store.lengths[store.lengths <= 150].sum()
    assert 2 * tokens <= sum(step["tokens"] for step in log) and sum(step["tokens"] for step in log[:-1]) < 2 * tokens
    assert f"train:\n  steps: {len(log)}\n  epochs: null" in (tmp_path / "run" / "config.yaml").read_text()
    assert f"finished step {len(log)}" in capfd.readouterr().out
    assert main([*words, "--continue", str(tmp_path)]) == 2
    assert "but the steps of both runs are counted: set train.steps" in capfd.readouterr().err
