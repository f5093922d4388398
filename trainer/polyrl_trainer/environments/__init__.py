"""Environments of several turns: the `protocol` for the user's own, and `calculator`, which ships as an example.

A user's code and the trainer import both from here; the folder imports only `sample` of the trainer.
"""

from polyrl_trainer.environments.calculator import CalculatorEnvironment
from polyrl_trainer.environments.protocol import Ending, Environment, Generate

__all__ = ["CalculatorEnvironment", "Ending", "Environment", "Generate"]
