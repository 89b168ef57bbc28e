"""Writes documents of filler and facts, each stated three times, to train for `longctx eval --needle`.

python examples/retrieval_documents.py task.jsonl [COUNT [WORDS]]
longctx prepare --source task.jsonl --vocab-size 1024 --out stores/retrieval
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from longctx.evaluation.retrieval import KEYS, NOISE, VALUES, answer, ask


def main(path: str, count: str = "24000", words: str = "100") -> None:
    with Path(path).open("w", encoding="utf-8") as file:
        for text in task_documents(int(count), int(words)):
            file.write(json.dumps({"text": text}) + "\n")


def task_documents(count: int, words: int, seed: int = 0) -> Iterator[str]:
    """Yields documents to train on, of up to about `words` words: every fact three times, and filler, in random order.

    The value of a key cannot be predicted where the key occurs first; after that it can.
    """
    random = Random(seed)
    for _ in range(count):
        length = random.randint(words // 4, words)
        most = min(len(KEYS), max(1, length // 9))  # three words, three times
        keys = random.sample(KEYS, random.randint(max(1, most // 3), most))
        facts = [f"{ask(key)}{answer(random.choice(VALUES))}." for key in keys]
        sentences = 3 * facts
        while sum(sentence.count(" ") + 1 for sentence in sentences) < length - 5:
            sentences.append(random.choice(NOISE))
        random.shuffle(sentences)
        yield "".join(sentences)


if __name__ == "__main__":
    main(*sys.argv[1:])
