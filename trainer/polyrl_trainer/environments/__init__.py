"""Environments that ship, and the protocol for the user's own. Read next: `protocol`, then `calculator`."""

from polyrl_trainer.environments.calculator import CalculatorEnvironment
from polyrl_trainer.environments.protocol import Environment, Generate

__all__ = ["CalculatorEnvironment", "Environment", "Generate"]
