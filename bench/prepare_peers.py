"""CPU seconds per GB of JSON Lines of `longctx prepare`, datatrove and Megatron's preprocess_data.py,
with the same file and tokenizer, beside those of the tokenizer alone.

    python bench/prepare_peers.py                                    # longctx alone; about 2 minutes
    python bench/prepare_peers.py --megatron path/to/Megatron-LM     # pip install datatrove before

Each row is a program of its own that is measured twice, on a file and on its first eighth: what the
rest takes does not count how it starts. CPU seconds are those of all its processes, which other
work on the machine changes little; the clock is of a quiet machine only. The file is the standard
library of this Python, read often enough for 64 MB, and the tokenizer a BPE of 4,096 entries that
is trained before. All programs have one tokenizer thread per process. Not measured: other
tokenizers, compressed files, networks. Writes results/prepare-peers.csv.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Table, facts, options
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare

MIB = 1 << 20
EIGHTH = 8
COLUMNS = ("tool", "processes", "bytes", "cpu_s_per_gb", "clock_s_per_gb", "of_tokenizer")
TOKENIZER_ALONE = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
import time
began = time.process_time()
for start in range(0, len(texts), 256):
    tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
print(time.process_time() - began)
"""
LONGCTX = """
import os, sys
from longctx.data.records import slices
from longctx.data.store.prepare import prepare
slices.SLICE_BYTES = os.path.getsize(sys.argv[1]) // 8
prepare(sys.argv[1], sys.argv[3], tokenizer=sys.argv[2], workers=int(sys.argv[4]))
"""
DATATROVE = """
import sys
from pathlib import Path
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
file, tokenizer, out, workers = sys.argv[1:]
steps = [
    JsonlReader(str(Path(file).parent), glob_pattern=Path(file).name),
    DocumentTokenizer(
        out + "/tokens", tokenizer, eos_token="<|endoftext|>", shuffle_documents=False
    ),
]
if __name__ == "__main__":
    LocalPipelineExecutor(steps, tasks=1, workers=1, logging_dir=out + "/logs").run()
"""

MEGATRON = """
import runpy, sys, typing
from pathlib import Path
typing.override = lambda function: function  # of Python 3.12, which it needs for nothing else
file, model, out, workers, script = sys.argv[1:]
sys.path.insert(0, str(Path(script).parents[1]))
sys.argv = [script, "--input", file, "--output-prefix", out, "--workers", workers, "--append-eod",
    "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model]
runpy.run_path(script, run_name="__main__")
"""
CODE = {"longctx": LONGCTX, "datatrove": DATATROVE, "megatron": MEGATRON}


def written(file: Path, size: int) -> int:
    """Writes documents of the standard library as JSON Lines. Returns their bytes."""
    texts = [document.texts[0] for document in open_corpus("python-stdlib").documents()]
    with file.open("w", encoding="utf-8") as stream:
        while stream.tell() < size:
            for text in texts:
                stream.write(json.dumps({"text": text}) + "\n")
                if stream.tell() >= size:
                    break
    return file.stat().st_size


def measured(command: list[str], log: Path) -> tuple[float, float, str]:
    """Returns CPU and clock seconds of a program with all its processes, and what it said. Raises
    RuntimeError with that if it fails."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as stream:
        began = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
        _, status, used = os.wait4(process.pid, 0)
        clock = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    said = log.read_text("utf-8", "replace")
    if process.returncode != 0:
        raise RuntimeError(said[-1000:])
    return used.ru_utime + used.ru_stime, clock, said


def of_the_rest(code: str, files: list[Path], tokenizer: Path, *more: str) -> tuple[float, float]:
    """Returns CPU and clock seconds per GB of what the second file has more than the first; a
    program that prints CPU seconds has these."""
    found = []
    for file in files:
        out = str(file.parent / f"out-{time.monotonic_ns()}")
        command = [sys.executable, "-c", code, str(file), str(tokenizer), out, *more]
        cpu_s, clock_s, said = measured(command, file.parent / "log")
        if code is TOKENIZER_ALONE:
            cpu_s = float(said)
        found.append((cpu_s, clock_s))
    gb = (files[1].stat().st_size - files[0].stat().st_size) / 1e9
    return (found[1][0] - found[0][0]) / gb, (found[1][1] - found[0][1]) / gb


def main() -> None:
    parser = options(__doc__ or "", "prepare-peers")
    parser.add_argument("--megatron", type=Path, help="a checkout of NVIDIA/Megatron-LM")
    parser.add_argument("--mib", type=int, default=64)
    arguments = parser.parse_args()
    table = Table(
        arguments.out.with_suffix(".csv"),
        COLUMNS,
        facts("longctx", "tokenizers", "datatrove"),
        overwrite=True,
    )
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare("python-stdlib", folder / "trained", workers=1)
        tokenizer = folder / "trained" / "tokenizer.json"
        model = folder / "model"
        model.mkdir()
        (model / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        files = [folder / "part" / "texts.jsonl", folder / "whole" / "texts.jsonl"]
        for file, mib in zip(files, (arguments.mib // EIGHTH, arguments.mib), strict=True):
            file.parent.mkdir()
            written(file, mib * MIB)
        alone, clock_s = of_the_rest(TOKENIZER_ALONE, files, tokenizer)
        rows = [("tokenizer", 1, alone, clock_s)]
        for tool, processes in (("longctx", 1), ("longctx", 2), ("datatrove", 1), ("megatron", 1)):
            more = [str(processes)]
            given = tokenizer
            if tool == "megatron":
                if arguments.megatron is None:
                    continue
                more.append(str(arguments.megatron / "tools" / "preprocess_data.py"))
                given = model
            try:
                cpu_s, clock_s = of_the_rest(CODE[tool], files, given, *more)
            except RuntimeError as error:
                print(f"{tool} fails here: {error}", file=sys.stderr)
                continue
            rows.append((tool, processes, cpu_s, clock_s))
        size = files[1].stat().st_size - files[0].stat().st_size
        for tool, processes, cpu_s, clock_s in rows:
            row = {"tool": tool, "processes": processes, "bytes": size, "cpu_s_per_gb": cpu_s}
            table.append({**row, "clock_s_per_gb": clock_s, "of_tokenizer": cpu_s / alone})
            print(table.rows[-1])


if __name__ == "__main__":
    main()
