"""`longctx generate`: generates text from a transformers checkpoint, such as an exported run, with transformers."""

import argparse
import sys
from typing import Any

from longctx.errors import UserError, brief, install

SUMMARY = "Continue a text or answer a message with an exported model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="DIR", help="transformers checkpoint: a folder, or OWNER/NAME on the hub")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="text to continue")
    what.add_argument(
        "--chat", metavar="TEXT", nargs="?", const="", help="message to answer; without TEXT, read from standard input"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="maximum number of generated tokens")
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (default: greedy decoding)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="dtype of the weights; auto: the checkpoint's"
    )
    parser.add_argument("--device", default="auto", help="auto (cuda if available, otherwise cpu), cpu, cuda or cuda:1")


def run(arguments: argparse.Namespace) -> int:
    from longctx.model.checkpoint_files import check_name

    if arguments.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {arguments.max_new_tokens}: must be at least 1")
    if arguments.temperature is not None and arguments.temperature <= 0:
        raise UserError(f"--temperature is {arguments.temperature}: must be above 0; omit it for greedy decoding")
    check_name(arguments.checkpoint)
    return _generate(arguments)


def _generate(arguments: argparse.Namespace) -> int:
    import torch

    try:
        from safetensors import SafetensorError
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TextStreamer
    except ImportError as error:
        raise UserError(
            f"generation needs transformers, which cannot be imported ({error}): {install('huggingface')}"
        ) from error
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    try:
        _check_generates(arguments.checkpoint, AutoConfig.from_pretrained(arguments.checkpoint, trust_remote_code=False))
        tokenizer: Any = AutoTokenizer.from_pretrained(arguments.checkpoint, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=dtype, trust_remote_code=False)
    except UserError:
        raise
    except (ValueError, OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{arguments.checkpoint} cannot be loaded: {brief(error)}") from error
    try:
        model = model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error
    ids = _ids(arguments, tokenizer).to(device)
    sampled = arguments.temperature is not None
    chosen: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": arguments.max_new_tokens, "num_beams": 1}
    # Greedy decoding must not warn about sampling options in the checkpoint's generation config.
    chosen |= {"temperature": arguments.temperature} if sampled else {"temperature": None, "top_p": None, "top_k": None}
    if tokenizer.pad_token_id is None:
        chosen["pad_token_id"] = tokenizer.eos_token_id
    torch.manual_seed(arguments.seed)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **chosen)
    return 0


def _check_generates(checkpoint: str, config: Any) -> None:
    """Raises UserError for an encoder, which transformers would load as if it were causal."""
    from longctx.model.checkpoint_files import MASKED_CLASS

    names = [name for name in config.architectures or () if name.endswith(MASKED_CLASS)]
    if names:
        raise UserError(
            f"{checkpoint} is an encoder ({names[0]}), which predicts masked tokens and cannot continue a text: use "
            "transformers' pipeline('fill-mask', ..)"
        )


def _ids(arguments: argparse.Namespace, tokenizer: Any) -> Any:
    """Returns token ids [1, tokens] of the prompt, or of the conversation up to the start of the answer."""
    if arguments.prompt is not None:
        if not arguments.prompt:
            raise UserError("--prompt is empty: give some text to continue")
        return tokenizer(arguments.prompt, return_tensors="pt")["input_ids"]
    if tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {arguments.checkpoint} has no chat template: use --prompt instead of --chat")
    text = arguments.chat or sys.stdin.read()
    if not text.strip():
        raise UserError("the message is empty: give --chat TEXT, or write it to standard input")
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
