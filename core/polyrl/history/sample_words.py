"""A kept sample in words: what is known of it beside its texts, and long texts without their middle."""

from __future__ import annotations

from polyrl.history.foreign_text import printable
from polyrl.sample_record import SampleRecord


def facts(row: SampleRecord) -> str:
    """What is known of it beside the reward, on one line."""
    parts = [f"{printable(name)} {value:g}" for name, value in row.metrics.items()]
    if row.advantage is not None:
        parts.append(f"advantage {row.advantage:+.3g}")
    versions = " to ".join(str(version) for version in dict.fromkeys(row.versions[:1] + row.versions[-1:]))
    parts += [f"finish {row.finish}", f"version {versions}", f"{row.prompt_tokens} + {row.response_tokens} tokens"]
    return ", ".join(parts)


def shortened(text: str, max_chars: int | None) -> str:
    """The text with its middle left out where it is too long."""
    if max_chars is None or len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} more characters: --full …]\n{text[-half:]}"
