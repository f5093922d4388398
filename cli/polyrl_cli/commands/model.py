"""What a run has trained: take it, fetch it, try it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyrl_cli.commands.options import Context, JobName, Kubeconfig, Namespace, Step, echo, print_lines


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the model.")],
    step: Step = None,
) -> None:
    """Copy a run's model: weights, tokenizer, chat template and model card, for transformers, SGLang or a Hub."""
    from polyrl_cli.model.export import export_lines

    print_lines(export_lines(run, target, step))


def get(
    job: JobName,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    step: Step = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Fetch the model, the metrics and the result of a job on a cluster."""
    from polyrl_cli.model.get import get_from_cluster
    from polyrl_cli.remote.cluster import ClusterOptions

    options = ClusterOptions(kubeconfig, context, namespace=namespace)
    get_from_cluster(job, target, step, options, echo)


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or an exported model's.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What the model answers.")],
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer; default: the run's.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    answers: Annotated[int, typer.Option("--n", min=1, max=1024, help="How many answers.")] = 1,
    step: Step = None,
) -> None:
    """Let a run's model answer a prompt."""
    from polyrl_cli.model.generate import HowToAnswer, generate_lines

    wanted = HowToAnswer(max_tokens=max_tokens, temperature=temperature, seed=seed, answers=answers)
    for answer in generate_lines(run, prompt, wanted, step, lambda note: echo(f"note: {note}", err=True)):
        echo(answer)
