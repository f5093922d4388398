"""The user's Python and small data in the trainer's pod: `recipe.code` names them in one way for laptop and cluster.

A ConfigMap or a claim is mounted at `recipe.code.path`, which starts from the manifest's folder as on a laptop; what
lies beside the code there is found by the manifest's other relative paths. With neither, the path is one of the image.
Refuses to hold: what is imported (see the trainer). Read next: `trainer`.
"""

from __future__ import annotations

import posixpath

from polyrl.cluster import names
from polyrl.cluster.resources.pods.pod import Mounted
from polyrl.manifest.recipe import CodeSpec


def code_volume(code: CodeSpec) -> Mounted | None:
    """Where the user's files are mounted; None when they are in the image."""
    path = posixpath.normpath(posixpath.join(names.MANIFEST_DIR, code.path))
    if code.config_map is not None:
        return Mounted("polyrl-code", path, {"configMap": {"name": code.config_map}}, read_only=True)
    if code.volume_claim is not None:
        claim = {"claimName": code.volume_claim, "readOnly": True}
        return Mounted("polyrl-code", path, {"persistentVolumeClaim": claim}, read_only=True)
    return None
