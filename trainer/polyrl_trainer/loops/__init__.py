"""What a run does step by step: SFT, RL, offline RL, evaluation, and the stages that string them together."""
