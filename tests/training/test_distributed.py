"""Several processes: the same run as one process with the same batches, and nobody left waiting when something breaks."""

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed_cases import CONFIG, OnOne

import children
from children import INTERRUPTED, LEFT, REFUSED, Trap
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.synthetic import synthetic
from rankgrad.errors import InterruptedRunError, OtherProcessError
from rankgrad.files import load_tensors
from rankgrad.runs.folder import Checkpoints, read_per_document, read_per_query
from rankgrad.runs.run import train_run
from rankgrad.training import distributed
from rankgrad.training.config import Data, Loss
from rankgrad.training.distributed import Signals

pytestmark = pytest.mark.slow  # each starts processes


def with_train(config=CONFIG, **changes):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


def alone(out, config=CONFIG):
    list(train_run(out, config))
    return out


def together(out, config=CONFIG, world=2, trap=None, expected=0):
    """Train with several processes that all call train_run; their exit codes must be as expected."""
    group = children.group(children.train, world, out, trap, config)
    codes = [children.code(process) for process in group]
    assert codes == (expected if isinstance(expected, list) else [expected] * world), messages(out)
    return out


def history(out):
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def report(out):
    return json.loads((out / "report.json").read_text())


def messages(out):
    return [path.read_text() for path in sorted(out.parent.glob(f"{out.name}.message-*"))]


