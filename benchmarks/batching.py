"""Our batches against the usual way: a DataLoader that takes list after list and pads them with pad_sequence.

    python benchmarks/batching.py [--device cuda] [--queries 4000] [--features 136]

Lists have Web30K-like lengths (log-normal, mean 120, at most 1,251). Both sides shuffle, subsample long lists to
--list-size, pad, and deliver features, labels and mask on the device; ours also makes sure of a relevant document
and puts lists of similar length together. A time is that of a whole epoch, the best of --repeats, the two sides
taken in turns; documents are real ones, not padding. Needs torch and numpy only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from rankgrad.data import RankingDataset, batches


def web30k_like(queries: int, features: int) -> RankingDataset:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(np.log(120) - 0.62**2 / 2, 0.62, queries)), 1, 1251).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    labels = rng.choice(5, offsets[-1], p=[0.52, 0.32, 0.13, 0.02, 0.01])
    return RankingDataset(rng.random((offsets[-1], features), dtype=np.float32), labels, offsets, np.arange(queries))


class Lists(Dataset):  # type: ignore[type-arg]
    """One list at a time, as most learning-to-rank code has it."""

    def __init__(self, dataset: RankingDataset, list_size: int | None) -> None:
        self.features, self.labels, offsets = dataset.tensors()
        self.offsets, self.list_size = offsets.tolist(), list_size

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, query: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = self.offsets[query : query + 2]
        if self.list_size is None or end - begin <= self.list_size:
            return self.features[begin:end], self.labels[begin:end]
        drawn = torch.randperm(end - begin)[: self.list_size] + begin
        return self.features[drawn], self.labels[drawn]


def padded(lists: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    features = pad_sequence([features for features, _ in lists], batch_first=True)
    labels = pad_sequence([labels for _, labels in lists], batch_first=True)
    mask = pad_sequence([torch.ones(len(labels), dtype=torch.bool) for _, labels in lists], batch_first=True)
    return features, labels, mask


def measure(epoch: Callable[[], Iterable[torch.Tensor]], device: str) -> tuple[float, int, int]:
    """Seconds, real documents and padded slots of an epoch; counted on the device, asked for once."""
    begin = time.perf_counter()
    real, slots = torch.zeros((), dtype=torch.int64, device=device), 0
    for mask in epoch():
        real += mask.sum()
        slots += mask.numel()
    documents = int(real)
    return time.perf_counter() - begin, documents, slots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--queries", type=int, default=4000)
    parser.add_argument("--features", type=int, default=136)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--list-size", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    dataset = web30k_like(args.queries, args.features)
    usual = DataLoader(Lists(dataset, args.list_size), batch_size=args.batch_size, shuffle=True, collate_fn=padded)

    def ours() -> Iterable[torch.Tensor]:
        made = batches(dataset, args.batch_size, list_size=args.list_size, device=args.device)
        return (batch.mask for batch in made)

    def theirs() -> Iterable[torch.Tensor]:
        return ([part.to(args.device) for part in batch][2] for batch in usual)

    sides = {"DataLoader + pad_sequence": theirs, "rankgrad batches": ours}
    for epoch in sides.values():
        measure(epoch, args.device)  # warm up: page cache, allocator, the move to the device
    runs = [{name: measure(epoch, args.device) for name, epoch in sides.items()} for _ in range(args.repeats)]
    best = {name: min(run[name] for run in runs) for name in sides}
    print(f"{dataset}, batches of {args.batch_size} lists of at most {args.list_size}")
    name = torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "CPU"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {name}\n")
    print(f"{'':<28}{'seconds':>9}{'documents/s':>15}{'padding':>10}")
    for name, (seconds, documents, slots) in best.items():
        print(f"{name:<28}{seconds:>9.3f}{documents / seconds:>15,.0f}{1 - documents / slots:>10.1%}")
    (theirs_s, _, _), (ours_s, _, _) = best.values()
    print(f"\nrankgrad is {theirs_s / ours_s:.1f} times as fast")


if __name__ == "__main__":
    main()
