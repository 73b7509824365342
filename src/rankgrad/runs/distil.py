"""Distilling: a small ranker learns the scores of a large one, of an ensemble, or of networks and trees together.

What comes out is a run like any other. Its results are measured by the labels of the lists; lists without labels teach as well, and
are then measured by the order of what was distilled.
"""

import dataclasses
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.load import read_splits
from rankgrad.data.scaling import fit_scaling
from rankgrad.files import replacing
from rankgrad.ranker import Ranker
from rankgrad.runs import folder as files
from rankgrad.runs.ensemble import Ensemble, Network, open_run
from rankgrad.runs.run import Event, Finished, Run, ScoringRun, Started, settled
from rankgrad.runs.significance import compare
from rankgrad.runs.trees import write_models
from rankgrad.training.build import fit_to_data, make_device, make_objectives, make_state
from rankgrad.training.config import TREES, Config, Loss, Model, Optimiser, Train, replaced, with_settings
from rankgrad.training.data import columns_of, fingerprint_of, hold_out, scaled
from rankgrad.training.evaluate import measure
from rankgrad.training.loop import Epoch, train
from rankgrad.training.precision import threads_and_precision
from rankgrad.training.threads import most_threads, threads_asleep, threads_of_training, torch_threads
from rankgrad.trees.fit import fit_trees
from rankgrad.trees.settings import Boosting

HIDDEN = (64, 32)
ROUNDS, PATIENCE = 1_000, 50  # of trees
TREE_SETTINGS = {"objective": "reg:squarederror", "eval_metric": "rmse", "max_depth": 6, "learning_rate": 0.1}
TIMED = 100  # queries scored one by one, to say how much faster the student is


def distil(
    folders: Sequence[Path],
    data: str,
    into: str,
    out: Path,
    *,
    given: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    networks: Sequence[Network] = (),
) -> Iterator[Event]:
    """Train a small ranker on the scores that runs give to lists, yielding what happens; the report comes last.

    - `folders`: finished runs, of networks or of trees, or saved rankers. Several are averaged as `rankgrad rank` does.
    - `data`: lists to learn from; labels are not needed. A part is held out where there is no validation split.
    - `into`: "mlp:64,32" with the sizes of its layers, "linear", or "xgboost".
    - `out`: a new folder for the run.
    - `given`, `settings`: values of a configuration by key, and texts SECTION.KEY=VALUE, that change what is trained.
    - `networks`: those of your own that the runs were trained with, as in `open_run`.

    The folder appears whole, at the end; a run that fails or is interrupted leaves none behind.
    """
    together = Ensemble.open(folders, networks)
    teacher: ScoringRun | Ensemble = together if len(folders) > 1 else together.runs[0]
    config = student_config(together.runs[0].config, data, into, given or {}, settings)
    config = settled(config)
    files.expect_new(out)
    with replacing(
        out
    ) as building:  # at once: half of it could be taken for a run to resume, which would learn the labels
        files.make_folder(building, config)
        yield Started(out, config)
        with threads_and_precision(config.train.threads, config.train.precision):
            report = yield from _distil(teacher, together.runs, config, building)
    yield Finished({"run": str(out), **report})


def student_config(teacher: Config, data: str, into: str, given: Mapping[str, Any], settings: Sequence[str]) -> Config:
    """What is trained: squared errors of differences within a list, as many epochs as small networks need."""
    kind, colon, sizes = into.partition(":")
    words = [word.strip() for word in sizes.split(",")] if colon else []
    if kind not in ("mlp", "linear", "xgboost") or (words and kind != "mlp") or not all(map(str.isdecimal, words)):
        raise ValueError(
            f"nothing can be distilled into {into!r}; expected mlp:64,32 with the sizes of its layers, linear or xgboost"
        )
    trees = kind in TREES
    config = Config(
        data=dataclasses.replace(teacher.data, path=data, scaling="auto", weight=None),
        model=Model(kind=kind, hidden=tuple(map(int, words)) or HIDDEN, dropout=0.0),
        loss=Loss("query_rmse"),
        optimiser=Optimiser(name="adamw", lr=2e-3, weight_decay=1e-2, schedule="cosine", warmup_epochs=2),
        train=Train(
            epochs=ROUNDS if trees else 60,
            batch_size=16,
            patience=PATIENCE if trees else None,
            metrics=teacher.train.metrics,
            device="cpu" if trees else "auto",
        ),
    )
    return with_settings(config, given, settings)


