"""Steps recorded as CUDA graphs and replayed: one call of the host instead of a thousand launches.

A step that cannot be recorded is computed as it is, and `reason` says why; where it was asked for by name (`required`) that
is a ValueError. A graph repeats the same kernels on the same memory, so what changes from step to step comes in through tensors
of its own, and there is one graph for each shape. Random numbers are those the generators give when a graph is replayed,
the same as without it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class GraphInputs:
    """The tensors a graph reads, for one shape of batch, and once it is recorded the graph and what it leaves."""

    def __init__(self, batch: Any) -> None:
        self.inputs = [part.clone() for part in batch if isinstance(part, Tensor)]
        left = iter(self.inputs)
        self.batch = batch._make(next(left) if isinstance(part, Tensor) else part for part in batch)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output = torch.empty(0)

    def fill(self, batch: Any) -> None:
        """Take another batch of this shape."""
        torch._foreach_copy_(self.inputs, [part for part in batch if isinstance(part, Tensor)], non_blocking=True)


class GraphedStep:
    """function(batch) -> tensor, recorded the second time a shape comes and then replayed; a batch is a named tuple.

    The first time it is computed as it is: whatever is compiled or allocated once is so by then. The output is overwritten by
    the next call.
    """

    def __init__(
        self,
        function: Callable[[Any], Tensor],
        generators: Sequence[torch.Generator],
        device: torch.device,
        *,
        required: bool = False,
    ) -> None:
        self.reason = ""
        self._required = required
        self._function, self._generators = function, generators
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._by_shape: dict[Any, GraphInputs] = {}

    def __call__(self, batch: Any) -> Tensor:
        """Compute, record, or replay."""
        key = tuple(part.shape if isinstance(part, Tensor) else part for part in batch)
        slot = self._by_shape.get(key)
        if slot is None:
            slot = self._by_shape[key] = GraphInputs(batch)
            return self._compute(slot)
        slot.fill(batch)
        if slot.graph is None and not self.reason:
            self._record(slot)
        if slot.graph is None:
            return self._compute(slot)
        slot.graph.replay()
        return slot.output

    def _compute(self, slot: GraphInputs) -> Tensor:
        """On the stream that records: what autograd remembers of streams must fit the recording."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            output = self._function(slot.batch)
        here.wait_stream(self._stream)
        return output

    def _record(self, slot: GraphInputs) -> None:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        try:
            # thread_local: a thread that pins the next batches meanwhile must not break the recording
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                slot.output = self._function(slot.batch)
        except RuntimeError as error:
            cause = error.__context__ or error  # the end of a broken recording is an error of its own
            self.reason = f"the step cannot be recorded: {_first_line(cause)}"
            own = torch.cuda.default_generators[self._stream.device_index]  # torch records it unasked
            for generator in {own, *self._generators}:  # their states still wait for the end of the recording
                generator.graphsafe_set_state(generator.clone_state())
            torch.cuda.synchronize()
            if self._required:
                raise ValueError(f"train.graph = true: {self.reason}; say 'auto' or false") from error
        else:
            slot.graph = graph


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
