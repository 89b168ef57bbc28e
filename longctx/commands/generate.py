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
    try:
        from safetensors import SafetensorError
        from transformers import AutoConfig, TextStreamer, pipeline, set_seed
    except ImportError as error:
        raise UserError(
            f"generation needs transformers, which cannot be imported ({error}): {install('huggingface')}"
        ) from error
    checkpoint, device = arguments.checkpoint, None if arguments.device == "auto" else arguments.device
    try:
        _check_generates(checkpoint, AutoConfig.from_pretrained(checkpoint, trust_remote_code=False))
        generator: Any = pipeline("text-generation", checkpoint, dtype=arguments.dtype, device=device, trust_remote_code=False)
    except UserError:
        raise
    except (ValueError, OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{checkpoint} cannot be loaded: {brief(error)}") from error
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error
    text = _text(arguments, has_template=generator.tokenizer.chat_template is not None)
    sampled = arguments.temperature is not None
    # Greedy decoding must not warn about sampling options in the checkpoint's generation config.
    sampling = {"temperature": arguments.temperature} if sampled else {"temperature": None, "top_p": None, "top_k": None}
    set_seed(arguments.seed)
    streamer = TextStreamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True)
    generator(text, streamer=streamer, do_sample=sampled, max_new_tokens=arguments.max_new_tokens, num_beams=1, **sampling)
    return 0


def _check_generates(checkpoint: str, config: Any) -> None:
    """Raises UserError for models that do not continue a text, some of which transformers would load as if they did."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from longctx.model.vision import VISION_FAMILIES

    if config.model_type in VISION_FAMILIES and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"{checkpoint} reads images ({config.model_type}), which this command does not: use transformers' "
            f"pipeline('image-text-to-text', {checkpoint!r})"
        )
    names = [name for name in config.architectures or () if name.endswith(("ForMaskedLM", "ForConditionalGeneration"))]
    if names:
        raise UserError(f"{checkpoint} is a {names[0]}, which does not continue a text: use it by transformers' own pipeline")


def _text(arguments: argparse.Namespace, has_template: bool) -> str | list[dict[str, str]]:
    """Returns the prompt, or the conversation to answer."""
    if arguments.prompt is not None:
        if not arguments.prompt:
            raise UserError("--prompt is empty: give some text to continue")
        return str(arguments.prompt)
    if not has_template:
        raise UserError(f"the tokenizer of {arguments.checkpoint} has no chat template: use --prompt instead of --chat")
    message = arguments.chat or sys.stdin.read()
    if not message.strip():
        raise UserError("the message is empty: give --chat TEXT, or write it to standard input")
    return [{"role": "user", "content": message}]
