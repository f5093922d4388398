"""The vocabulary head and its loss, ours and torch's fused one: `python benchmarks/learner/head.py`.

`torch.nn.functional.linear_cross_entropy` makes the gradient while it computes the loss, so it must know what each
token weighs before it has its logprob: enough for SFT, not for a loss whose weights follow from the logprobs. In turns
both score the same positions and go back; CPU seconds of one thread. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polyrl_trainer.backends.configs import EngineConfig
from polyrl_trainer.backends.policy import LOGIT_BYTES, _score_chunk


def ours(head: nn.Linear, hidden_PH: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean of what `Policy` scores, in the chunks that it takes."""
    size = max(1, EngineConfig().max_logits_bytes // (LOGIT_BYTES * head.out_features))
    chunks = list(zip(torch.split(hidden_PH, size), torch.split(targets, size), strict=True))
    if len(chunks) == 1:
        return -_score_chunk(head, hidden_PH, targets, 1.0, entropy_gradient=False)[0].mean()
    parts = [checkpoint(_score_chunk, head, *chunk, 1.0, False, use_reentrant=False)[0] for chunk in chunks]
    return -torch.cat(parts).mean()


def fused(head: nn.Linear, hidden_PH: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same loss by torch."""
    options = nn.LinearCrossEntropyOptions()
    return nn.functional.linear_cross_entropy(hidden_PH, head.weight, targets, options=options)


def gradient(
    loss: Callable[[nn.Linear, torch.Tensor, torch.Tensor], torch.Tensor],
    head: nn.Linear,
    hidden_PH: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[float, torch.Tensor]:
    """CPU seconds, and what the positions get."""
    given = hidden_PH.clone().requires_grad_()
    began = time.process_time()
    of_positions, _of_head = torch.autograd.grad(loss(head, given, targets), (given, head.weight))
    return time.process_time() - began, of_positions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("positions", 1024), ("hidden", 896), ("vocabulary", 151936), ("turns", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.set_num_threads(1)
    head = nn.Linear(given.hidden, given.vocabulary, bias=False)
    case = head, torch.randn(given.positions, given.hidden), torch.randint(given.vocabulary, (given.positions,))
    ratios = []
    for turn in range(given.turns + 1):
        (fused_s, theirs), (our_s, own) = gradient(fused, *case), gradient(ours, *case)
        torch.testing.assert_close(own, theirs, rtol=1e-3, atol=1e-8)
        if turn:  # the first one is for memory
            ratios.append(our_s / fused_s)
    spread = [round(one, 2) for one in sorted(ratios)]
    print(json.dumps({"seed": given.seed, "vsFused": round(statistics.median(ratios), 2), "ratios": spread}))


if __name__ == "__main__":
    main()
