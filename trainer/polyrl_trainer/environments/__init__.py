"""Environments that ship (`calculator`), and the `protocol` for the user's own; import both from here."""

from polyrl_trainer.environments.calculator import CalculatorEnvironment
from polyrl_trainer.environments.protocol import Environment, Generate

__all__ = ["CalculatorEnvironment", "Environment", "Generate"]
