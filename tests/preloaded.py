"""What the fork server of the tests imports and computes once for all processes.

Transformers' table of conversions takes each process half a second otherwise, and TRL's trainers as
much. Nothing of all that is garbage: it is not looked for meanwhile, nor in what was imported later
on.
"""

import gc
import importlib
from contextlib import suppress

MODULES = (
    "torch",
    "torch.distributed",
    "longctx.training.trainer",
    "longctx.commands.train",
    "pandas",
    "peft",
    "datasets",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.kto_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.rloo_trainer",
    "trl.trainer.sft_trainer",
    "longctx.trainers",
    "pytest",
    "hypothesis",
    "torch.distributed.tensor.debug",
    "torch._dynamo.testing",
    "tests.training_cases",
    "tests.trainer_cases",
)
"""What is not installed is passed over. The last ones are what workers import to read the function
that they shall run."""


def _preload() -> None:
    """Imports all modules, and has transformers make its table."""
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    with suppress(ImportError):
        conversions = importlib.import_module("transformers.conversion_mapping")
        conversions.get_checkpoint_conversion_mapping("llama")


gc.disable()
_preload()
gc.enable()
gc.freeze()
