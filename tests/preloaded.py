"""What the fork server of the tests imports and computes once for all processes: transformers'
table of conversions takes each half a second, and TRL's trainers as much."""

import trl.trainer.dpo_trainer
import trl.trainer.grpo_trainer
import trl.trainer.kto_trainer
import trl.trainer.reward_trainer
import trl.trainer.rloo_trainer
import trl.trainer.sft_trainer  # noqa: F401
from transformers import conversion_mapping

import longctx.trainers  # noqa: F401

conversion_mapping.get_checkpoint_conversion_mapping("llama")
