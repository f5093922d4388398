"""What a run does step by step; the loops know the backend and the rollouts by their ports only.

    stages                 the stages of a run in order, and the evaluations between them
    sft_loop               supervised fine-tuning; the shortest, to read first
    rl_loop                online RL: the order of steps, and what one step does
    offline_loop           RL over a file of finished samples
    evaluation             greedy evaluation through the same engines
    step_metrics           where a step's time went, and its numbers

The process imports `stages` and `evaluation`; the rest is imported by them.
"""
