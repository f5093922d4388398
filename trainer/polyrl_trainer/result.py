"""RUN/trainer-result.json: what the trainer knows at its end, for the run's summary; replaced as a whole.

Refuses to hold: what the manager knows (samples, tokens, preemptions). Read next: `state`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polyrl_trainer.state import TrainerState

RESULT = "trainer-result.json"


def write_result(run: Path, state: TrainerState, outcome: str) -> Path:
    """`outcome` is done, stopped or failed."""
    path = run / RESULT
    unfinished = path.with_name(f".{RESULT}.unfinished")
    unfinished.write_text(json.dumps(result_of_run(state, outcome), indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def was_done(run: Path) -> bool:
    """True when a trainer in this folder got to the end before."""
    try:
        return bool(json.loads((run / RESULT).read_bytes())["outcome"] == "done")
    except FileNotFoundError:
        return False


def result_of_run(state: TrainerState, outcome: str) -> dict[str, Any]:
    """Names as in summary.json; seconds, counts and shares."""
    results = state.results
    longer = max(results.generate_seconds, results.rl_train_seconds)
    return {
        "outcome": outcome,
        "seed": state.seed,
        "exactMatch": results.exact_match,
        "steps": results.steps,
        "optimizerSteps": results.optimizer_steps,
        "weightVersions": state.version + 1,
        "generateSeconds": round(results.generate_seconds, 3),
        "trainSeconds": round(results.train_seconds, 3),
        "rlTrainSeconds": round(results.rl_train_seconds, 3),
        "rlStepSeconds": round(results.rl_step_seconds, 3),
        "stepRatio": round(results.rl_step_seconds / longer, 4) if longer else None,
        "tokensTrained": results.tokens_trained,
        "paddingFraction": results.padded_positions / max(1, results.positions_computed),
        "droppedGroups": results.dropped_groups,
        "userCodeFailures": results.user_code_failures,
        "firstFailures": results.first_failures,
    }
