"""The weights of a trained ranker as the start of a new run on other lists, as one goes on from month to month.

Weights are of use with the features they were learned from alone, so the lists are brought into their form: columns by name, in
the order of old, scaled as they were then. A column that has gone is refused. One that is new comes last; it is scaled by what the
new lists show and begins with weight zero, so that the first scores are those of the old ranker.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rankgrad.data.dataset import RankingDataset
from rankgrad.data.scaling import Scaling, fit_scaling
from rankgrad.files import pack, unpack
from rankgrad.models import INPUTS, SharedMLP, SharedTransformer
from rankgrad.training import distributed
from rankgrad.training.members import MemberState
from rankgrad.training.state import TrainState, under

MEMBERS = "members"  # the name of the weights of all members together


@dataclass(frozen=True)
class Start:
    """What a new run takes over of a ranker."""

    weights: Mapping[str, Tensor]  # of a network by name; of members [K, P] under MEMBERS
    scaling: Scaling
    names: tuple[str, ...] | None  # of the features
    source: str  # where it lay, for messages

    def packed(self) -> bytes:
        """As the bytes of a file."""
        scaling = {f"scaling.{name}": torch.from_numpy(np.array(a)) for name, a in self.scaling.to_state().items()}
        weights = {f"model.{name}": tensor for name, tensor in self.weights.items()}
        return pack(weights | scaling, {"feature_names": self.names, "source": self.source})

    @classmethod
    def unpacked(cls, content: bytes, name: str) -> "Start":
        """What `packed` gave."""
        tensors, facts = unpack(content, name)
        scaling = Scaling.from_state({key: tensor.numpy() for key, tensor in under(tensors, "scaling.").items()})
        names = None if facts["feature_names"] is None else tuple(facts["feature_names"])
        return cls(under(tensors, "model."), scaling, names, facts["source"])

    def in_order(self, data: RankingDataset) -> RankingDataset:
        """The same lists with the columns of old first, in their order, and then those that are new."""
        old, new, columns = self.names, data.feature_names, data.features.shape[1]
        if old is None or new is None:
            if columns != self.scaling.columns:
                raise ValueError(
                    f"the data have {columns} features, {self.source} was trained on {self.scaling.columns}, and without names of "
                    "both there is no telling which is which; expected as many; give it tables with named columns"
                )
            return data
        gone = [name for name in old if name not in new]
        if gone:
            raise ValueError(
                f"{self.source} was trained on columns that the data lack: {', '.join(gone)}; expected all of them, under the same "
                "names; add them (missing values are fine), or train anew without --init"
            )
        order = [new.index(name) for name in (*old, *(name for name in new if name not in old))]
        if order == list(range(columns)):
            return data
        categories = {order.index(column): texts for column, texts in data.categories.items()}
        features = np.ascontiguousarray(np.asarray(data.features)[:, order])
        names = tuple(new[column] for column in order)
        return dataclasses.replace(data, features=features, feature_names=names, categories=categories)

    def new_columns(self, data: RankingDataset) -> tuple[str, ...]:
        """The names of those that lists `in_order` have more."""
        return (data.feature_names or ())[self.scaling.columns :]

    def scaling_for(self, train: RankingDataset) -> Scaling:
        """That of old, and for new columns one that is fitted on lists `in_order`."""
        first, names = self.scaling.columns, self.new_columns(train)
        if not names:
            return self.scaling
        texts = [name for column, name in enumerate(names, first) if column in train.categories]
        if texts:
            raise ValueError(
                f"the columns {', '.join(texts)} hold categories that {self.source} was not trained on; expected numbers in new "
                "columns; leave them out with data.ignore, or train anew without --init"
            )
        kind = "auto" if self.scaling.kind == "web30k" else self.scaling.kind
        features = np.asarray(train.features)[:, first:]
        alone = dataclasses.replace(train, features=features, feature_names=names, categories={})
        return self.scaling.beside(fit_scaling(alone, kind))

    def give(self, state: TrainState | MemberState, scaling: Scaling, inputs: str) -> None:
        """Put the weights into what is to be trained on lists of a scaling that `scaling_for` gave."""
        with torch.no_grad():
            if isinstance(state, MemberState):
                self._give_members(state, scaling, inputs)
            elif MEMBERS in self.weights:
                self._refuse(f"it has {len(self.weights[MEMBERS])} members, and the new run is of one network")
            else:
                state.model.load_state_dict(self._fitting(state.model, scaling, inputs))

    def _fitting(self, model: nn.Module, scaling: Scaling, inputs: str) -> dict[str, Tensor]:
        """The weights in the shapes of a model that may have more columns."""
        fresh = model.state_dict()
        if fresh.keys() != self.weights.keys():
            self._refuse("it is of another kind")
        before, after, places = self._places(scaling, INPUTS[inputs], model)
        if before != after and not hasattr(model, "document"):
            self._refuse("columns that are new cannot be given weight 0 in a network of your own")
        # Signs that weights are multiplied with: zero beside zero weights, they would never learn.
        drawn = model.vectors() if isinstance(model, SharedMLP | SharedTransformer) else ()
        signs = {name for name, parameter in model.named_parameters() if any(parameter is vector for vector in drawn)}
        fitted = {}
        for name, tensor in fresh.items():
            old = self.weights[name].to(tensor)
            if old.shape != tensor.shape:
                differ = [dim for dim, sizes in enumerate(zip(old.shape, tensor.shape)) if sizes == (before, after)]
                expected = [*old.shape[: differ[0]], after, *old.shape[differ[0] + 1 :]] if differ else None
                if before == after or expected != list(tensor.shape):
                    self._refuse(f"{name} has the shape {list(old.shape)} there, and {list(tensor.shape)} here")
                wider = tensor.clone() if name in signs else torch.zeros_like(tensor)
                old = wider.index_copy(differ[0], places.to(tensor.device), old)
            fitted[name] = old
        return fitted

    def _give_members(self, state: MemberState, scaling: Scaling, inputs: str) -> None:
        model, (rank, world) = state.model, distributed.place()
        if MEMBERS not in self.weights:
            self._refuse("it is one network, and the new run has members")
        total = int(distributed.sum_over_processes(len(model.weights)))
        every = self.weights[MEMBERS]
        if len(every) != total:
            self._refuse(f"it has {len(every)} members, and the new run {total}")
        old = every[rank::world].to(model.weights)
        before, after, places = self._places(scaling, INPUTS[inputs], model)
        hidden = model.shapes[0][1]
        if old.shape[1] - before * hidden != model.weights.shape[1] - after * hidden:
            self._refuse(f"a member has {old.shape[1]} weights there, and {model.weights.shape[1]} here")
        first = old.new_zeros(len(old), after, hidden)
        first = first.index_copy(1, places.to(old.device), old[:, : before * hidden].view(len(old), before, hidden))
        model.weights.copy_(torch.cat([first.flatten(1), old[:, before * hidden :]], 1))
        state.best.copy_(model.weights)

    def _places(self, scaling: Scaling, blocks: int, model: Any) -> tuple[int, int, Tensor]:
        """How many inputs the first layer had and has, and where the old ones are now.

        They are the numbers, once or also relative to the list, and then vectors of categories; numbers are columns, then
        indicators of missing values.
        """
        old, new, added = self.scaling.inputs, scaling.inputs, scaling.columns - self.scaling.columns
        categories = len(self.scaling.levels)
        old, new = old - categories, new - categories
        columns = self.scaling.columns - categories
        numbers = [place if place < columns else place + added for place in range(old)]
        vectors = model.document.embedding if hasattr(model, "document") else 0
        places = [block * new + place for block in range(blocks) for place in numbers]
        places += [blocks * new + place for place in range(vectors)]
        return blocks * old + vectors, blocks * new + vectors, torch.tensor(places, dtype=torch.int64)

    def _refuse(self, why: str) -> None:
        raise ValueError(
            f"the weights of {self.source} do not fit the new run: {why}; expected [model] and [members] as they are in its "
            "config.toml; leave them as they are there, or train anew without --init"
        )
