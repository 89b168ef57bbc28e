"""Faults and right set-ups of training loops, written without a look into the checker, and what
`check_step` says of each (docs/check-step.md).

python -m bench.check_hidden [REGEX] [--dtype bfloat16] [--second]
torchrun --standalone --nproc-per-node 2 -m bench.check_hidden [REGEX]
python -m bench.check_hidden score
"""
