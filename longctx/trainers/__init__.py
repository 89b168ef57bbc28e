"""Dynamic context parallelism inside the trainers of transformers and TRL.

    # SFTTrainer, transformers.Trainer, TRL's DPO, KTO, GRPO, RLOO and RewardTrainer, or subclasses.
    trainer = SFTTrainer(...)
    dynamic_context_parallel(trainer, tokens_per_rank=16384)
    trainer.train()

Each optimizer step is planned over all documents that the ranks have drawn for it, whatever the
batch size; where a loss needs whole rows, each call of the model. The trainer keeps its loader,
optimizer, callbacks, logging, evaluation and checkpoints.
"""

from longctx.trainers.dynamic import dynamic_context_parallel, restore
from longctx.trainers.refusals import TrainerError

__all__ = ["TrainerError", "dynamic_context_parallel", "restore"]
