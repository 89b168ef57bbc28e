"""Chat templates in the style of five families, and tiny tokenizers for them.

The templates are our own texts: they treat turns, tools and reasoning as the families do.
Generation marks say what the assistant writes; families have them removed, but for one.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as TokenizerJson

Message = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def chat(*contents: str, system: str | None = None) -> list[Message]:
    """User and assistant in turns."""
    turns = [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]
    return [{"role": "system", "content": system}, *turns] if system is not None else turns


PLAIN = {
    "one turn": chat("Hello", "Hi."),
    "system": chat("Hello", "Hi.", "And now?", "Now this.", system="Be brief."),
    "empty turns": chat("", "", "again", "", "", "at last"),
    "multi-byte": chat("Grüße, 日本 🦊?", "Größe é́ 漢字 🦊🦊.", "noch", "ß"),
    "white space": chat("  Hello\n\n", "\n  Hi there.  \n", " x ", " y "),
    "the same words": chat("assistant", "assistant", "assistant\n", "user", "user", "assistant"),
    "ends with a question": chat("Hello", "Hi.", "And?"),
    "code": chat(
        "x = {'a': 1}", "<think>no</think", "{{ messages }}", "{% if a %}\n\tb\n{% endif %}"
    ),
}
WITH_TOOLS = {
    "a tool": [
        *chat("What is 2 + 3?", system="Calculate."),
        {"role": "assistant", "tool_calls": [call("add", a=2, b="drei 🦊", c=[1, "x"])]},
        {"role": "tool", "name": "add", "content": "5", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "It is 5."},
    ],
    "a tool, and on": [
        *chat("2 + 3?"),
        {"role": "assistant", "tool_calls": [call("add", a=2)]},
        {"role": "tool", "name": "add", "content": "5", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "5."},
        *chat("And twice that?", "10.", "Thanks.", "Yes."),
    ],
}
THINKING = {
    "reasoning": [
        *chat("Why?"),
        {"role": "assistant", "content": "So.", "reasoning_content": "Let me think: ß."},
        *chat("And?"),
        {"role": "assistant", "content": "Therefore.", "reasoning_content": "Once more."},
    ],
    "reasoning in the text": chat(
        "Why?", "<think>\nHm.\n</think>\n\nSo.", "And?", "<think>\nOh.\n</think>\n\nThat."
    ),
    "reasoning with a tool": [
        *chat("2 + 3?"),
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning_content": "A tool.",
            "tool_calls": [call("add", a=2)],
        },
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5.", "reasoning_content": "Done."},
        *chat("Thanks."),
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Polite."},
    ],
}

# --- ChatML with a system turn of its own, as SmolLM2's

SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% "
    "endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SMOLLM2_MARKED = (
    "{% for message in messages %}"
    "{% if loop.first and message.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% "
    "endif %}"
    "{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# --- Llama 3

LLAMA3_MARKED = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}
    {{- 'Functions:\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in rest %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set function = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- generation %}{{- '{"name": "' + function.name + '", "parameters": ' + (function.arguments | tojson) }}
        {{- '}<|eot_id|>' }}{%- endgeneration %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- generation %}{{- message.content | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""


# --- Qwen 3: reasoning of turns before the last question is left out, and the last answers always
# have some

QWEN3_MARKED = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(searching=true, question=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if seen.searching and message.role == 'user' %}
        {%- set seen.searching = false %}{%- set seen.question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}{%- generation %}
        {%- if loop.index0 > seen.question and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


# --- Gemma 3: the system's text stands in the first question, and roles must alternate

GEMMA3_MARKED = """{{ bos_token }}
{%- set first = '' %}{%- set rest = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0]['content'] + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if role == 'model' %}
        {%- generation %}{{- message['content'] | trim + '<end_of_turn>' }}{%- endgeneration %}{{- '\\n' }}
    {%- else %}{{- message['content'] | trim + '<end_of_turn>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""


# --- Mistral: no generation prompt, tools and the system's text before the last question only

MISTRAL_MARKED = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{%- set last = (rest | selectattr('role', 'equalto', 'user') | list)[-1] %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools and message == last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST] ' + (system + '\\n\\n' if system and message == last else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {%- generation %}{{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']') }}
        {%- endfor %}
        {{- eos_token }}{%- endgeneration %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{%- endgeneration %}
    {%- else %}
        {{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""


# --- tokenizers

CORPUS = [
    "Hello Hi there. What is it? user assistant system model It is so.\n\n",
    'Größe Grüße 日本 🦊 {"name": "add"}',
    "<think>\n",
] * 3


def byte_level(
    special: Sequence[str], other: Sequence[str] = (), *, nfc: bool = False
) -> TokenizerJson:
    """Byte-level BPE, as in Llama 3, Qwen and SmolLM2. `other`: added tokens that are not
    special."""
    inner = TokenizerJson(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if nfc:
        inner.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, show_progress=False, special_tokens=list(special)
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in other])
    return inner


def sentence_piece(special: Sequence[str], *, prefix: bool) -> TokenizerJson:
    """BPE over characters with ▁ for a space and byte fallback, as in Gemma and Mistral."""
    inner = TokenizerJson(models.BPE())
    space = normalizers.Replace(" ", "▁")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    trainer = trainers.BpeTrainer(
        vocab_size=150, show_progress=False, limit_alphabet=60, special_tokens=["<unk>"]
    )
    inner.train_from_iterator(CORPUS, trainer)
    content = json.loads(inner.to_str())
    vocabulary = content["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    merges = [tuple(merge) for merge in content["model"]["merges"]]
    made = TokenizerJson(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = inner.normalizer
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", *special])
    return made


@dataclass(frozen=True)
class Family:
    template: str
    marked: str
    """The same template, with marks around what the assistant writes."""
    tokenizer: TokenizerJson
    named: dict[str, str]
    """Special tokens by role."""
    conversations: dict[str, list[Message]]

    def save(self, folder: Path, template: str | None = None) -> Path:
        """A checkpoint's folder, without weights."""
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, **self.named)
        tokenizer.chat_template = self.template if template is None else template
        tokenizer.save_pretrained(folder)
        return folder


def unmarked(template: str) -> str:
    return re.sub(r"\{%- (end)?generation %\}", "", template)


QWEN3 = unmarked(QWEN3_MARKED)
CHATML = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
HEADERS = ["<|begin|>", "<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
THINKS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]
BRACKETS = [
    f"[{slash}{name}]"
    for name in ("INST", "TOOL_RESULTS", "AVAILABLE_TOOLS")
    for slash in ("", "/")
]
OF_CHATML = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

FAMILIES = {
    "Llama 3": Family(
        unmarked(LLAMA3_MARKED),
        LLAMA3_MARKED,
        byte_level(HEADERS),
        {"bos_token": "<|begin|>", "eos_token": "<|eot_id|>"},
        {**PLAIN, **WITH_TOOLS},
    ),
    "Qwen 3": Family(
        QWEN3,
        QWEN3_MARKED,
        byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], THINKS, nfc=True),
        {"eos_token": "<|im_end|>"},
        {**PLAIN, **WITH_TOOLS, **THINKING},
    ),
    "Gemma 3": Family(
        unmarked(GEMMA3_MARKED),
        GEMMA3_MARKED,
        sentence_piece(["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], prefix=False),
        {"bos_token": "<bos>", "eos_token": "<eos>"},
        PLAIN,
    ),
    "SmolLM2": Family(SMOLLM2, SMOLLM2_MARKED, CHATML, OF_CHATML, PLAIN),
    "SmolLM2, marked": Family(SMOLLM2_MARKED, SMOLLM2_MARKED, CHATML, OF_CHATML, PLAIN),
    "Mistral": Family(
        unmarked(MISTRAL_MARKED),
        MISTRAL_MARKED,
        sentence_piece(["<s>", "</s>", "[TOOL_CALLS]", *BRACKETS], prefix=True),
        {"bos_token": "<s>", "eos_token": "</s>"},
        {**PLAIN, **WITH_TOOLS},
    ),
}
