"""A checkpoint is complete or absent, never half; what is missing, cut or foreign is refused by name."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from polyrl.errors import CannotGoOn, DiskRefused, InvalidData, Superseded
from polyrl.manifest.job import PolyRLJob
from polyrl.manifest.recipe import RecipeSpec
from polyrl.sample_record import SAMPLES
from polyrl.testing.job_values import raw_job
from polyrl_cli.local.run_folder import RunFolder, kept_state
from polyrl_trainer.app import _open_session, _resumed_state
from polyrl_trainer.checkpoints import COMPLETE, Checkpoints, complete_checkpoints, latest, read_checkpoint
from polyrl_trainer.checkpoints.continuation import BEGAN, refuse_other_run, saved_stays
from polyrl_trainer.checkpoints.store import CheckpointStore
from polyrl_trainer.checkpoints.writer import Writer
from polyrl_trainer.state import TrainerState, TrainingStage
from tests.unit.trainer.sample_log.test_log import line

WAIT_S = 30.0


class Weights:
    """A backend that saves one file, or dies while it does."""

    def __init__(self, fail=False):
        self.fail = fail

    def save(self, folder, *, copied):
        written = Future()
        try:
            written.set_result(self.write(folder))
        except OSError as error:
            written.set_exception(error)
        return written

    def write(self, folder):
        (folder / "model.safetensors").write_bytes(b"weights" * 1000)
        if self.fail:
            raise OSError("disk full")


def state(step, stage=TrainingStage.SFT, done=False):
    return TrainerState(seed=1, stage=stage, step=step, stage_done=done, cursors={"sft": {"drawn": [step]}})


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.start()
    return checkpoints


def names(checkpoints):
    return [path.name for path in complete_checkpoints(checkpoints.folder)]


def test_state_survives_exactly(checkpoints):
    saved = state(3)
    saved.results.evaluations["base"] = {"exact_match": 0.25}
    assert read_checkpoint(checkpoints.save(saved, Weights()).result(WAIT_S)) == saved


def test_the_newest_and_the_stages_last_are_kept(checkpoints):
    for step in (1, 2, 3):
        checkpoints.save(state(step, done=step == 3), Weights()).result(WAIT_S)
    for step in (1, 2, 3, 4):
        checkpoints.save(state(step, TrainingStage.RL), Weights()).result(WAIT_S)
    assert names(checkpoints) == ["sft-step-000003", "rl-step-000003", "rl-step-000004"]
    assert checkpoints.stage_final(TrainingStage.SFT).name == "sft-step-000003"
    assert checkpoints.stage_final(TrainingStage.RL) is None
    assert latest(checkpoints.folder.parent).name == "rl-step-000004"


def test_what_completes_a_model_is_sealed_with_it(tmp_path):
    def complete(folder, state):
        assert (folder / "model.safetensors").is_file()
        (folder / "README.md").write_text(f"step {state.step}")

    checkpoints = Checkpoints(tmp_path, keep=2, complete_model=complete)
    checkpoints.start()
    saved = checkpoints.save(state(3), Weights()).result(WAIT_S)
    (saved / "model" / "README.md").write_text("step 4")
    with pytest.raises(InvalidData, match=r"README.md: its content differs"):
        read_checkpoint(saved)


def test_who_starts_last_is_the_one_writer(checkpoints, tmp_path):
    """A machine that was frozen comes back, and with it a trainer that has a successor by now."""
    checkpoints.save(state(1), Weights()).result(WAIT_S)
    successor = Checkpoints(tmp_path, keep=2)
    successor.start()
    with pytest.raises(Superseded, match="another trainer writes here"):
        checkpoints.save(state(2), Weights()).result(WAIT_S)
    successor.save(state(3), Weights()).result(WAIT_S)
    assert names(successor) == ["sft-step-000001", "sft-step-000003"]
    assert not list(checkpoints.folder.glob(".unfinished-*"))


def test_a_save_that_a_successor_comes_into_leaves_nothing(checkpoints, tmp_path):
    class Slow(Weights):
        def write(self, folder):
            super().write(folder)
            successor.start()

    successor = Checkpoints(tmp_path, keep=2)
    with pytest.raises(Superseded):
        checkpoints.save(state(2), Slow()).result(WAIT_S)
    assert names(successor) == []
    assert successor.newest() is None


@pytest.mark.parametrize("shift_s", [3600, -3600])
def test_the_newest_is_the_last_that_was_saved_wherever_the_clock_was_set(checkpoints, shift_s):
    for step in (1, 2, 3):
        saved = checkpoints.save(state(step, TrainingStage.RL), Weights()).result(WAIT_S)
        seal = saved / COMPLETE
        os.utime(seal, (seal.stat().st_atime, seal.stat().st_mtime - step * shift_s))
    checkpoints.save(state(2, TrainingStage.RL), Weights()).result(WAIT_S)
    assert names(checkpoints) == ["rl-step-000003", "rl-step-000002"]
    assert checkpoints.newest().name == "rl-step-000002"
    assert kept_state(RunFolder(checkpoints.folder.parent)).rl_steps == 2


def test_one_in_the_middle_of_a_step_goes_before_whole_ones(checkpoints):
    """Two stops left nothing but parts of steps, none of which was ever evaluated."""
    kept = []
    for step, groups in ((1, 0), (2, 0), (2, 4), (2, 8), (3, 4), (4, 0)):
        saved = state(step, TrainingStage.RL, done=step == 4)
        saved.trained_groups = groups
        checkpoints.save(saved, Weights()).result(WAIT_S)
        kept.append([name.removeprefix("rl-step-00000") for name in names(checkpoints)])
    parts = [["2", f"{one}-groups"] for one in ("2-and-000004", "2-and-000008", "3-and-000004")]
    assert kept == [["1"], ["1", "2"], *parts, ["2", "4"]]


def test_an_interrupted_save_leaves_the_older_one_and_is_swept_up(checkpoints):
    checkpoints.save(state(1), Weights()).result(WAIT_S)
    (checkpoints.folder / ".unfinished-sft-step-000002").mkdir()
    assert names(checkpoints) == ["sft-step-000001"]
    checkpoints.start()
    assert [path.name for path in checkpoints.folder.iterdir()] == ["sft-step-000001"]


def test_a_save_that_the_disk_refuses_gives_back_the_room_that_it_took(checkpoints):
    checkpoints.save(state(1), Weights()).result(WAIT_S)
    with pytest.raises(DiskRefused, match="disk full"):
        checkpoints.save(state(2), Weights(fail=True)).result(WAIT_S)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["sft-step-000001"]


class SlowWeights(Weights):
    """Writes beside the caller, when it may."""

    def __init__(self, fail=False):
        super().__init__(fail)
        self.free = threading.Event()

    def save(self, folder, *, copied):
        return Writer("slow").submit(lambda: self.free.wait(WAIT_S) and self.write(folder))


def test_nothing_is_removed_while_another_model_of_the_save_is_written(checkpoints):
    critic = SlowWeights()
    saving = checkpoints.save(state(1), Weights(fail=True), critic)
    with pytest.raises(TimeoutError):
        saving.result(0.2)
    critic.free.set()
    with pytest.raises(DiskRefused, match="disk full"):
        saving.result(WAIT_S)
    assert list(checkpoints.folder.iterdir()) == []


def test_what_a_successor_writes_is_not_removed(checkpoints, tmp_path):
    successor, ours, theirs = Checkpoints(tmp_path, keep=2), SlowWeights(fail=True), SlowWeights()
    first = checkpoints.save(state(1), ours)
    successor.start()
    second = successor.save(state(1), theirs)
    ours.free.set()
    with pytest.raises(Superseded):
        first.result(WAIT_S)
    theirs.free.set()
    assert read_checkpoint(second.result(WAIT_S)) == state(1)


def test_the_same_step_can_be_saved_again(checkpoints):
    checkpoints.save(state(1), Weights()).result(WAIT_S)
    path = checkpoints.save(state(1, done=True), Weights()).result(WAIT_S)
    assert read_checkpoint(path).stage_done
    assert [path.name for path in checkpoints.folder.iterdir()] == ["sft-step-000001"]


def test_a_save_again_that_is_killed_between_the_two_names_leaves_the_first(checkpoints, monkeypatch):
    """It was covered: the manager has forgotten what is in it."""
    checkpoints.save(state(1), Weights()).result(WAIT_S)
    rename = type(checkpoints.folder).rename
    monkeypatch.setattr(
        "pathlib.Path.rename", lambda path, to: kill() if path.name.startswith(".unf") else rename(path, to)
    )
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(1, done=True), Weights()).result(WAIT_S)
    monkeypatch.undo()
    assert names(checkpoints) == []
    checkpoints.start()
    assert not read_checkpoint(checkpoints.newest()).stage_done
    assert [path.name for path in checkpoints.folder.iterdir()] == ["sft-step-000001"]


def test_a_checkpoint_that_is_removed_is_none_from_the_first_file_on(checkpoints, monkeypatch):
    for step in (1, 2):
        checkpoints.save(state(step), Weights()).result(WAIT_S)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors=False: None if ignore_errors else kill())
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(state(3), Weights()).result(WAIT_S)
    assert names(checkpoints) == ["sft-step-000002", "sft-step-000003"]


def kill():
    raise KeyboardInterrupt


def cut(path):
    file = path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(path):
    file = path / "model" / "model.safetensors"
    file.write_bytes(b"x" + file.read_bytes()[1:])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (cut, "model.safetensors: has 6999 bytes, the checkpoint was sealed with 7000"),
        (flip, r"model.safetensors: its content differs from what was saved \(checksum\)"),
        (
            lambda path: (path / "model" / "model.safetensors").unlink(),
            "model.safetensors: the checkpoint lacks this file",
        ),
        (lambda path: (path / "state.json").unlink(), "state.json: the checkpoint lacks this file"),
        (lambda path: (path / COMPLETE).unlink(), "not a complete checkpoint, COMPLETE.json is missing"),
        (lambda path: (path / COMPLETE).write_text("{}"), "COMPLETE.json: not written by PolyRL"),
        (lambda path: (path / COMPLETE).write_text('{"stage_final":false,"files":{}}'), "does not list state.json"),
        (lambda path: (path / COMPLETE).write_bytes(b"\x00"), "COMPLETE.json: not written by PolyRL"),
    ],
)
def test_damage_is_named(checkpoints, damage, sentence):
    path = checkpoints.save(state(1), Weights()).result(WAIT_S)
    damage(path)
    with pytest.raises(InvalidData, match=sentence):
        read_checkpoint(path)


def test_foreign_folders_are_refused(tmp_path):
    with pytest.raises(InvalidData, match="no such folder to resume from"):
        latest(tmp_path / "none")
    with pytest.raises(InvalidData, match="holds no complete checkpoint"):
        latest(tmp_path)


@pytest.mark.parametrize("place", ["model", "model/weights.safetensors", ""], ids=["folder", "file", "checkpoint"])
def test_a_final_that_holds_a_link_is_not_taken_along(checkpoints, tmp_path, place):
    final = checkpoints.save(state(3, done=True), Weights()).result(WAIT_S)
    source = checkpoints.save(state(1, TrainingStage.RL), Weights()).result(WAIT_S)
    linked, outside = final / place, tmp_path / "outside"
    linked.exists() or linked.touch()
    linked.rename(outside)
    linked.symlink_to(outside)
    other = Checkpoints(tmp_path / "other", keep=2)
    other.start()
    with pytest.raises(InvalidData, match="is a link; a checkpoint holds files alone"):
        other.adopt_finals(source)
    assert list(other.folder.iterdir()) == []


def test_a_resumed_run_in_another_folder_takes_the_stages_finals_along(checkpoints, tmp_path):
    checkpoints.save(state(3, done=True), Weights()).result(WAIT_S)
    source = checkpoints.save(state(1, TrainingStage.RL), Weights()).result(WAIT_S)
    other = Checkpoints(tmp_path / "other", keep=2)
    other.start()
    other.adopt_finals(source)
    assert names(other) == ["sft-step-000003"]
    assert read_checkpoint(other.stage_final(TrainingStage.SFT)).step == 3


def test_mini_batches_that_do_not_fit_a_begun_step_are_refused_before_anything_is_awaited(checkpoints):
    """On a cluster nobody reads the checkpoint before the trainer does; it published its weights first."""
    begun = state(3, TrainingStage.RL)
    begun.trained_groups = 4
    saved = checkpoints.save(begun, Weights()).result(WAIT_S)
    raw = raw_job()
    raw["spec"]["recipe"] |= {
        "mode": "rl",
        "seed": 1,
        "algorithm": {"steps": 9, "promptsPerStep": 10, "miniBatchPrompts": 5},
    }
    with pytest.raises(InvalidData, match=r"recipe\.algorithm\.miniBatchPrompts: the checkpoint has learned 4 groups"):
        _resumed_state(saved, PolyRLJob.model_validate(raw))
    raw["spec"]["recipe"]["algorithm"]["miniBatchPrompts"] = 2
    assert _resumed_state(saved, PolyRLJob.model_validate(raw)) == begun


@pytest.mark.parametrize(
    ("stage", "groups", "section", "most"),
    [
        (TrainingStage.SFT, 0, "sft", 3),
        (TrainingStage.DPO, 0, "dpo", 3),
        (TrainingStage.REWARD_MODEL, 0, "rewardModel", 3),
        (TrainingStage.OFFLINE_RL, 0, "algorithm", 3),
        (TrainingStage.RL, 0, "algorithm", 3),
        (TrainingStage.RL, 16, "algorithm", 4),
    ],
)
def test_fewer_steps_than_are_done_or_begun_are_refused_in_every_stage(checkpoints, stage, groups, section, most):
    """A cluster's trainer took 40 steps and 16 groups for the end of 40 steps, and RL, which comes next, found no end
    of SFT."""
    begun = state(3, stage)
    begun.trained_groups = groups
    saved = checkpoints.save(begun, Weights()).result(WAIT_S)

    def resumed(steps):
        algorithm = {"promptsPerStep": 32, "miniBatchPrompts": 16}
        recipe = {"mode": stage.value, "seed": 1, "model": {"path": "/m"}, "algorithm": algorithm}
        recipe = {**recipe, section: {**recipe.get(section, {}), "steps": steps}}
        return _resumed_state(saved, SimpleNamespace(spec=SimpleNamespace(recipe=RecipeSpec.model_validate(recipe))))

    with pytest.raises(InvalidData, match=rf"recipe\.{section}\.steps: {most - 1} steps, .*: ask for {most} or more"):
        resumed(most - 1)
    assert resumed(most) == begun


def opened(run, raw, resume=None, job=None):
    """As by a runner on this machine; in a pod, where its job is in a file."""
    arguments = SimpleNamespace(run=run, store="", resume=resume, max_manager_outage_s=0, grace_s=1)
    arguments.job, arguments.hand_over = job, job is not None
    session, resumed_from = _open_session(arguments, PolyRLJob.model_validate(raw), SimpleNamespace(write=None))
    session.end(run, "")
    return session.state, resumed_from


def test_a_run_of_which_nothing_was_saved_is_resumed_from_its_beginning(tmp_path):
    """As its last line says; the trainer refused it."""
    assert opened(tmp_path, raw_job(), resume=tmp_path) == (TrainerState(seed=0, stage=TrainingStage.RL), None)


def test_a_pod_goes_on_with_no_other_run_than_was_begun(tmp_path):
    """Nobody compared them on a cluster: a trainer went on with another model's tokenizer, or other adapters."""
    file, raw = tmp_path / "job.json", raw_job()

    def opened_with(**recipe):
        raw["spec"]["recipe"].update(recipe)
        file.write_text(json.dumps(raw))
        return opened(tmp_path, raw, job=file)

    opened_with(model={"path": "/model"})
    assert opened_with(model={"path": "/other"})[1] is None, "nothing is saved yet: the run begins anew"
    learned, checkpoints = state(3, TrainingStage.RL), Checkpoints(tmp_path, keep=2)
    learned.seed = 0
    checkpoints.start()
    checkpoints.save(learned, Weights()).result(WAIT_S)
    with pytest.raises(InvalidData, match=r"spec\.recipe\.model\.path: was /other when the run began, /third now"):
        opened_with(model={"path": "/third"})
    assert opened_with(model={"path": "/other"}, algorithm={"steps": 20})[1] is not None


