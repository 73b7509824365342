"""Many small networks trained at once, each with hyper-parameters of its own: tuning and averaging in one training.

Every step computes all members in one batch; there is no loop over them. What a member starts from, draws and is given is a
function of (seed, member) alone, so that member 7 of 64 is the member 7 that trains alone. A member keeps its own best epoch,
stops when it has not improved for `patience` epochs, and is dropped where its loss or gradient is not finite.

With `members.bag` = B the queries are dealt into B folds; member m never learns from fold m mod B and is validated on it, so that
every query teaches some members and none is lost. The lists of that fold weigh nothing for it in the shared step.

Under torchrun each process trains a share of the members on all lists; nothing but their ends is exchanged.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.feature_rows import FeatureRows, rows_at_once
from rankgrad.data.order import hash_of, mix, random_keys
from rankgrad.data.packed import Packed, padded
from rankgrad.data.scaling import codes_of
from rankgrad.errors import NonFiniteError
from rankgrad.metrics import Metric, parse_metric
from rankgrad.models import NO_CATEGORIES, AveragedMembers, Categories, Members, PackedLayout
from rankgrad.training import distributed
from rankgrad.training.config import Config, Train
from rankgrad.training.evaluate import evaluate, mean, metric_that_chooses, metrics_of
from rankgrad.training.execution import ExecutionPlan
from rankgrad.training.state import Epoch, Progress
from rankgrad.training.step import Objective, ScoredBatch, document_weights, sum_weights, weighing

ALL_DIVERGED = (
    "the loss or gradient of every member became not finite and nothing was learned; lower members.ranges.lr, clip gradients "
    "with optimiser.clip, or look at the features"
)
BETAS, EPSILON = (0.9, 0.99), 1e-8  # of Adam
FOLDS = 3  # what a random key is for, beside those of data/order
DOCUMENTS_AT_ONCE = 2**21  # scores of all members together, in evaluation
VALUES_AT_ONCE = 2**22  # of features that are read for it
LISTS_MEASURED = 64  # padded together in evaluation: few pad little, many launch little
LR, DROPOUT, DECAY, SCALE = range(4)
ALL_KEPT = "every member, last epoch"
KEPT = "each member's best epoch by validation, the best members averaged"


Evaluator = Callable[[Sequence[str]], dict[str, np.ndarray]]  # names of metrics -> per-query values [Q]


class Drawn(NamedTuple):
    """What members were dealt, an entry for each: functions of (seed, member)."""

    ids: list[int]
    loss: list[str]
    lr: list[float]
    dropout: list[float]
    weight_decay: list[float]
    scale: list[float]  # of tanh on the scores; 0: none
    fold: list[int]  # it is validated on; 0 without bagging

    def describe(self) -> list[dict[str, Any]]:
        """A dict per member, for a report."""
        names = ("member", *self._fields[1:])
        return [dict(zip(names, values)) for values in zip(*self)]


def draw_members(config: Config, ids: Sequence[int], tanh: Sequence[bool]) -> Drawn:
    """Hyper-parameters from `members.ranges`; losses in turn, `tanh` says which of them put tanh on the scores."""
    members, seed = config.members, config.train.seed
    names = config.loss.names
    ranges = members.ranges

    def uniform(what: int, low: float, high: float, *, log: bool) -> list[float]:
        values = []
        for member in ids:
            share = hash_of(seed, member, what) / 2**63
            values.append(low * (high / low) ** share if log and low > 0 else low + (high - low) * share)
        return values

    of_loss = [number % len(names) for number in ids]
    scale = uniform(SCALE, *ranges.scale, log=True)
    return Drawn(
        ids=list(ids),
        loss=[names[number] for number in of_loss],
        lr=uniform(LR, *ranges.lr, log=True),
        dropout=uniform(DROPOUT, *ranges.dropout, log=False),
        weight_decay=uniform(DECAY, *ranges.weight_decay, log=True),
        scale=[value if tanh[number] else 0.0 for value, number in zip(scale, of_loss)],
        fold=[_fold(number, len(names), members.bag) for number in ids],
    )


def _fold(number: int, losses: int, bag: int) -> int:
    """Folds in turn like losses, so that few members have different ones; moved by one after a round: every loss meets every fold.

    >>> [_fold(number, losses=2, bag=2) for number in range(4)]
    [0, 1, 1, 0]
    """
    return (number + number // math.lcm(losses, bag)) % bag


def folds_of(data: RankingDataset, bag: int, seed: int) -> np.ndarray:
    """The fold of each query, [Q] int64: folds of equal size, a function of (seed, query id)."""
    order = np.argsort(random_keys(data.query_ids, seed, FOLDS), kind="stable")
    folds = np.empty(len(data), np.int64)
    folds[order] = np.arange(len(data)) % bag
    return folds


def make_members(config: Config, features: int, categories: Categories, drawn: Drawn) -> Members:
    """The networks of a configuration, at their start."""
    return Members(
        features,
        ids=drawn.ids,
        hidden=config.model.hidden if config.model.kind == "mlp" else (),
        inputs=config.model.inputs,
        categories=categories,
        dropout=drawn.dropout,
        scale=drawn.scale,
        seed=config.train.seed,
    )


class MemberAdam:
    """AdamW on rows [K, P], each with a rate and a decay of its own; a row whose rate is 0 stays as it is.

    The first and second moments are kept where the caller can save them; biases do not decay.
    """

    def __init__(self, model: Members, drawn: Drawn) -> None:
        self.first, self.second = (torch.zeros_like(model.weights) for _ in range(2))
        self.steps = torch.zeros((), dtype=torch.float64, device=model.weights.device)
        self._weights = model.weights
        self._decay = model.weights.new_tensor(drawn.weight_decay)[:, None] * model.decays.to(model.weights)

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: Tensor) -> None:
        """One step with finite gradients [K, P] and rates [K]."""
        self.steps += 1
        self.first.lerp_(gradient, 1 - BETAS[0])
        self.second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        unbias = [1 - beta**self.steps for beta in BETAS]
        size = (self.second / unbias[1]).sqrt_().add_(EPSILON)
        change = (self.first / unbias[0]).div_(size).to(self._weights.dtype).addcmul_(self._decay, self._weights)
        self._weights.addcmul_(change, rate[:, None], value=-1.0)


class MemberStep:
    """A step of training for all members: a batch -> its report [4 + B] float64, as that of `step.TrainStep`.

    The report's loss is the mean over members of their losses. A member whose loss or gradient is not finite is dropped for
    good; the step is refused when none is left. Lists are marked whose loss is not finite for a member that still learns.
    """

    def __init__(
        self,
        state: "MemberState",
        score: Callable[[Packed], ScoredBatch],
        objectives: dict[str, Objective],
        folds: Tensor | None,
        *,
        weights: Tensor | None,
        clip: float | None,
        amp: torch.autocast,
        generator: torch.Generator,
        seed: int,
        number: int,
        document_weights: Tensor | None = None,
    ) -> None:
        self.asked = False
        self._state, self._score, self._folds, self._weights = state, score, folds, weights
        self._document_weights = document_weights  # [N], of lists that lie on the device
        self._clip, self._amp, self._generator, self._world = clip, amp, generator, distributed.place()[1]
        device, drawn = state.model.weights.device, state.drawn
        # Losses are dealt out in turn: the members of one are a slice, which costs no copy.
        names = list(dict.fromkeys(drawn.loss))
        self._groups = [(objectives[name], slice(at, None, len(names))) for at, name in enumerate(names)]
        self._rates = torch.tensor(drawn.lr, dtype=torch.float64, device=device)
        self._own_fold = torch.tensor(drawn.fold, device=device)
        self._keys = torch.tensor([hash_of(seed, number) for number in drawn.ids], device=device)[:, None, None]
        layers = len(state.model.shapes)
        self._draws = torch.arange(1, 2 * layers + 1, device=device).view(layers, 2)
        self._rate = torch.zeros((), dtype=torch.float64, device=device)
        self._number = torch.full((), number, device=device)  # of the step in the run: what dropout is drawn by

    def prepare(self, rate: float, *, asked: bool) -> None:
        """Give the next step its rate, as a multiple of the members' own."""
        self.asked = asked
        self._rate.fill_(rate)

    def __call__(self, batch: Packed) -> Tensor:
        """Learn from a batch."""
        state, model = self._state, self._state.model
        model.seeds = mix(self._keys + mix(self._number * 64 + self._draws)).to(torch.int32)  # [K, layers, 2]
        self._number += 1
        with self._amp:
            scores, labels, mask = self._score(batch)  # [K, B, L]
        weights = document_weights(batch, self._document_weights)
        scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
        values, share, counted = self._values(scores, labels, mask, batch.queries, weights)
        total = self._joined([(v.detach() * s).sum(1, dtype=torch.float64) for v, s in zip(values, share)])  # [K]
        count = self._joined([c.sum(1, dtype=torch.float64) for c in counted])
        per_unit = 1 / count.clamp(min=torch.finfo(torch.float32).tiny)
        slopes = [s * per_unit[at, None].to(s.dtype) for s, (_, at) in zip(share, self._groups)]
        (gradient,) = torch.autograd.grad(values, model.weights, slopes)
        norm = torch.linalg.vector_norm(gradient, dim=1).double()
        finite = (total + norm).isfinite()
        learning = [torch.where(state.active[at, None], v.detach(), 0.0) for v, (_, at) in zip(values, self._groups)]
        suspects = ~torch.stack([of_group.sum(0, dtype=torch.float64) for of_group in learning]).sum(0).isfinite()
        state.active &= finite
        state.dropped |= ~finite
        if gradient.device.type != "cpu" or not bool(state.active.all()):  # the rule, unless the host knows better
            gradient = torch.where(state.active[:, None], gradient, 0.0)
        if self._clip is not None:
            gradient = gradient * (self._clip / norm.clamp(min=self._clip)).nan_to_num().to(gradient.dtype)[:, None]
        rate = torch.where(state.active, self._rates * self._rate, 0.0).to(gradient.dtype)
        state.optimiser.step(gradient, rate)
        mean = torch.where(state.active & (count > 0), total / count.clamp(min=1e-300), 0.0)
        left = (~state.dropped).any()
        report = torch.stack([mean.sum(), (state.active & (count > 0)).sum(), (~left), torch.zeros_like(left)]).double()
        if self._world > 1:
            report[3].fill_(float(self.asked))
            dist.all_reduce(report)
            report[2] = report[2] >= self._world
        return torch.cat([report, suspects.double()])

    def _values(
        self, scores: Tensor, labels: Tensor, mask: Tensor, queries: Tensor, weights: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """For each loss and its members: losses [k, B], what each list weighs, and how much it counts in the mean."""
        weight = None if self._weights is None else self._weights[queries].to(scores.dtype)
        values, shares, counted = [], [], []
        for objective, at in self._groups:
            of_group = scores[at]
            like = labels.expand_as(of_group), mask.expand_as(of_group), self._generator
            found = objective.values(of_group, *like, *(() if weights is None else (weights.expand_as(of_group),)))
            share = objective.counts(labels, weighing(mask, weights)).to(found.dtype)
            share = share if weight is None else share * weight
            if self._folds is not None:
                share = share * (self._folds[queries] != self._own_fold[at, None])
            share = share.expand_as(found)
            values.append(found)
            shares.append(share)
            counted.append(share * sum_weights(mask, weights) if objective.by_document else share)
        return values, shares, counted

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """One number per member [K], of the numbers of each loss's members."""
        joined = torch.empty(len(self._rates), dtype=parts[0].dtype, device=parts[0].device)
        for part, (_, at) in zip(parts, self._groups):
            joined[at] = part
        return joined


def member_scores(model: Members, table: tuple[Tensor, Tensor] | None) -> Callable[[Packed], ScoredBatch]:
    """How members score packed lists: [K, B, L]; `table` holds the documents (features, labels), None: the batch does."""

    def score(batch: Packed) -> ScoredBatch:
        features, labels = (batch.features, batch.labels) if table is None else table
        assert features is not None
        assert labels is not None
        rows, slots, offsets, queries, width, *_ = batch
        lists = len(queries)
        documents = features[rows].masked_fill((slots == lists * width)[:, None], 0.0)
        scores = model.packed(documents, PackedLayout(offsets, width))  # [K, T]
        # Padding rows go to a slot that is cut off again.
        flat = scores.new_zeros(len(scores), lists * width + 1).index_copy(1, slots, scores)
        return ScoredBatch(flat[:, :-1].unflatten(1, (lists, width)), *padded(rows, offsets, lists, width, labels))

    return score


@dataclass
class MemberState:
    """What changes while members train; rows of its tensors are members."""

    model: Members
    drawn: Drawn
    optimiser: MemberAdam
    tanh: Sequence[bool]  # of each loss
    folds: np.ndarray | None  # [Q] of the training queries, with bagging
    progress: Progress
    best: Tensor  # [K, P] weights of each member's best epoch
    values: Tensor  # [K, epochs so far] float64, validation by epoch
    active: Tensor  # [K] bool, still learning
    dropped: Tensor  # [K] bool, diverged
    best_epoch: Tensor  # [K] int64
    plan: ExecutionPlan | None = None
    metric: Metric | None = None  # that picks the epochs, if it is the caller's own
    measured: "dict[int, tuple[RankingDataset, list[ListsToMeasure]]]" = field(
        default_factory=dict
    )  # by a dataset's id
    shares_lists = False  # of several processes each trains some members on all lists

    @classmethod
    def build(
        cls, config: Config, train_set: RankingDataset, tanh: Sequence[bool], device: torch.device
    ) -> "MemberState":
        """The members of this process, at their start; `tanh` as in `draw_members`."""
        members, (rank, world) = config.members, distributed.place()
        if members.count < world:
            raise ValueError(
                f"members.count is {members.count} and {world} processes share this run; expected a member for each of them; "
                "start fewer processes, or train more members"
            )
        ids = range(members.first, members.first + members.count)[rank::world]
        folds = folds_of(train_set, members.bag, config.train.seed) if members.bag > 1 else None
        return cls.of(config, ids, train_set.features.shape[1], folds, tanh, device, codes_of(train_set))

    @classmethod
    def of(
        cls,
        config: Config,
        ids: Sequence[int],
        features: int,
        folds: np.ndarray | None,
        tanh: Sequence[bool],
        device: torch.device,
        categories: Categories = NO_CATEGORIES,
    ) -> "MemberState":
        """These members, at their start."""
        drawn = draw_members(config, ids, tanh)
        model = make_members(config, features, categories, drawn).to(device)
        none = torch.zeros(len(ids), dtype=torch.bool, device=device)
        return cls(
            model=model,
            drawn=drawn,
            optimiser=MemberAdam(model, drawn),
            tanh=tanh,
            folds=folds,
            progress=Progress(),
            best=model.weights.detach().clone(),
            values=torch.zeros(len(ids), 0, dtype=torch.float64),
            active=~none,
            dropped=none,
            best_epoch=torch.zeros(len(ids), dtype=torch.int64),
        )

    def make_step(
        self,
        objectives: dict[str, Objective],
        train_set: RankingDataset,
        weights: Tensor | None,
        config: Config,
        plan: ExecutionPlan,
        amp: torch.autocast,
        generator: torch.Generator,
    ) -> MemberStep:
        """The step of all members, executed as planned."""
        device = self.model.weights.device
        table = train_set.tensors(device)[:2] if plan.resident else None
        return MemberStep(
            self,
            member_scores(self.model, table),
            objectives,
            None if self.folds is None else torch.from_numpy(self.folds).to(device),
            weights=weights,
            clip=config.optimiser.clip,
            amp=amp,
            generator=generator,
            seed=config.train.seed,
            number=self.progress.epoch * -(-len(train_set) // config.train.batch_size) + self.progress.step,
            document_weights=train_set.weight_tensor(device) if plan.resident else None,
        )

    def end_epoch(self, vali_set: RankingDataset, config: Config, device: torch.device, lr: float) -> Epoch:
        """Validate every member, keep its best weights, count what early stopping goes by."""
        progress, settings, smooth = self.progress, config.train, config.members.smooth
        metric = metric_that_chooses(config, self.metric)
        found, finite = self._validation(vali_set, metric, device)  # [K]
        self.active &= finite.to(device)
        self.dropped |= ~finite.to(device)
        # A member that no longer learns has no more epochs to choose from.
        self.values = torch.cat([self.values, torch.where(self.active.cpu(), found, 0.0)[:, None]], 1)
        progress.epoch, progress.step = progress.epoch + 1, 0
        alive = ~self.dropped.cpu()
        better = best_running(self.values, smooth) > best_running(self.values[:, :-1], smooth)
        better = alive & self.active.cpu() & (better | (progress.epoch <= smooth))
        at = better.to(device)[:, None]
        self.best = torch.where(at, self.model.weights.detach(), self.best)
        self.best_epoch = torch.where(better, progress.epoch, self.best_epoch)
        if settings.patience is not None:
            self.active &= (progress.epoch - self.best_epoch < settings.patience).to(device)
        usable = found[alive]
        count = distributed.sum_over_processes(len(usable))
        value = distributed.sum_over_processes(usable.sum().item()) / count if count else math.nan
        progress.best = value if progress.best is None else max(progress.best, value)
        ended = Epoch(
            epoch=progress.epoch,
            loss=progress.loss_sum / progress.loss_count if progress.loss_count else math.nan,
            metric=value,
            best=progress.best == value,
            lr=lr,
            skipped=progress.skipped,
            stop=self.finished(settings) and progress.epoch < settings.epochs,
        )
        progress.loss_sum, progress.loss_count, progress.skipped = 0.0, 0.0, 0
        return ended

    def _validation(self, data: RankingDataset, metric: Metric, device: torch.device) -> tuple[Tensor, Tensor]:
        """The metric of each member on the queries it does not learn from, [K] float64, and whether all scores are finite."""
        (values,), finite = self._measured(data, [metric], device)
        if self.folds is None:
            return _mean_over_queries(values, metric), finite
        own = torch.from_numpy(self.folds) == torch.tensor(self.drawn.fold)[:, None]
        return _mean_over_queries(values, metric, own), finite

    def _measured(
        self, data: RankingDataset, metrics: Sequence[Metric], device: torch.device
    ) -> tuple[list[Tensor], Tensor]:
        """Per-query values of each metric for every member, [K, Q] float64, and whether all its scores are finite, [K]."""
        if id(data) not in self.measured:
            parts = parts_to_measure(data, len(self.drawn.ids))
            self.measured[id(data)] = data, [ListsToMeasure(part, device) for part in parts]
        found = [lists.values(self.model, metrics) for lists in self.measured[id(data)][1]]
        values = [torch.cat([of_part[at] for of_part, _ in found], 1).cpu() for at in range(len(metrics))]
        return values, torch.stack([finite for _, finite in found]).all(0).cpu()

    def measure(self, data: RankingDataset, metrics: Sequence[Metric], device: torch.device) -> dict[str, float]:
        """The mean of each metric over the members of the moment, those that have been dropped left out."""
        if not metrics:
            return {}
        values, _ = self._measured(data, metrics, device)
        alive = ~self.dropped.cpu()
        return {
            metric.name: _mean_over_queries(found[alive], metric).mean().item()
            for metric, found in zip(metrics, values)
        }

    def finished(self, settings: Train) -> bool:
        """Whether the last epoch is done, or no member is left that learns."""
        return self.progress.epoch >= settings.epochs or not distributed.any_process(bool(self.active.any()))

    def tensors(self) -> dict[str, Tensor]:
        """By name, rows of all processes, for a checkpoint."""
        own = {
            "members.weights": self.model.weights.detach(),
            "members.first": self.optimiser.first,
            "members.second": self.optimiser.second,
            "members.best": self.best,
            "members.values": self.values,
            "members.active": self.active,
            "members.dropped": self.dropped,
            "members.best_epoch": self.best_epoch,
        }
        return {name: distributed.gather_rows(tensor) for name, tensor in own.items()}

    def facts(self) -> dict[str, Any]:
        """The numbers, for a checkpoint."""
        return asdict(self.progress) | {"adam_steps": int(self.optimiser.steps)}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go back to what `tensors` and `facts` gave, in any number of processes."""
        facts = dict(facts)
        self.optimiser.steps.fill_(facts.pop("adam_steps"))
        self.progress = Progress(**facts)
        rank, world = distributed.place()
        own = {name.removeprefix("members."): tensor[rank::world] for name, tensor in tensors.items()}
        with torch.no_grad():
            self.model.weights.copy_(own["weights"])
        for tensor, name in (
            (self.optimiser.first, "first"),
            (self.optimiser.second, "second"),
            (self.best, "best"),
            (self.active, "active"),
            (self.dropped, "dropped"),
            (self.best_epoch, "best_epoch"),
        ):
            tensor.copy_(own[name])
        self.values = own["values"].clone()

    def gathered(self, config: Config, device: torch.device, *, choose: bool = True) -> "MemberState":
        """All members in every process, with the best weights of each, or the last if nothing is to be chosen."""
        tensors, members = self.tensors(), config.members
        ids = range(members.first, members.first + members.count)
        model = self.model
        everyone = MemberState.of(config, ids, model.features, self.folds, self.tanh, device, model.categories)
        with torch.no_grad():
            everyone.model.weights.copy_(tensors["members.best" if choose else "members.weights"])
        everyone.values, everyone.best_epoch = tensors["members.values"], tensors["members.best_epoch"]
        if not choose:
            everyone.values = everyone.values[:, -1:]
            everyone.best_epoch = torch.full_like(everyone.best_epoch, self.progress.epoch)
        everyone.dropped, everyone.progress = tensors["members.dropped"], self.progress
        return everyone

    def result(
        self, config: Config, vali_set: RankingDataset, device: torch.device, *, choose: bool = True
    ) -> tuple[AveragedMembers, dict[str, Any], Evaluator]:
        """One ranker of the members to keep, what a report says of the choice, and how it is measured on validation."""
        if not distributed.any_process(not bool(self.dropped.all())):
            raise NonFiniteError(ALL_DIVERGED)
        choose = choose and config.train.select == "best"
        everyone = self.gathered(config, device, choose=choose)
        places = everyone.kept(config) if choose else [at for at, bad in enumerate(everyone.dropped) if not bad]
        metric = metric_that_chooses(config, self.metric)
        members = describe_members(everyone, places, config)

        def measured(metrics: Sequence[str]) -> dict[str, np.ndarray]:
            return held_out_values(everyone, places, vali_set, metrics_of(config, metrics), device)

        of_average = held_out_values(everyone, places, vali_set, [metric], device)
        facts = {
            "selection": KEPT if choose else ALL_KEPT,
            "best_epoch": int(np.median([members[at]["best_epoch"] for at in places])),
            "members": members,
            "kept": len(places),
            "validation_of_best": max(member["validation"] for member in members if not member["dropped"]),
            "validation_of_average": mean(of_average[metric.name], metric.empty),
        }
        return average(everyone, places).to(device), facts, measured

    def kept(self, config: Config) -> list[int]:
        """Places of the members to average: the best on validation, as many of each fold as far as it has them."""
        scores = best_running(self.values, config.members.smooth)
        folds = dict.fromkeys(self.drawn.fold)
        chosen: list[int] = []
        for number, fold in enumerate(folds):
            room = (config.members.keep - len(chosen)) // (len(folds) - number)
            of_fold = [at for at, own in enumerate(self.drawn.fold) if own == fold and not self.dropped[at]]
            chosen += sorted(of_fold, key=lambda at: -scores[at].item())[: max(1, room)]
        left = [at for at in range(len(self.dropped)) if at not in chosen and not self.dropped[at]]
        chosen += sorted(left, key=lambda at: -scores[at].item())[: max(0, config.members.keep - len(chosen))]
        return sorted(chosen)


def best_running(values: Tensor, smooth: int) -> Tensor:
    """The best mean of `smooth` epochs in a row, [K, E] -> [K]; the last value where there are fewer epochs yet.

    >>> best_running(torch.tensor([[0.9, 0.1, 0.5, 0.6]]), 2).tolist()
    [0.550000011920929]
    """
    if values.shape[1] < smooth:
        return values[:, -1] if values.shape[1] else torch.full((len(values),), -math.inf, dtype=torch.float64)
    return values.unfold(1, smooth, 1).mean(-1).amax(1)


def _mean_over_queries(values: Tensor, metric: Metric, own: Tensor | None = None) -> Tensor:
    """[K, Q] -> [K], NaN counted by the metric's rule for empty queries; `own` says which queries are a member's, [K, Q]."""
    values = torch.where(values.isnan(), metric.empty, values)
    if own is not None:
        own = own & ~values.isnan()
        return torch.where(own, values, 0.0).sum(1) / own.sum(1).clamp(min=1)
    return values.nanmean(1) if math.isnan(metric.empty) else values.mean(1)


def parts_to_measure(data: RankingDataset, members: int) -> list[RankingDataset]:
    """A dataset as it is; in parts of consecutive lists where its features are larger than the memory that is free."""
    if not isinstance(data.features, FeatureRows):
        return [data]
    at_once = min(DOCUMENTS_AT_ONCE // members, VALUES_AT_ONCE // data.features.shape[1])
    part = (data.offsets[1:] - 1) // max(1, at_once)  # of the last document of each query
    ends = [*(np.flatnonzero(np.diff(part)) + 1).tolist(), len(data)]
    return [data.select(slice(first, end)) for first, end in pairwise([0, *ends])]


class ListsToMeasure:
    """A dataset laid out once for measuring members on it epoch after epoch: lists of similar length together."""

    def __init__(self, data: RankingDataset, device: torch.device) -> None:
        self._features, (labels, offsets) = data.batch_source(device), data.list_tensors(device)
        self._ends = offsets.cpu().tolist()
        self.queries = len(data)
        self._groups = []
        order = np.argsort(data.lengths, kind="stable")
        for queries in np.array_split(order, max(1, -(-len(order) // LISTS_MEASURED))):
            place = np.arange(int(data.lengths[queries].max()))
            mask = place < data.lengths[queries, None]
            rows = np.where(mask, data.offsets[queries, None] + place, 0)
            there = [torch.from_numpy(array).to(device) for array in (queries, rows, mask)]
            self._groups.append((*there, labels[there[1]]))
        self._device = device

    @torch.no_grad()
    def values(self, model: Members, metrics: Sequence[Metric]) -> tuple[Tensor, Tensor]:
        """Per-query values of metrics for every member, [M, K, Q] float64, NaN at empty queries; and whose scores are finite."""
        training = model.training
        model.eval()
        scores = torch.cat([self._scored(model, first, end) for first, end in self._chunks(len(model.weights))], 1)
        model.train(training)
        values = torch.zeros(len(metrics), len(scores), self.queries, dtype=torch.float64, device=self._device)
        for queries, rows, mask, labels in self._groups:
            padded = scores[:, rows].double()
            given = labels.expand_as(padded), mask.expand_as(padded)
            for at, metric in enumerate(metrics):
                values[at][:, queries] = metric(padded, *given, empty=math.nan, check=False)
        return values, scores.isfinite().all(1)

    def _chunks(self, members: int) -> Iterator[tuple[int, int]]:
        """Consecutive lists whose documents fit into memory for all members, as places of queries."""
        first, limit = 0, max(1, DOCUMENTS_AT_ONCE // members)
        if isinstance(self._features, FeatureRows):
            limit = rows_at_once(self._features, limit)
        for query in range(1, self.queries + 1):
            if query == self.queries or self._ends[query + 1] - self._ends[first] > limit:
                yield first, query
                first = query

    def _scored(self, model: Members, first: int, end: int) -> Tensor:
        begin, stop = self._ends[first], self._ends[end]
        offsets = torch.tensor(self._ends[first : end + 1], dtype=torch.int32, device=self._device) - begin
        features = self._features[begin:stop]
        if isinstance(features, np.ndarray):  # read for this
            features = torch.from_numpy(features).to(self._device)
        return model.packed(features, PackedLayout(offsets, 0))


def average(state: MemberState, places: Sequence[int]) -> AveragedMembers:
    """One ranker of some members."""
    return AveragedMembers(state.model.select(places)).eval()


def describe_members(state: MemberState, places: Sequence[int], config: Config) -> list[dict[str, Any]]:
    """What was kept and why: a dict per member with what it was dealt, its validation and its best epoch."""
    values = best_running(state.values, config.members.smooth).tolist()
    found = zip(state.drawn.describe(), state.best_epoch.tolist(), values, state.dropped.tolist())
    return [
        entry | {"best_epoch": epoch, "validation": value, "kept": at in places, "dropped": dropped}
        for at, (entry, epoch, value, dropped) in enumerate(found)
    ]


def held_out_values(
    state: MemberState,
    places: Sequence[int],
    data: RankingDataset,
    metrics: Sequence[str | Metric],
    device: torch.device,
) -> dict[str, np.ndarray]:
    """Per-query metrics [Q] of the average on lists it has not learned from: with bagging, of the members of a query's fold.

    A fold that no kept member was validated on is scored by all of them, which have learned from it.
    """
    if state.folds is None:
        return evaluate(average(state, places).to(device), data, metrics, device=device)
    values = {parse_metric(metric).name: np.full(len(data), np.nan) for metric in metrics}
    for fold in np.unique(state.folds):
        queries = np.flatnonzero(state.folds == fold)
        own = [at for at in places if state.drawn.fold[at] == fold] or places
        part = evaluate(average(state, own).to(device), data.select(queries), metrics, device=device)
        for name, found in part.items():
            values[name][queries] = found
    return values
