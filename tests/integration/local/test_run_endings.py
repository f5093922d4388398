"""However a run ends, nothing of it is left: every ending over real processes, checked in the process table."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from polyrl.forks.client import READY_S
from polyrl.testing.started import StartedProcess, words_of
from polyrl.worker import FAILED_STARTS_LIMIT
from polyrl_cli.inspection.why import why_lines

DEADLINE_S = 120.0
POLL_S = 0.05
DRIVER = Path(__file__).parent / "run_with_stand_ins.py"

SLEEPS = "import time; time.sleep(600)"
DEAF = "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(600)"
DIES = "import sys; sys.exit('the engine found no device')"
ALL_DONE = (
    "import asyncio, sys, time, pathlib\n"
    "from polyrl_trainer.client import RolloutClient\n"
    "root = pathlib.Path(sys.argv[1])\n"
    "manager, key = root / 'run/endpoints/manager.json', root / 'keys/trainer.key'\n"
    "async def finish():\n"
    "    async with RolloutClient.connect(manager, key, 1) as client:\n"
    "        await client.finish(True, 'done')\n"
    "asyncio.run(finish())\n"
    "print('said', flush=True)\n"
    "time.sleep(600)"
)
WITH_CHILD = (
    "import os, subprocess, sys, time\n"
    "os.environ[parent_death_signal.PARENT_PID] = str(os.getpid())\n"
    "code = 'from polyrl import parent_death_signal; parent_death_signal.hold(); import time; time.sleep(600)'\n"
    "subprocess.Popen([sys.executable, '-c', code, sys.argv[1], 'engine'], start_new_session=True)\n"
    "time.sleep(600)"
)

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def start() -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def begin(root: Path, trainer: str = SLEEPS, agent: str = SLEEPS, *more: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "polyrl.testing.script", str(DRIVER), str(root), trainer, agent, *more]
        run = StartedProcess(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(run)
        return run

    yield begin
    for run in started:
        run.kill()
        run.communicate()


def processes_of(root: Path) -> list[psutil.Process]:
    """Everything alive that names the run's folder, this test left out."""
    found = []
    for process in psutil.process_iter():
        try:
            named = any(part.startswith(str(root)) for part in words_of(process))
            if named and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(POLL_S)


def is_up(root: Path, engines: int = 0) -> Callable[[], bool]:
    """Runner, manager, trainer, three agents, and as many engines."""
    return lambda: len(processes_of(root)) >= 6 + engines


def come_up(run: subprocess.Popen[str], root: Path, engines: int = 0) -> None:
    """Waits until all is there; a run that ends meanwhile shows what it said."""

    def there() -> bool:
        assert run.poll() is None, run.communicate()[0]
        return is_up(root, engines)()

    wait_until(there, "the whole run")


def the_worker(root: Path, name: str) -> psutil.Process:
    return next(
        process
        for process in processes_of(root)
        if name in words_of(process)[-1:] or f"polyrl_rollout.{name}" in words_of(process)
    )


def output_of(run: subprocess.Popen[str]) -> str:
    return run.communicate(timeout=DEADLINE_S)[0]


def test_a_good_end(root: Path, start: Run) -> None:
    run = start(root, trainer="import time; time.sleep(0.5)")
    output = output_of(run)
    assert run.returncode == 0, output
    assert "succeeded" in output
    assert json.loads((root / "summary.json").read_text())["outcome"] == "succeeded"
    assert processes_of(root) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_asked_to_stop_once_it_stops_and_sums_up(root: Path, start: Run, number: signal.Signals, code: int) -> None:
    run = start(root)
    come_up(run, root)
    run.send_signal(number)
    output = output_of(run)
    assert run.returncode == code, output
    assert json.loads((root / "summary.json").read_text())["outcome"] == "interrupted"
    assert f"polyrl resume {root} goes on from its beginning, since nothing was saved" in output
    assert processes_of(root) == []


def test_asked_to_stop_once_all_is_done_it_has_succeeded(root: Path, start: Run) -> None:
    """`polyrl resume` says of the same folder that nothing is left to do."""
    result = "import pathlib, sys; result = pathlib.Path(sys.argv[1]) / 'trainer-result.json'\n"
    run = start(root, trainer=result + 'result.write_text(\'{"outcome": "done"}\')\n' + SLEEPS)
    come_up(run, root)
    wait_until(lambda: (root / "trainer-result.json").exists(), "the trainer's result")
    run.send_signal(signal.SIGINT)
    output = output_of(run)
    assert run.returncode == 0, output
    assert json.loads((root / "summary.json").read_text())["outcome"] == "succeeded"


