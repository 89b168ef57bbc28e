"""Writes documents of filler and facts, each stated three times, to train for `longctx eval --needle`.

python examples/retrieval_documents.py task.jsonl [COUNT [WORDS]]
longctx prepare --source task.jsonl --vocab-size 1024 --out stores/retrieval
"""

import json
import sys
from pathlib import Path

from longctx.evaluation.retrieval import task_documents


def main(path: str, count: str = "24000", words: str = "100") -> None:
    with Path(path).open("w", encoding="utf-8") as file:
        for text in task_documents(int(count), int(words)):
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
