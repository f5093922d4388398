"""Rows from files, checked and tokenized, in an order that can be resumed exactly.

    rows         JSONL and parquet to rows that know file and line
    tokenizers   text to ids: single characters, or a Hugging Face folder
    examples     rows to prompts, conversations and groups of finished samples
    buffer       `DataBuffer`: an endless weighted stream whose place fits in a checkpoint

Nothing here knows a manager or a model.
"""
