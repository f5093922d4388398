"""Each token keeps the version that its frame named, whatever its engine serves when the frame arrives (I6)."""

from __future__ import annotations

from polyrl.ledger import Effects, events as f
from polyrl.ledger.state import LedgerState
from polyrl.wire import Deltas, row_columns


class TokenVersions:
    """Watches the tokens of one run."""

    def __init__(self) -> None:
        self._samples: dict[int, str] = {}
        """The sample of each assignment, ended ones too."""

    def happened(self, message: object, outcome: Effects, state: LedgerState) -> str:
        """The ledger has decided this on a message. What is wrong, in a sentence."""
        for event in outcome.events:
            if isinstance(event, f.Assigned | f.Reclaimed):
                self._samples[event.assignment] = event.sample
            elif isinstance(event, f.TokensTaken) and isinstance(message, Deltas):
                numbers, offsets, counts, _ = row_columns(event.rows)
                for number, offset, count in zip(numbers, offsets, counts, strict=True):
                    sample = state.samples.get(self._samples.get(number, ""))
                    spans = [] if sample is None else sample.spans
                    kept = {span.version for span in spans if span.start < offset + count and offset < span.end}
                    if count and kept and kept != {message.version}:
                        text = f"tokens of version {message.version} of assignment {number} are kept as of {kept}"
                        return f"{text}, from {offset} on"
        return ""
