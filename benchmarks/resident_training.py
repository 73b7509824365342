"""Training on data in memory by two versions of the library: CPU seconds of an epoch, and their ratio.

    python benchmarks/resident_training.py OLD/src NEW/src [--rounds 5]

Each round starts a process with either version, in turn, on one thread, and takes five epochs after a first; the ratio is that of the medians. `read` is the new
version made to read and scale every batch, as it does where memory is too small.
"""

import argparse
import os
import statistics
import subprocess
import sys

CHILD = """
import sys, time, torch
from rankgrad.training.config import Config, Data, Loss, Members, Model, Train
from rankgrad.training.build import make_objectives, make_state
from rankgrad.training.data import load_splits
from rankgrad.training.loop import Epoch, train
torch.set_num_threads(1)
if sys.argv[2] == "read":
    import rankgrad.data.memory
    rankgrad.data.memory.free_bytes = lambda: 0
of = {"mlp": Config(model=Model(kind="mlp")), "transformer": Config(model=Model(width=32, feedforward=64)),
      "members": Config(model=Model(kind="mlp", hidden=(64,)), members=Members(count=8, keep=4))}[sys.argv[1]]
config = Config(Data("synthetic:small"), of.model, Loss("softmax"), of.optimiser, of.members, Train(epochs=6, device="cpu", threads=1))
splits, *_ = load_splits(config)
torch.manual_seed(0)
state = make_state(config, splits["train"], torch.device("cpu"))
begun, times = time.process_time(), []
for event in train(state, make_objectives(config), splits["train"], splits["vali"], config, torch.device("cpu")):
    if isinstance(event, Epoch):
        times.append(time.process_time() - begun)
        begun = time.process_time()
print(*times[1:])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{'model':<14}{'old s':>8}{'new s':>8}{'new / old':>12}{'read s':>9}{'read / new':>12}")
    for model in ("mlp", "transformer", "members"):
        seconds: dict[str, list[float]] = {"old": [], "new": [], "read": []}
        for _ in range(options.rounds):
            for version, found in seconds.items():
                source = options.old if version == "old" else options.new
                environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-c", CHILD, model, version]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found.extend(map(float, done.stdout.split()))
        old, new, read = (statistics.median(found) for found in seconds.values())
        print(f"{model:<14}{old:>8.2f}{new:>8.2f}{new / old:>12.3f}{read:>9.2f}{read / new:>12.2f}", flush=True)


if __name__ == "__main__":
    main()
