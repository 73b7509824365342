"""Bad numbers in training: NaN or infinity in one of two processes, and batches that teach one of them nothing.

Two processes are forked for every try from one that has imported everything, and train a small run through gloo.
"""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
import re
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankgrad.data.batches import batches
from rankgrad.data.scaling import fit_scaling
from rankgrad.data.synthetic import synthetic
from rankgrad.errors import NonFiniteError
from rankgrad.runs import run as runs
from rankgrad.runs.folder import read_per_document
from rankgrad.training import loop, members
from rankgrad.training.config import Config, Data, Loss, Members, Model, Optimiser, Train
from rankgrad.training.data import scaled
from reliability.promise import Promise, Tally, tally

LONGEST = 60  # seconds a pair of processes may take
EPOCHS, BATCH, LIST = 2, 7, 12  # 30 queries: five steps in an epoch, the last of two lists
LOSSES = ("neural_ndcg@5", "query_rmse", "ranknet", "softmax", "bce", "lambdarank", "rmse", "approx_ndcg")
MODELS: dict[str, tuple[Model, Members]] = {
    "transformer": (Model(kind="transformer", width=8, layers=1, feedforward=8, dropout=0.0), Members()),
    "mlp": (Model(kind="mlp", hidden=(8,), dropout=0.0), Members()),
    "shared": (Model(kind="mlp", hidden=(8,), dropout=0.0), Members(count=4, keep=2, share=True)),
    "linear": (Model(kind="linear"), Members()),
}
OWN = (
    Model(kind="mlp", hidden=(8,)),
    Members(count=4, keep=2),
)  # members with weights of their own, two in each process
BAD = (math.nan, math.inf, -math.inf)


def config_of(model: tuple[Model, Members], loss: str, *, clip: float | None = None, nonfinite: str = "stop") -> Config:
    """A run of ten steps."""
    return Config(
        data=Data("synthetic:tiny", list_size=LIST),
        model=model[0],
        members=model[1],
        loss=Loss(loss),
        optimiser=Optimiser(lr=0.01, clip=clip),
        train=Train(epochs=EPOCHS, batch_size=BATCH, threads=1, device="cpu", nonfinite=nonfinite),
    )


# --- two processes ----------------------------------------------------------------------------------------------------


def in_processes(world: int, work: Callable[[Path], Any], folder: Path) -> list[Any]:
    """What `work(folder)` returns in each of `world` forked processes; a text for one that failed or did not end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "GROUP_RANK": "0"}

    def enter(rank: int) -> None:
        os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
        try:
            found = work(folder)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        (folder / f"found-{rank}").write_text(json.dumps(found))

    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=enter, args=(rank,)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LONGEST)
    late = [process.is_alive() for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    files = [folder / f"found-{rank}" for rank in range(world)]
    return [
        f"did not end within {LONGEST} s" if slow else json.loads(file.read_text()) if file.is_file() else "died"
        for slow, file in zip(late, files)
    ]


def import_everything() -> None:
    """Train once, here, so that no forked process has to import or compile what a step needs."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        watched_run(Path(folder), config_of(MODELS["mlp"], LOSSES[0]))


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """Of tensors, to the bit."""
    return " ".join(f"{name}:{zlib.crc32(tensor.detach().numpy().tobytes()):08x}" for name, tensor in tensors.items())


