"""Models of transformers, run by their own code: ring attention put into them, LoRA, quantized
weights and vision.

`attention` prepares a model for packed and split documents (`masks`, `seq2seq` and `linear` are its
parts), and `exactness` runs it to see whether it is exact. `source` opens a checkpoint, and
`model`, `lora` and `quantized` make a run's model of it.
"""
