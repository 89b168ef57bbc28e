"""Small trainers of transformers and TRL, on one process and on several, with dynamic context
parallelism and without."""

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from longctx.planning.hardware_profile import HardwareProfile
from tests.host_waits import waits_of_a_trainer

PROFILE = HardwareProfile.load("cpu-2core")
LONGEST, TOKENS_PER_RANK, VOCABULARY = 90, 64, 128
DOCUMENTS_A_STEP, DOCUMENTS = 12, 41
"""Steps of documents; the last of an epoch is not full."""


def documents(count: int = DOCUMENTS, seed: int = 0) -> list[dict[str, list[int]]]:
    """Documents of 2 to LONGEST tokens, the first third of each without a loss, and the fourth
    whole."""
    random = np.random.default_rng(seed)
    rows = []
    for length in [LONGEST, 2, *random.integers(2, LONGEST // 2, count - 3), LONGEST - 1]:
        ids = random.integers(0, VOCABULARY, length)
        labels = np.where(
            np.arange(length) < (length if len(rows) == 3 else length // 3), -100, ids
        )
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def model(kind: str = "qwen2") -> Any:
    """A model with the same random weights in every process."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    if kind == "gemma3":
        config = transformers.Gemma3TextConfig(
            **sizes, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
        )
        return transformers.Gemma3ForCausalLM(config)
    if kind == "gpt_oss":
        config = transformers.GptOssConfig(
            **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
        )
        config.layer_types = ["sliding_attention", "full_attention"]
        return transformers.GptOssForCausalLM(config)
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **sizes, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
        )
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
        made = transformers.Qwen3MoeForCausalLM(config)
        for layer in made.model.layers:
            # Rounding decides between experts that are almost equally likely.
            layer.mlp.gate.weight.data *= 30
        return made
    if kind == "mamba2":
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
        }
        return transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(**sizes, num_heads=8, head_dim=8, n_groups=2)
        )
    if kind in ("deepseek_v3", "deepseek_v32"):
        sizes |= {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        }
        sizes |= {"qk_rope_head_dim": 8, "first_k_dense_replace": 2}
        if kind == "deepseek_v3":
            return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))
        sizes |= {"index_topk": 8, "index_n_heads": 32, "index_head_dim": 8}
        sizes |= {"mlp_layer_types": ["dense", "dense"]}
        indexed = transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**sizes))
        for layer in indexed.model.layers:
            # Rounding decides between keys of almost equal scores; with few heads many are 0, of
            # which transformers chooses others in padded rows.
            layer.self_attn.indexer.wk.weight.data *= 30
        return indexed
    if kind == "arcee":
        return transformers.ArceeForCausalLM(transformers.ArceeConfig(**sizes))
    if kind in ("bert", "roberta", "modernbert"):
        name = {"bert": "Bert", "roberta": "Roberta", "modernbert": "ModernBert"}[kind]
        sizes |= {
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "local_attention": 16,
        }
        sizes |= {
            "vocab_size": VOCABULARY + 1,
            "pad_token_id": VOCABULARY,
            "max_position_embeddings": 256,
        }
        # RoBERTa gives padding no position.
        config = getattr(transformers, f"{name}Config")(**sizes)
        return getattr(transformers, f"{name}ForMaskedLM")(config)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A data collator: pads rows on the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    fillers = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    padded = {name: [] for name in fillers}
    for row in rows:
        values = {**row, "attention_mask": [1] * len(row["input_ids"])}
        for name, filler in fillers.items():
            padded[name].append(values[name] + [filler] * (longest - len(values[name])))
    return {name: torch.tensor(values) for name, values in padded.items()}


def arguments(folder: Path, ranks: int, accumulation: int, **more: Any) -> dict[str, Any]:
    """Arguments of a run whose steps have the same documents on any number of ranks."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": DOCUMENTS_A_STEP // ranks // accumulation,
        "per_device_eval_batch_size": DOCUMENTS_A_STEP // ranks,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "include_num_input_tokens_seen": "non_padding",
        "prediction_loss_only": True,
        **more,
    }


def as_rank() -> int:
    """Tells accelerate which rank of the workers' group this process is. Returns the number of
    ranks."""
    from accelerate.state import AcceleratorState

    ranks = dist.get_world_size()
    AcceleratorState._reset_state(True)
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[name]  # of the arguments of the run before
    names = {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in names.items():
        if ranks > 1:
            os.environ[name] = str(value)
        else:
            os.environ.pop(name, None)
    return ranks


def report(trainer: Any) -> dict[str, Any]:
    """What is compared between runs."""
    shared = trainer.dynamic if hasattr(trainer, "dynamic") else None
    parts = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    whole = ((name, getattr(each, "full_tensor", lambda each=each: each)()) for name, each in parts)
    weights = {name: each.detach().clone() for name, each in whole}
    return {
        "log": trainer.state.log_history,
        "weights": weights,
        "tokens": trainer.state.num_input_tokens_seen,
        "trees": sum(len(plan.trees) for plan in shared.plans) if shared else 0,
        "plans": [plan.lengths for plan in shared.plans] if shared else [],
        "micro_batches": max(len(plan.micro_batches) for plan in shared.plans) if shared else 0,
        "degrees": sorted({degree for plan in shared.plans for degree in plan.degrees})
        if shared
        else [],
    }


class Batches:
    """A sampler of batches without a sampler of rows, and, as it may be, without a size."""

    def __init__(self, rows: int, size: int) -> None:
        self.batches = [
            list(range(start, min(start + size, rows))) for start in range(0, rows, size)
        ]

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def train(
    folder: Path, kind: str, accumulation: int, dynamic: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Trains with `transformers.Trainer`; steps have the same documents on any number of ranks."""
    from transformers import Trainer, TrainingArguments

    from longctx.trainers import dynamic_context_parallel

    ranks, options = as_rank(), dict(options)
    resume, data = options.pop("resume", None), documents()
    if options.pop("streamed", False):
        import datasets

        data = datasets.Dataset.from_list(data).to_iterable_dataset()
    if "fsdp" in options:
        select_fsdp_on_cpus()
    predicting, sampling, watched = (
        options.pop(name, None) for name in ("predicting", "sampling", "watched")
    )
    budget = options.pop("budget", {"tokens_per_rank": TOKENS_PER_RANK if ranks > 1 else LONGEST})
    if sampling == "rebalanced":
        options["train_sampling_strategy"] = "batch_rebalance"

    class InBatches(Trainer):
        def get_train_dataloader(self) -> Any:
            batches = Batches(len(data), self.args.per_device_train_batch_size)
            return self.accelerator.prepare(
                torch.utils.data.DataLoader(
                    data, batch_sampler=batches, collate_fn=self.data_collator
                )
            )

    trainer = (InBatches if sampling == "of batches" else Trainer)(
        model(kind),
        TrainingArguments(**arguments(folder, ranks, accumulation, **options)),
        data_collator=pad,
        train_dataset=data,
        eval_dataset=documents(19, seed=1),
        compute_metrics=likelihood if predicting else None,
    )
    if dynamic:
        dynamic_context_parallel(trainer, profile=PROFILE, **budget)
    if watched:
        return {"waits": waits_of_a_trainer(trainer)}
    trainer.train(resume_from_checkpoint=resume)
    predictions = trainer.predict(documents(7, seed=2)) if predicting else None
    return report(trainer) | {"predictions": predictions}


def train_by_launcher(
    folder: Path, kind: str, options: dict[str, Any], around: bool = False
) -> dict[str, Any]:
    """Trains twice with one trainer, as a program does, in the launcher; reports the first.
    `around`: of a class with a `train` of its own."""
    from transformers import Trainer, TrainingArguments

    from longctx.trainers.launcher import Launched

    class Around(Trainer):
        own_trains = 0

        def train(self, *arguments: Any, **named: Any) -> Any:
            self.own_trains += 1
            return super().train(*arguments, **named)

    ranks = as_rank()
    own = Trainer.train
    launched = Launched({"profile": PROFILE, **options})
    try:
        trainer = (Around if around else Trainer)(
            model(kind),
            TrainingArguments(**arguments(folder, ranks, 1)),
            data_collator=pad,
            train_dataset=documents(),
            eval_dataset=documents(19, seed=1),
        )
        trainer.train()
        reported = report(trainer)
        trainer.train()
    finally:
        launched.undo()
    return reported | {
        "trained": launched.trained,
        "restored": Trainer.train is own,
        "own_trains": getattr(trainer, "own_trains", 0),
    }


def likelihood(prediction: Any) -> dict[str, float]:
    """A metric of logits and labels."""
    likelihoods = torch.log_softmax(torch.tensor(prediction.predictions[:, :-1]), -1)
    labels = torch.tensor(prediction.label_ids[:, 1:])
    chosen = likelihoods.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return {"likelihood": chosen[labels != -100].mean().item()}


def select_fsdp_on_cpus() -> None:
    """Makes accelerate select FSDP for processes on CPUs, as it does on GPUs: it would silently
    train with DDP."""
    from accelerate import state
    from accelerate.utils import DistributedType

    begin = state.AcceleratorState.__init__
    if begin.__name__ == "selecting":
        return

    def selecting(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        begin(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = state.PartialState._shared_state["distributed_type"] = (
                DistributedType.FSDP
            )
            self.fsdp_plugin = fsdp_plugin

    state.AcceleratorState.__init__ = selecting


TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}[A]{% generation %}{{ "
    "message.content }}[E]"
    "{% endgeneration %}{% else %}[U]{{ message.content }}[E]{% endif %}{% endfor %}"
)


def tokenizer() -> Any:
    """A tokenizer of words, with a chat template that marks what the assistant says."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[P]", "[E]", "[U]", "[A]", "[X]"]
    vocabulary = {
        word: number
        for number, word in enumerate(
            [*special, *(f"w{n}" for n in range(VOCABULARY - len(special)))]
        )
    }
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[X]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[P]", eos_token="[E]", unk_token="[X]"
    )
    made.add_special_tokens({"additional_special_tokens": special[2:4]})
    made.chat_template = TEMPLATE
    return made


def conversations(count: int = DOCUMENTS, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of one or two turns, the first of which is LONGEST tokens long."""
    random = np.random.default_rng(seed)

    def words(number: int) -> str:
        return " ".join(f"w{n}" for n in random.integers(0, VOCABULARY - 5, number))

    rows = [
        {
            "messages": [
                {"role": "user", "content": words(20)},
                {"role": "assistant", "content": words(LONGEST - 24)},
            ]
        }
    ]
    for _ in range(count - 1):
        turns = random.integers(1, 3)
        roles = ["user", "assistant"] * turns
        rows.append(
            {
                "messages": [
                    {"role": role, "content": words(int(random.integers(1, 10)))} for role in roles
                ]
            }
        )
    return rows


def as_rank_alone() -> None:
    """Makes this process one without others, whatever ran in it before."""
    import os

    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def adapters(lora: bool | str | float) -> Any:
    """LoRA, DoRA ("dora"), LoRA of the embedding ("embedding"), or LoRA with a dropout."""
    from peft import LoraConfig

    if lora == "embedding":
        return LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM")
    kinds = {
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": lora == "dora",
    }
    return (
        LoraConfig(r=4, lora_dropout=lora if isinstance(lora, float) else 0.0, **kinds)
        if lora
        else None
    )


def finetune(
    folder: Path, accumulation: int, dynamic: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Fine-tunes with `trl.SFTTrainer`. Options: those of SFTConfig, and `lora` and `kind` of the
    model."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    from longctx.trainers import dynamic_context_parallel

    ranks, options = as_rank(), dict(options)
    lora, kind, predicting = (
        options.pop("lora", False),
        options.pop("kind", "qwen2"),
        options.pop("predicting", False),
    )
    budget = options.pop(
        "budget", {"tokens_per_rank": TOKENS_PER_RANK if ranks > 1 else 2 * LONGEST}
    )
    defaults = {"assistant_only_loss": True, "max_length": None}
    data = [
        datasets.Dataset.from_list(conversations(count, seed))
        for count, seed in ((DOCUMENTS, 0), (19, 1))
    ]
    given = arguments(folder, ranks, accumulation, **{**defaults, **options})
    trainer = SFTTrainer(
        model(kind),
        args=SFTConfig(
            **{name: value for name, value in given.items() if name != "remove_unused_columns"}
        ),
        train_dataset=data[0],
        eval_dataset=data[1],
        processing_class=tokenizer(),
        peft_config=adapters(lora),
        compute_metrics=likelihood if predicting else None,
    )
    if dynamic:
        dynamic_context_parallel(trainer, profile=PROFILE, **budget)
    trainer.train()
    return report(trainer)


class Engine:
    """Stands for vLLM in TRL: reads the weights, and makes completions and their likelihoods of the
    prompts alone."""

    def __init__(self, model: Any, **_: Any) -> None:
        self.model, self.read = model, 0

    def sync_weights(self) -> None:
        self.read += sum(weight.data.numel() for weight in self.model.parameters())

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        assert self.read
        made = [
            [10 + (sum(ids) + 7 * k * number) % 90 for k in range(2 + number % 5)]
            for number, ids in enumerate(prompts)
        ]
        return prompts, made, [[[-4.0]] * len(ids) for ids in made], None


def play(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A `rollout_func` of GRPO: a turn of the model, an answer of an environment, which is not
    trained, and another turn; all made of the prompt alone."""
    encoded = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    turns = []
    masks = []
    for number, ids in enumerate(encoded):
        answer = 1 + number % 4
        length = 3 + answer + number % 5
        turns.append([10 + (sum(ids) + 7 * k * number) % 90 for k in range(length)])
        masks.append([0 if 2 <= k < 2 + answer else 1 for k in range(length)])
    likelihoods = [[-4.0] * len(ids) for ids in turns]
    return {
        "prompt_ids": encoded,
        "completion_ids": turns,
        "logprobs": likelihoods,
        "env_mask": masks,
    }


def play_with_experts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same, with experts of every token but the last, as engines return them: of a model of two
    layers with two of four experts a token. A prompt begins with the same experts in every
    completion, but may end with others."""
    output = play(prompts, trainer)
    experts = []
    for number, parts in enumerate(
        zip(output["prompt_ids"], output["completion_ids"], strict=True)
    ):
        ids = np.concatenate(parts)
        first = (ids[:-1, None] + np.arange(2)) % 4  # by token and layer
        first[len(parts[0]) - 1 :] += number
        chosen = np.stack([first, first + 1 + ids[:-1, None] % 2], -1) % 4
        experts.append(chosen.astype(np.int16))
    return output | {"routed_experts": experts}


def prefer(folder: Path, kind: str, dynamic: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Trains with one of TRL's trainers that need whole sequences. Options: those of its config,
    `lora`, `budget`, `kind` of the model, whether an `agent` plays (or a function that does), what `changes` the trainer, whether to be `evaluating` before, and whether the config
    of a mixture `asks` for the loss of its routers, with which it does not generate."""
    import datasets
    import trl

    from longctx.trainers import dynamic_context_parallel

    ranks, options = as_rank(), dict(options)
    if "fsdp" in options:
        select_fsdp_on_cpus()
    lora, budget = (
        options.pop("lora", False),
        options.pop("budget", {"tokens_per_rank": TOKENS_PER_RANK}),
    )
    watched, evaluating, of = (
        options.pop("watched", False),
        options.pop("evaluating", False),
        options.pop("kind", "qwen2"),
    )
    agent, changes = options.pop("agent", False), options.pop("changes", None)
    base = folder / "base"  # TRL loads the reference model from there
    made, asks = model(of), options.pop("asks", False)
    if of == "qwen3_moe":
        made.config.output_router_logits = asks
    if dist.get_rank() == 0:
        made.save_pretrained(base)
    dist.barrier()
    given = arguments(
        folder, ranks, 1, max_steps=3, eval_strategy="no", optim="sgd", learning_rate=0.05
    )
    given |= {
        "per_device_train_batch_size": 4,
        "include_num_input_tokens_seen": "no",
        "max_grad_norm": 0.0,
    }
    del given["remove_unused_columns"]
    more: dict[str, Any] = {}
    library = trl
    if kind == "GMPO":
        library = importlib.import_module("trl.experimental.gmpo")
    if kind in ("GRPO", "RLOO", "GMPO"):
        given |= {"num_generations": 2, "max_completion_length": 12}
        more["reward_funcs"] = lambda completions, **_: [
            float(len(set(text.split()))) for text in completions
        ]
        if agent:
            more["rollout_func"] = agent if callable(agent) else play
        name = kind.lower().replace("gmpo", "grpo")
        importlib.import_module(f"trl.trainer.{name}_trainer").VLLMGeneration = Engine
    elif kind == "DPO":
        given["max_length"] = None
    trainer = getattr(library, f"{kind}Trainer")(
        model=str(base),
        args=getattr(library, f"{kind}Config")(**{**given, **options}),
        train_dataset=datasets.Dataset.from_list(preferences(kind)),
        processing_class=tokenizer(),
        peft_config=adapters(lora),
        **more,
    )
    if changes is not None:
        changes(trainer)
    if dynamic:
        dynamic_context_parallel(trainer, profile=PROFILE, **budget)
    if watched:
        return {"waits": waits_of_a_trainer(trainer)}
    if evaluating:
        trainer.evaluate(trainer.train_dataset)
    trainer.train()
    return report(trainer)


def preferences(kind: str) -> list[dict[str, Any]]:
    """Prompts, of which every sixth is long, with the completions that a trainer of this kind
    needs."""
    random = np.random.default_rng(0)

    def words(number: int) -> str:
        return " ".join(f"w{n}" for n in random.integers(0, VOCABULARY - 5, number))

    rows: list[dict[str, Any]] = []
    for number in range(24):
        rows.append(
            {"prompt": words(LONGEST - 20 if number % 6 == 0 else int(random.integers(2, 20)))}
        )
        if kind == "DPO":
            rows[-1] |= {
                "chosen": words(int(random.integers(2, 12))),
                "rejected": words(int(random.integers(2, 12))),
            }
        if kind == "KTO":
            rows[-1] |= {
                "completion": words(int(random.integers(2, 12))),
                "label": bool(number % 2),
            }
    return rows


def share(batches: list[list[list[tuple[list[int], list[int]]]]]) -> tuple[bool, list[int]]:
    """Shares a step of random documents, by rank, batch and document.

    Returns whether this rank got what packing all documents gives it, and gave it back, and the
    tokens it sent to every rank.
    """
    from longctx.data.packing import pack_documents
    from longctx.trainers.documents import Document
    from longctx.trainers.families import AttentionOptions
    from longctx.trainers.step import Planning, StepExchange

    rank, sent = dist.get_rank(), []
    exchange = dist.all_to_all_single

    def counting(
        received: torch.Tensor,
        rows: torch.Tensor,
        counts: list[int],
        sizes: list[int],
        **named: Any,
    ) -> None:
        sent.extend(sizes)
        exchange(received, rows, counts, sizes, **named)

    dist.all_to_all_single = counting
    try:
        world = dist.group.WORLD
        planning = Planning(PROFILE, TOKENS_PER_RANK)
        attention = AttentionOptions(torch.device("cpu"), group=world)
        sharing = StepExchange(planning, attention, ids_group=world)
        mine = [
            [Document(np.array(ids), np.array([*labels[1:], -100])) for ids, labels in batch]
            for batch in batches[rank]
        ]
        step = sharing.plan_and_exchange(mine)
    finally:
        dist.all_to_all_single = exchange
    everything = [
        document for turn in zip(*batches, strict=True) for batch in turn for document in batch
    ]
    trained = [(ids, labels) for ids, labels in everything if has_target(labels)]
    expected, targets = pack_documents(sharing.plans[-1], rank, *zip(*trained, strict=True))
    pairs = zip(step.micro_batches, expected, strict=True)
    same = all(
        torch.equal(ours.tokens, theirs.tokens)
        and torch.equal(ours.labels, theirs.labels)
        and torch.equal(ours.positions, theirs.positions)
        for ours, theirs in pairs
    )
    assert step.tokens == sum(len(ids) for ids, _ in everything)
    drawn = [document for batch in batches[rank] for document in batch]
    mask = torch.zeros(len(drawn) + 1, LONGEST * 2)
    back = torch.zeros(*mask.shape, 2, dtype=torch.int64)
    for row, (ids, labels) in enumerate(drawn):
        mask[row, : len(ids)] = 1
        if has_target(labels):
            back[row, : len(ids)] = torch.stack([torch.tensor(ids), torch.arange(len(ids))], 1)
    values = [torch.stack([batch.tokens, batch.positions], 1) for batch in step.micro_batches]
    same &= torch.equal(sharing.rows_of_batch(step, values, mask), back)
    return same and targets == step.targets, sent


def has_target(labels: list[int]) -> bool:
    return any(label != -100 for label in labels[1:])
