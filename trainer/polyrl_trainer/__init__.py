"""The trainer: a PyTorch learner that gets its samples from rollouts on machines that may vanish.

    app, __main__    one process: job and keys in, stages run, one result file out
    check            what the user brought, looked at before a run does
    container        on a cluster: the trainer and its reserved engines as processes of one container
    loops            SFT, RL, offline RL, evaluation, and the stages that string them together
    generation       groups of prompts submitted, finished turns answered by user code, samples read from the wire
    user_code        rewards, group filters and environments of the user's, behind deadlines
    weights          versions of the policy, and the publisher that agents pull them from
    backends         the learner on PyTorch, behind the port `backend`
    client           `RolloutClient`, the only thing that other trainers need; behind the port `rollouts`
    data, preparation   files to prompts and samples, checked before anything starts
    losses           losses and advantages: formulas as pure functions
    session, state, checkpoints, metrics   one run: where it stands, what is saved, what is logged
    sinks, sample_log   TensorBoard, W&B, MLflow; what the model wrote, as text
    fetch            on a cluster: downloads model and rows before the trainer starts
    testing          rollouts without a manager, the suite that every backend must pass; in no image

Imports go downwards in the layers of pyproject.toml. Read first: `sample`, `backend`, then `loops.sft_loop`.
"""
