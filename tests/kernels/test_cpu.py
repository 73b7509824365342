"""NeuralNDCG and the scaled sort in loops compiled by numba: the same values and gradients as the torch path, in any thread or process."""

import math
import multiprocessing
import threading

import pytest
import torch

pytest.importorskip("numba")

from cases import Case, value_and_grad
from rankgrad import RankingLoss, jit, kernels, sorting
from rankgrad.kernels.neural_ndcg import cpu
from rankgrad.losses import LOSSES

NDCG = ["neural_ndcg", "neural_ndcg_transposed"]
RELAXED = [*NDCG, "neural_map", "neural_mrr", "neural_err", "neural_precision"]


def draws(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grades(*shape, seed=0):
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def agree(name, scores, labels, mask=None, *, tau=1.0, backend="numba", **options):
    """Values of each list within 1e-6 of float64, gradients within 1e-4 of the list's largest.

    A gradient below 1e-12 (times tau) counts as 0: float64 itself has few of its digits then.
    """
    options = {"reduction": "none", "tau": tau, **options}
    expected, slope = value_and_grad(LOSSES[name], scores.double(), labels, mask, backend="torch", **options)
    value, gradient = value_and_grad(LOSSES[name], scores, labels, mask, backend=backend, **options)
    assert value.dtype == torch.float32 and gradient.dtype == scores.dtype and value.shape == expected.shape
    assert (value - expected).abs().max() <= 1e-6
    off = (gradient - slope).abs().amax(-1)
    assert (off <= 1e-4 * slope.abs().amax(-1) + 1e-12 / tau).all(), (off / slope.abs().amax(-1)).tolist()
    return value, gradient


SCORES = {
    "tanh": torch.tanh,
    "normal": lambda z: z,
    "N(0, 10)": lambda z: 10 * z,
    "ties": lambda z: z.round(),
    "equal": torch.zeros_like,
    "two clusters": lambda z: torch.where(z > 0, 5.0, 0.0) + 1e-3 * z,
    "1e30": lambda z: 1e30 * z,
    "an outlier": lambda z: torch.cat([z[:, 1:], torch.full((len(z), 1), -3e38)], 1),
}


@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize("kind", list(SCORES))
def test_agrees_with_float64(name, kind):
    for n, taus in (
        (1, (1.0,)),
        (2, (0.1, 1.0)),
        (7, (1e-4, 0.1, 1.0, 1e4)),
        (8, (1.0,)),
        (65, (0.1, 1.0, 1e4)),
        (240, (0.1, 1.0)),
    ):
        for tau in taus:
            scores, labels = SCORES[kind](draws(3, n, seed=n)), grades(3, n, seed=n)
            agree(name, scores, labels, tau=tau, k=5, sinkhorn_tol=0.0)
            agree(name, scores, labels, tau=tau, sinkhorn_iters=2)


@pytest.mark.parametrize("name", NDCG)
def test_a_list_of_a_thousand_documents(name):
    agree(name, draws(1, 1024), grades(1, 1024))


@pytest.mark.parametrize("name", RELAXED)
@pytest.mark.parametrize(
    "options", [{}, {"k": 3}, {"tau": 0.3, "sinkhorn_iters": 0}, {"sinkhorn_iters": 1}, {"sinkhorn_tol": 0.01}]
)
def test_the_family_with_padding_anywhere(name, options):
    case = Case(name, lengths=(7, 3, 10, 1, 5, 0, 70), width=72, dtype=torch.float32)
    for tensor in (case.scores, case.labels):
        tensor[~case.mask] = math.nan
    _, gradient = agree(name, case.scores, case.labels, case.mask, **{"k": 5, **options})
    assert not gradient[~case.mask].any()


@pytest.mark.parametrize("name", RELAXED)
def test_the_stochastic_form(name):
    case = Case(name, dtype=torch.float32)
    agree(name, case.scores, case.labels, case.mask, k=3, noise=draws(4, *case.labels.shape, seed=3))


@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize("gain", ["linear", torch.sqrt])
def test_gains(name, gain):
    case = Case(name, dtype=torch.float32)
    agree(name, case.scores, case.labels + 0.25, case.mask, gain=gain)


@pytest.mark.parametrize("name", NDCG)
def test_a_band_that_was_too_narrow_is_widened(name):
    """Neighbours exp(-24) apart: the gradient is all in what a narrow band leaves out."""
    scores = -24.0 * torch.arange(100.0)[None] + 0.1 * draws(1, 100)
    labels = torch.zeros(1, 100)
    labels[0, 8], labels[0, 40] = 4, 1  # at the edges of blocks: within one, entries are kept whatever they are
    _, gradient = value_and_grad(LOSSES[name], scores, labels, backend="numba")
    _, expected = value_and_grad(LOSSES[name], scores.double(), labels)
    assert 0 < expected.abs().max() < 1e-10
    assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_every_list_stops_by_itself():
    scores = draws(3, 30) * torch.tensor([[1.0], [1e-2], [3.0]])
    together, _ = agree("neural_ndcg", scores, grades(3, 30), sinkhorn_tol=1e-2)
    for row in range(3):
        alone, _ = agree("neural_ndcg", scores[row], grades(3, 30)[row], sinkhorn_tol=1e-2)
        assert torch.equal(alone, together[row])
    never = LOSSES["neural_ndcg"](scores, grades(3, 30), sinkhorn_tol=0.0, backend="numba", reduction="none")
    assert (never != together).all()


def distances_from_one(scores, tau, transposed, rounds):
    """How far the sums that decide when to stop are from one after each round, in float64."""
    matrix = sorting.neural_sort(scores.double(), tau=tau)
    matrix = matrix.mT if transposed else matrix
    rows, off = torch.ones_like(matrix[0]), []
    for _ in range(rounds):
        columns = 1 / (rows @ matrix)
        rows = 1 / (matrix @ columns)
        off.append((columns * (rows @ matrix) - 1).abs().max().item())
    return off


@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize(
    ("kind", "n", "tau"),
    [("normal", 6, 1.0), ("ties", 30, 3.0), ("two clusters", 70, 300.0), ("normal", 117, 3e4), ("ties", 240, 100.0)],
)
def test_stops_at_the_round_at_which_float64_stops(name, kind, n, tau):
    """A tolerance just beside what is left after a round: a round more or less would change the gradient."""
    scores, labels = SCORES[kind](draws(n, seed=n)), grades(n, seed=n)
    for off in distances_from_one(scores, tau, name == "neural_ndcg_transposed", 4):
        if off > 1e-12:  # less is rounding even in float64
            for tol in (off * (1 - 1e-4), off * (1 + 1e-4)):
                agree(name, scores, labels, tau=tau, sinkhorn_tol=tol)


STOPS_BESIDE_THE_TOLERANCE = {  # found by a search: after a round the sums are 0.9e-6 to 1.1e-6 from one
    "nearly equal scores": ("neural_ndcg_transposed", 1e-3 * draws(1, 117, seed=220), grades(1, 117), 30.0),
    "pairs of equal scores": (
        "neural_ndcg",
        torch.tensor([[2.0, 0, 1, 1, 2, 0]]),
        torch.tensor([[2, 0, 0, 2, 0, 0]]),
        1.0,
    ),
    "scores as large as tau": (
        "neural_ndcg",
        1e4 * torch.tensor([[1.0, -1, 0, -1, 1, 0]]),
        torch.tensor([[2, 3, 4, 2, 2, 1]]),
        1e4,
    ),
}


@pytest.mark.parametrize("case", list(STOPS_BESIDE_THE_TOLERANCE))
def test_lists_that_come_close_to_the_default_tolerance(case):
    name, scores, labels, tau = STOPS_BESIDE_THE_TOLERANCE[case]
    agree(name, scores, labels, tau=tau)
    agree(name, scores, labels, tau=tau, k=10 if scores.shape[-1] > 10 else 3)


@pytest.mark.parametrize("n", [3, 100])
def test_a_gradient_that_is_the_rest_of_large_terms(n):
    """Equal labels: what is left is how far the scaling has not come yet, down to 1e-9 of its terms."""
    for iters in (1, 3, 4, 8):
        agree("neural_ndcg_transposed", 0.1 * draws(2, n), torch.full((2, n), 4), sinkhorn_iters=iters, tau=0.1 * n)


def test_lists_of_many_kinds():
    """A small share of a search over thousands: every length, spread, temperature, share of ties, tolerance and number of rounds."""
    random = torch.Generator().manual_seed(0)

    def one_of(*choices):
        return choices[int(torch.randint(len(choices), (), generator=random))]

    for seed in range(100):
        n, spread = one_of(1, 2, 3, 5, 8, 16, 33, 64, 65, 66, 80, 129), 10 ** one_of(-4.0, -2.0, 0.0, 1.0, 4.0)
        scores = spread * draws(2, n, seed=seed)
        scores = one_of(
            scores, scores.where(draws(2, n, seed=seed + 1) > one_of(-1, 0, 1), 0.0), spread + 1e-4 * scores
        )
        labels = one_of(grades(2, n, seed=seed), grades(2, n, seed=seed) > 3, torch.ones(2, n)).float()
        tau = one_of(1e-4, 1e-2, 1.0, 30.0, 1e4, spread, spread * n, 30 * spread)
        agree(
            one_of(*NDCG, "neural_map", "neural_precision"), scores, labels, draws(2, n, seed=seed + 2) > one_of(-9, -1),
            tau=min(max(tau, 1e-4), 1e4), k=one_of(None, 1, 10) if n > 1 else 1,
            sinkhorn_iters=one_of(0, 1, 3, 30, 30, 100), sinkhorn_tol=one_of(0.0, 1e-9, 1e-7, 1e-6, 1e-6, 1e-3, 0.1),
        )  # fmt: skip


@pytest.mark.parametrize("name", RELAXED)
def test_bad_values_and_lists_that_do_not_count(name):
    scores, labels, mask = draws(5, 9), grades(5, 9) + 1, torch.ones(5, 9, dtype=torch.bool)
    mask[:, 4] = False
    scores[1, 2], labels[2, 3] = math.inf, -1.0
    labels[3] = 0.0
    options = {"check": False, "backend": "numba"}
    value, gradient = value_and_grad(LOSSES[name], scores, labels, mask, reduction="none", **options)
    assert value.isnan().tolist() == [False, True, True, False, False] and value[3] == 0
    assert gradient[1].isnan().any() and gradient[2].isnan().any() and not gradient[~mask].any()
    assert gradient[0].isfinite().all() and not gradient[3].any() and gradient[4].any()
    assert LOSSES[name](scores, labels, mask, **options).isnan()
    with pytest.raises(ValueError, match="scores of real documents"):
        LOSSES[name](scores, labels, mask, backend="numba")
    good = [0, 3, 4]
    for reduction in ("mean", "sum"):
        agree(name, scores[good], labels[good], mask[good], reduction=reduction)


@pytest.mark.parametrize("name", NDCG)
def test_gains_that_are_not_finite(name):
    scores, labels = draws(3, 6), torch.tensor([[1.0, 2, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0], [2000.0, 1, 0, 0, 0, 0]])
    value, gradient = value_and_grad(LOSSES[name], scores, labels, reduction="none", check=False, backend="numba")
    assert value.isnan().tolist() == [False, False, True] and gradient[2].isnan().all()
    value, gradient = value_and_grad(
        LOSSES[name], scores, labels, reduction="none", gain=lambda y: y - 0.5, backend="numba"
    )
    assert value.isnan().tolist() == [True, False, True] and not gradient[1].any()


@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(name, dtype):
    scores, labels = draws(4, 12).to(dtype), grades(4, 12)
    value, gradient = value_and_grad(LOSSES[name], scores, labels, backend="numba")
    expected, slope = value_and_grad(LOSSES[name], scores.float(), labels, backend="numba")
    assert torch.equal(value, expected) and torch.equal(gradient, slope.to(dtype))


@pytest.mark.parametrize("name", RELAXED)
def test_layouts_and_lists_that_members_share(name):
    scores, labels = draws(3, 4, 12), grades(4, 12)
    mask = draws(4, 12, seed=5) > -1
    shared = labels.expand(3, 4, 12), mask.expand(3, 4, 12)
    expected = value_and_grad(LOSSES[name], scores, shared[0].clone(), shared[1].clone(), backend="numba", k=5)
    strided = scores.mT.contiguous().mT
    for given in (
        (scores, *shared),
        (strided, *shared),
        (scores, shared[0].clone(), shared[1]),
        (scores, shared[0].int(), shared[1]),
    ):
        found = value_and_grad(LOSSES[name], *given, backend="numba", k=5)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
    own = grades(3, 4, 12, seed=7)  # labels that are not shared, beside a mask that is
    found = [value_and_grad(LOSSES[name], scores, own, m, backend="numba", k=5) for m in (shared[1], shared[1].clone())]
    assert all(torch.equal(a, b) for a, b in zip(*found))
    unmasked = value_and_grad(LOSSES[name], scores, shared[0], backend="numba")
    everything = value_and_grad(LOSSES[name], scores, shared[0], torch.ones_like(shared[1]), backend="numba")
    assert all(torch.equal(a, b) for a, b in zip(unmasked, everything))


def test_a_loss_that_needs_no_gradient():
    scores, labels = draws(4, 12), grades(4, 12)
    expected = LOSSES["neural_ndcg"](scores.requires_grad_(), labels).detach()
    with torch.no_grad():
        assert torch.equal(LOSSES["neural_ndcg"](scores, labels), expected)
    with torch.inference_mode():
        assert torch.equal(LOSSES["neural_ndcg"](scores.clone(), labels.clone()), expected)


def test_a_gradient_that_nobody_wants_is_not_computed(monkeypatch):
    wanted, lists = [], cpu._ndcg_lists
    monkeypatch.setattr(cpu, "_ndcg_lists", lambda *given: (wanted.append(given[-4]), lists(*given)))
    scores, labels = draws(4, 12).requires_grad_(), grades(4, 12)
    LOSSES["neural_ndcg"](scores, labels, backend="numba").backward()
    with torch.no_grad():
        LOSSES["neural_ndcg"](scores, labels, backend="numba")
    LOSSES["neural_ndcg"](scores.detach(), labels, backend="numba")
    assert wanted == [True, False, False]


# --- threads and processes --------------------------------------------------------------------------------------------


def large_batch():
    return draws(40, 380).tanh(), grades(40, 380)


def both(scores, labels):
    """Of the two kernels, value and gradient."""
    return [
        *value_and_grad(LOSSES["neural_ndcg"], scores, labels, backend="numba", sinkhorn_iters=5),
        *value_and_grad(LOSSES["neural_map"], scores, labels, backend="numba", sinkhorn_iters=5),
    ]


@pytest.fixture
def threads():
    """Sets torch's number of threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_results_do_not_depend_on_the_number_of_threads(threads, monkeypatch):
    threads(1)
    expected = both(*large_batch())
    used = set()
    lists = cpu._ndcg_lists

    def recorded(*arguments):
        used.add(threading.get_ident())
        lists(*arguments)

    monkeypatch.setattr(cpu, "_ndcg_lists", recorded)
    for number in (2, 3, 7):
        threads(number)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(both(*large_batch()), expected))
    assert len(used) > 1


def test_a_batch_of_little_but_padding_takes_one_thread(threads, monkeypatch):
    """Documents make work, not places: a second thread would only be waited for."""
    threads(2)
    monkeypatch.setattr(cpu, "_pool", lambda: pytest.fail("a second thread"))
    scores, labels = large_batch()
    mask = (torch.arange(380) < 100).expand(scores.shape)
    for name in ("neural_ndcg", "neural_map"):
        LOSSES[name](scores, labels, mask, backend="numba", sinkhorn_iters=5)


def test_short_passes_stay_in_the_calling_thread(threads):
    """On a busy machine torch's threads wait a turn for each other after every operation that they share."""
    threads(2)
    scores, labels = large_batch()
    shared = 32_768  # what torch divides among threads
    assert scores.numel() < shared < 4 * scores.numel()
    scores, labels = scores.repeat(4, 1).requires_grad_(), labels.repeat(4, 1)
    mask = torch.ones_like(labels, dtype=torch.bool)
    with torch.profiler.profile(record_shapes=True) as profile:
        LOSSES["neural_ndcg"](scores, labels, mask, backend="numba", sinkhorn_iters=2)
    work = {"abs", "copy_", "mul", "mul_", "masked_fill_", "aminmax", "bitwise_not", "linalg_vector_norm"}
    passes = [e.name for e in profile.events() if e.name[6:] in work and [*scores.shape] in e.input_shapes]
    assert not passes


def test_an_error_in_a_thread_is_not_lost(threads, monkeypatch):
    threads(3)
    caller = threading.get_ident()

    def failing(first, last, *arguments):
        if threading.get_ident() != caller:
            raise MemoryError("in another thread")
        threading.Event().wait(0.01)  # until the others have begun

    monkeypatch.setattr(cpu, "_ndcg_lists", failing)
    with pytest.raises(MemoryError, match="in another thread"):
        LOSSES["neural_ndcg"](*large_batch(), backend="numba")


def test_many_callers_at_once(threads):
    threads(2)
    expected, found = both(*large_batch()), []
    callers = [threading.Thread(target=lambda: found.append(both(*large_batch()))) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 6 and all(torch.equal(a, b) for result in found for a, b in zip(result, expected))


def in_a_child(batch, expected):
    torch.set_num_threads(3)  # which torch itself must not use here: its threads are gone
    found = LOSSES["neural_ndcg"](*batch, backend="numba", sinkhorn_iters=5, check=False)
    assert torch.equal(found, expected)
    assert cpu._pool()._threads and all(thread.is_alive() for thread in cpu._pool()._threads)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_after_a_fork(threads):
    threads(3)
    expected = both(*large_batch())[0]
    assert cpu._pool()._threads
    child = multiprocessing.get_context("fork").Process(target=in_a_child, args=(large_batch(), expected))
    child.start()
    child.join(60)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0


# --- the door ---------------------------------------------------------------------------------------------------------


def test_which_scores_get_it():
    scores = torch.zeros(2, 3)
    assert kernels.choose("auto", scores, on_cpu=True) == "numba"
    assert kernels.choose("auto", scores.half(), on_cpu=True) == "numba"
    for other in (scores.double(), torch.zeros(2, 0), torch.zeros(()), scores.to("meta")):
        assert kernels.choose("auto", other, on_cpu=True) == "torch"
    with pytest.raises(ValueError, match="backend='numba' cannot run here: .*float64"):
        kernels.choose("numba", scores.double(), on_cpu=True)
    with pytest.raises(ValueError, match="scores are on meta; move them to the CPU"):
        kernels.choose("numba", scores.to("meta"), on_cpu=True)
    with pytest.raises(ValueError, match="'triton', 'numba', got 'fast'"):
        LOSSES["neural_map"](scores, scores, backend="fast")
    with pytest.raises(ValueError, match="'triton', got 'numba'"):
        LOSSES["ranknet"](scores, scores, backend="numba")
    with pytest.raises(ValueError, match="backend='numba' has kernels for sort=neural_sort alone"):
        LOSSES["neural_ndcg"](scores, scores, backend="numba", sort=sorting.soft_sort)
    assert RankingLoss("neural_ndcg@5", backend="numba").config()["backend"] == "numba"
    with pytest.raises(ValueError, match="backend must be one of"):
        RankingLoss("ranknet", backend="numba")


def test_without_numba(monkeypatch):
    monkeypatch.setattr(jit, "COMPILED", False)
    scores, labels = draws(3, 9), grades(3, 9)
    found = value_and_grad(LOSSES["neural_ndcg"], scores, labels)
    expected = value_and_grad(LOSSES["neural_ndcg"], scores, labels, backend="torch")
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    with pytest.raises(ValueError, match=r"backend='numba' cannot run here.*pip install numba, or use backend='auto'"):
        LOSSES["neural_ndcg"](scores, labels, backend="numba")


def test_where_the_compiled_code_cannot_be_cached(monkeypatch):
    asked, njit = [], jit.numba.njit

    def without_cache(**options):
        asked.append(options)
        if options.get("cache"):  # as numba does where no folder can be written
            raise RuntimeError("cannot cache function 'twice': no locator available for file 'twice.py'")
        return njit(**options)

    monkeypatch.setattr(jit.numba, "njit", without_cache)

    @jit.compiled(error_model="numpy")
    def twice(x):
        return 2 * x

    assert twice(3) == 6 and [options.get("cache") for options in asked] == [True, None]
    assert all(options["nogil"] and options["error_model"] == "numpy" for options in asked)