def test_asked_to_stop_again_while_it_sums_up_it_says_all(root: Path, start: Run) -> None:
    """The second Ctrl-C fell between the end and the summary, of which nothing was shown."""
    run = start(root)
    come_up(run, root)
    while not (root / "summary.json").exists():
        assert run.poll() is None, output_of(run)
        run.send_signal(signal.SIGINT)
        time.sleep(0.001)
    output = output_of(run)
    assert run.returncode == 130, output
    assert "All of it lies in" in output
    assert "Traceback" not in output
    assert json.loads((root / "summary.json").read_text())["outcome"] == "interrupted"


def test_a_disk_that_takes_no_summary_is_a_sentence_below_it(root: Path, start: Run) -> None:
    """It was a traceback, and no summary at all."""
    run = start(root, trainer="import time; time.sleep(2)")
    come_up(run, root)
    (root / "summary.json").mkdir()  # as good as a full disk
    output = output_of(run)
    assert run.returncode == 1, output
    assert "succeeded" in output
    assert f"{root}: summary.json and run.png cannot be written: Is a directory" in output
    assert "Traceback" not in output


def test_a_manager_that_cannot_go_on_is_the_cause_in_its_own_words(root: Path, start: Run) -> None:
    run = start(root)
    come_up(run, root)
    manager = the_worker(root, "manager")
    (root / "job.json").write_text("{")
    manager.kill()
    output = output_of(run)
    assert run.returncode == 1, output
    assert str(root / "job.json") in json.loads((root / "summary.json").read_text())["cause"]


def test_asked_to_stop_while_a_process_is_being_forked_it_waits_for_none(root: Path, start: Run) -> None:
    """It waited until the server had loaded its libraries, or for two minutes."""
    run = start(root, SLEEPS, SLEEPS, "frozen")
    events = root / "fleet.jsonl"
    wait_until(lambda: events.exists() and "start manager" in events.read_text(), "the first process to be asked for")
    run.send_signal(signal.SIGINT)
    began = time.monotonic()
    output = output_of(run)
    assert run.returncode == 130, output
    assert time.monotonic() - began < READY_S / 2
    assert processes_of(root) == []


def test_workers_that_do_not_listen_end_all_the_same(root: Path, start: Run) -> None:
    run = start(root, trainer=DEAF, agent=DEAF)
    come_up(run, root)
    run.send_signal(signal.SIGINT)
    output_of(run)
    assert run.returncode == 130
    assert processes_of(root) == []


def test_nothing_survives_a_killed_runner_not_even_engines(root: Path, start: Run) -> None:
    run = start(root, agent=WITH_CHILD)
    come_up(run, root, engines=3)
    run.kill()
    wait_until(lambda: processes_of(root) == [], "an empty process table")


def test_a_killed_agent_takes_its_engine_along_and_is_replaced(root: Path, start: Run) -> None:
    run = start(root, agent=WITH_CHILD)
    come_up(run, root, engines=3)
    victim = the_worker(root, "rollout-0")
    engine = victim.children()[0]
    victim.kill()
    psutil.wait_procs([victim, engine], timeout=DEADLINE_S)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    wait_until(lambda: any("rollout-2" in words_of(process) for process in processes_of(root)), "a replacement")
    run.send_signal(signal.SIGINT)
    output_of(run)
    # The runner waits for its agents; their engines the kernel ends, in its own time.
    wait_until(lambda: processes_of(root) == [], "an empty process table")


def test_without_its_trainer_the_run_ends_and_shows_its_last_words(root: Path, start: Run) -> None:
    run = start(root, trainer="import sys; print('the last words', file=sys.stderr, flush=True); " + SLEEPS)
    come_up(run, root)
    wait_until(lambda: "last words" in (root / "logs" / "trainer.log").read_text(), "the trainer's words")
    the_worker(root, "trainer").kill()
    output = output_of(run)
    assert run.returncode == 1
    assert "the trainer ended with exit code -9" in output
    assert "the last words" in output
    assert processes_of(root) == []


def test_a_trainer_that_is_killed_after_its_last_words_has_ended_well(root: Path, start: Run) -> None:
    run = start(root, trainer=ALL_DONE)
    wait_until(lambda: (root / "logs" / "prints.log").exists(), "the trainer's prints")
    wait_until(lambda: "said" in (root / "logs" / "prints.log").read_text(), "the trainer's words")
    line = '"text":"manager has ended"'  # without an exit code: who wrote it knows that the job is over
    wait_until(lambda: line in (root / "fleet.jsonl").read_text(), "the runner to hear them")
    the_worker(root, "trainer").kill()
    output = output_of(run)
    assert run.returncode == 0, output
    assert processes_of(root) == []


