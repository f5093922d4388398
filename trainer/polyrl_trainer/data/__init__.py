"""Rows from files, checked and tokenized, in an order that can be resumed exactly. Read next: `rows`, then
`buffer`."""

from polyrl_trainer.data.buffer import DataBuffer

__all__ = ["DataBuffer"]
