"""`NeuralRanker`: fit, predict and score in scikit-learn's manners; everything is done elsewhere.

Needs scikit-learn, which rankgrad itself does not: this module is imported when `rankgrad.NeuralRanker` is first used.
It turns arrays and frames into a RankingDataset and parameters into a Config, runs the training loop, and gives torch's
random states and current GPU back as it found them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

try:
    import sklearn
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_array, check_random_state, check_X_y
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("NeuralRanker needs scikit-learn 1.6 or newer; pip install 'rankgrad[sklearn]'") from error

from rankgrad.checks import one_of, whole
from rankgrad.data.batches import batches
from rankgrad.data.categories import Levels, blame_a_column, frame_names, is_frame, split_frame, with_codes
from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import Features
from rankgrad.data.grouping import (
    as_float32,
    as_query_ids,
    as_sparse_rows,
    group_arrays,
    ids_of_sizes,
    with_document_weights,
)
from rankgrad.data.scaling import fit_scaling
from rankgrad.data.sparse import is_sparse
from rankgrad.explain.importance import Importance, feature_importances
from rankgrad.files import load_tensors, pack, unpack
from rankgrad.losses import LossSpec
from rankgrad.metrics import Metric, parse_metric
from rankgrad.models import AveragedMembers
from rankgrad.ranker import Ranker
from rankgrad.runs.folder import read_history, read_report
from rankgrad.runs.load import load as load_ranker
from rankgrad.training import config as settings
from rankgrad.training.build import (
    as_spec,
    fit_to_data,
    for_weighted_documents,
    make_device,
    make_objectives,
    make_state,
    takes_gain,
    validate,
)
from rankgrad.training.config import ARRAYS, RECIPES, Config, dumps, replaced
from rankgrad.training.data import hold_out, scaled
from rankgrad.training.evaluate import can_choose, expect_gains, expect_grades, mean, measure, metric_that_chooses
from rankgrad.training.loop import Epoch, Step, train
from rankgrad.training.members import MemberState
from rankgrad.training.network import OwnModel, expect_network, import_network, is_own, network_name
from rankgrad.training.progress import is_watched, watch
from rankgrad.training.state import TrainState
from rankgrad.training.step import Objective
from rankgrad.training.threads import (
    most_threads,
    set_threads,
    threads_asleep,
    threads_of_jobs,
    threads_of_training,
    torch_threads,
)

NUMBERS: dict[str, Any] = {
    "dtype": [np.float32, np.float64],
    "ensure_all_finite": False,  # `as_float32` says where
    "accept_sparse": "csr",
}
ROWS = 1024  # documents scored at once where no list is needed
A_FEW_SECONDS = 3.0  # of a fit, before it shows progress by itself
EXPECTED_SETS = (
    "expected eval_set=(X, y, qid), or eval_set=[(X, y), ...] with eval_qid=[qid, ...] or eval_group=[sizes, ...]"
)
OTHER_NAMES = {  # of keys of a configuration, as parameters
    "model.kind": "model",
    "data.validation": "validation_fraction",
    "data.gain": "label_gain",
    "optimiser.name": "optimiser",
    "members.count": "members",
}
ROUTING = "switch metadata routing on: sklearn.set_config(enable_metadata_routing=True)"


class EvalSet(NamedTuple):
    """An evaluation set, and whether it is the training set."""

    data: RankingDataset
    training: bool


class NeuralRanker(BaseEstimator):
    """A neural ranker, trained on the metric itself or on any other loss of `rankgrad.LOSSES`.

    Parameters carry the names and the meaning of a run's config.toml; None is what the recipe says.

    - `recipe`: "strong" (many small networks at once on list-relative inputs, the best averaged), "paper" (the Transformer of
      arXiv 2102.07831), "small", "dasalc"; None: strong, or the paper's where a model or its sizes are given.
    - `loss`: a name, with `@10` for a cut-off, or several names to deal out among members, or a loss of your own: a
      `rankgrad.losses.LossSpec`, or a function with the signature of every loss; `loss_options`: a dict of the loss's other
      options, such as {"tau": 0.5}.
    - `members`: networks trained at once, each with a learning rate, dropout and weight decay of its own (given here, the
      same for all); `keep`: how many of them are averaged, the best on validation; `bag`: folds of the queries, each member
      learns from all but one and is validated on that one; `share`: one network with vectors of each member's own (TabM).
    - `model`: "transformer" (`width`, `layers`, `heads`, `feedforward`), "mlp" (`hidden`) or "linear", or a network of your
      own, an `nn.Module` or a class of one (see `rankgrad.training.network`); with `dropout`
      and `input_noise` (deviation of what is added to scaled features in training); `inputs`: "features"; "list" for where
      each feature stands within its list beside it; "pieces" for both cut into pieces too, so that a first layer draws curves; "auto", as strong
      says, for pieces up to 1,024 features; `tanh` on the scores, None: where the loss asks for it (neural_...).
    - `scaling` of the features, fitted on the training queries: auto, web30k, symlog, standard, quantile, quantile_auto, none.
    - `categorical`: columns of categories by name, pattern ("brand_*") or place, beside those of a frame whose type says so
      (category, texts, truth values); each level has a vector that is learned.
    - `list_size`: documents of a longer list are subsampled in training; predictions see whole lists.
    - `epochs`, `batch_size` (lists), `optimiser` (adam, adamw), `lr`, `weight_decay`, `clip` (largest gradient norm),
      `schedule` (constant; step: times `gamma` after the epochs `milestones`; cosine; plateau: times `gamma` after
      `plateau` epochs without a better metric), `warmup` (steps), `nonfinite` (stop, skip).
    - `metric`: what `score` returns, and what picks the epoch whose weights are kept, on `eval_set`: a name, or a function of
      your own as in `rankgrad.parse_metric`, such as one of a list's labels and scores. Without an `eval_set` a `patience` (epochs without a better metric before training stops) holds out `validation_fraction` of the queries
      instead; without both, every query trains, the metric in `history_` is that of the training queries, and the last
      epoch's weights are kept. Members of the strong recipe are bagged instead, from 10 queries on.
    - `label_gain`: what a label is worth to NDCG, in the loss and in `metric`: "exp2" (2^y - 1, also None), "linear", or a number for
      each of the grades 0, 1, ..., such as [0, 1, 3, 7, 15].
    - `device`: auto, cpu, cuda, ...; `n_jobs`: CPU threads, None for as many as the work is worth, -1 for all cores;
      `random_state`: an int gives the same model again, to the bit on the CPU with the same number of threads; None draws a new
      seed without touching numpy's.
    - `warm_start`: a further `fit` goes on from the weights and the scaling of the last one, for `epochs` more; of members those
      that were kept go on, the others begin again.
    - `verbose`: 1 shows progress on stderr, 0 or less nothing; None shows a bar in a terminal or a notebook when `fit` takes longer than a few
      seconds.

    After `fit`: `ranker_` (a `rankgrad.ranker.Ranker`) and its parts `model_` (the torch module), `scaling_` and `config_`
    (what a run's config.toml would say, with the seed); `history_` (a dict per epoch), `evals_result_` (of every
    `eval_set` every metric, a list with a number per epoch, as in LightGBM), `best_epoch_` (whose weights are kept,
    from 1; of members the median), `best_score_` (its metric), `members_` (a dict per member: what it was dealt, its
    validation, whether it was kept), `n_features_in_`, and `feature_names_in_` where X had names.

    >>> X = np.array([[0.1], [0.9], [0.2], [0.8], [0.3], [0.5]])
    >>> y, qid = [0, 1, 0, 2, 0, 1], ["a", "a", "b", "b", "b", "a"]
    >>> ranker = NeuralRanker(model="linear", epochs=30, lr=0.1, random_state=0).fit(X, y, qid=qid)
    >>> ranker.predict(X, qid=qid).argmax()
    np.int64(1)
    >>> ranker.score(X, y, qid=qid)
    1.0
    """

    # With metadata routing on, qid goes where it is needed without a set_fit_request: a ranker is nothing without it.
    __metadata_request__fit = {"qid": True}  # noqa: RUF012 (scikit-learn reads it so)
    __metadata_request__predict = {"qid": True}  # noqa: RUF012
    __metadata_request__score = {"qid": True}  # noqa: RUF012

    def __init__(
        self,
        *,
        recipe: str | None = None,
        loss: str | Sequence[str] | LossSpec | Callable[..., Tensor] | None = None,
        loss_options: Mapping[str, Any] | None = None,
        members: int | None = None,
        keep: int | None = None,
        bag: int | None = None,
        share: bool | None = None,
        model: str | torch.nn.Module | Callable[..., torch.nn.Module] | None = None,
        width: int | None = None,
        layers: int | None = None,
        heads: int | None = None,
        feedforward: int | None = None,
        hidden: tuple[int, ...] | None = None,
        inputs: str | None = None,
        dropout: float | None = None,
        input_noise: float | None = None,
        tanh: bool | None = None,
        scaling: str | None = None,
        categorical: Sequence[str | int] | None = None,
        list_size: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        optimiser: str | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        clip: float | None = None,
        schedule: str | None = None,
        milestones: tuple[int, ...] | None = None,
        gamma: float | None = None,
        plateau: int | None = None,
        warmup: int | None = None,
        nonfinite: str | None = None,
        metric: str | Callable[..., Any] = "ndcg@10",
        label_gain: str | Sequence[float] | None = None,
        patience: int | None = None,
        validation_fraction: float | None = None,
        device: str = "auto",
        n_jobs: int | None = None,
        random_state: Any = None,
        warm_start: bool = False,
        verbose: int | None = None,
    ) -> None:
        self.recipe = recipe
        self.loss = loss
        self.loss_options = loss_options
        self.members = members
        self.keep = keep
        self.bag = bag
        self.share = share
        self.model = model
        self.width = width
        self.layers = layers
        self.heads = heads
        self.feedforward = feedforward
        self.hidden = hidden
        self.inputs = inputs
        self.dropout = dropout
        self.input_noise = input_noise
        self.tanh = tanh
        self.scaling = scaling
        self.categorical = categorical
        self.list_size = list_size
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimiser = optimiser
        self.lr = lr
        self.weight_decay = weight_decay
        self.clip = clip
        self.schedule = schedule
        self.milestones = milestones
        self.gamma = gamma
        self.plateau = plateau
        self.warmup = warmup
        self.nonfinite = nonfinite
        self.metric = metric
        self.label_gain = label_gain
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.device = device
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        qid: Any = None,
        group: Any = None,
        sample_weight: Any = None,
        document_weight: Any = None,
        eval_set: Any = None,
        eval_X: Any = None,
        eval_y: Any = None,
        eval_qid: Any = None,
        eval_group: Any = None,
        eval_names: Any = None,
        eval_metric: Any = None,
        eval_at: Any = None,
    ) -> Self:
        """Train on documents X [N, F] with grades y [N] (0 = irrelevant) and the query of each.

        - `qid`: the query of each row [N], rows in any order; or `group`: how many rows each query has, one after the other, as in
          LightGBM; or a column "qid" of a frame X, as in XGBoost.
        - `sample_weight`: one weight per query, in order of first appearance, or one per row, equal within a query.
          A query of weight 0 is never seen. Evaluation sets are not weighted.
        - `document_weight`: one weight per row, for losses that are sums over documents or pairs; the others refuse it, and of several
          losses only those that take it learn.
        - `eval_set`: (X, y, qid) that picks the best epoch by `metric`; or (X, y) with `eval_qid` or `eval_group`; or a list of such sets,
          with a list of `eval_qid` or `eval_group`. Of several the last one picks, as in XGBoost, unless it is (X, y) itself.
        - `eval_X`, `eval_y`: the same in LightGBM's other form, of one set or, as tuples, of several.
        - `eval_names`: of the sets, in `evals_result_`; "valid_0", "valid_1", ..., and "training" for (X, y) itself if not given.
        - `eval_metric`: further metrics to record of every set, a name or a function like `metric`, or a list of them; `eval_at`:
          cut-offs for the names without one, and for NDCG if no metric is named: (5, 10).
        """
        config, loss, metric = self._config(), self._own_loss(), self._own_metric()
        _expect_scores(config, qid, group)
        before: Ranker | None = getattr(self, "ranker_", None) if self.warm_start else None
        features, qid = _own_queries(X, qid, group, (before.names or ()) if before else ())
        places = [*before.scaling.levels] if before else None
        rows, labels, levels = _graded(self, features, y, reset=before is None, places=places)
        data = group_arrays(rows, labels, _query_ids(len(rows), qid, group), sample_weight, categories=levels)
        if document_weight is not None:
            config = for_weighted_documents(config, loss)
            data = with_document_weights(data, document_weight, len(rows))
        chosen_by = metric_that_chooses(config, metric)
        expect_grades(data, [chosen_by])
        if takes_gain(config, loss):
            expect_gains(data, f"the loss {config.loss.title}", ", or choose a loss without gains, such as listnet")
        metrics = _eval_metrics(self.metric, chosen_by, eval_metric, eval_at, config.data.gain)
        eval_set = _with_eval_xy(eval_set, eval_X, eval_y)
        parts = _eval_parts(eval_set, eval_qid, eval_group, eval_names)
        sets = self._eval_sets(X, parts, metrics, [*levels])
        held_out = None
        if sets:
            others = [part for part in sets.values() if not part.training] or [*sets.values()]
            held_out = others[-1].data
            if config.members.bag > 1:
                raise ValueError(
                    "bag holds queries out to choose by, and so does eval_set; expected one of them; leave bag out, or eval_set"
                )
        elif config.train.patience is not None and (config.members.count == 1 or config.members.share):
            if len(data) < 2:
                raise ValueError(
                    "patience needs queries to compare epochs on and there is only one query; expected at least two; "
                    "pass eval_set=(X, y, qid), or patience=None"
                )
            data, held_out = hold_out(data, config.data.validation, config.train.seed)
        scaling = before.scaling if before else fit_scaling(data, config.data.scaling)
        train_set = scaled(data, scaling)
        members = config.members.count != 1 and not config.members.share
        objectives = make_objectives(config, loss)
        with torch_threads(1):
            _warn_if_nothing_counts(train_set, objectives, config.loss.title)
            if held_out is not None:
                _warn_if_nothing_chooses(held_out, chosen_by)
        with (
            _borrowed(self.device) as device,
            torch_threads(self._jobs() or most_threads()),
            torch.inference_mode(False),  # wherever fit is called from
            torch.enable_grad(),
        ):
            torch.manual_seed(config.train.seed)
            config = fit_to_data(config, train_set, device, validated=held_out is not None)
            chooses = held_out is not None or config.members.bag > 1
            if members and not chooses:
                warnings.warn(
                    f"{len(data)} queries are too few to hold any out: every member trains to its last epoch on all of them and "
                    "all are kept; pass eval_set=(X, y, qid) to choose by",
                    stacklevel=2,
                )
            state = make_state(config, train_set, device, loss, self._own_model())
            state.metric = metric
            if before:
                _go_on_from(state, before.model, self.__dict__["members_"])
            config = replaced(config, "train.threads", threads_of_training(config, state.model, train_set, device))
            if config.train.threads:
                set_threads(config.train.threads)
            scaled_sets = {name: scaled(part.data, scaling) for name, part in sets.items()}
            last = next((name for name, part in sets.items() if part.data is held_out), None)
            vali_set = train_set if held_out is None else scaled_sets[last] if last else scaled(held_out, scaling)

            def measured(epoch: Epoch) -> dict[str, dict[str, float]]:
                """Every metric of every set after an epoch; what chose it is known."""
                found = {}
                for name, part in scaled_sets.items():
                    known = {chosen_by.name: epoch.metric} if name == last else {}
                    rest = [metric for metric in metrics if metric.name not in known]
                    found[name] = known | state.measure(part, rest, device)
                return found

            events = train(state, objectives, train_set, vali_set, config, device)
            history: list[dict[str, Any]] = []
            watch(_recorded(events, history, measured if sets else None), config, **self._shown())
            with threads_asleep(config.train.threads or torch.get_num_threads()):
                model, selected, _ = state.result(config, vali_set, device, choose=chooses)
        ranker = Ranker.of(model, scaling, config, data, device, loss)
        self.ranker_, self.history_ = dataclasses.replace(ranker, names=self._names()), history
        self.best_epoch_ = selected["best_epoch"]
        self.best_score_ = selected.get("validation_of_average", history[self.best_epoch_ - 1]["metric"])
        self.members_ = selected.get("members", [])
        return self

    @property
    def evals_result_(self) -> dict[str, dict[str, list[float]]]:
        """By name of the set and of the metric: its value after each epoch."""
        self._fitted()
        epochs = [line.get("evals", {}) for line in self.history_]
        first = epochs[0] if epochs else {}
        return {name: {metric: [epoch[name][metric] for epoch in epochs] for metric in first[name]} for name in first}

    @property
    def model_(self) -> torch.nn.Module:
        """The fitted torch module."""
        return self._fitted().model

    @property
    def scaling_(self) -> Any:
        """How the features are scaled before the model sees them."""
        return self._fitted().scaling

    @property
    def config_(self) -> Config:
        """What a run's config.toml would say, with the seed."""
        return self._fitted().config

    def _fitted(self) -> Ranker:
        ranker = self.__dict__.get("ranker_")
        if ranker is None:
            raise AttributeError(f"this {type(self).__name__} is not fitted yet; call fit first")
        return ranker

    def _names(self) -> tuple[str, ...] | None:
        names = getattr(self, "feature_names_in_", None)
        return None if names is None else tuple(map(str, names))

    def predict(self, X: Any, qid: Any = None, group: Any = None) -> np.ndarray:
        """Scores [N] float32 in the order of the rows: higher is better, comparable within a query only.

        A model that scores a document beside the others of its list needs `qid`, or `group`, or a column "qid" of a frame X, as `fit`
        does; the other models do without. Without rows there are no scores.
        """
        check_is_fitted(self, "ranker_")
        X, qid = _own_queries(X, qid, group, self._names() or ())
        if np.shape(X) in ((0,), (0, 0)):  # a list of no candidates has no columns to look at
            return np.empty(0, np.float32)
        rows, _, levels = _documents(self, X, places=[*self.scaling_.levels])
        if qid is not None or group is not None:
            ids = _query_ids(len(rows), qid, group)
        elif len(rows) and not _scores_alone(self.config_):
            raise ValueError(
                "predict needs qid, the query id of every row, because this model scores a document beside the others "
                "of its list; pass predict(X, qid=...), np.zeros(len(X), int) for one list, or fit with model='mlp'; of a search it is "
                "search.best_estimator_.predict(X, qid=...); a frame may have a column 'qid' instead"
            )
        else:
            ids = np.arange(len(rows)) // ROWS
        if not len(rows):
            return np.empty(0, np.float32)
        data = group_arrays(rows, np.zeros(len(rows)), ids, categories=levels)
        return data.in_source_order(self._scores(data))

    def score(self, X: Any, y: Any, *, qid: Any = None, group: Any = None, sample_weight: Any = None) -> float:
        """The mean of `metric` over queries; one without a relevant document counts as 1 for NDCG and 0 for the rest.

        `sample_weight`: of queries, as in `fit`; the mean is then weighted.
        """
        check_is_fitted(self, "ranker_")
        metric = self._metric()
        X, qid = _own_queries(X, qid, group, self._names() or ())
        if qid is None and group is None:
            raise ValueError(
                f"score needs qid, the query id of every row; pass score(X, y, qid=...); in a search or a pipeline {ROUTING}"
            )
        rows, labels, levels = _graded(self, X, y, places=[*self.scaling_.levels])
        data = group_arrays(rows, labels, _query_ids(len(rows), qid, group), sample_weight, categories=levels)
        scores = self._scores(data)
        with torch_threads(1):
            values = measure(scores, data, [metric])[metric.name]
        return mean(values, metric.empty, data.weights)

    def feature_importances(
        self,
        X: Any,
        y: Any,
        *,
        qid: Any = None,
        group: Any = None,
        permute: str = "within",
        correlated: float | None = None,
        repeats: int = 5,
        seed: int = 0,
    ) -> list[Importance]:
        """What `metric` loses where a feature is permuted, the largest loss first; see `rankgrad.feature_importances`.

        X, y and qid, or group, are rows it has not learned from.
        """
        check_is_fitted(self, "ranker_")
        X, qid = _own_queries(X, qid, group, self._names() or ())
        rows, labels, levels = _graded(self, X, y, places=[*self.scaling_.levels])
        data = group_arrays(rows, labels, _query_ids(len(rows), qid, group), categories=levels)
        data = dataclasses.replace(data, feature_names=self._names())
        with _borrowed(self.device) as device, torch_threads(self._jobs() or most_threads()):
            ranker = dataclasses.replace(self.ranker_, model=self.model_.to(device), device=device)
            return feature_importances(
                ranker, data, metric=self._metric(), permute=permute, correlated=correlated, repeats=repeats, seed=seed
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted ranker into one safetensors file; `load` reads it without executing anything.

        A `random_state` that is not an int is written as the seed it gave.
        """
        check_is_fitted(self, "ranker_")
        self.ranker_.save(Path(path), self._facts())

    def _facts(self) -> dict[str, Any]:
        """What a file holds beside the ranker."""
        parameters = {name: _plain(value) for name, value in self.get_params(deep=False).items()}
        # A loss, a network or a metric of one's own has a name and no other form on disk.
        parameters["loss"] = self.config_.loss.name if self._own_loss() else parameters["loss"]
        parameters["model"] = parameters["model"] if isinstance(self.model, str | None) else self.config_.model.kind
        parameters["metric"] = self.config_.train.metric if callable(self.metric) else parameters["metric"]
        if not isinstance(parameters["random_state"], int | None):
            parameters["random_state"] = self.config_.train.seed
        learned = {"best_epoch": self.best_epoch_, "best_score": self.best_score_, "members": self.members_}
        return {"parameters": parameters, "history": self.history_, **learned}

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, model: OwnModel = None) -> Self:
        """The ranker that `save` wrote, or that of a run's folder; predictions are the same to the bit.

        The parameters of a run's are those of its configuration, as far as they have names here. `model` is the network of
        one's own it was fitted with: files hold weights, not code.
        """
        if Path(path).is_dir():
            return cls._of_run(Path(path), model)
        tensors, facts = load_tensors(Path(path))
        if "parameters" not in facts:
            raise ValueError(f"{path} is not a saved NeuralRanker; expected a file that NeuralRanker.save wrote")
        try:
            ranker = cls(**_plain(facts["parameters"]))
            ranker.ranker_ = Ranker.restore(tensors, facts, "cpu", own=model, source=str(path))
            ranker.history_, ranker.best_epoch_ = facts["history"], facts["best_epoch"]
            ranker.best_score_ = facts.get("best_score", ranker.history_[ranker.best_epoch_ - 1]["metric"])
            ranker.members_ = facts.get("members", [])
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} does not hold what a ranker needs ({type(error).__name__}: {error}); expected a file that NeuralRanker.save "
                "wrote"
            ) from error
        if model is None and ranker.model is not None and is_own(str(ranker.model)):  # not what its weights are for
            raise ValueError(
                f"{path} says of its model {ranker.model!r} and another thing in its configuration; was it changed?"
            )
        ranker.model = ranker.model if model is None else model
        return ranker._with_columns()

    @classmethod
    def _of_run(cls, folder: Path, model: OwnModel) -> Self:
        """A finished run as if it had been fitted here."""
        fitted, report = load_ranker(folder, "cpu", model=model), read_report(folder)
        ranker = cls(**_parameters(fitted.config))
        ranker.model = ranker.model if model is None else model
        ranker.ranker_, ranker.history_ = fitted, read_history(folder)
        ranker.best_epoch_, ranker.members_ = report["best_epoch"], report.get("members", [])
        metrics = [epoch["metric"] for epoch in ranker.history_ if epoch["epoch"] == ranker.best_epoch_]
        ranker.best_score_ = report.get("validation_of_average", metrics[0] if metrics else None)
        return ranker._with_columns()

    def _with_columns(self) -> Self:
        self.n_features_in_ = self.ranker_.features
        if self.ranker_.names:
            self.feature_names_in_ = np.array(self.ranker_.names, dtype=object)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: no torch module, no class of ours, but the bytes of a safetensors file."""
        state = dict(super().__getstate__())
        if "ranker_" in state:
            ranker = state["ranker_"]
            state["ranker_"] = pack(ranker.tensors(), ranker.description())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = inspect.signature(NeuralRanker).parameters
        state = {name: parameter.default for name, parameter in known.items()} | dict(state)  # a pickle may be older
        if "ranker_" in state:
            own = _own_model(state["model"])  # pickled beside it
            state["ranker_"] = Ranker.restore(*unpack(state["ranker_"], "the pickled ranker"), "cpu", own=own)
        super().__setstate__(state)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # a missing feature: 0 after scaling, and an indicator
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        tags.target_tags.positive_only = True
        return tags

    def _config(self) -> Config:
        """The recipe with the parameters that were given, as a run's configuration, which says what they may be."""
        values = {name: _plain(value) for name, value in self.get_params(deep=False).items() if value is not None}
        if not isinstance(self.categorical, Iterable | None):
            raise ValueError(
                f"categorical is {self.categorical!r}; expected a list of names, patterns or places, such as [{self.categorical!r}]"
            )
        values["categorical"] = () if self.categorical is None else tuple(map(str, self.categorical))
        config = RECIPES[self._recipe()]()
        of_a_member = (
            ("lr", "dropout", "weight_decay") if config.members.count != 1 or values.get("members", 1) != 1 else ()
        )
        ranges = {name: (values[name], values[name]) for name in of_a_member if name in values}  # one value for all
        values |= {"seed": self._seed(), "path": ARRAYS, "threads": self._jobs()}
        own, metric = self._own_model(), self._own_metric()
        if own is not None:
            expect_network(own, {})
            values["model"] = network_name(own)
        if metric is not None:
            values["metric"] = metric.name
        values |= {key: values[given] for key, given in OTHER_NAMES.items() if given in values}
        sections = {
            part.name: dataclasses.replace(
                getattr(config, part.name), **_fields(part.name, getattr(config, part.name), values)
            )
            for part in dataclasses.fields(config)
        }
        members = sections["members"]
        sections["members"] = dataclasses.replace(members, ranges=dataclasses.replace(members.ranges, **ranges))
        sections["loss"] = settings.Loss(self._loss_name(config), values.get("loss_options", {}))
        config = Config(**sections)
        try:
            dumps(config)
        except TypeError as error:
            raise ValueError(f"a parameter is not a plain value: {error}; expected numbers, texts or tuples") from None
        try:
            return validate(config, self._own_loss(), metric, own=own)
        except ValueError as error:
            told = re.sub(r"\b(?:data|model|optimiser|members|train)\.[a-z_]+", _parameter, str(error))
            raise ValueError(told.removeprefix("the configuration: ")) from None

    def _recipe(self) -> str:
        """The one that was named; the paper's if a model or its sizes were."""
        if self.recipe is not None:
            return one_of("recipe", self.recipe, RECIPES)
        named = (self.model, self.width, self.layers, self.heads, self.feedforward)
        return "strong" if all(value is None for value in named) else "paper"

    def _own_loss(self) -> LossSpec | None:
        """The loss of the caller's own, None where it is named."""
        return as_spec(self.loss) if isinstance(self.loss, LossSpec) or callable(self.loss) else None

    def _own_model(self) -> OwnModel:
        return _own_model(self.model)

    def _metric(self) -> Metric:
        """What `score` returns, with the gains that were trained for unless others have been set."""
        gain = self.config_.data.gain if self.label_gain is None else _plain(self.label_gain)
        return parse_metric(self.metric or self.config_.train.metric, gain)

    def _own_metric(self) -> Metric | None:
        """The metric of the caller's own, None where it is named."""
        return parse_metric(self.metric) if callable(self.metric) else None

    def _jobs(self) -> int:
        """How many threads were asked for; 0: none in particular."""
        return 0 if self.n_jobs is None else threads_of_jobs(self.n_jobs)

    def _shown(self) -> dict[str, Any]:
        """How `fit` shows its progress: by itself only to a person who waits, and never from a worker among others."""
        if self.verbose is not None:
            return {
                "quiet": whole("verbose", int(self.verbose) if self.verbose in (True, False) else self.verbose) <= 0
            }
        return {"quiet": not is_watched(), "after": A_FEW_SECONDS}

    def _eval_sets(
        self,
        X: Any,
        given: list[tuple[str, Any, Any, Any, Any]],
        metrics: list[Metric],
        places: list[int],
    ) -> dict[str, EvalSet]:
        """By name the evaluation sets; `X` is what is trained on, which may be one of them."""
        sets: dict[str, EvalSet] = {}
        for name, X_set, y, qid, group in given:
            same = X_set is X
            features, qid = _own_queries(X_set, qid, group, self._names() or ())
            if qid is None and group is None:
                raise ValueError(f"eval_set has 2 parts and eval_qid is None; {EXPECTED_SETS}")
            rows, labels, levels = _graded(self, features, y, places=places, of="eval_")
            data = group_arrays(rows, labels, _query_ids(len(rows), qid, group, "eval_"), categories=levels)
            expect_grades(data, metrics)
            name = name or ("training" if same and "training" not in sets else f"valid_{len(sets)}")
            if name in sets:
                raise ValueError(f"eval_names has {name!r} twice; expected a name of its own for every set")
            sets[name] = EvalSet(data, same)
        return sets

    def _loss_name(self, config: Config) -> Any:
        own = self._own_loss()
        if own is not None:
            return own.name
        return config.loss.name if self.loss is None else _plain(self.loss)

    def _seed(self) -> int:
        if self.random_state is None:
            return int(np.random.SeedSequence().generate_state(1)[0])
        if isinstance(self.random_state, int | np.integer):
            return whole("random_state", self.random_state, 0)
        if isinstance(self.random_state, np.random.Generator):  # which LightGBM takes, and scikit-learn does not
            return int(self.random_state.integers(2**31 - 1))
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _scores(self, data: RankingDataset) -> np.ndarray:
        """[N] in the order of the dataset."""
        with _borrowed(self.device) as device, torch_threads(self._jobs() or most_threads()):
            ranker = self.ranker_
            if device != ranker.device or any(weights.device != device for weights in self.model_.parameters()):
                ranker = dataclasses.replace(ranker, model=self.model_.to(device), device=device)
            return ranker.score_lists(data)


def _own_model(model: Any) -> OwnModel:
    """The network of the caller's own, None where it is one of ours."""
    if isinstance(model, str):
        return import_network(model) if is_own(model) else None
    return model


# --- training and keeping ---------------------------------------------------------------------------------------------


def _parameters(config: Config) -> dict[str, Any]:
    """The parameters of the estimator that would train by a run's configuration; members draw their own learning rates."""
    many = config.members.count != 1
    own = {"lr", "dropout", "weight_decay"} if many else set()
    shared = {"name", "kind", "count", "validation", "options", "ranges", "seed", "path", "device", *own}
    values = {
        field.name: getattr(section, field.name)
        for section in (config.data, config.model, config.optimiser, config.members, config.train)
        for field in dataclasses.fields(section)
        if field.name not in shared
    }
    values |= {
        "recipe": "strong" if many else "paper",
        "loss": config.loss.name,
        "loss_options": dict(config.loss.options),
        "random_state": config.train.seed,
    }
    for key, name in OTHER_NAMES.items():
        section, _, field = key.partition(".")
        values[name] = getattr(getattr(config, section), field)
    known = inspect.signature(NeuralRanker).parameters
    return {name: value for name, value in values.items() if name in known}


@contextlib.contextmanager
def _borrowed(name: str) -> Iterator[torch.device]:
    """The device of a name; torch's random states and current GPU are given back afterwards."""
    if torch.cuda.is_initialized() or (torch.cuda.is_available() and name != "cpu"):
        gpus = range(torch.cuda.device_count())
        with torch.cuda.device(torch.cuda.current_device()), torch.random.fork_rng(devices=gpus):
            yield make_device(name)
    else:
        with torch.random.fork_rng(devices=[]):
            yield make_device(name)


def _recorded(
    events: Iterator[Step | Epoch],
    history: list[dict[str, Any]],
    measured: Callable[[Epoch], dict[str, dict[str, float]]] | None,
) -> Iterator[Step | Epoch]:
    """The same events, every epoch written down on the way, with what evaluation sets say of it."""
    for event in events:
        if isinstance(event, Epoch):
            history.append(event._asdict() | ({"evals": measured(event)} if measured else {}))
        yield event


def _go_on_from(state: TrainState | MemberState, model: torch.nn.Module, members: list[dict[str, Any]]) -> None:
    """Give what is to be trained the weights of a fitted model; of members, to those that were kept."""
    try:
        if isinstance(state, MemberState):
            kept = [place for place, member in enumerate(members) if member["kept"]]
            if len(members) != len(state.model.weights) or not isinstance(model, AveragedMembers):
                raise ValueError
            with torch.no_grad():
                state.model.weights[kept] = model.members.weights.to(state.model.weights)
        else:
            state.model.load_state_dict(model.state_dict())
    except (ValueError, RuntimeError):
        raise ValueError(
            "warm_start goes on with the fitted model, and the parameters ask for another one; expected the same model, sizes and "
            "number of members; set warm_start=False to begin again"
        ) from None


def _parameter(key: re.Match[str]) -> str:
    """What a key of a configuration is called as a parameter of the estimator, where it is one."""
    name = OTHER_NAMES.get(key[0], key[0].partition(".")[2])
    return name if name in inspect.signature(NeuralRanker).parameters else key[0]


def _fields(section: str, now: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a section of the configuration has by the same name, or by the name SECTION.KEY."""
    names = {key.name for key in dataclasses.fields(now)} - {"name", "ranges", "options"}
    return {
        key: values.get(f"{section}.{key}", values.get(key))
        for key in names
        if f"{section}.{key}" in values or key in values
    } | ({"name": values[f"{section}.name"]} if f"{section}.name" in values else {})


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, sequences as tuples: what TOML and JSON can hold."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return value


# --- what fit is given ------------------------------------------------------------------------------------------------


def _graded(
    ranker: NeuralRanker, X: Any, y: Any, *, reset: bool = False, places: Sequence[int] | None = None, of: str = ""
) -> tuple[Features, np.ndarray, Levels]:
    """`_documents` with grades, which are not left out; `of` begins the arguments' names."""
    if y is None:
        raise ValueError(
            f"{type(ranker).__name__} requires y to be passed, but the target {of}y is None; expected the grades of the documents, one per row "
            f"of {of}X, 0 for an irrelevant one"
        )
    return _documents(ranker, X, y, reset=reset, places=places)


def _documents(
    ranker: NeuralRanker, X: Any, y: Any = None, *, reset: bool = False, places: Sequence[int] | None = None
) -> tuple[Features, np.ndarray, Levels]:
    """X [N, F] float32, y [N] after scikit-learn's checks, and the levels of X's categories.

    `reset` notes the number and names of the features; `places` are the columns of categories, where they are known; y may be None.
    """
    rest, found = (X, {}) if is_sparse(X) else split_frame(X, ranker.categorical, places)
    if is_sparse(X) and (places or (ranker.categorical is not None and len(ranker.categorical))):
        raise ValueError(
            "X is sparse and some of its columns are to be categories; expected numbers alone; give an array or a frame instead"
        )
    try:
        if found:
            validate_data(ranker, X, reset=reset, skip_check_array=True)
            numbers = np.empty((len(X), 0))
            if rest.shape[1]:
                numbers = check_array(rest, ensure_min_samples=0, **NUMBERS)
            X = with_codes(numbers, found)
            any_number = {"ensure_min_samples": 0, **NUMBERS}
            X, y = (check_array(X, **any_number), y) if y is None else check_X_y(X, y, y_numeric=True, **NUMBERS)
        elif y is None:
            X = validate_data(ranker, rest, reset=reset, ensure_min_samples=0, **NUMBERS)
        else:
            X, y = validate_data(ranker, rest, y, y_numeric=True, reset=reset, **NUMBERS)
    except (TypeError, ValueError) as error:
        if "feature names" not in str(error):  # scikit-learn says which
            blame_a_column(rest)
        raise
    X = as_sparse_rows(X) if is_sparse(X) else as_float32(X, ranker._names())
    levels = {place: texts for place, (_, texts) in found.items()}
    if y is None:
        return X, np.zeros(len(X)), levels
    if y.dtype.kind not in "fiub":
        raise ValueError(f"y is of type {y.dtype}; expected grades of relevance; map your labels to 0, 1, ...")
    if y.min() < 0:
        row = int(np.argmax(y < 0))
        raise ValueError(f"y[{row}] is {y[row]}; expected grades of relevance, 0 or above; shift or map your labels")
    return X, y, levels


def _own_queries(X: Any, qid: Any, group: Any, features: Sequence[str] = ()) -> tuple[Any, Any]:
    """X without its column "qid", and the query ids, where a frame has such a column and it is not one of the `features`."""
    if type(X).__name__ == "LazyFrame":
        raise ValueError("X is a query of polars that was not run yet; expected a frame; pass X.collect()")
    if not is_frame(X) or "qid" not in frame_names(X) or "qid" in features:
        return X, qid
    if qid is None and group is None:
        qid = X["qid"]
    elif not features and not _same_lists(X["qid"], _query_ids(len(X), qid, group)):
        return X, qid  # not the query ids: a feature that is called so
    if hasattr(X, "column_names"):  # of pyarrow
        return X.drop_columns("qid"), np.asarray(qid)
    return X.drop(columns="qid") if hasattr(X, "iloc") else X.drop("qid"), qid


def _same_lists(one: Any, other: Any) -> bool:
    """Whether two columns of ids say the same of every two rows: that they are of one list, or of two."""
    ids = [np.asarray(column).tolist() for column in (one, other)]
    return len(ids[0]) == len(ids[1]) and len(set(ids[0])) == len(set(ids[1])) == len(set(zip(*ids)))


def _query_ids(rows: int, qid: Any, group: Any, prefix: str = "") -> np.ndarray:
    """The query of each row, from ids or from sizes; `prefix` is that of the arguments' names."""
    if qid is not None and group is not None:
        raise ValueError(f"{prefix}qid and {prefix}group were given; expected one of them; leave one out")
    if group is not None:
        return ids_of_sizes(group, rows, f"{prefix}group")
    if qid is None:
        raise ValueError(
            f"fit needs {prefix}qid, the query id of every row, because documents are ranked within their query; pass fit(X, y, "
            f"qid=...), or group= where you have group sizes; in a search or a pipeline {ROUTING}"
        )
    return as_query_ids(qid, rows, f"{prefix}qid")


def _expect_scores(config: Config, qid: Any, group: Any) -> None:
    """Refuse to train in a search of scikit-learn's whose scores would all be NaN, because `score` or `predict` would not be given qid."""
    if qid is None and group is None:
        return
    routed = sklearn.get_config()["enable_metadata_routing"]
    callers = [*_callers()]
    for frame in callers:
        if frame.f_code.co_name != "_fit_and_score" or not frame.f_globals["__name__"].startswith("sklearn."):
            continue
        if group is not None:
            raise ValueError(
                "group holds the sizes of all queries, and a search trains on a part of the rows; expected the query of every row; pass "
                f"qid=np.repeat(np.arange(len(group)), group), and {ROUTING}"
            )
        scorer = frame.f_locals.get("scorer")
        kinds = [type(one) for one in getattr(scorer, "_scorers", {"one": scorer}).values()]
        by_score = [kind.__name__ == "_PassthroughScorer" for kind in kinds]  # else by `predict`, of X alone
        if not all(kind.__module__.startswith("sklearn.") for kind in kinds):  # one's own may know the queries
            continue
        if all(by_score) and not routed:
            message = f"scikit-learn gives qid to fit and not to score, and every score would be NaN; {ROUTING}"
        elif not any(by_score) and not _scores_alone(config):
            message = (
                "scikit-learn calls predict(X) without qid for this scoring, and this model scores a document beside the others of its list: "
                f"every score would be NaN; expected the ranker's own score; leave scoring out, and {ROUTING}; or fit with model='mlp'"
            )
        else:
            continue
        if any(caller.f_code.co_name == "validation_curve" for caller in callers):
            warnings.warn(message, stacklevel=2)  # it says nothing of fits that failed
        raise ValueError(message)


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _scores_alone(config: Config) -> bool:
    """Whether a document's score does not depend on the others of its list."""
    model, members = config.model, config.members
    standardised = members.count > 1 and not members.share  # within the list, before they are averaged
    return model.kind in ("mlp", "linear") and model.inputs == "features" and not standardised


def _eval_parts(eval_set: Any, eval_qid: Any, eval_group: Any, eval_names: Any) -> list[tuple[str, Any, Any, Any, Any]]:
    """(name, X, y, qid, group) of each evaluation set, in the forms they may have; the name is "" where none was given."""
    others = {"eval_qid": eval_qid, "eval_group": eval_group, "eval_names": eval_names}
    if eval_set is None:
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"{name} was given without eval_set; expected both; pass eval_set=(X, y, qid)")
        return []
    if not isinstance(eval_set, list | tuple):
        raise ValueError(f"eval_set is of type {type(eval_set).__name__}; {EXPECTED_SETS}")
    several = len(eval_set) == 1 or all(map(_is_set, eval_set))
    sets = eval_set if several else [eval_set]
    if isinstance(eval_names, str):
        eval_names = [eval_names]
    queries, groups = (
        _one_for_each(name, others[name], len(sets), listed=several) for name in ("eval_qid", "eval_group")
    )
    names = [""] * len(sets) if eval_names is None else [*map(str, eval_names)]
    if len(names) != len(sets):
        raise ValueError(f"eval_names holds {len(names)} names; expected one for each of {len(sets)} evaluation sets")
    parts = []
    for name, one, qid, group in zip(names, sets, queries, groups):
        if not isinstance(one, list | tuple):
            raise ValueError(f"eval_set holds a {type(one).__name__}; {EXPECTED_SETS}")
        if not 2 <= len(one) <= 3 or (len(one) == 3 and qid is not None):
            given = "" if qid is None else "not "
            raise ValueError(f"eval_set has {len(one)} parts and eval_qid is {given}None; {EXPECTED_SETS}")
        X, y, ids = (*one, qid, None)[:3]
        parts.append((name, X, y, ids, group))
    return parts


def _with_eval_xy(eval_set: Any, eval_X: Any, eval_y: Any) -> Any:
    """The evaluation sets of `eval_X` and `eval_y`, in the form of `eval_set`."""
    if eval_X is None and eval_y is None:
        return eval_set
    if eval_set is not None or eval_X is None or eval_y is None:
        raise ValueError("eval_X and eval_y belong together, in place of eval_set; expected both and no eval_set")
    if isinstance(eval_X, list) and eval_X and len(getattr(eval_X[0], "shape", ())) == 2:  # of sets, not of rows
        eval_X, eval_y = tuple(eval_X), tuple(eval_y) if isinstance(eval_y, list) else eval_y
    if not isinstance(eval_X, tuple):
        return [(eval_X, eval_y)]
    if not isinstance(eval_y, tuple) or len(eval_X) != len(eval_y):
        raise ValueError(
            "eval_X is a tuple of sets, and eval_y is not as many; expected the grades of each; pass tuples"
        )
    return [*zip(eval_X, eval_y)]


def _is_set(part: Any) -> bool:
    """Whether a part of eval_set is a set of its own: (X, y) or (X, y, qid), X of rows and columns."""
    if not isinstance(part, list | tuple) or not 2 <= len(part) <= 3:
        return False
    try:
        return len(getattr(part[0], "shape", None) or np.shape(part[0])) == 2
    except ValueError:  # rows of unequal length
        return False


def _one_for_each(name: str, given: Any, count: int, *, listed: bool) -> list[Any]:
    """What belongs to each of the evaluation sets; for one set it may stand alone."""
    if given is None:
        return [None] * count
    parts = isinstance(given, list | tuple) and len(given) > 0 and all(np.ndim(part) > 0 for part in given)
    if not parts and (not listed or count == 1):
        return [given]
    if not parts or len(given) != count:
        came = f"{len(given)} parts" if parts else f"a {type(given).__name__}"
        raise ValueError(f"{name} is {came}; expected a list with one entry for each of {count} evaluation sets")
    return [*given]


def _eval_metrics(chosen: Any, chosen_by: Metric, eval_metric: Any, eval_at: Any, gain: Any) -> list[Metric]:
    """What is measured of evaluation sets: what picks the epoch, `chosen` as it was given, and what else was asked for."""
    if eval_metric is None:
        given = [] if eval_at is None else ["ndcg"]
    else:
        given = [*eval_metric] if isinstance(eval_metric, list | tuple) else [eval_metric]
    depths = [] if eval_at is None else [whole("eval_at", k, 1) for k in np.atleast_1d(eval_at)]
    metrics = {chosen_by.name: chosen_by}
    functions = {chosen_by.name: chosen if callable(chosen) else chosen_by.function}
    for one in given:
        cut = [f"{one}@{k}" for k in depths] if isinstance(one, str) and "@" not in one else []
        for metric in (parse_metric(name, gain) for name in cut or [one]):
            metrics.setdefault(metric.name, metric)
            if callable(one) and functions.setdefault(metric.name, one) is not one:
                raise ValueError(
                    f"two metrics are called {metric.name!r}; expected a name of its own for each function"
                )
    return [*metrics.values()]


def _warn_if_nothing_counts(data: RankingDataset, objectives: dict[str, Objective], loss: str) -> None:
    """Say that a loss will learn nothing from these queries."""
    unseen = np.zeros((len(data.labels), 1), np.float32)
    data = dataclasses.replace(data, features=unseen, feature_names=None, categories={})
    lists = batches(data, 256, list_size=None, shuffle=False, max_documents=2**16)
    if not any(bool(o.counts(b.labels, b.mask).any()) for b in lists for o in objectives.values()):
        warnings.warn(
            f"{loss} can learn from no query and the model stays as it began; expected a query of at least two "
            "documents with different grades; look at y and qid",
            UserWarning,
            stacklevel=3,
        )


def _warn_if_nothing_chooses(held_out: RankingDataset, metric: Metric) -> None:
    """Say that no epoch will be better than another on the queries that are to choose one."""
    if not can_choose(held_out, metric):
        warnings.warn(
            f"no query that epochs are compared on has a relevant document for {metric.name}, so the first epoch is kept; expected "
            "grades above 0 there, or from 1 on for metrics without gains; look at eval_set, or at y if queries were held out",
            UserWarning,
            stacklevel=3,
        )