@pytest.mark.parametrize(
    "content", [b"", b'{"apiVersion": "polyrl.dev/v1alpha1", "kind"', b'{"spec": {"later": 1}}', None]
)
def test_what_a_run_began_with_ends_none_when_it_cannot_be_read(tmp_path, content):
    """A power cut left nothing of it, or another version wrote it: no edit of the job could mend that."""
    file, raw = tmp_path / "job.json", raw_job()
    file.write_text(json.dumps(raw))
    learned, checkpoints = state(3, TrainingStage.RL), Checkpoints(tmp_path, keep=2)
    learned.seed = 0
    checkpoints.start()
    checkpoints.save(learned, Weights()).result(WAIT_S)
    if content is not None:
        (tmp_path / BEGAN).write_bytes(content)
    assert opened(tmp_path, raw, job=file)[1] is not None
    assert (tmp_path / BEGAN).read_bytes() == file.read_bytes(), "from now on there is one"


def test_what_lies_in_a_store_alone_stays_as_well(tmp_path):
    """The folder of a run without a volume of its own is empty whenever its trainer starts."""
    store = f"file://{tmp_path}/store"
    with pytest.raises(InvalidData), saved_stays(tmp_path / "another", store):
        raise InvalidData("no such rows")
    checkpoints = Checkpoints(tmp_path / "run", keep=2, store=CheckpointStore(store))
    checkpoints.start()
    checkpoints.save(state(3), Weights()).result(WAIT_S)
    with pytest.raises(CannotGoOn, match="no such rows"), saved_stays(tmp_path / "another", store):
        raise InvalidData("no such rows")


