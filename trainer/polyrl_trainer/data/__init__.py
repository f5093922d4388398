"""Rows from files, checked and tokenized, in an order that can be resumed exactly.

    rows              JSONL and parquet to rows that know file and line
    tokenizers        text to ids: single characters, or a Hugging Face folder
    character_files   the former as files for transformers
    hub               a model that is no folder here, from a Hub
    columns           rows of any data set as those that are read here
    examples          rows to prompts, conversations and groups of finished samples
    preferences       rows to pairs of answers
    buffer            `DataBuffer`: an endless weighted stream whose place fits in a checkpoint
    model_files       what a run's tokenizer and recipe leave beside each checkpoint's weights

Nothing here knows a manager or a tensor of a model.
"""