@contextlib.contextmanager
def replaced(owner: Any, name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `made(owner.name)` for a while."""
    before = getattr(owner, name)
    setattr(owner, name, made(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def watched_run(folder: Path, config: Config, read: Any = None) -> dict[str, Any]:
    """Train a run, here: the weights before it, after every step and when it has ended, and the message it ended with."""
    seen: dict[str, Any] = {}
    weights, message, rows = [], "", {}

    def weights_now() -> str:
        model = seen["state"].model
        return fingerprint({"weights": model.weights} if hasattr(model, "weights") else model.state_dict())

    def kept(make_state: Any) -> Any:
        def made(*arguments: Any) -> Any:
            seen["state"] = make_state(*arguments)
            weights.append(weights_now())
            return seen["state"]

        return made

    with replaced(runs, "make_state", kept):
        try:
            events = runs.train_run(folder / "run", config, **({} if read is None else {"read": read}))
            weights.extend(weights_now() for event in events if isinstance(event, loop.Step))
        except NonFiniteError as error:
            message = str(error)
    if isinstance(seen["state"], members.MemberState):
        state = seen["state"]
        rows = {
            str(number): [bool(dropped), fingerprint({"best": best, "last": last})]
            for number, dropped, best, last in zip(state.drawn.ids, state.dropped, state.best, state.model.weights)
        }
    history = folder / "run" / "history.jsonl"
    lines = [json.loads(line) for line in history.read_text().splitlines()] if history.is_file() else []
    return {
        "weights": [*weights, weights_now()],
        "message": message,
        "rows": rows,
        "skipped": [x["skipped"] for x in lines],
    }


# --- something bad at one step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Injection:
    """What goes wrong where: in step `step` of the run, from 1, in process `rank`, with the list at `place` of its batch."""

    kind: str
    rank: int
    step: int
    place: int
    bad: float
    model: str
    loss: str
    clip: float | None
    nonfinite: str

    def __str__(self) -> str:
        clipped = "" if self.clip is None else ", clipped"
        return f"{self.bad} in {self.kind} of rank {self.rank}, step {self.step}, {self.model}, {self.loss}{clipped}, {self.nonfinite}"


def spoil_features(given: Injection) -> Any:
    """A batch whose features hold a bad number at one document."""

    def made(epoch_lists: Any) -> Any:
        def lists(data: Any, config: Any, progress: Any, *rest: Any) -> Iterator[Any]:
            done = progress.epoch * 5 + progress.step
            for number, (batch, count) in enumerate(epoch_lists(data, config, progress, *rest), done + 1):
                if number == given.step:
                    batch.features[given.place, 0, 0] = given.bad
                yield batch, count

        return lists

    return replaced(loop, "_epoch_lists", made)


def spoil_loss(given: Injection) -> Any:
    """A bad number in the loss of one list, or in its gradient."""
    steps = itertools.count(1)

    def of(objective: Any) -> Any:
        def values(scores: Any, *rest: Any) -> Any:
            if next(steps) != given.step:
                return objective.values(scores, *rest)
            spoilt = torch.zeros(len(scores))
            spoilt[given.place] = given.bad
            if given.kind == "the loss":
                return objective.values(scores, *rest) + spoilt
            scores.register_hook(lambda gradient: gradient + spoilt.view(-1, *[1] * (gradient.dim() - 1)))
            return objective.values(scores, *rest)

        return objective._replace(values=values)

    def made(make: Any) -> Any:
        return lambda *arguments: {name: of(objective) for name, objective in make(*arguments).items()}

    return replaced(runs, "make_objectives", made)


def spoil_gradient(given: Injection) -> Any:
    """A bad number in the gradient of a parameter, in one process alone: before the processes exchange them, or after."""
    if given.kind == "a gradient after the exchange":
        steps = itertools.count(1)

        def norm(original: Any) -> Any:
            def spoilt(gradients: Any, *rest: Any) -> Any:
                if next(steps) == given.step:
                    gradients[0].view(-1)[0] = given.bad
                return original(gradients, *rest)

            return spoilt

        return replaced(torch, "_foreach_norm", norm)

    def made(make_state: Any) -> Any:
        def state(*arguments: Any) -> Any:
            own, calls = make_state(*arguments), itertools.count(1)
            first = next(own.model.parameters())
            first.register_hook(lambda gradient: gradient + (given.bad if next(calls) == given.step else 0.0))
            return own

        return state

    return replaced(runs, "make_state", made)


KINDS: dict[str, Callable[[Injection], Any]] = {
    "features": spoil_features,
    "the loss": spoil_loss,
    "the gradient of scores": spoil_loss,
    "a gradient before the exchange": spoil_gradient,
    "a gradient after the exchange": spoil_gradient,
}


def injections(times: int, seed: int) -> list[Injection]:
    """Every kind in turn, all else drawn."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(times):
        step = int(draw.integers(1, 5 * EPOCHS + 1))
        lists = 1 if step % 5 == 0 else 3  # of either process at least
        found.append(
            Injection(
                kind=list(KINDS)[number % len(KINDS)],
                rank=int(draw.integers(2)),
                step=step,
                place=int(draw.integers(lists)),
                bad=BAD[int(draw.integers(len(BAD)))],
                model=list(MODELS)[int(draw.integers(len(MODELS)))],
                loss=LOSSES[int(draw.integers(len(LOSSES)))],
                clip=[None, 1.0][int(draw.integers(2))],
                nonfinite=["stop", "stop", "skip"][int(draw.integers(3))],
            )
        )
    return found


def ids_of_step(step: int, rank: int, world: int) -> list[int]:
    """Ids of the queries that a process has in a step of the run, from 1."""
    data, (epoch, place) = synthetic("tiny", "train"), divmod(step - 1, 5)
    lists = batches(data, BATCH, list_size=LIST, rank=rank, world=world, epoch=epoch, start=place)
    return [int(number) for number in data.query_ids[next(iter(lists)).queries.numpy()]]


def try_injection(given: Injection) -> str:
    """Whether the step was refused by both processes, and what both said; "" if all was right."""
    config = config_of(MODELS[given.model], given.loss, clip=given.clip, nonfinite=given.nonfinite)

    def work(folder: Path) -> dict[str, Any]:
        spoilt = int(os.environ["RANK"]) == given.rank
        with KINDS[given.kind](given) if spoilt else contextlib.nullcontext():
            return watched_run(folder, config)

    with tempfile.TemporaryDirectory() as folder:
        found = in_processes(2, work, Path(folder))
    return "".join(f"{given}: {complaint}" for complaint in [complaint_of(given, found)] if complaint)


def complaint_of(given: Injection, found: list[Any]) -> str:
    """What is wrong with how two processes took an injection."""
    for one in found:
        if isinstance(one, str):
            return one
    one, other = found
    if one["weights"] != other["weights"] or one["message"] != other["message"]:
        return f"the processes differ: {one['message']!r}, {other['message']!r}"
    weights, message = one["weights"], one["message"]
    if given.nonfinite == "skip":
        expected = [int(given.step <= 5), int(given.step > 5)]
        if message or one["skipped"] != expected:
            return f"skipped {one['skipped']}, said {message!r}"
        if weights[given.step] != weights[given.step - 1]:
            return "the weights moved in the step that was skipped"
        return "" if len(set(weights)) >= len(weights) - 2 else "nothing was learned beside the step that was skipped"
    if len(weights) != given.step + 1:
        return f"{len(weights) - 2} steps were done"
    if weights[-1] != weights[-2]:
        return "the weights are not those of the step before"
    epoch, place = divmod(given.step - 1, 5)
    if f"step {place + 1} in epoch {epoch + 1} " not in message:
        return f"the message does not name the step: {message!r}"
    named = [int(text) for text in re.search(r"look at quer(?:y|ies) ([\d, ]+)", message)[1].strip(" ,").split(", ")]
    own = ids_of_step(given.step, given.rank, 2)
    if given.kind in ("the loss", "the gradient of scores") and named != [own[given.place]]:
        return f"{named} were named, and query {own[given.place]} was bad"
    everyone = {*own, *ids_of_step(given.step, 1 - given.rank, 2)}
    if own[given.place] not in named or not {*named} <= everyone:
        return f"{named} were named; the step had {sorted(everyone)}"
    return ""


def refused_steps(times: int, seed: int) -> Tally:
    """Bad numbers in one process of two."""
    import_everything()
    return tally(try_injection(given) for given in injections(times, seed))


# --- members with weights of their own ----------------------------------------------------------------------------------


def spoil_members(step: int, place: int, which: slice, bad: float) -> Any:
    """Bad scores of one list, for some members of this process, at one step."""
    steps = itertools.count(1)

    def made(member_scores: Any) -> Any:
        def scorer(*arguments: Any) -> Any:
            score = member_scores(*arguments)

            def spoilt(batch: Any) -> Any:
                scored = score(batch)
                if next(steps) != step:
                    return scored
                marks = torch.zeros_like(scored.scores)
                marks[which, place] = bad
                return scored._replace(scores=scored.scores + marks)

            return spoilt

        return scorer

    return replaced(members, "member_scores", made)


def try_members(number: int, draw: np.random.Generator, whole: dict[str, dict[str, list[Any]]]) -> str:
    """Members whose numbers are bad are dropped with the weights they had; nobody else notices; if none is left, all stop.

    `whole`: by loss and clipping what becomes of members that nothing happens to.
    """
    loss, bad = LOSSES[int(draw.integers(len(LOSSES)))], BAD[int(draw.integers(len(BAD)))]
    step, place = int(draw.integers(1, 11)), int(draw.integers(2))
    kind = ("one member", "all members of one rank", "all members")[number % 3]
    rank, config = int(draw.integers(2)), config_of(OWN, loss, clip=[None, 1.0][int(draw.integers(2))])
    which = slice(0, 1) if kind == "one member" else slice(None)

    def work(folder: Path, *, spoil: bool = True) -> dict[str, Any]:
        hit = spoil and (kind == "all members" or int(os.environ["RANK"]) == rank)
        with spoil_members(step, place, which, bad) if hit else contextlib.nullcontext():
            return watched_run(folder, config)

    key = f"{loss} {config.optimiser.clip}"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as undisturbed:
        found = in_processes(2, work, Path(folder))
        if key not in whole:
            both = in_processes(2, lambda folder: work(folder, spoil=False), Path(undisturbed))
            whole[key] = {name: row for one in both for name, row in one["rows"].items()}
    query = ids_of_step(step, 0, 1)[place]
    complaint = members_complaint(kind, rank, step, query, found, whole[key])
    return f"{bad} in {kind}, rank {rank}, step {step}, {loss}: {complaint}" if complaint else ""


def members_complaint(
    kind: str, rank: int, step: int, query: int, found: list[Any], whole: dict[str, list[Any]]
) -> str:
    """What is wrong with how the members of two processes took it."""
    for one in found:
        if isinstance(one, str):
            return one
    messages = [one["message"] for one in found]
    if kind == "all members":
        epoch, place = divmod(step - 1, 5)
        if messages[0] != messages[1] or f"step {place + 1} in epoch {epoch + 1} " not in messages[0]:
            return f"the messages were {messages}"
        if not re.search(rf"look at query {query}\b", messages[0]):
            return f"query {query} is not named: {messages[0]!r}"
        return "" if all(one["weights"][-1] == one["weights"][-2] for one in found) else "the weights moved"
    if any(messages):
        return f"it stopped: {messages}"
    rows = {name: row for one in found for name, row in one["rows"].items()}
    own = [*found[rank]["rows"]]
    hit = own[:1] if kind == "one member" else own
    dropped = [name for name, row in rows.items() if row[0]]
    if dropped != hit:
        return f"dropped {dropped}, expected {hit}"
    moved = [name for name in rows if name not in hit and rows[name] != whole[name]]
    return f"members {moved} are not what they are without it" if moved else ""


def dropped_members(times: int, seed: int) -> Tally:
    """Bad numbers in members with weights of their own."""
    import_everything()
    draw, whole = np.random.default_rng(seed), {}
    return tally(try_members(number, draw, whole) for number in range(times))


# --- nothing to learn from on one side ------------------------------------------------------------------------------------


def try_nothing_relevant(number: int, draw: np.random.Generator) -> str:
    """Steps in which one process has no relevant document end as those of one process with the same lists."""
    loss = LOSSES[number % len(LOSSES)]
    name = [*MODELS, "own"][int(draw.integers(len(MODELS) + 1))]
    model, idle = {**MODELS, "own": OWN}[name], int(draw.integers(2))
    config, weighted = config_of(model, loss, clip=[None, 1.0][int(draw.integers(2))]), bool(draw.integers(2))
    splits = {split: synthetic("tiny", split) for split in ("train", "vali", "test")}
    data, empty = splits["train"], np.zeros(30, bool)
    for step in (1, 2, 5):  # of the first epoch: the second deals other lists out
        empty[np.isin(data.query_ids, ids_of_step(step, idle, 2))] = True
    labels = np.where(np.repeat(empty, data.lengths), 0, data.labels)
    weights = draw.random(30) + 0.1 if weighted else None
    splits["train"] = replace(data, labels=labels, weights=weights)
    scaling = fit_scaling(splits["train"], "standard")
    lists = {split: scaled(own, scaling) for split, own in splits.items()}

    def work(folder: Path) -> Any:
        watched_run(folder, config, lambda *_: (dict(lists), scaling, "tiny"))
        found = read_per_document(folder / "run").scores
        starts, lengths = lists["test"].offsets[:-1], lists["test"].lengths
        # Where the scores of a list lie most losses leave to rounding: features of the query move all of them.
        return (found - np.repeat(np.add.reduceat(found, starts) / lengths, lengths)).tolist()

    scores = []
    for world in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            scores.append(in_processes(world, work, Path(folder)))
    complaint = next((one for of_world in scores for one in of_world if isinstance(one, str)), "")
    if not complaint and not np.allclose(scores[0][0], scores[1][0], rtol=1e-3, atol=1e-4):
        complaint = f"scores differ by {np.abs(np.subtract(scores[0][0], scores[1][0])).max():.1e}"
    return f"nothing relevant on rank {idle}, {name}, {loss}, weights {weighted}: {complaint}" if complaint else ""


def nothing_relevant(times: int, seed: int) -> Tally:
    """Batches with nothing relevant in one process of two."""
    import_everything()
    draw = np.random.default_rng(seed)
    return tally(try_nothing_relevant(number, draw) for number in range(times))


PROMISES = [
    Promise(
        "bad-numbers",
        "NaN or infinity in one of two processes (features, loss, gradients before and after their exchange): the step is refused by "
        "both, weights stay to the bit, the message names step and queries",
        40,
        refused_steps,
    ),
    Promise(
        "bad-members",
        "NaN or infinity in members with weights of their own: they are dropped, the others end to the bit as if nothing had "
        "happened; where none is left both processes stop and name step and queries",
        12,
        dropped_members,
    ),
    Promise(
        "nothing-relevant",
        "a batch with nothing relevant in one of two processes: nobody waits, and the scores are those of one process",
        20,
        nothing_relevant,
    ),
]
