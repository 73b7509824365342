"""Each loss, textbook against torch path against kernel: time, peak memory, ratio, in one run.

    python benchmarks/losses.py [--device cpu] [--threads 1] [--repeats 5] [--busy]
    python benchmarks/losses.py [--device cuda] [--lists 64] [--length 240] [--losses neural_ndcg ...]

On the CPU: NeuralNDCG, forward+backward, a fresh process for each row, the growth of its memory at the peak; the smallest CPU
time and the median wall time of the repeats. --busy: the wall time again while other processes keep every core busy, by each path and
in as many threads as there are cores, beside the same without them. On a GPU: every loss that has a kernel; `graph` is a
captured CUDA graph replayed back to back, `eager` a call from Python until the device is done, both medians, and memory is
the peak beyond the inputs.

The textbook is the formula as it reads: [B, L, L] tensors, for NeuralNDCG one per half-round of Sinkhorn, and autograd back
through all of them. All sides run 30 rounds without early stop, but for the row that says so. Nothing is printed if value or
gradient disagree, or if NeuralNDCG's gradient is off by more than 1e-4 from the float64 textbook.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from rankgrad.losses import LOSSES

ROUNDS = 30
TEXTBOOK_ROUNDS = {"sinkhorn_iters": ROUNDS, "sinkhorn_tol": 0.0}
NDCG = ("neural_ndcg", "neural_ndcg_transposed")
NAMES = (*NDCG, "neural_map", "ranknet", "lambdarank", "ndcg_loss1", "ndcg_loss2", "ndcg_loss2pp", "approx_ndcg")


def scaled_sort(scores, mask=None, *, transposed=False, tau=1.0):
    """NeuralSort's matrix, scaled, for lists of equal length or padded ones."""
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    apart = (scores[:, :, None] - scores[:, None, :]).abs()
    if mask is None:
        n = torch.full_like(scores[:, :1], scores.shape[-1])
        logits = ((n + 1 - 2 * ranks)[:, :, None] * scores[:, None, :] - apart.sum(-1)[:, None, :]) / tau
        matrix = torch.softmax(logits, -1)
    else:
        n = mask.sum(-1, keepdim=True).to(scores.dtype)
        b = torch.where(mask[:, :, None] & mask[:, None, :], apart, 0.0).sum(-1)
        logits = ((n + 1 - 2 * ranks)[:, :, None] * scores[:, None, :] - b[:, None, :]) / tau
        matrix = torch.softmax(logits.masked_fill(~mask[:, None, :], -1e30), -1) * (ranks <= n)[:, :, None]
    matrix = matrix.mT if transposed else matrix
    for _ in range(ROUNDS):
        for dim in (-2, -1):
            sums = matrix.sum(dim, keepdim=True)
            matrix = matrix / (sums if mask is None else sums + (sums == 0))
    return matrix.mT if transposed else matrix


def textbook_neural_ndcg(scores, labels, mask=None, *, transposed=False, tau=1.0):
    """NeuralNDCG as the formula reads."""
    matrix = scaled_sort(scores, mask, transposed=transposed, tau=tau)
    gains, discounts, best = ideal(scores, labels, mask)
    return -((torch.bmm(matrix, gains[:, :, None])[:, :, 0] * discounts).sum(-1) / best).mean()


def textbook_ranknet(scores, labels):
    gap = scores[:, :, None] - scores[:, None, :]
    above = labels[:, :, None] > labels[:, None, :]
    return torch.where(above, torch.nn.functional.softplus(-gap), 0.0).sum((-1, -2)).mean()


def weighted_pairs(scores, labels, weigh):
    """LambdaRank and its kin: RankNet's pairs times |G_i - G_j| times what `weigh` makes of the discounts and the current ranks."""
    gains, discounts, best = ideal(scores, labels)
    ranks = scores.detach().argsort(descending=True, stable=True).argsort()
    gap = scores[:, :, None] - scores[:, None, :]
    above = labels[:, :, None] > labels[:, None, :]
    weights = (gains[:, :, None] - gains[:, None, :]).abs() * weigh(discounts, ranks)
    losses = torch.where(above, weights * torch.nn.functional.softplus(-gap), 0.0)
    return (losses.sum((-1, -2)) / best).mean()


def by_discount(discounts, ranks):
    current = discounts[ranks]
    return (current[:, :, None] - current[:, None, :]).abs()


