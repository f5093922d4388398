"""Where a run's metrics and samples go besides its own files: TensorBoard, Weights & Biases, MLflow.

    port         what a sink can do, and what it is given
    delivery     one thread and one bounded queue per sink: no sink stalls, ends or silently thins a run
    chosen       the sinks of a manifest
    packages     what they need that is not installed
    tensorboard, wandb, mlflow

A sink's x-axis is the step over all stages: those of earlier stages count, so no tag has two values at one step.
"""