def test_steps_of_a_stage_that_is_over_are_said_to_move_nothing(tmp_path):
    file, raw = tmp_path / "job.json", raw_job()
    rows = {"sft": [{"path": "sft.jsonl"}], "rl": [{"path": "rl.jsonl"}]}
    raw["spec"]["recipe"] |= {"mode": "sft+rl", "data": rows, "sft": {"steps": 5}}
    file.write_text(json.dumps(raw))
    for stage, warnings in ((None, 0), (TrainingStage.SFT, 0), (TrainingStage.RL, 1)):
        with capture_logs() as logs:
            refuse_other_run(tmp_path, file, stage=stage)
        assert len(logs) == warnings
        raw["spec"]["recipe"]["sft"] = {"steps": 7}
        file.write_text(json.dumps(raw))


@pytest.mark.parametrize(("steps", "kept"), [(10, ["rl"]), (20, ["rl", "eval"])])
def test_the_evaluation_at_the_end_of_a_run_that_goes_on_with_more_steps_stays(checkpoints, tmp_path, steps, kept):
    """It is not measured again, and the curve had a gap there."""
    ended = state(10, TrainingStage.RL, done=True)
    ended.seed, ended.results.evaluations["base"] = 0, {"reward": 0.5}
    checkpoints.save(ended, Weights()).result(WAIT_S)
    rows = [{"phase": phase, "step": 10} for phase in ("rl", "eval")]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = [line("train-rl-10"), line("eval-rl-10")]
    (tmp_path / SAMPLES).write_bytes(b"".join(texts))
    raw = raw_job()
    raw["spec"]["recipe"]["algorithm"]["steps"] = steps
    resumed, _ = opened(tmp_path, raw)
    assert [json.loads(row)["phase"] for row in (tmp_path / "metrics.jsonl").read_text().splitlines()] == kept
    assert (tmp_path / SAMPLES).read_bytes().splitlines(keepends=True) == texts[: len(kept)]
    assert resumed == ended, "the seal of its last checkpoint stays one of a stage's end"


def test_what_an_own_loss_draws_from_torch_follows_from_the_seed(tmp_path):
    def drawn(number, seed):
        torch.default_generator.seed()  # as in every process that torch is loaded in, or that is forked
        raw = raw_job()
        raw["spec"]["recipe"]["seed"] = seed
        run = tmp_path / str(number)
        arguments = SimpleNamespace(run=run, store="", resume=None, max_manager_outage_s=0, grace_s=1, hand_over=False)
        session, _ = _open_session(arguments, PolyRLJob.model_validate(raw), SimpleNamespace(write=None))
        session.end(arguments.run, "")
        return torch.rand(3).tolist()

    assert drawn(1, seed=3) == drawn(2, seed=3) != drawn(3, seed=4)