def by_distance(discounts, ranks):
    """d(m) - d(m + 1) for ranks m apart; a document's pair with itself does not count."""
    apart = torch.arange(1, len(discounts) + 1, device=ranks.device)
    steps = 1 / torch.log2(apart + 1.0) - 1 / torch.log2(apart + 2.0)
    return steps[((ranks[:, :, None] - ranks[:, None, :]).abs() - 1).clamp(min=0)]


def textbook_ndcg_loss1(scores, labels):
    gains, discounts, best = ideal(scores, labels)
    current = discounts[scores.detach().argsort(descending=True, stable=True).argsort()]
    gap = scores[:, :, None] - scores[:, None, :]
    losses = (gains * current)[:, :, None] * torch.nn.functional.softplus(-gap)
    others = ~torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    return (torch.where(others, losses, 0.0).sum((-1, -2)) / best).mean()


def textbook_neural_map(scores, labels):
    relevant = (labels >= 1).to(scores.dtype)
    q = torch.bmm(scaled_sort(scores), relevant[:, :, None])[:, :, 0]
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device)
    return -((q / ranks * q.cumsum(-1)).sum(-1) / relevant.sum(-1)).mean()


def textbook_approx_ndcg(scores, labels):
    gains, _, best = ideal(scores, labels)
    ranks = 0.5 + torch.sigmoid(scores[:, None, :] - scores[:, :, None]).sum(-1)  # the document itself gives 1/2
    return -((gains / torch.log2(1 + ranks)).sum(-1) / best).mean()


def ideal(scores, labels, mask=None):
    gains = (2.0**labels - 1).to(scores.dtype)
    gains = gains if mask is None else torch.where(mask, gains, 0.0)
    ranks = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
    discounts = 1 / torch.log2(ranks + 1)
    return gains, discounts, (gains.sort(dim=-1, descending=True).values * discounts).sum(-1)


TEXTBOOK = {
    "neural_ndcg": textbook_neural_ndcg,
    "neural_ndcg_transposed": lambda scores, labels: textbook_neural_ndcg(scores, labels, transposed=True),
    "neural_map": textbook_neural_map,
    "ranknet": textbook_ranknet,
    "lambdarank": lambda scores, labels: weighted_pairs(scores, labels, by_discount),
    "ndcg_loss1": textbook_ndcg_loss1,
    "ndcg_loss2": lambda scores, labels: weighted_pairs(scores, labels, by_distance),
    "ndcg_loss2pp": lambda scores, labels: weighted_pairs(
        scores, labels, lambda discounts, ranks: by_discount(discounts, ranks) + 10 * by_distance(discounts, ranks)
    ),
    "approx_ndcg": textbook_approx_ndcg,
}


def implementation(name, path):
    if path == "textbook":
        return TEXTBOOK[name]
    options = TEXTBOOK_ROUNDS if name.startswith("neural") else {}
    return lambda *lists: LOSSES[name](*lists, backend=path, **options)


# --- on the CPU -------------------------------------------------------------------------------------------------------


def lists_like_web30k(draw):
    """Log-normal lengths with a mean of about 120, the longest of 64 several times that."""
    return torch.exp(4.6 + 0.6 * torch.randn(64, generator=draw)).round().long().clamp(2, 1251)


def equal_lists(lists, length):
    return lambda _: torch.full((lists,), length)


CASES = {
    "64 x 240": equal_lists(64, 240),
    "64, Web30K-like lengths": lists_like_web30k,
    "16 x 1,024": equal_lists(16, 1024),
    "1 x 4,096": equal_lists(1, 4096),
    "256 x 20": equal_lists(256, 20),
}
WITH_TEXTBOOK = ("64 x 240",)  # it takes gigabytes for longer lists
BESIDE_OTHERS = ("64 x 240", "64, Web30K-like lengths")
RIVAL = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"  # ends with a benchmark that is killed


def padded_batch(case):
    draw = torch.Generator().manual_seed(0)
    counts = CASES[case](draw)
    mask = torch.arange(int(counts.max())) < counts[:, None]
    scores = torch.tanh(torch.randn(mask.shape, generator=draw))
    labels = torch.randint(0, 5, mask.shape, generator=draw).float()
    return scores.requires_grad_(), labels, mask


