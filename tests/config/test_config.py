"""Configuration: reading, precedence, and errors with key, value, rule and fix for every
mistake."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from longctx import config
from longctx.config import Config, ConfigError
from longctx.config.explain import ELSEWHERE
from longctx.config.names import ALIASES, SETTINGS
from longctx.model.presets import PRESETS
from longctx.planning.cost.spec import Scan
from longctx.planning.hardware_profile import SHIPPED
from longctx.planning.layout import largest_shard, longest_document
from longctx.training.checks import notes_on

PROFILE = "context.profile=h100-nvlink-ib"


def load(*overrides: str, world_size: int | None = None) -> Config:
    return config.load(None, [PROFILE, *overrides], world_size=world_size)


def problems(*overrides: str, world_size: int | None = None) -> dict[str, str]:
    """Returns the problems of the settings: key → text shown to the user."""
    with pytest.raises(ConfigError) as caught:
        load(*overrides, world_size=world_size)
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return {problem.key: str(problem) for problem in caught.value.problems}


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_replace_the_file_and_the_last_override_wins(tmp_path: Path) -> None:
    path = written(
        tmp_path, "batch: {tokens_per_rank: 1024, global_tokens: 9999}\ntrain:\n  # steps: 5\n"
    )
    loaded = config.load(
        path, [PROFILE, "batch.tokens_per_rank=2048", "batch.tokens-per-rank=4096"]
    )
    assert (loaded.batch.tokens_per_rank, loaded.batch.global_tokens) == (4096, 9999)
    assert loaded.train == Config().train
    path.write_bytes("\ufeffbatch:\r\n  global_tokens: 9000\r\n".encode())
    assert config.load(path, [PROFILE]).batch.global_tokens == 9000, "a file of Windows"
    assert config.load(written(tmp_path, "# nothing yet\n"), [PROFILE]) == load()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.learning_rate=3e-4", 3e-4),  # a text in YAML 1.1
        ("optimizer.betas=[0.8, 0.99]", (0.8, 0.99)),
        ("optimizer.clip_grad_norm=null", None),
        ("optimizer.weight_decay=0", 0.0),
        ("batch.global_tokens=1e6", 1_000_000),
        ("data.store=my stores/a=b", Path("my stores/a=b")),
        ("train.run_dir=2001-13-45", Path("2001-13-45")),
        ("model.overrides.tie_word_embeddings=false", False),
        ("model.preset=llama-3.1-8b", "llama-3.1-8b"),
    ],
)
def test_values_of_overrides_are_yaml(override: str, expected: object) -> None:
    assert load(override).value_of(override.partition("=")[0]) == expected


def test_every_name_of_another_program_leads_to_a_setting() -> None:
    assert {ours.partition(":")[0] for ours in ALIASES.values()} <= SETTINGS.keys()
    assert "did you mean bfloat16?" in problems("train.dtype=bf16")["train.dtype"]


@pytest.mark.parametrize(
    ("settings", "gpus", "expected"),
    [
        ([], True, "bfloat16"),
        ([], False, "float32"),
        (["train.device=cuda"], False, "bfloat16"),
        (["train.device=cpu"], True, "float32"),
        (["train.device=cpu", "train.float8=rowwise"], True, "bfloat16"),
        (["train.dtype=float32"], True, "float32"),
        (["train.dtype=bfloat16"], False, "bfloat16"),
    ],
)
def test_the_dtype_follows_the_device(
    settings: list[str], gpus: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert load(*settings).dtype == expected


def test_float32_on_a_gpu_is_said() -> None:
    (note,) = notes_on(load("train.dtype=float32"), torch.device("cuda"))
    assert "train.dtype is float32" in note and "bfloat16" in note
    assert not notes_on(load("train.dtype=bfloat16"), torch.device("cuda")) + notes_on(
        load(), torch.device("cpu")
    )


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path, "batch: {tokens_per_rnk: 4096, global_tokens: 0}\ntrain: {dtype: fp16}\n"
    )
    with pytest.raises(ConfigError) as caught:
        config.load(path, [PROFILE, "context.degree=9", "data.max_length=1000000"], world_size=4)
    assert [p.key for p in caught.value.problems] == [
        "batch.global_tokens",
        "batch.tokens_per_rnk",
        "train.dtype",
        "context.degree",
        "data.max_length",
    ]
    assert str(caught.value).startswith(f"5 problems in {path} and the command line:")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("batch.tokens_per_rnk=1", "did you mean batch.tokens_per_rank?"),
        ("train.learning_rate=1", "did you mean optimizer.learning_rate?"),
        ("optimiser.learning_rate=1", "did you mean section optimizer?"),
        ("batch.zzz=1", "section batch has global_tokens, tokens_per_rank"),
        ("zzz.zzz=1", "sections are model, lora, data, batch"),
        ("optimizer.lr=1", "did you mean optimizer.learning_rate?"),
        ("train.gradient_checkpointing=true", "did you mean train.recompute?"),
    ],
)
def test_unknown_keys_get_a_suggestion(override: str, hint: str) -> None:
    (text,) = problems(override).values()
    assert "unknown setting" in text and hint in text


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("dpo", "TRL's DPOTrainer"),
        ("policy", "TRL's GRPOTrainer or RLOOTrainer"),
        ("data.rollouts", "TRL's GRPOTrainer"),
        ("masked", "transformers.Trainer"),
        ("images", "SFTTrainer"),
        ("encoder", "Seq2SeqTrainer"),
    ],
)
def test_what_runs_elsewhere_says_where(tmp_path: Path, name: str, where: str) -> None:
    section, _, key = name.partition(".")
    with pytest.raises(ConfigError) as caught:
        config.load(
            written(tmp_path, f"{section}: {{{key or 'x'}: 1}}\n"),
            [PROFILE, "batch.global_tokens=0"],
        )
    problem, _ = sorted(caught.value.problems, key=lambda each: each.key.startswith("batch"))
    assert problem.key == name and problem.rule == "not a part of longctx train"
    assert (
        where in problem.fix
        and Path(problem.fix.rsplit(": ")[-1]).is_file()
        and problem.fix == ELSEWHERE[name]
    )


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("train.steps=0", "greater than or equal to 1"),
        ("optimizer.warmup_steps=1.5", "must be less than 1"),
        ("optimizer.warmup_steps=-0.5", "must be greater than or equal to 0"),
        *(
            (f"optimizer.warmup_steps={value}", "valid integer")
            for value in ("true", "0100", "1:30", "0x10")
        ),
        ("train.steps='20'", "valid integer"),
        ("train.seed=4294967296", "less than or equal to 4294967295"),
        ("train.dtype=float16", "'float32' or 'bfloat16'"),
        ("train.timeout_s=.inf", "finite"),
        ("train.run_dir=3", "must be a path"),
        ("optimizer.betas=[0.9]", "required"),
        ("model.preset=huge", "unknown preset"),
        ("model.preset=8b", "unknown preset"),
        (
            "model.overrides.num_attention_heads=3",
            "which is not divisible by num_key_value_heads 2",
        ),
        ("model.overrides.head_dim=33", "must be even"),
        ("model.overrides.hidden_size=0", "greater than or equal to 1"),
        ("context.profile=nowhere.yaml", "no hardware profile 'nowhere.yaml'"),
        ("parallel.tensor_parallel_size=4", "the model has 4 query heads and 2 KV heads"),
        (
            "context.ulysses_degree=3",
            "that divides the query heads, 4\n      fix:  set it to 1, 2, 4",
        ),
        (
            "parallel.pipeline_parallel_size=3",
            "fix:  set it to 2 or less, or use a model with more layers",
        ),
        ("parallel.pipeline_chunks=2", "several chunks need a pipeline of 2 or more ranks"),
        ("train.steps=[1", "the value is not valid YAML"),
        ("train.steps", "an override has the form section.key=value"),
        ("steps=3", "an override has the form section.key=value"),
    ],
)
def test_each_rule(override: str, rule: str) -> None:
    (text,) = problems(override).values()
    key, _, value = override.partition("=")
    assert rule in text and "fix: " in text
    assert key == "model.overrides.num_attention_heads" or (
        key.split(".")[0] in text and value.strip("'") in text
    )


@pytest.mark.parametrize(
    ("bins", "rule"),
    [
        ("{}", "must not be empty"),
        ("{0: 1}", "greater than or equal to 1 (at 0.[key])"),
        ("{8192: 0}", "greater than or equal to 1 (at 8192)"),
        ("{16384: 2, 8192: 1}", "lengths must be ascending"),
        ("{4096: 2, 8192: 1}", "degrees must not decrease with length"),
        ("{long: 1}", "valid integer"),
    ],
)
def test_invalid_tables_of_bins(bins: str, rule: str) -> None:
    assert rule in problems("context.mode=bins", f"context.bins={bins}")["context.bins"]


STAGES, CHUNKS = "parallel.pipeline_parallel_size", "parallel.pipeline_chunks"
BINS = "context.mode=bins"
PIPELINE = ["model.overrides.num_hidden_layers=8", f"{STAGES}=2"]
OVER_FOUR = ["parallel.tensor_parallel_size=4", "model.overrides.num_key_value_heads=4"]


@pytest.mark.parametrize(
    ("overrides", "world_size", "key", "rule"),
    [
        (
            ["context.mode=static", "context.degree=4"],
            2,
            "context.degree",
            "the number of ranks in the domain, 2",
        ),
        (
            ["context.mode=bins", "context.bins={8192: 1, 32768: 4}"],
            2,
            "context.bins",
            "the number of ranks in the domain, 2",
        ),
        (
            ["context.mode=bins", "context.bins={8193: 1}"],
            2,
            "context.bins",
            "degree 1 holds 8192 tokens",
        ),
        (
            ["data.max_length=16385"],
            2,
            "data.max_length",
            "a document over 2 processes has at most 16,384 tokens",
        ),
        (
            ["data.max_length=16384", "batch.tokens_per_rank=8191"],
            2,
            "data.max_length",
            "at most 16,380 tokens",
        ),
        (
            ["context.mode=static", "context.degree=1", "data.max_length=8193"],
            2,
            "data.max_length",
            "at most 8,192 tokens",
        ),
        (
            ["context.mode=bins", "context.bins={8192: 1}", "data.max_length=8193"],
            2,
            "data.max_length",
            "at most 8,192 tokens",
        ),
        (["parallel.tensor_parallel_size=2"], 3, "parallel", "start 2 or 4 processes"),
        (
            ["parallel.tensor_parallel_size=2", "batch.tokens_per_rank=501"],
            2,
            "batch.tokens_per_rank",
            "set it to 500 or 502",
        ),
        (
            [*OVER_FOUR, "model.overrides.intermediate_size=9"],
            4,
            "model.overrides.intermediate_size",
            "set it to 8 or 10",
        ),
        (
            [*OVER_FOUR, "model.overrides.intermediate_size=3"],
            4,
            "model.overrides.intermediate_size",
            "set it to 4",
        ),
        (["parallel.shard_ranks=4"], 6, "parallel.shard_ranks", "set it to 3, or omit it to use 6"),
        ([*PIPELINE, f"{CHUNKS}=5"], None, STAGES, "set parallel.pipeline_chunks to 4"),
        ([*PIPELINE, f"{STAGES}=16", f"{CHUNKS}=2"], None, STAGES, "set it to 4 or less"),
    ],
)
def test_rules_on_processes_and_stages(
    overrides: list[str], world_size: int | None, key: str, rule: str
) -> None:
    problem_of = problems(*overrides, world_size=world_size)
    assert rule in problem_of[key] and (world_size or len(problem_of) == 1)


def test_blocks_are_compiled_on_gpus_where_that_is_possible() -> None:
    assert load().compiles("cuda") and not load().compiles("cpu")
    assert load("train.compile=true").compiles("cpu") and not load("train.compile=false").compiles(
        "cuda"
    )
    assert not load("train.mlp_tile_tokens=100").compiles("cuda")
    plain, mixture = (PRESETS[name].spec for name in ("tiny", "tiny-moe"))
    linear = replace(plain, layers=(replace(plain.layers[0], scan=Scan(8)), *plain.layers[1:]))
    assert [load().compiles("cuda", spec) for spec in (plain, mixture, linear)] == [
        True,
        False,
        False,
    ]
    assert not config.load(None, ["parallel.tensor_parallel_size=2"], world_size=2).compiles("cuda")
    assert load("parallel.pipeline_parallel_size=2").compiles("cuda")


def test_check_reports_the_same_problems_for_a_loaded_configuration() -> None:
    loaded = load("data.max_length=16385")
    with pytest.raises(ConfigError, match="1 problem in the configuration for 2 processes"):
        config.check(loaded, world_size=2)
    config.check(loaded, world_size=3)


@pytest.mark.parametrize("degree", [1, 2, 3, 7])
@pytest.mark.parametrize("tokens_per_rank", [1, 2, 5, 16, 31])
def test_every_document_up_to_the_longest_fits(degree: int, tokens_per_rank: int) -> None:
    longest = longest_document(degree, tokens_per_rank)
    assert all(largest_shard(length, degree) <= tokens_per_rank for length in range(1, longest + 1))
    assert longest > degree * (tokens_per_rank - 1) - 1


def test_max_length_is_what_the_mode_can_hold() -> None:
    assert load().max_length(4) == 4 * 8192
    assert (
        load(
            BINS, "context.bins={8192: 1, 100000: 2}", "data.max_length=16384", world_size=2
        ).max_length(2)
        == 16384
    )
    assert load("data.max_length=100").max_length(4) == 100
    assert load("context.mode=static", "context.degree=2").max_length(4) == 2 * 8192
    assert load("context.mode=static").max_length(4) == 4 * 8192
    assert load("context.mode=bins", "context.bins={8192: 1, 16000: 2}").max_length(4) == 16000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch: [1", "not valid YAML"),
        ("batch: {tokens_per_rank: 1}\nbatch: {}", "'batch' is given twice"),
        ("train: {steps: 1, steps: 2}", "'steps' is given twice"),
        ("- batch", "contains list, not a mapping"),
        ("learning_rate: 1", r"did you mean optimizer\.learning_rate\?"),
        ("batch: 5", "a section must be a mapping of settings"),
        ("model: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (
            "context:\n  mode: bins\n  bins:\n  8192: 1\n  32768: 4\n",
            r"indent it further than `bins:`",
        ),
        ("balance: {zloss: 1}", r"did you mean balance\.z_loss\?"),
        ("batch: {global_token: 1}", r"did you mean batch\.global_tokens\?"),
        ("train: {on: 1}", r"train\.on = 1"),
        ("optimizer: {betas: [0.9, 1.0]}", r"must be less than 1 \(at 1\)"),
        ("? [a]\n", "a key must be text or a number"),
        ("batch:\n\tglobal_tokens: 1\n", "line 2, column 1: .*indent with spaces instead of tabs"),
        ("train: {steps: !!int abc}", "column 16: abc is not a valid int"),
        ("train: {steps: " + "9" * 5000 + "}", r"characters \.\.\]9+ is not a valid int"),
        (
            'train: {run_dir: "\\UFFFFFFFF"}',
            r"an escape such as \\U or a directive has a number that is too large",
        ),
        (
            "%YAML 1." + "9" * 5000 + "\n---\ntrain: {}",
            r"an escape such as \\U or a directive has a number that is too large",
        ),
        ("train: {steps: 18446744073709551616}", "more than 64 bits"),
        ("train: " + "[" * 400 + "]" * 400, "levels of nesting"),
        ("train: &a [*a]", "levels of nesting"),
        ('train: {run_dir: "a\\0b"}', "characters that are not text"),
        ("parallel: {tensor_parallel_size: 17179869184}", "less than or equal to 16384"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load(written(tmp_path, text), [PROFILE])


def test_missing_files_and_files_that_are_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder: give a configuration file"):
        config.load(tmp_path)
    with pytest.raises(ConfigError, match="is not a path: embedded null byte"):
        config.load(Path("run\0.yaml"))
    with pytest.raises(ConfigError, match=r"configuration file .*nowhere\.yaml not found"):
        config.load(tmp_path / "nowhere.yaml", [])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml is not valid YAML"):
        config.load(tmp_path / "binary.yaml", [])


def test_messages_stay_short_and_print_no_control_characters(tmp_path: Path) -> None:
    wrong = "".join(f"  key{number}: {'x' * 900}\n" for number in range(300))
    with pytest.raises(ConfigError) as caught:
        config.load(written(tmp_path, "train:\n" + wrong + '  steps: "\\e[31m"\n'), [PROFILE])
    assert len(caught.value.problems) == 301
    assert len(str(caught.value)) < 4000 and "more: correct these first" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_the_resolved_dump_reads_back_equal(tmp_path: Path) -> None:
    changed = [
        "context.mode=bins",
        "context.bins={8192: 1, 16384: 2}",
        "optimizer.learning_rate=1e-5",
    ]
    loaded = load(
        *changed,
        "optimizer.betas=[0.8, 0.99]",
        "data.store=elsewhere",
        "model.overrides.hidden_size=64",
    )
    text = loaded.to_yaml()
    assert config.load(written(tmp_path, text), []) == loaded
    every_setting = {(s, k) for s, content in yaml.safe_load(text).items() for k in content}
    assert every_setting == {
        (s, k) for s, content in Config().model_dump().items() for k in content
    }


def test_help_lists_every_setting_with_type_description_and_default() -> None:
    lines = config.describe().splitlines()
    for section, content in Config().model_dump().items():
        for key in content:
            at = next(
                i for i, line in enumerate(lines) if line.split()[:1] == [f"--{section}.{key}"]
            )
            assert len(lines[at].split(maxsplit=1)) == 2
            assert len(lines[at + 1].strip()) > 0
    text = config.describe()
    for expected in (
        "--batch.tokens_per_rank int\n        token budget: maximum tokens per rank in one "
        "micro-batch (default: 8192)",
        "--context.mode auto|static|bins",
        "--context.bins {int: int}|null",
        "--optimizer.betas [float, float]",
        "--log.tensorboard true|false",
        "(default: runs/default)",
    ):
        assert expected in text


def test_a_model_is_its_preset_with_the_sizes_given() -> None:
    shape = load("model.preset=small", "model.overrides.num_hidden_layers=3").model.shape(
        vocab_size=4096
    )
    assert shape == PRESETS["small"].model_copy(update={"num_hidden_layers": 3, "vocab_size": 4096})
    assert load("model.vocab_size=4100").model.shape(vocab_size=4096).vocab_size == 4100
    with pytest.raises(ConfigError, match="at least the size of the store's tokenizer, 4096"):
        load("model.vocab_size=100").model.shape(vocab_size=4096)


@pytest.mark.parametrize(("name", "world_size"), [("quickstart", 2), ("pretrain_128k_cpu", 2)])
def test_the_examples_are_valid(repository: Path, name: str, world_size: int) -> None:
    loaded = config.load(repository / "examples" / f"{name}.yaml", world_size=world_size)
    assert "128k" not in name or loaded.max_length(world_size) >= 131072


def test_several_stores_replace_the_default_store(tmp_path: Path) -> None:
    loaded = load("data.store=[{path: a, weight: 3}, {path: b, weight: 1.5}]")
    assert loaded.data.paths == [Path("a"), Path("b")] and loaded.data.description == "a, b"
    assert config.load(written(tmp_path, loaded.to_yaml())) == loaded
    assert Config().data.paths == [Path("stores/python-stdlib")]
    assert Config().data.mix is None
    assert "--data.store path|[{path, weight, epochs}, ..]" in config.describe()


@pytest.mark.parametrize(
    ("stores", "rule"),
    [
        ("[]", "must not be empty"),
        ("[{path: a}]", "each store needs either weight or epochs"),
        ("[{path: a, weight: 1, epochs: 2}]", "each store needs either weight or epochs"),
        (
            "[{path: a, weight: 1}, {path: b, epochs: 2}]",
            "stores with weight and stores with epochs cannot be mixed",
        ),
        ("[{path: a, weight: 1}, {path: ./a, weight: 2}]", "a store must not be listed twice"),
        ("[{path: a, weight: 0}]", "must be greater than 0 (at 0.weight)"),
        ("[{path: a, weight: 1}, {path: b, wieght: 1}]", "unknown key wieght (at 1)"),
        ("[{weight: 1}]", "required (at 0.path)"),
        ("null", "must be a path, or a list of {path, weight}"),
        ("3", "must be a path, or a list of {path, weight}"),
        ("ftp://bucket", "and not ftp://"),
    ],
)
def test_invalid_lists_of_stores(stores: str, rule: str) -> None:
    (text,) = problems(f"data.store={stores}").values()
    assert rule in text and text.startswith("  data.store = ")


def test_a_mix_has_no_epochs_of_the_run() -> None:
    text = problems("data.store=[{path: a, weight: 3}]", "train.epochs=2")["train.epochs"]
    assert "stores of a mix have epochs of their own" in text


def test_a_profile_is_found_beside_its_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder; that of the working directory comes first, and a shipped name before both."""
    beside = tmp_path / "settings"
    here = tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
    file = beside / "run.yaml"
    file.write_text("context: {profile: ours.yaml}\n")
    shipped = SHIPPED / "a100-40gb.yaml"
    (beside / "ours.yaml").write_text(shipped.read_text("utf-8"))
    monkeypatch.chdir(here)
    assert config.load(file).context.profile == str(beside / "ours.yaml")
    (here / "ours.yaml").write_text(shipped.read_text("utf-8"))
    assert config.load(file).context.profile == "ours.yaml"
    (beside / "a100-40gb").write_text("wrong")
    file.write_text("context: {profile: a100-40gb}\n")
    assert config.load(file).context.profile == "a100-40gb"