def test_a_killed_manager_has_a_successor_and_the_others_stay(root: Path, start: Run) -> None:
    run = start(root)
    come_up(run, root)
    before = set(processes_of(root))
    manager = the_worker(root, "manager")
    manager.kill()
    psutil.wait_procs([manager], timeout=DEADLINE_S)
    wait_until(lambda: len(processes_of(root)) == len(before), "its successor")
    assert before - {manager} < set(processes_of(root))
    run.send_signal(signal.SIGINT)
    assert "start manager-1: manager is gone" in output_of(run)
    assert processes_of(root) == []


def test_a_wrong_input_is_one_sentence(root: Path, start: Run) -> None:
    sentence = "rl.jsonl:3: the row has no prompt"
    log = """import sys; print("a reward's print"); print('{"event": "a log record"}', file=sys.stderr); """
    code = f"{log}print({sentence!r}, file=sys.stderr, flush=True); print('another', flush=True); sys.exit(2)"
    run = start(root, trainer=code)
    output = output_of(run)
    assert run.returncode == 2
    assert output.splitlines()[-1] == sentence
    assert "Traceback" not in output
    assert output.index(sentence) < output.index("the trainer ended with exit code 2")
    assert "print" not in output.replace("prints.log", "")


def test_rollouts_that_fail_at_start_are_given_up_while_the_run_goes_on(root: Path, start: Run) -> None:
    agent = f"import sys\nif sys.argv[2] != 'reserved': {DIES}\n" + SLEEPS
    run = start(root, agent=agent)
    timeline = root / "fleet.jsonl"
    wait_until(lambda: timeline.exists() and "rollouts given up" in timeline.read_text(), "rollouts to be given up")
    events = [json.loads(line) for line in timeline.read_text().splitlines()]
    tries = [
        event for event in events if event["event"] == "started" and event.get("worker", "").startswith("rollout-")
    ]
    # Two start at once. Where both fail before either is started again, that is once in a row.
    assert FAILED_STARTS_LIMIT <= len(tries) <= 2 * FAILED_STARTS_LIMIT
    assert run.poll() is None
    run.send_signal(signal.SIGINT)
    output, counts = output_of(run), range(FAILED_STARTS_LIMIT, len(tries) + 1)
    assert any(f"the last {count} ended before they served" in output for count in counts), output


def test_a_run_whose_starting_engines_are_killed_waits_says_so_and_counts_them(root: Path, start: Run) -> None:
    run = start(root)
    come_up(run, root)
    killed = {"reserved": 0, "rollout": 0}

    def enough() -> bool:
        assert run.poll() is None, run.communicate()[0]
        for process in processes_of(root):
            kind = "".join(words_of(process)[-1:]).split("-")[0]
            if killed.get(kind, FAILED_STARTS_LIMIT + 1) <= FAILED_STARTS_LIMIT:
                process.kill()
                psutil.wait_procs([process], timeout=DEADLINE_S)
                killed[kind] += 1
        return min(killed.values()) > FAILED_STARTS_LIMIT

    wait_until(enough, "engines to be killed")
    assert any("the run waits for an engine: reserved" in line for line in why_lines(root))
    wait_until(lambda: any(words_of(process)[-1:] == ["reserved"] for process in processes_of(root)), "another one")
    run.send_signal(signal.SIGINT)
    output_of(run)
    assert json.loads((root / "summary.json").read_text())["preemptions"] == sum(killed.values())
    assert processes_of(root) == []


def test_two_runs_live_side_by_side(tmp_path: Path, start: Run) -> None:
    roots = [tmp_path / "one", tmp_path / "two"]
    for root in roots:
        root.mkdir()
    runs = [start(root) for root in roots]
    for run, root in zip(runs, roots, strict=True):
        come_up(run, root)
    ports = [json.loads((root / "run" / "endpoints" / "manager.json").read_text())["http"] for root in roots]
    assert len(set(ports)) == 2
    runs[0].send_signal(signal.SIGINT)
    output_of(runs[0])
    assert processes_of(roots[0]) == []
    assert is_up(roots[1])()
    runs[1].send_signal(signal.SIGINT)
    output_of(runs[1])
    assert processes_of(roots[1]) == []


def test_a_folder_has_one_runner(root: Path, start: Run) -> None:
    first = start(root)
    come_up(first, root)
    second = start(root)
    assert "another `polyrl run` is at work in this folder" in output_of(second)
    assert second.returncode != 0
    assert first.poll() is None
