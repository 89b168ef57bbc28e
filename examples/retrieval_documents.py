"""Writes documents of facts and filler, in which every fact is asked for later: a task that a small model can learn.

python examples/retrieval_documents.py task.jsonl [COUNT [WORDS]]
longctx prepare --source task.jsonl --vocab-size 1024 --out stores/retrieval
torchrun --standalone --nproc-per-node 2 -m longctx train examples/retrieval.yaml
longctx eval runs/retrieval --needle --keys 4 --lengths 32,64,96,128,192,256

`longctx eval --needle` asks for facts of the same form.
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
