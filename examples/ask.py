"""Answers a message by a checkpoint, with transformers: echo 'What is a ring?' | python examples/ask.py MODEL"""

import sys

from transformers import TextStreamer, pipeline

generator = pipeline("text-generation", sys.argv[1])
streamer = TextStreamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True)
generator([{"role": "user", "content": sys.stdin.read()}], streamer=streamer, do_sample=False, max_new_tokens=60)
