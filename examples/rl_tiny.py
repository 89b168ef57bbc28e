"""Reinforcement learning in a loop of one's own: a tiny model learns to copy three digits, from a reward for every right one.

    torchrun --standalone --nproc-per-node 2 examples/rl_tiny.py [train.steps=150 ..] [--resume] [--plot FILE]

Runs for one or two minutes on two CPU cores. `Engine` stands for vLLM or SGLang: it takes the trainer's weights by the names of
transformers, samples, and returns completions with their log-probabilities. The reward of every step is in metrics.jsonl of
the run folder, runs/rl-tiny.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import longctx
from longctx.data.rollouts import Rollouts
from longctx.training.loop import start
from longctx.training.trainer import Trainer

DIGITS, COPY, VOCABULARY = 3, 10, 12
"""Digits of a prompt, the token after them, and the number of tokens."""
PROMPTS, SAMPLES = 64, 8
"""Prompts of a step, and completions of each."""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


SETTINGS = {
    **{f"model.{name}": value for name, value in SIZES.items()},
    "policy.loss": "grpo",
    "batch.tokens_per_rank": 1024,
    "optimizer.learning_rate": 3e-3,
    "optimizer.warmup_steps": 10,
    "checkpoint.every": 50,
    "train.steps": 150,
    "train.run_dir": "runs/rl-tiny",
}


class Engine:
    """Samples with transformers and a KV cache."""

    def __init__(self) -> None:
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES)).eval()
        self.random = torch.Generator()

    @torch.no_grad()
    def update(self, trainer: Trainer) -> None:
        """Takes the trainer's present weights, tensor by tensor."""
        parameters = dict(self.model.named_parameters())
        for name, tensor in trainer.weights():
            parameters.pop(name).copy_(tensor)
        assert not parameters, f"no weights for {', '.join(parameters)}"

    @torch.no_grad()
    def sample(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns completions of `prompts`, and the log-probability of each of their tokens, both [prompts, digits]."""
        tokens, log_probabilities, cache, given = [], [], None, prompts
        for _ in range(DIGITS):
            out = self.model(given, past_key_values=cache, use_cache=True)
            scores, cache = out.logits[:, -1].log_softmax(-1), out.past_key_values
            given = scores.exp().multinomial(1, generator=self.random)
            tokens.append(given)
            log_probabilities.append(scores.gather(1, given))
        return torch.cat(tokens, 1), torch.cat(log_probabilities, 1)


def roll_out(engine: Engine, trainer: Trainer) -> Rollouts:
    """Returns the rollouts of a step, of which every rank samples its share."""
    mesh = trainer.mesh
    engine.random.manual_seed(trainer.steps_done * mesh.world_size + mesh.world_rank)  # so that --resume is exact
    digits = torch.randint(0, 10, (PROMPTS // mesh.world_size, DIGITS), generator=engine.random).repeat_interleave(SAMPLES, 0)
    prompts = torch.cat([digits, torch.full((len(digits), 1), COPY)], 1)
    completions, log_probabilities = engine.sample(prompts)
    rewards = (completions == digits).double().mean(1)
    of_rank = [prompts.tolist(), completions.tolist(), rewards.tolist(), log_probabilities.tolist()]
    columns = zip(*mesh.gather_objects(of_rank), strict=True)
    prompts, completions, rewards, log_probabilities = ([row for part in column for row in part] for column in columns)
    return Rollouts(prompts, completions, rewards=rewards, sampler_logps=log_probabilities)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="settings of longctx that replace those of this file")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in train.run_dir")
    parser.add_argument("--plot", type=Path, help="picture of the rewards")
    arguments = parser.parse_args()
    config = longctx.load_config(None, [f"{name}={value}" for name, value in SETTINGS.items()] + arguments.settings)
    trainer = start(config, vocab_size=VOCABULARY, resume=arguments.resume)
    engine, began = Engine(), time.perf_counter()
    while trainer.steps_done < config.train.steps:
        engine.update(trainer)
        metrics = trainer.step(roll_out(engine, trainer))
        if trainer.log is not None:  # on rank 0
            trainer.log.write(metrics)
        if trainer.steps_done % config.checkpoint.every == 0:
            trainer.save()  # `longctx export` makes it a checkpoint of transformers
    trainer.mesh.close()
    if trainer.log is not None:
        print(f"{trainer.steps_done} steps in {time.perf_counter() - began:.0f} s")
        if arguments.plot is not None:
            draw(config.train.run_dir / "metrics.jsonl", arguments.plot)


def draw(log: Path, picture: Path) -> None:
    """Draws the reward of every step."""
    import matplotlib.pyplot as plt

    steps = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot([step["step"] for step in steps], [step["reward"] for step in steps])
    axes.set(xlabel="step", ylabel="reward: share of right digits", ylim=(0, 1))
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