def memory(name):
    """A line of /proc/self/status in MiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))


def measure(case, path, repeats):
    """In a process of its own: milliseconds per forward+backward, growth of the memory, value and gradient."""
    function = implementation("neural_ndcg", path)
    small = torch.rand(2, 3, requires_grad=True)  # loads libraries and threads, and compiles, before memory is watched
    function(small, torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)).backward()
    scores, labels, mask = padded_batch(case)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the peak is now
    before = memory("VmRSS")
    wall, cpu = [], []
    for _ in range(repeats + 1):
        scores.grad = None
        begin = time.perf_counter(), time.process_time()
        value = function(scores, labels, mask)
        value.backward()
        wall.append(1e3 * (time.perf_counter() - begin[0]))
        cpu.append(1e3 * (time.process_time() - begin[1]))
    return {
        "cpu": min(cpu[1:]),
        "wall": statistics.median(wall[1:]),
        "mebibytes": memory("VmHWM") - before,
        "value": value.item(),
        "grad": scores.grad.flatten().tolist(),
    }


def measured(case, path, threads, repeats):
    command = [sys.executable, __file__, "--device", "cpu", "--threads", str(threads), "--repeats", str(repeats)]
    done = subprocess.run([*command, "--measure", case, path], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def on_the_cpu(threads, repeats):
    print(f"torch {torch.__version__}, threads: {threads}, {ROUNDS} rounds, {repeats} repeats\n")
    print("| lists | path | CPU ms | wall ms | MiB | torch / this, CPU |\n|---|---|---|---|---|---|")
    for case in CASES:
        paths = ("torch", "numba", *(["textbook"] if case in WITH_TEXTBOOK else []))
        results = {path: measured(case, path, threads, repeats) for path in paths}
        reference = torch.tensor(results["torch"]["grad"])
        for path, result in results.items():
            error = float((torch.tensor(result["grad"]) - reference).norm() / reference.norm())
            off = abs(result["value"] - results["torch"]["value"])
            # the textbook's difference is its own: in float32 it loses three digits
            if off > 1e-5 or not error < (5e-3 if path == "textbook" else 1e-4):
                sys.exit(f"{case}: {path} and torch disagree (values by {off:.1e}, gradients by {error:.1e})")
            ratio = results["torch"]["cpu"] / result["cpu"]
            cells = (
                case, path, f"{result['cpu']:.1f}", f"{result['wall']:.1f}", f"{result['mebibytes']:.1f}", f"{ratio:.1f}"
            )  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)


def beside_others(repeats):
    """Wall times on an idle machine and beside processes that keep every core busy."""
    cores = os.cpu_count() or 1
    print(f"\n{cores} threads beside {cores} busy processes\n")
    print("| lists | path | idle ms | busy ms | busy / idle |\n|---|---|---|---|---|")
    for case in BESIDE_OTHERS:
        for path in ("numba", "torch"):
            # a call of the kernel takes no longer than a turn of another process: a few calls meet none, or only those
            often = 20 * repeats if path == "numba" else repeats
            idle = measured(case, path, cores, often)["wall"]
            others = [subprocess.Popen([sys.executable, "-c", RIVAL]) for _ in range(cores)]
            try:
                busy = measured(case, path, cores, often)["wall"]
            finally:
                for other in others:
                    other.kill()
                    other.wait()
            print(f"| {case} | {path} | {idle:.1f} | {busy:.1f} | {busy / idle:.1f} |", flush=True)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def value_and_gradient(function, scores, labels):
    leaf = scores.detach().clone().requires_grad_()
    loss = function(leaf, labels)
    loss.backward()
    return loss.detach().double(), leaf.grad.double()


def refuse_disagreement(name, scores, labels):
    value, gradient = value_and_gradient(implementation(name, "torch"), scores.double(), labels)
    for path in ("triton", "textbook"):
        precise = scores.double() if path == "textbook" else scores
        other, slope = value_and_gradient(implementation(name, path), precise, labels)
        off = max(float((other - value).abs() / value.abs()), float((slope - gradient).norm() / gradient.norm()))
        if not off < 1e-4:
            sys.exit(f"{name}: {path} and torch disagree by {off:.1e}; nothing is measured")


def in_a_graph(function, scores, labels):
    """Milliseconds of one replay: the median of 15 runs of back-to-back replays."""
    leaf = scores.detach().clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            leaf.grad = None
            function(leaf, labels).backward()
        leaf.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function(leaf, labels).backward()
        graph.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times, repeats = [], max(3, min(100, int(30 / start.elapsed_time(end))))
        for _ in range(15):
            start.record()
            for _ in range(repeats):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / repeats)
    return statistics.median(times)


def in_eager_code(function, scores, labels):
    leaf = scores.detach().clone().requires_grad_()
    times = []
    start = time.perf_counter()
    while len(times) < 45 or (time.perf_counter() - start < 0.3 and len(times) < 500):
        leaf.grad = None
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function(leaf, labels).backward()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[5:])


def peak_memory(function, scores, labels):
    """MiB beyond the inputs."""
    leaf = scores.detach().clone().requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function(leaf, labels).backward()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def gradient_errors(draw):
    """Relative gradient errors of float32 NeuralNDCG against the float64 textbook, 8 lists of 240."""
    normal = torch.randn(8, 240, generator=draw).cuda()
    labels = torch.randint(0, 5, normal.shape, generator=draw).float().cuda()
    rows = []
    for what, scores, tau in (
        ("tanh", normal.tanh(), 1.0),
        ("N(0,1)", normal, 1.0),
        ("N(0,10)", 10 * normal, 1.0),
        ("tanh", normal.tanh(), 0.1),
    ):
        for name in NDCG:
            transposed = name == "neural_ndcg_transposed"
            _, exact = value_and_gradient(
                lambda s, y: textbook_neural_ndcg(s, y, transposed=transposed, tau=tau), scores.double(), labels  # noqa: B023
            )  # fmt: skip
            errors = []
            for path in ("torch", "triton"):
                _, gradient = value_and_gradient(
                    lambda s, y: LOSSES[name](s, y, tau=tau, backend=path, **TEXTBOOK_ROUNDS), scores, labels  # noqa: B023
                )  # fmt: skip
                errors.append(float((gradient - exact).norm() / exact.norm()))
            if not errors[1] < 1e-4:
                sys.exit(f"{name} on {what} scores at tau {tau}: gradient off by {errors[1]:.1e}; nothing is printed")
            rows.append(f"| {name} | {what}, tau {tau:g} | {errors[0]:.1e} | {errors[1]:.1e} |")
    return rows


def rows_of(name, scores, labels):
    """The table's rows of a loss; for NeuralNDCG also with the default tolerance, at which a list may stop early."""
    ways = {path: implementation(name, path) for path in ("textbook", "torch", "triton")}
    if name in NDCG:
        ways["triton, tol 1e-6"] = lambda s, y: LOSSES[name](s, y, backend="triton")
    graphs, eagers = {}, {}
    for way, function in ways.items():
        graphs[way], eagers[way] = in_a_graph(function, scores, labels), in_eager_code(function, scores, labels)
        memory = peak_memory(function, scores, labels)
        ratios = (f"{times['textbook'] / times[way]:.1f}" for times in (graphs, eagers))
        cells = (name, way, f"{graphs[way]:.3f}", f"{eagers[way]:.3f}", f"{memory:.1f}", *ratios)
        yield f"| {' | '.join(cells)} |"