def _distil(
    teacher: ScoringRun | Ensemble, teachers: Sequence[ScoringRun], config: Config, out: Path
) -> Generator[Event, None, dict[str, Any]]:
    begin = time.perf_counter()
    lists = _read(teachers[0], config)
    targets = _targets(teacher, {name: part for name, part in lists.items() if name != "test"})
    device = make_device(config.train.device)
    files.rewrite_config(out, config, fingerprint_of(targets))
    if config.model.kind in TREES:
        facts = _grow(config, targets, lists["train"], out)
    else:
        facts = yield from _train(config, targets, out, device)
    student = open_run(out, config.train.device)
    labelled = any((part.labels > 0).any() for part in lists.values())
    measured = lists if labelled else targets
    split, metrics = files.kept_split(measured), config.train.metrics
    scores = {name: student.score(part) for name, part in measured.items()}
    results = {
        name: measure(scores[name], measured[name], wanted)
        for name, wanted in files.metrics_to_measure(measured, metrics).items()
    }
    metric = config.train.metric
    distilled: dict[str, Any] = {
        "from": [run.folder.resolve().name for run in teachers],
        "measured_by": "labels" if labelled else "the order of what was distilled",
        "split": split,
        "metric": metric,
        **_times(teachers, student, lists[split]),
    }
    if labelled:
        best = measure(teacher.score(lists[split]), lists[split], [metric])[metric]
        distilled |= {
            f"quality_{key}": value for key, value in dataclasses.asdict(compare(results[split][metric], best)).items()
        }
    return files.write_results(
        out,
        measured,
        results,
        metrics,
        {
            "loss": f"distilled from {', '.join(distilled['from'])}",
            "data": config.data.path,
            "seed": config.train.seed,
            **facts,
            "seconds": round(time.perf_counter() - begin, 3),
            "processes": 1,
            "distilled": distilled,
        },
        device=device,
        threads=student.config.train.threads,
        scores=scores[split],
    )


def _read(teacher: ScoringRun, config: Config) -> dict[str, RankingDataset]:
    """The splits as they are, a part of train held out where there is no validation split; a file may be without labels."""
    source = config.data.path
    try:
        lists = read_splits(source, fold=config.data.fold, columns=columns_of(config.data))
    except ValueError as error:
        if not Path(source).is_file():
            raise
        try:
            lists = {"train": teacher.read(source, labelled=False)}
        except ValueError:
            raise error from None
    lists = {name: _like(teacher, part, source) for name, part in lists.items()}
    train_set = lists["train"]
    if "vali" not in lists:
        if len(train_set) < 2:
            raise ValueError(f"{source} has one query; expected at least two, one to learn from and one to validate")
        fitted, held_out = hold_out(train_set, config.data.validation, config.train.seed)
        lists = {**lists, "train": fitted, "vali": held_out}
    return lists


def _like(teacher: ScoringRun, part: RankingDataset, source: str) -> RankingDataset:
    """Columns by name in the teacher's order; narrower text is padded as the teacher pads it."""
    names, wide = teacher.names, part.features.shape[1]
    if wide == teacher.features and names in (None, part.feature_names):
        return part
    if names is not None and part.feature_names is not None and set(names) <= set(part.feature_names):
        order = [part.feature_names.index(name) for name in names]
        categories = {order.index(column): texts for column, texts in part.categories.items() if column in order}
        features = np.asarray(part.features)[:, order]
        return dataclasses.replace(part, features=features, feature_names=names, categories=categories)
    if names is None and part.feature_names is None and wide < teacher.features:
        fill = np.nan if teacher.config.data.missing == "nan" else 0.0
        padding = np.full((len(part.features), teacher.features - wide), fill, np.float32)
        return dataclasses.replace(part, features=np.concatenate([part.features, padding], 1))
    expected = f"{teacher.features} features" if names is None else ", ".join(names)
    raise ValueError(
        f"{source} has {wide} features, which are not those of {teacher.folder}; expected {expected}; give lists with the columns it "
        "was trained on"
    )


