"""Scaling of features: fitted on the train split, stored with the model, applied to whatever is ranked later.

A `Scaling` is a pure function of single values: what a document becomes depends on the train split alone, never on the
batch it comes in. Statistics are taken in float64 over blocks of rows, so that a memory-mapped dataset of gigabytes is
never copied.

Whatever the kind, a missing value (NaN) becomes 0 and the result is finite; for each feature that was missing in the train
split an indicator follows, 1 where the value is missing and 0 elsewhere. For every kind but `none`, which changes
nothing else, a column that is constant or missing throughout the train split becomes 0, and values beyond 1e30, such
as Istella's 1.797e308, count as the column's largest ordinary value.

Columns of categories are not scaled. Those that `RARE` documents of the train split or more have are the levels that a model has
vectors for, coded 0, 1, ... in the order of their texts; then come the code of all others (unknown) and that of missing ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankgrad.data.categories import Levels, code_map
from rankgrad.data.dataset import MAX_FLOAT32, RankingDataset
from rankgrad.data.feature_rows import Features, column_block
from rankgrad.data.sparse import Entries
from rankgrad.files import parsed_json

KINDS = ("auto", "web30k", "symlog", "standard", "quantile", "quantile_auto", "none")

ABSURD = 1e30
BLOCK = 4096  # rows taken at once: a few megabytes in float64
WIDE_BLOCK = 1 << 20  # values taken at once, where rows are so wide that this is less
SAMPLE = 65_536  # documents, evenly spaced, from which quantiles and tails are estimated
HEAVY = 10.0  # kurtosis from which `auto` takes logarithms; normal 3, exponential 9
AUTO_LIMIT = 10.0  # `auto` clips values at this many deviations from the mean
QUANTILES = 1_001
RARE = 3  # documents; levels of categories that fewer have are unknown, which teaches a model what to make of those
UNIT_SHARE = 0.9  # of the columns that must lie in [0, 1] for `quantile_auto` to leave them their shape

# The paper's transform of Web30K, 0-based columns: the language models count downwards, and some columns stay linear.
WEB30K_FEATURES = 136
WEB30K_NEGATED = (*range(110, 121), 123, 124)
WEB30K_LINEAR = (5, 6, 7, 8, 9, 15, 19, 57, 58, 62, 75, 79, 85, *range(95, 105), 121, 122, 127, 129, 130)

AS_IS, LOG, SYMLOG = 0, 1, 2  # curves a column is sent through: x, log(max(x, 0) + unit), sign(x) log(1 + |x| / unit)

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Scaling:
    """A fitted scaling. `arrays` are its parameters per column; `to_state` and `from_state` are for saving and loading.

    `arrays["indicators"]` holds the columns that were missing somewhere in the train split, rising; it is absent where there
    were none, and from what was saved before there were indicators.

    >>> data = RankingDataset([[1.0, 5.0], [3.0, np.nan]], [0, 1], [0, 2], [7])
    >>> scaling = fit_scaling(data, "standard")
    >>> scaling.apply(np.array([[1.0, 5.0], [np.nan, np.nan]])).tolist()
    [[-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    >>> Scaling.from_state(scaling.to_state()).kind
    'standard'
    """

    kind: str
    arrays: Mapping[str, NDArray[Any]]
    levels: Levels = field(default_factory=dict)  # of categories, by column
    source: Levels | None = None  # what the codes to come stand for; None: for `levels`

    def of(self, data: RankingDataset) -> Scaling:
        """The same for the features of a dataset, whose codes stand for its own texts."""
        if not self.levels and not data.categories:
            return self
        for column in {*self.levels} ^ {*data.categories}:
            name = f"column {column}" if data.feature_names is None else f"column {data.feature_names[column]!r}"
            here, there = ("categories", "numbers") if column in data.categories else ("numbers", "categories")
            raise ValueError(
                f"{name} holds {here} and the model was trained on {there} there; expected the same; convert the column, or name it "
                "in data.categorical (categorical= in Python) in training"
            )
        return replace(self, source=data.categories)

    @property
    def columns(self) -> int:
        """Number of features a document must have."""
        return len(self.arrays["low"])

    @property
    def indicators(self) -> NDArray[np.int64]:
        """The features, rising, that have an indicator of missing values."""
        return self.arrays.get("indicators", np.empty(0, np.int64))

    @property
    def inputs(self) -> int:
        """Number of columns that `apply` gives: a model's inputs."""
        return self.columns + len(self.indicators)

    @property
    def codes(self) -> dict[int, int]:
        """By column of categories, how many codes `apply` gives: its levels, one for unknown and one for missing values."""
        return {column: len(texts) + 2 for column, texts in self.levels.items()}

    def apply(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Scaled features and, after them, indicators of missing values, as a new float32 array [N, inputs]."""
        features = np.asarray(features)
        if features.ndim != 2 or features.shape[1] != self.columns:
            raise ValueError(
                f"cannot scale an array of shape {list(features.shape)}; expected [documents, {self.columns}], the "
                "features this scaling was fitted on"
            )
        scaled = np.empty((len(features), self.inputs), np.float32)
        curve = _interpolated if self.kind == "quantile" else _standardised
        source = self.levels if self.source is None else self.source
        codes = {column: code_map(source[column], levels) for column, levels in self.levels.items()}
        step = max(1, min(BLOCK, WIDE_BLOCK // self.columns))
        for start in range(0, len(features), step):
            rows = slice(start, start + step)
            x = _tame(features[rows].astype(np.float64), self.arrays["low"], self.arrays["high"])
            missing = np.isnan(x)
            if missing.any():
                scaled[rows, : self.columns] = np.where(missing, 0.0, curve(np.where(missing, 0.0, x), self.arrays))
            else:
                scaled[rows, : self.columns] = curve(x, self.arrays)
            scaled[rows, self.columns :] = missing[:, self.indicators]
            for column, levels in self.levels.items():
                scaled[rows, column] = _model_codes(x[:, column], len(levels), codes[column])
        return scaled

    def beside(self, other: Scaling) -> Scaling:
        """The scaling of these columns and, after them, those of another one; both by quantiles, or neither."""
        first = self.columns
        arrays = {
            name: np.concatenate([self.arrays[name], other.arrays[name]])
            for name in self.arrays
            if name not in ("starts", "indicators")
        }
        if "starts" in self.arrays:
            arrays["starts"] = np.concatenate(
                [self.arrays["starts"], self.arrays["starts"][-1] + other.arrays["starts"][1:]]
            )
        indicators = np.concatenate([self.indicators, first + other.indicators]).astype(np.int64)
        levels = {**self.levels, **{first + column: texts for column, texts in other.levels.items()}}
        return Scaling(self.kind, arrays | ({"indicators": indicators} if indicators.size else {}), levels)

    def apply_entries(self, background: NDArray[np.float32], entries: Entries, rows: int) -> NDArray[np.float32]:
        """`apply` of sparse rows, to the same bits: `background` [1, inputs] is that of a row without entries."""
        place, columns, values = entries
        scaled = np.repeat(background, rows, 0)
        low, high = self.arrays["low"][columns], self.arrays["high"][columns]
        x = _tame(values.astype(np.float64)[None], low, high)  # entries as a row of columns of their own
        missing = np.isnan(x)
        x = np.where(missing, 0.0, x)
        if self.kind == "quantile":
            y = _interpolated_entries(x, columns, self.arrays)
        else:
            y = _standardised(x, {name: self.arrays[name][columns] for name in STANDARD_ARRAYS})
        scaled[place, columns] = np.where(missing, 0.0, y)[0]
        if len(self.indicators):
            which = np.searchsorted(self.indicators, columns).clip(max=len(self.indicators) - 1)
            has = self.indicators[which] == columns
            scaled[place[has], self.columns + which[has]] = missing[0, has]
        return scaled

    def to_state(self) -> dict[str, NDArray[Any]]:
        """Plain arrays by name, for safetensors or .npz; the kind is among them as its UTF-8 bytes, and categories as JSON."""
        texts = {"kind": self.kind} | ({"categories": json.dumps(dict(self.levels))} if self.levels else {})
        return {name: np.frombuffer(text.encode(), np.uint8).copy() for name, text in texts.items()} | dict(self.arrays)

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]]) -> Scaling:
        """The scaling that `to_state` was called on; a state with other names, types or shapes is refused."""
        arrays = {name: np.asarray(array) for name, array in state.items() if name not in ("kind", "categories")}
        letters = np.asarray(state.get("kind", ()))
        kind = bytes(letters).decode(errors="replace") if letters.dtype == np.uint8 else "?"
        expected = {"low", "high"} | (QUANTILE_ARRAYS if kind == "quantile" else STANDARD_ARRAYS)
        if kind not in KINDS or set(arrays) - {"indicators"} != expected:
            raise ValueError(
                f"a state of kind {kind!r} with {', '.join(sorted(arrays)) or 'no arrays'} is not a scaling; expected "
                "what Scaling.to_state returned; fit the scaling again"
            )
        columns = arrays["low"].size
        shapes = dict.fromkeys(arrays, (columns,))
        if kind == "quantile":
            starts = arrays["starts"]
            rising = starts.dtype.kind in "iu" and starts.ndim == 1 and len(starts) > 1 and starts[0] == 0
            nodes = int(starts[-1]) if rising and (np.diff(starts) > 0).all() else -1
            shapes |= {"starts": (columns + 1,), "nodes": (nodes,), "scores": (nodes,)}
        if "indicators" in arrays:
            of = arrays["indicators"]
            places = of.dtype.kind in "iu" and of.ndim == 1 and (np.diff(of) > 0).all()
            good = places and of.size and of[0] >= 0 and of[-1] < columns
            shapes["indicators"] = of.shape if good else (-1,)
        for name, shape in shapes.items():
            if arrays[name].shape != shape or arrays[name].dtype.kind not in "fiu":
                raise ValueError(
                    f"the state's {name} is {arrays[name].dtype} of shape {list(arrays[name].shape)}, which does not "
                    f"fit {columns} columns; expected what Scaling.to_state returned; fit the scaling again"
                )
        levels = parsed_json(bytes(np.asarray(state["categories"]))) if "categories" in state else {}
        return cls(kind, arrays, {int(column): tuple(texts) for column, texts in levels.items()})


STANDARD_ARRAYS = {"sign", "curve", "unit", "mean", "factor", "limit"}
QUANTILE_ARRAYS = {"nodes", "scores", "starts"}


def fit_scaling(train: RankingDataset, kind: str = "auto") -> Scaling:
    """Fit a scaling on the train split.

    - `train`: the lists to fit on.
    - `kind`: how each column is transformed:

      - "auto": log(x + unit) for heavy-tailed columns without negative values, the symmetric sign(x) log(1 + |x| /
        unit) for other heavy-tailed ones, the rest as they are; then standardised and cut at 10 deviations. The unit
        is taken from the column: its lowest tenth of positive values, or its median size.
      - "web30k": the transform of the NeuralNDCG paper for MSLR-WEB30K's 136 features.
      - "symlog": sign(x) log(1 + |x|), standardised.
      - "standard": standardised.
      - "quantile": the normal score of the value's mid-rank among the train values, interpolated.
      - "quantile_auto": "quantile", or "standard" where nearly all columns lie in [0, 1] already, as those do that were
        normalised within each query, and quantiles over queries would only blur that.
      - "none": as they are.
    """
    if kind not in KINDS:
        raise ValueError(f"there is no scaling {kind!r}; expected one of {', '.join(KINDS)}")
    features, levels = train.features, _usual_levels(train)
    columns = features.shape[1]
    if kind == "web30k" and columns != WEB30K_FEATURES:
        raise ValueError(
            f"the scaling 'web30k' is for MSLR-WEB30K's {WEB30K_FEATURES} features and the data has {columns}; "
            "use 'auto'"
        )
    low, high, missing = _ordinary_range(features)
    numbers = np.array([column not in levels for column in range(columns)])
    missing &= numbers  # a missing category has a code of its own
    indicators: dict[str, NDArray[Any]] = {"indicators": np.flatnonzero(missing)} if missing.any() else {}
    if kind == "none":
        high = np.full(columns, MAX_FLOAT32)
        return Scaling(kind, {"low": -high, "high": high, **_curves(columns), **indicators}, levels)
    if kind == "quantile_auto":
        in_unit = ((low >= 0) & (high <= 1))[numbers]
        kind = "standard" if not in_unit.size or np.mean(in_unit) >= UNIT_SHARE else "quantile"
    if kind == "quantile":
        table = _quantile_table(_sampled_columns(features, low, high))
        return Scaling(kind, {"low": low, "high": high, **table, **indicators}, levels)
    curves = _curves(columns)
    if kind == "symlog":
        curves["curve"][:] = SYMLOG
    elif kind == "web30k":
        curves["sign"][list(WEB30K_NEGATED)] = -1
        least = np.minimum(low * curves["sign"], high * curves["sign"])
        curves["curve"][:] = np.where(least < 0, AS_IS, LOG)
        curves["curve"][list(WEB30K_LINEAR)] = AS_IS
        curves["unit"][:] = 0.01
    elif kind == "auto":
        curves["limit"][:] = AUTO_LIMIT
        for column, sample in enumerate(_sampled_columns(features, low, high)):
            curves["curve"][column], curves["unit"][column] = _curve_by_tail(sample, low[column])
    mean, deviation = _moments(features, low, high, curves)
    varies = (high > low) & (deviation > 0)
    spread = np.where(varies, deviation + (1e-6 if kind == "web30k" else 0.0), 1.0)
    curves |= {"mean": mean, "factor": np.where(varies, 1 / spread, 0.0)}
    return Scaling(kind, {"low": low, "high": high, **curves, **indicators}, levels)


def codes_of(scaled: RankingDataset) -> dict[int, int]:
    """`Scaling.codes` of a scaled dataset."""
    return {column: len(texts) + 2 for column, texts in scaled.categories.items()}


def _blocks(features: Features) -> Iterator[tuple[slice, Floats]]:
    """Consecutive rows in float64."""
    step = max(1, min(BLOCK, WIDE_BLOCK // features.shape[1]))
    for start in range(0, len(features), step):
        rows = slice(start, start + step)
        yield rows, features[rows].astype(np.float64)


def _usual_levels(train: RankingDataset) -> dict[int, tuple[str, ...]]:
    """By column of categories the texts, sorted, that are not rare in the train split."""
    counts = {column: np.zeros(len(texts), np.int64) for column, texts in train.categories.items()}
    for _, x in _blocks(train.features) if counts else ():
        for column, count in counts.items():
            codes = x[:, column]
            known = (codes >= 0) & (codes < len(count))
            count += np.bincount(codes[known].astype(np.int64), minlength=len(count))
    return {
        column: tuple(sorted(np.array(train.categories[column], object)[count >= RARE]))
        for column, count in counts.items()
    }


def _model_codes(x: Floats, levels: int, places: NDArray[np.int64]) -> Floats:
    """Codes of a model from those of a dataset, whose `places` among the model's levels are known: -1 is none of them."""
    known = (x >= 0) & (x < len(places))
    place = np.append(places, -1)[np.where(known, x, len(places)).astype(np.int64)]
    return np.where(np.isnan(x), levels + 1, np.where(place < 0, levels, place))


def _sampled_columns(features: Features, low: Floats, high: Floats) -> Iterator[Floats]:
    """Column after column, tamed, of documents that are evenly spaced; never many columns of all of them at once."""
    rows = np.linspace(0, len(features) - 1, min(len(features), SAMPLE)).astype(np.int64)
    step = max(1, WIDE_BLOCK // len(rows))
    for first in range(0, features.shape[1], step):
        end = min(first + step, features.shape[1])
        block = column_block(features, rows, first, end)
        for column in range(first, end):
            yield _tame(block[:, column - first].astype(np.float64), low[column], high[column])


def _ordinary_range(features: Features) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Smallest and largest value of each column [F] apart from missing and absurd ones, 0 and 0 where none is left; which miss any."""
    low = np.full(features.shape[1], np.inf)
    high = np.full(features.shape[1], -np.inf)
    missing = np.zeros(features.shape[1], np.bool_)
    for _, x in _blocks(features):
        missing |= np.isnan(x).any(0)
        x[~(np.abs(x) < ABSURD)] = np.nan
        low, high = np.fmin(low, np.fmin.reduce(x)), np.fmax(high, np.fmax.reduce(x))
    known = high >= low
    return np.where(known, low, 0.0), np.where(known, high, 0.0), missing


def _tame(x: Floats, low: Any, high: Any) -> Floats:
    """Absurd values replaced by the end of the ordinary range, [F] or of one column, that they exceed."""
    if np.abs(x).max(initial=0.0) < ABSURD:  # of nearly all documents; not of NaN, which compares as false
        return x
    x = np.where(x >= np.maximum(ABSURD, high), high, x)
    return np.where(x <= np.minimum(-ABSURD, low), low, x)


def _curves(columns: int) -> dict[str, NDArray[Any]]:
    """Parameters [F] that change nothing."""
    return {
        "sign": np.ones(columns),
        "curve": np.full(columns, AS_IS, np.int8),
        "unit": np.ones(columns),
        "mean": np.zeros(columns),
        "factor": np.ones(columns),
        "limit": np.full(columns, MAX_FLOAT32),
    }


def _curved(x: Floats, p: Mapping[str, NDArray[Any]]) -> Floats:
    x = x * p["sign"]
    log, symlog = np.flatnonzero(p["curve"] == LOG), np.flatnonzero(p["curve"] == SYMLOG)
    if len(log):
        x[:, log] = np.log(np.maximum(x[:, log], 0.0) + p["unit"][log])
    if len(symlog):
        x[:, symlog] = np.sign(x[:, symlog]) * np.log1p(np.abs(x[:, symlog]) / p["unit"][symlog])
    return x


def _standardised(x: Floats, p: Mapping[str, NDArray[Any]]) -> Floats:
    return np.clip((_curved(x, p) - p["mean"]) * p["factor"], -p["limit"], p["limit"])


def _moments(features: Features, low: Floats, high: Floats, p: Mapping[str, NDArray[Any]]) -> tuple[Floats, Floats]:
    """Mean and population deviation [F] of the curved columns, blocks merged as in Chan et al. 1979."""
    count, mean, squares = np.zeros((3, features.shape[1]))
    for _, x in _blocks(features):
        x = _curved(_tame(x, low, high), p)
        known = ~np.isnan(x)
        n = known.sum(0)
        block_mean = np.where(known, x, 0.0).sum(0) / np.maximum(n, 1)
        block_squares = (np.where(known, x - block_mean, 0.0) ** 2).sum(0)
        total = np.maximum(count + n, 1)
        step = block_mean - mean
        squares += block_squares + step**2 * count * n / total
        mean += step * n / total
        count += n
    return mean, np.sqrt(squares / np.maximum(count, 1))


def _curve_by_tail(x: Floats, low: float) -> tuple[int, float]:
    """The curve and unit that `auto` takes for a column, from a sample of it and its smallest value."""
    x = x[~np.isnan(x)]
    centred = x - x.mean() if len(x) else x
    variance = (centred**2).mean() if len(x) else 0.0
    if variance == 0 or np.square(np.square(centred / np.sqrt(variance))).mean() < HEAVY:
        return AS_IS, 1.0
    if low >= 0:
        return LOG, float(np.quantile(x[x > 0], 0.1))
    return SYMLOG, float(np.median(np.abs(x[x != 0])))


def _quantile_table(columns: Iterable[Floats]) -> dict[str, NDArray[Any]]:
    """Distinct quantiles of every column with their normal scores, one column after the other."""
    grid = np.linspace(0, 1, QUANTILES)
    nodes, scores = [], []
    for x in columns:
        x = x[~np.isnan(x)]
        values, place = np.unique(np.quantile(x, grid) if len(x) else [0.0], return_inverse=True)
        place = place.reshape(-1)
        mid_rank = np.bincount(place, grid[: len(place)]) / np.bincount(place)
        mid_rank = np.clip(mid_rank, 0.5 / QUANTILES, 1 - 0.5 / QUANTILES)
        nodes.append(values)
        scores.append([NormalDist().inv_cdf(q) if len(values) > 1 else 0.0 for q in mid_rank])
    starts = np.cumsum([0, *map(len, nodes)])
    return {"nodes": np.concatenate(nodes), "scores": np.concatenate(scores), "starts": starts}


def _interpolated(x: Floats, p: Mapping[str, NDArray[Any]]) -> Floats:
    y = np.empty_like(x)
    for column, (start, end) in enumerate(zip(p["starts"][:-1], p["starts"][1:])):
        y[:, column] = np.interp(x[:, column], p["nodes"][start:end], p["scores"][start:end])
    return y


def _interpolated_entries(x: Floats, columns: NDArray[np.int64], p: Mapping[str, NDArray[Any]]) -> Floats:
    """The same of entries [1, E] of columns [E]."""
    y, order = np.empty_like(x), np.argsort(columns, kind="stable")
    for entries in np.split(order, np.flatnonzero(np.diff(columns[order])) + 1) if len(order) else ():
        start, end = p["starts"][columns[entries[0]]], p["starts"][columns[entries[0]] + 1]
        y[0, entries] = np.interp(x[0, entries], p["nodes"][start:end], p["scores"][start:end])
    return y
