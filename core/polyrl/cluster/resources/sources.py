"""Where a trainer's pod has its model and its rows from, when the manifest names them by a URI, or a model by its name
on a Hub.

A model's claim is mounted. Anything else an init container fetches, in each pod of the trainer, before the trainer
begins; it alone has the credentials of `recipe.model.secretRef` and `recipe.data.secretRef`. What it fetches lies in
an emptyDir, or in a volume of the trainer's template at the same path, which may outlive the pod: a claim, or a disk of
the node.
"""

from __future__ import annotations

from typing import Final

from polyrl.cluster import names
from polyrl.cluster.resources import pod
from polyrl.cluster.resources.owner import Settings
from polyrl.cluster.resources.template import RESTRICTED, Fields
from polyrl.manifest.environment import FETCHED, MODEL_CLAIM
from polyrl.manifest.parts.sources import CLAIM_SCHEME
from polyrl.manifest.recipe import RecipeSpec
from polyrl.worker import Role

FETCH_MODULE: Final = "polyrl_trainer.fetch"
FETCH_RESOURCES: Final[Fields] = {"requests": {"cpu": "500m", "memory": "512Mi"}}
"""Downloads; less than what the trainer itself asks for, so that the pod asks for no more."""


def source_volumes(recipe: RecipeSpec) -> tuple[pod.Mounted, ...]:
    """What the trainer reads them from."""
    volumes = []
    model = recipe.model.source
    if model is not None and model.is_claimed:
        claim = model.path.removeprefix(CLAIM_SCHEME).partition("/")[0]
        source: Fields = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        volumes.append(pod.Mounted("polyrl-model", names.MODEL_DIR, source=source, read_only=True))
    if recipe.fetchable:
        source = {"emptyDir": {"sizeLimit": pod.TRAINER_TMP}}
        volumes.append(pod.Mounted("polyrl-fetched", names.FETCHED_DIR, source=source))
    return tuple(volumes)


def source_environment(recipe: RecipeSpec) -> dict[str, str]:
    """Variables by which the trainer finds its model and its rows."""
    found = {}
    if recipe.model.source is not None and recipe.model.source.is_claimed:
        found[MODEL_CLAIM] = names.MODEL_DIR
    if recipe.fetchable:
        found |= {FETCHED: names.FETCHED_DIR, "HF_HOME": f"{names.FETCHED_DIR}/huggingface"}
    return found


def fetch_containers(
    recipe: RecipeSpec, image: str, settings: Settings, volumes: tuple[pod.Mounted, ...], *, reports: bool
) -> list[Fields]:
    """The init container, where there may be something to fetch; `volumes` are the trainer's that it needs as well.
    One that `reports` to the manager how much has come has the trainer's keys, which are among them."""
    if not recipe.fetchable:
        return []
    argv: tuple[str, ...] = ("--job", f"{names.JOB_DIR}/job.json", "--manifest-dir", names.MANIFEST_DIR)
    if reports:
        argv += ("--manager-endpoints", f"{names.JOB_DIR}/manager.json", "--pod", f"$({pod.POD_NAME_ENV})")
        argv += ("--keys", f"{names.KEYS_DIR}/{names.KEY_FILES[Role.TRAINER][0]}")
    environment = pod.ENVIRONMENT | source_environment(recipe)
    plain = [{"name": name, "value": value} for name, value in environment.items()]
    pod_name = [pod.from_field(pod.POD_NAME_ENV, "metadata.name")] if reports else []
    named = (recipe.env_secret, recipe.model.secret_ref, recipe.data.secret_ref)
    secrets = [one for one in dict.fromkeys(named) if one is not None]
    given = {"envFrom": [{"secretRef": {"name": one}} for one in secrets]} if secrets else {}
    return [
        {
            "name": names.FETCH_CONTAINER,
            "image": image,
            "imagePullPolicy": settings.image_pull_policy,
            "command": [pod.PYTHON, "-m", FETCH_MODULE, *argv],
            "env": [*pod_name, *plain],
            **given,
            "resources": FETCH_RESOURCES,
            "volumeMounts": [one.mount() for one in volumes],
            "securityContext": RESTRICTED,
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    ]