def _targets(teacher: ScoringRun | Ensemble, lists: Mapping[str, RankingDataset]) -> dict[str, RankingDataset]:
    """The lists with the teacher's scores as labels: of deviation 1, and moved so that none is negative."""
    scores = {name: teacher.score(part).astype(np.float64) for name, part in lists.items()}
    everything = np.concatenate([*scores.values()])
    if not np.isfinite(everything).all():
        raise ValueError(
            "what is to be distilled gives scores that are not finite; expected finite ones; look at its features"
        )
    low, deviation = everything.min(), everything.std() or 1.0
    return {
        name: dataclasses.replace(part, labels=((scores[name] - low) / deviation).astype(np.float32), weights=None)
        for name, part in lists.items()
    }


def _train(
    config: Config, targets: Mapping[str, RankingDataset], out: Path, device: torch.device
) -> Generator[Event, None, dict[str, Any]]:
    """Train a network and write it; what the report says of it."""
    scaling = fit_scaling(targets["train"], config.data.scaling)
    train_set, vali_set = (scaled(targets[name], scaling) for name in ("train", "vali"))
    config = fit_to_data(config, train_set, device, validated=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        state = make_state(config, train_set, device)
    config = replaced(config, "train.threads", threads_of_training(config, state.model, train_set, device))
    files.rewrite_config(out, config)
    history, begin = files.HistoryFile(out), time.perf_counter()
    with torch_threads(config.train.threads or most_threads()):
        for event in train(state, make_objectives(config), train_set, vali_set, config, device):
            if isinstance(event, Epoch):
                history.add(event._asdict() | {"seconds": round(time.perf_counter() - begin, 3)})
            yield event
    with threads_asleep(config.train.threads or torch.get_num_threads()):
        model, selected, _ = state.result(config, vali_set, device)
    files.write_ranker(out, Ranker.of(model, scaling, config, targets["train"], device))
    return {**selected, "epochs": state.progress.epoch}


def _grow(config: Config, targets: Mapping[str, RankingDataset], lists: RankingDataset, out: Path) -> dict[str, Any]:
    """Grow trees and write them; what the report says of them."""
    settings = config.train
    how = Boosting(
        config.model.kind, str(TREE_SETTINGS["objective"]), settings.seed, settings.threads, settings.epochs,
        settings.patience or settings.epochs,
    )  # fmt: skip
    trees = fit_trees(how, TREE_SETTINGS, targets["train"], targets["vali"])
    facts = {
        "library": how.library,
        "objective": how.objective,
        "path": config.data.path,
        "fold": config.data.fold,
        "seed": how.seed,
        "threads": how.threads,
        "metrics": settings.metrics,
        "chosen": {**TREE_SETTINGS, "rounds": trees.kept},
    }
    write_models(out, how.library, [trees], lists, facts)
    return {"selection": "stopped by validation", "best_epoch": trees.kept, "epochs": trees.rounds}


def _times(teachers: Sequence[ScoringRun], student: ScoringRun, data: RankingDataset) -> dict[str, float]:
    """Median seconds that one query takes each, scored alone, and how many times faster the student is."""
    queries = [data.select([number]) for number in range(min(TIMED, len(data)))]

    def median(run: ScoringRun) -> float:
        seconds = []
        for query in (queries[0], *queries):  # what is done once, at the first, is not counted
            begin = time.perf_counter()
            if isinstance(run, Run):
                run.ranker.score(query.features)
            else:
                run.score(query)
            seconds.append(time.perf_counter() - begin)
        return float(np.median(seconds[1:]))

    before, after = sum(map(median, teachers)), median(student)
    return {"seconds_before": before, "seconds_after": after, "times_faster": before / after}
