"""What the model wrote, kept as text so that people can read it: samples.jsonl.

choice    which few samples of a step are kept
texts     texts that fit and that any reader of UTF-8 can read
log       the file, its bound, and the way back to a checkpoint
"""
