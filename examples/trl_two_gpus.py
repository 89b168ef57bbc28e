"""LoRA of Qwen3-8B by TRL on conversations of up to 40,960 tokens, on two GPUs of 80 GB.

    torchrun --nproc-per-node 2 examples/trl_two_gpus.py

chats.jsonl has lines {"messages": [{"role": "user", "content": ".."}, {"role": "assistant",
"content": ".."}]}. The adapters are saved in runs/qwen3-8b-lora. See docs/trl-two-gpus.md.
"""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from longctx.trainers import dynamic_context_parallel

conversations = load_dataset("json", data_files="chats.jsonl", split="train")
arguments = SFTConfig(
    "runs/qwen3-8b-lora",
    max_length=40_960,  # longer ones are cut
    per_device_train_batch_size=2,  # with accumulation, 16 conversations a step on both GPUs
    gradient_accumulation_steps=4,
    learning_rate=2e-4,
    num_train_epochs=1,
    bf16=True,
    model_init_kwargs={"dtype": "bfloat16"},
    gradient_checkpointing=True,
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
    logging_steps=1,
)
trainer = SFTTrainer(
    "Qwen/Qwen3-8B",
    args=arguments,
    train_dataset=conversations,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
)
dynamic_context_parallel(trainer)
trainer.train()
trainer.save_model()
