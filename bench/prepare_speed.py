"""Compares `longctx prepare` with a plain loop over the same conversations: json.loads, apply_chat_template, encode_batch.

    python -m bench.prepare_speed CHECKPOINT CONVERSATIONS.jsonl [--megabytes 80] [--rounds 3]

The conversations are repeated, each time with another first line, up to the given size. Each round runs both in turn, each in
its own process, including the start of Python. The loop keeps tokens as Arrow arrays, and does not compute which tokens have
loss.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median


def plain_loop(checkpoint: str, file: Path) -> None:
    """Tokenizes the conversations as a script without longctx would."""
    import pyarrow
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    kept = []
    with file.open(encoding="utf-8") as lines:
        while batch := list(islice(lines, 1000)):
            texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in batch]
            encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
            kept.append(pyarrow.array([encoding.ids for encoding in encoded], pyarrow.list_(pyarrow.int32())))
    print(sum(len(array.values) for array in kept))


def write(source: Path, file: Path, size: int) -> None:
    """Writes the conversations of `source` repeatedly, up to `size` bytes."""
    conversations = [json.loads(line)["messages"] for line in source.read_text("utf-8").splitlines()]
    with file.open("w", encoding="utf-8") as out:
        while out.tell() < size:
            for messages in conversations:
                asked = {**messages[0], "content": f"{out.tell()}: {messages[0]['content']}"}
                out.write(json.dumps({"messages": [asked, *messages[1:]]}) + "\n")


def timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare `longctx prepare` with a plain loop")
    parser.add_argument("checkpoint", help="folder with a tokenizer and a chat template")
    parser.add_argument("source", type=Path, help="JSONL file of conversations with messages")
    parser.add_argument("--megabytes", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.loop:
        plain_loop(arguments.checkpoint, arguments.source)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "conversations.jsonl")
        write(arguments.source, file, arguments.megabytes * 10**6)
        prepare = ["-m", "longctx", "prepare", "--source", str(file), "--tokenizer", arguments.checkpoint, "--overwrite"]
        ratios = []
        for number in range(arguments.rounds):
            loop = timed(["-m", "bench.prepare_speed", arguments.checkpoint, str(file), "--loop"])
            ours = timed([*prepare, "--out", str(Path(folder, f"store-{number}"))])
            ratios.append(loop / ours)
            print(f"loop {loop:.1f} s, prepare {ours:.1f} s: {ratios[-1]:.2f} times as fast", flush=True)
    print(f"median {median(ratios):.2f} times as fast, {arguments.megabytes} MB")


if __name__ == "__main__":
    main()
