"""Estimators of a KL divergence from the logprobs of drawn tokens alone (Schulman 2020, "Approximating KL Divergence",
joschu.net/blog/kl-approx.html). Tokens are drawn from q; r = p / q; KL[q, p] = E_q[-log r].

Refuses to hold: which policies are compared, and what is done with it (see `grpo`).
"""

from __future__ import annotations

import torch


def k1(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """-log r: unbiased, of high variance, negative for some tokens. Elementwise, any shape."""
    return log_q - log_p


def k3(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """(r - 1) - log r: unbiased, of low variance, never negative. Elementwise, any shape."""
    log_ratio = log_p - log_q
    return torch.expm1(log_ratio) - log_ratio
