"""Peak memory of a step of `transformers.Trainer` with a vocabulary of 150,000: plain, and with
dynamic context parallelism.

python bench/trainer_logits.py    # half a minute; a process for each case, in float32 on a CPU
"""

import contextlib
import resource
import subprocess
import sys
import tempfile

TOKENS, VOCABULARY = (1024, 2048, 4096), 150_000


def peak_mib(way: str, tokens: int) -> float:
    """Returns the most memory of a process with one step of a document of so many tokens, in
    MiB."""
    return float(
        subprocess.run(
            [sys.executable, __file__, way, str(tokens)], check=True, capture_output=True
        ).stdout
    )


def step(way: str, tokens: int) -> None:
    """Trains one step, and prints the peak in MiB."""
    import transformers

    from longctx.planning.hardware_profile import HardwareProfile
    from longctx.trainers import dynamic_context_parallel

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)
    )
    rows = [{"input_ids": list(range(tokens)), "labels": list(range(tokens))}]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, use_cpu=True, max_steps=1, save_strategy="no", disable_tqdm=True
        )
        trainer = transformers.Trainer(model, args, transformers.default_data_collator, rows)
        with contextlib.redirect_stdout(sys.stderr):
            if way == "longctx":
                dynamic_context_parallel(
                    trainer, tokens_per_rank=tokens, profile=HardwareProfile.load("cpu-2core")
                )
            trainer.train()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    if sys.argv[1:]:
        step(sys.argv[1], int(sys.argv[2]))
    else:
        print("| tokens | plain, MiB | longctx, MiB |\n|---:|---:|---:|")
        for tokens in TOKENS:
            print(
                f"| {tokens:,} | {peak_mib('plain', tokens):,.0f} | "
                f"{peak_mib('longctx', tokens):,.0f} |",
                flush=True,
            )
