"""Answers a message by a checkpoint, with transformers: python examples/ask.py MODEL "What is a
ring?", or standard input."""

import sys

from transformers import TextStreamer, pipeline

checkpoint, *message = sys.argv[1:]
generator = pipeline("text-generation", checkpoint)
streamer = TextStreamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True)
conversation = [{"role": "user", "content": " ".join(message) or sys.stdin.read()}]
generator(conversation, streamer=streamer, do_sample=False, max_new_tokens=60)
