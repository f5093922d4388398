"""`polyrl run --on kubernetes` uploads files of the manifest's own folder, and nothing else of this machine."""

from pathlib import Path

import pytest
import yaml

from polyrl.errors import UserError
from polyrl.manifest.job import PolyRLJob
from polyrl_cli.remote.run import code_config_map

MANIFEST = """
apiVersion: polyrl.dev/v1alpha1
kind: PolyRLJob
metadata: {name: a}
spec:
  recipe:
    code: {configMap: files, path: PATH}
    model: {path: /models/a}
    data: {rl: [{path: /data/rl.jsonl}]}
    algorithm: {steps: 1}
    reward: {function: "reward:score"}
  rollout: {engine: {type: sglang}}
"""


def uploaded(here: Path, path: str) -> set[str]:
    job = PolyRLJob.model_validate(yaml.safe_load(MANIFEST.replace("PATH", path)))
    made = code_config_map(job, here / "job.yaml", "ml")
    assert made is not None
    return set(made["data"])


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "id_ed25519").write_text("a private key\n")
    (tmp_path / "theirs.py").write_text("secrets = 1\n")
    folder = tmp_path / "job"
    (folder / "code").mkdir(parents=True)
    for place in (folder, folder / "code"):
        (place / "reward.py").write_text("def score(): ...\n")
    return folder


def test_files_of_the_folder_go(here: Path) -> None:
    assert uploaded(here, ".") == uploaded(here, "code") == {"reward.py"}


@pytest.mark.parametrize("path", ["..", "code/../..", "../job/..", "/etc"])
def test_code_outside_of_the_manifests_folder_does_not(here: Path, path: str) -> None:
    with pytest.raises(UserError, match=r"spec\.recipe\.code\.path: .* lies outside of"):
        uploaded(here, path)


def test_what_a_link_leads_to_does_not(here: Path) -> None:
    (here / "extra.py").symlink_to(here.parent / "id_ed25519")
    with pytest.raises(UserError, match=r"extra\.py lies outside of .*, or a link leads there"):
        uploaded(here, ".")


def test_a_folder_behind_a_link_does_not(here: Path) -> None:
    (here / "lib").symlink_to(here.parent)
    with pytest.raises(UserError, match="lies outside"):
        uploaded(here, "lib")
