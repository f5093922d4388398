"""An SGLang engine answers to its agent alone, and a process that holds keys leaves no core dump."""

import resource
import stat
from pathlib import Path

import pytest

from polyrl.keys import OperatorKeys, format_keys, read_keys
from polyrl.manifest.rollout import EngineSpec, EngineType
from polyrl_rollout.engines.port import EngineFailed
from polyrl_rollout.engines.sglang.launch import check_arguments, draw_key, server_command, write_config

KEY = "k" * 43


def spec(*args: str) -> EngineSpec:
    return EngineSpec(type=EngineType.SGLANG, args=list(args))


def test_the_key_is_in_a_file_of_this_account_and_in_no_argument(tmp_path: Path) -> None:
    config = write_config(KEY)
    try:
        command = server_command(spec("--tp", "2"), 1, tmp_path, 30000, context_tokens=1024, config=config)
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        assert config.read_text() == f'api-key: "{KEY}"\n'
    finally:
        config.unlink()
    assert command[command.index("--config") + 1] == str(config)
    assert not any(KEY in word for word in command)


def test_code_of_a_models_folder_runs_only_if_the_manifest_says_so(tmp_path: Path) -> None:
    def command(*args: str) -> list[str]:
        return server_command(spec(*args), 1, tmp_path, 30000, context_tokens=1024, config=tmp_path / "c.yaml")

    assert "--trust-remote-code" not in command()
    assert "--trust-remote-code" in command("--trust-remote-code")


@pytest.mark.parametrize("argument", ["--api-key=x", "--api-key", "--config", "--admin-api-key", "--random-seed"])
def test_a_manifest_gives_neither_key_nor_seed(argument: str) -> None:
    with pytest.raises(EngineFailed, match=r"rollout\.engine\.args: --\S+ is not for the manifest"):
        check_arguments(spec(argument))


def test_who_reads_keys_leaves_no_core_dump(tmp_path: Path) -> None:
    file = tmp_path / "operator.key"
    file.write_text(format_keys(OperatorKeys("t" * 40, identity_key="k" * 43)))
    file.chmod(0o600)
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        read_keys(OperatorKeys, file)
        assert resource.getrlimit(resource.RLIMIT_CORE) == (0, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def test_no_key_is_taken_for_a_flag() -> None:
    """SGLang passes it on as an argument: of random base64, every 64th would begin with a dash."""
    keys = {draw_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(key.isalnum() and len(key) == 64 for key in keys)