def on_a_gpu(lists, length, names):
    import triton

    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(lists, length, generator=draw).tanh().cuda()
    labels = torch.randint(0, 5, scores.shape, generator=draw).float().cuda()
    for name in names:
        refuse_disagreement(name, scores, labels)
    errors = gradient_errors(draw)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    versions = f"torch {torch.__version__}, triton {triton.__version__}, commit {commit or '?'}"
    print(f"{torch.cuda.get_device_name()}, {versions}\n{lists} lists of {length}, tanh scores, forward+backward\n")
    print("| loss | path | graph ms | eager ms | MiB | textbook / this, graph | eager |\n|---|---|---|---|---|---|---|")
    for name in names:
        for row in rows_of(name, scores, labels):
            print(row, flush=True)
    print("\n| gradient error against float64, n = 240 | scores | torch float32 | triton |\n|---|---|---|---|")
    print("\n".join(errors))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lists", type=int, default=64)
    parser.add_argument("--length", type=int, default=240)
    parser.add_argument("--losses", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.measure:
        print(json.dumps(measure(*options.measure, options.repeats)))
    elif options.device == "cuda":
        on_a_gpu(options.lists, options.length, options.losses)
    else:
        on_the_cpu(options.threads, options.repeats)
        if options.busy:
            beside_others(options.repeats)


if __name__ == "__main__":
    main()