def assert_alike(out, single):
    for own, expected in zip(history(out), history(single), strict=True):
        assert own["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert own["metric"] == pytest.approx(expected["metric"], abs=1e-9)
        assert (own["lr"], own["best"], own["skipped"]) == (expected["lr"], expected["best"], expected["skipped"])
    for split, metrics in report(single)["metrics"].items():
        for name, rules in metrics.items():
            assert report(out)["metrics"][split][name] == pytest.approx(rules, abs=1e-9)
    assert report(out)["splits"] == report(single)["splits"]
    own, expected = read_per_query(out), read_per_query(single)
    assert own.query_ids == expected.query_ids
    for name, value in expected.metrics.items():
        np.testing.assert_allclose(own.metrics[name], value, atol=1e-9)
    for k, value in expected.curve.items():
        np.testing.assert_allclose(own.curve[k], value, atol=1e-6)
    if (single / "scores.safetensors").exists():
        np.testing.assert_allclose(read_per_document(out).scores, read_per_document(single).scores, atol=1e-4)
    names = {path.name for path in single.iterdir()}
    assert {path.name for path in out.iterdir()} == names


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return alone(tmp_path_factory.mktemp("single") / "run")


@pytest.mark.parametrize("world", [2, 3])
def test_several_processes_train_the_run_of_one(single, tmp_path, world):
    out = together(tmp_path / "run", world=world)
    assert_alike(out, single)
    assert report(out)["processes"] == world


@pytest.mark.parametrize("loss", ["lambdarank", "ordinal"])
def test_batches_so_small_that_a_process_gets_no_list(tmp_path, loss):
    config = with_train(dataclasses.replace(CONFIG, loss=Loss(loss)), batch_size=1, epochs=1)
    assert_alike(together(tmp_path / "two", config), alone(tmp_path / "one", config))


def test_query_weights_and_a_held_out_part_are_the_same_everywhere(tmp_path):
    data = synthetic("tiny", "train")
    dataclasses.replace(data, weights=np.linspace(0, 3, 30)).save(tmp_path / "data")
    config = with_train(dataclasses.replace(CONFIG, data=Data(str(tmp_path / "data"))), epochs=2)
    assert_alike(together(tmp_path / "two", config), alone(tmp_path / "one", config))


def on_its_own_machine(out, config):
    """As if no folder were shared: the run's folder leads the second process elsewhere."""
    rank = os.environ["RANK"]
    os.environ |= {"GROUP_RANK": rank, "LOCAL_RANK": "0"}
    own = out if rank == "0" else out.with_name("elsewhere") / "run"
    if rank == "1":
        from rankgrad.runs import run

        received = run._received
        run._received = lambda content: (received(content)[0]._replace(folder=own), own)
        (own / ".scaled-1" / "train").mkdir(parents=True)  # left by a run that was killed while it read
        (own / ".scaled-1" / "train" / "manifest.json").touch()
    children.train(out, None, config)


def test_machines_need_not_share_the_run_s_folder_and_only_the_first_keeps_anything(single, tmp_path):
    out = tmp_path / "run"
    group = children.group(on_its_own_machine, 2, out, CONFIG)
    assert [children.code(process) for process in group] == [0, 0], messages(out)
    assert_alike(out, single)
    assert not (tmp_path / "elsewhere" / "run").exists()


def test_only_the_first_process_writes(single, tmp_path):
    assert_alike(together(tmp_path / "run", trap=OnOne(1, 1, at="write", what="exit")), single)


def test_a_run_is_resumed_by_any_number_of_processes(single, tmp_path):
    one = tmp_path / "one"
    assert children.code(children.start(children.train, one, Trap(7, at="step", what="SIGTERM"), CONFIG)) == INTERRUPTED
    (one / ".scaled-7").mkdir()  # left by processes that were killed while they read
    together(one, config=None)
    assert_alike(one, single)
    two = together(tmp_path / "two", trap=Trap(7, at="step", what="SIGTERM"), expected=INTERRUPTED)
    assert Checkpoints(two).load()[1]["step"] == 3
    list(train_run(two))
    assert_alike(two, single)


# --- when something breaks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_them_all_at_the_same_step(single, tmp_path, rank):
    out = together(tmp_path / "run", trap=OnOne(rank, 3, at="step", what="SIGTERM"), expected=INTERRUPTED)
    assert all("epoch 1 " in m and f"rankgrad train --resume {out}" in m for m in messages(out))
    assert Checkpoints(out).load()[1]["step"] == 4
    list(train_run(out))
    assert_alike(out, single)


@pytest.mark.parametrize("what", ["exit", "SIGKILL"])
def test_a_process_that_dies_ends_the_run_with_a_message_and_a_checkpoint(single, tmp_path, what):
    began = time.monotonic()
    died = {"exit": 1, "SIGKILL": -signal.SIGKILL}[what]
    out = together(tmp_path / "run", trap=OnOne(1, 7, at="step", what=what), expected=[INTERRUPTED, died])
    assert time.monotonic() - began < 20
    (said,) = messages(out)
    assert "another process" in said and f"rankgrad train --resume {out}" in said
    facts = Checkpoints(out).load()[1]
    assert (facts["epoch"], facts["step"]) == (1, 2)  # not even the epoch's first steps are lost
    list(train_run(out))
    assert_alike(out, single)


def test_the_first_process_may_die_too(single, tmp_path):
    out = together(tmp_path / "run", trap=OnOne(0, 7, at="step", what="exit"), expected=[1, INTERRUPTED])
    assert Checkpoints(out).load()[1]["epoch"] == 1
    together(out, config=None)
    assert_alike(out, single)


def spoil_one_list():
    """NaN scores in one list, which one process has."""
    from rankgrad.training import build

    original = build.make_model

    def make_model(*arguments, **options):
        model = original(*arguments, **options)
        model.steps = 0

        def spoil(module, inputs, output):
            if module.training:
                model.steps += 1
                if model.steps == 2 and os.environ["RANK"] == "1":
                    spoilt = torch.ones(len(output), 1)
                    spoilt[0] = math.nan
                    return output * spoilt
            return None

        model.register_forward_hook(spoil)
        return model

    build.make_model = make_model


def test_a_bad_list_of_one_process_is_refused_by_all_and_named_by_all(tmp_path):
    out = together(tmp_path / "stop", trap=spoil_one_list, expected=REFUSED)
    one, other = messages(out)
    assert one == other and "step 2 in epoch 1 " in one and "not finite" in one
    from rankgrad.data.batches import batches

    data = synthetic("tiny", "train")
    step = list(batches(data, 7, list_size=12, rank=1, world=2))[1]
    assert f"query {data.query_ids[step.queries[0]]}, " in one and "queries" not in one
    out = together(tmp_path / "skip", with_train(nonfinite="skip"), trap=spoil_one_list)
    assert [line["skipped"] for line in history(out)] == [1, 0, 0]
    assert all(t.isfinite().all() for name, t in load_tensors(out / "model.safetensors")[0].items() if "model." in name)


def test_a_mistake_is_reported_once_by_the_first_process_and_the_others_leave(single):
    group = children.group(children.train, 2, single)  # a finished run
    assert [children.code(process) for process in group] == [REFUSED, LEFT]
    (said,) = messages(single)
    assert str(single) in said and "finished" in said
    Path(f"{single}.message-0").unlink()


def refused_reading():
    """Data that no process can read."""
    from rankgrad.training import data

    def read(*_, **__):
        raise ValueError("no such lists")

    data.read_splits = read


def test_a_new_run_that_fails_before_it_learned_anything_leaves_no_folder(tmp_path):
    group = children.group(children.train, 2, tmp_path / "run", refused_reading, CONFIG)
    assert children.code(group[0]) == REFUSED and children.code(group[1]) in (REFUSED, INTERRUPTED)
    assert "no such lists" in messages(tmp_path / "run")[0]
    assert not (tmp_path / "run").exists()


def test_what_the_first_process_makes_is_sent_and_a_failure_lets_the_others_leave(monkeypatch):
    sent = []
    monkeypatch.setattr(distributed, "broadcast_bytes", lambda content: sent.append(content) or b"7")
    assert distributed.from_first(lambda: 5, lambda n: str(n).encode(), int) == 5 and sent == [b"5"]
    with pytest.raises(ValueError, match="mine"):
        distributed.from_first(lambda: int("mine"), bytes, int)
    assert sent == [b"5", b""]
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    assert distributed.from_first(lambda: 5, bytes, int) == 7
    monkeypatch.setattr(distributed, "broadcast_bytes", lambda content: b"")
    with pytest.raises(OtherProcessError):
        distributed.from_first(lambda: 5, bytes, int)


# --- torchrun itself --------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {path}
import children
from distributed_cases import CONFIG, NumbaSeen, OnOne, Wait
children.train(Path({out!r}), {trap}, CONFIG)
"""


def torchrun(out, trap="None"):
    script = out.with_suffix(".py")
    script.write_text(
        SCRIPT.format(path=[str(Path(__file__).parent), str(Path(__file__).parents[1])], out=str(out), trap=trap)
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        port,
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_torchrun_trains_the_run_of_one_with_the_compiled_loss(single, tmp_path):
    process = torchrun(tmp_path / "run", f"NumbaSeen({str(tmp_path / 'run')!r})")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert_alike(tmp_path / "run", single)
    assert sorted(path.name for path in tmp_path.glob("run.numba-*")) == ["run.numba-0", "run.numba-1"]


def test_torchrun_that_loses_a_process(single, tmp_path):
    out = tmp_path / "run"
    process = torchrun(out, "OnOne(1, 7, at='step', what='exit')")
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "rank      : 1" in said
    assert "another process" in messages(out)[0]
    list(train_run(out))
    assert_alike(out, single)


def test_torchrun_told_to_stop(single, tmp_path):
    out = tmp_path / "run"
    process = torchrun(out, f"Wait(4, {str(out.with_suffix('.seen'))!r})")
    while not out.with_suffix(".seen").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert all("epoch 1 " in m and "--resume" in m for m in messages(out)) and len(messages(out)) == 2, said
    list(train_run(out))
    assert_alike(out, single)


def test_ctrl_c_is_answered_at_once_and_once(capfd, tmp_path):
    with Signals(tmp_path) as signals:
        signals.listen()
        signals.patient = True
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr() == ("", "rankgrad: stopping after this step\n")
        assert signals.received
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr() == ("", "")
        with pytest.raises(InterruptedRunError):
            signals.stop_at_once()
        with pytest.raises(InterruptedRunError):
            os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr() == ("", "")


def test_weights_of_documents_are_the_same_everywhere(tmp_path):
    """The mean of query_rmse is over the weight of all documents of a step, which no process has alone."""
    data = synthetic("tiny")
    weights = np.random.default_rng(0).random(len(data.labels))
    dataclasses.replace(data, document_weights=weights).save(tmp_path / "lists")
    config = dataclasses.replace(CONFIG, data=Data(str(tmp_path / "lists")), loss=Loss("query_rmse"))
    found, expected = (
        history(out) for out in (together(tmp_path / "together", config), alone(tmp_path / "alone", config))
    )
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-5)
    assert [line["metric"] for line in found] == pytest.approx([line["metric"] for line in expected], abs=1e-6)


def test_a_signal_that_comes_while_the_run_is_left_has_its_status(tmp_path):
    signals = Signals(tmp_path)
    with pytest.raises(InterruptedRunError) as caught:
        signals.handle(signal.SIGTERM)
    assert caught.value.status == 143


def test_a_signal_that_comes_while_a_file_is_read_is_not_taken_for_damage(monkeypatch, tmp_path):
    synthetic("tiny").save(tmp_path / "lists")
    monkeypatch.setattr(np, "load", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    with Signals(tmp_path) as signals:
        signals.listen()
        with pytest.raises(InterruptedRunError) as caught:
            RankingDataset.open(tmp_path / "lists")
    assert caught.value.status == 143


@pytest.mark.parametrize("said", ["Gloo connectFullMesh failed with ...", "Connection closed by peer [127.0.0.1]:1"])
def test_a_process_that_is_lost_while_all_join_is_one_sentence(said, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError(said)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    joining = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in joining.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", fail)
    with pytest.raises(InterruptedRunError, match="another process of the run ended"), distributed.process_group():
        pass
