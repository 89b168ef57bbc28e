"""Writes text with a model of block diffusion, by the plain denoising loop of BD3-LM: python
examples/denoise.py CHECKPOINT "def " [BLOCKS]

Each block begins as mask tokens. In every step, from noise t to s, a masked token is written with
probability (t - s) / t, by the model's probabilities; written tokens stay. A block sees itself both
ways and the blocks before it.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BLOCK, STEPS = 16, 32
checkpoint, prompt, *blocks = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
mask = tokenizer.eos_token_id
written = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids[0]


@torch.no_grad()
def probabilities(tokens: torch.Tensor) -> torch.Tensor:
    """Returns those of every token in its place; the mask token is never written."""
    block = torch.arange(len(tokens)) // BLOCK
    hidden = block[:, None] < block[None]
    bias = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    positions = torch.arange(len(tokens))[None]
    output = model(tokens[None], attention_mask=bias[None, None], position_ids=positions)
    logits = output.logits[0].float()
    logits[:, mask] = -torch.inf
    return logits.softmax(-1)


for _ in range(int(blocks[0]) if blocks else 12):
    missing = BLOCK - len(written) % BLOCK
    tokens = torch.cat([written, torch.full((missing,), mask)])
    masked = torch.arange(len(tokens)) >= len(written)
    for step in range(STEPS, 0, -1):
        drawn = torch.multinomial(probabilities(tokens), 1)[:, 0]
        chosen = masked & (torch.rand(len(tokens)) < 1 / step)
        tokens = torch.where(chosen, drawn, tokens)
        masked = masked & ~chosen
    written = tokens
print(tokenizer.decode(written))
