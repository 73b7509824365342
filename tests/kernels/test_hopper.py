"""The CUDA C++ kernels of short lists: they compile, and they pass the tests of their Triton twins, on a GPU or on a CPU."""

import contextlib
import functools
import importlib.util
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import test_short_lists

import cuda_on_cpu
from rankgrad.kernels import cuda as nvrtc
from rankgrad.kernels.neural_ndcg.hopper import launch as clusters
from rankgrad.losses import LOSSES

CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9

on_hopper = pytest.mark.skipif(not CLUSTERS, reason="needs a GPU with clusters of blocks (Hopper or later)")


@pytest.fixture
def _compiler(monkeypatch, tmp_path):
    """NVRTC as a test dependency brings it, whatever torch was built with."""
    if not (importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cu13")):
        pytest.skip("needs pip install nvidia-cuda-nvrtc")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvrtc._nvrtc.cache_clear()
    yield
    nvrtc._nvrtc.cache_clear()


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("chip", ["90", "100"])
@pytest.mark.parametrize(
    ("name", "sources", "definitions"),
    [
        ("sort_lists", clusters.SORT, ["N=128"]),
        ("sort_lists", clusters.SORT, ["N=256"]),
        *(("neural_ndcg", clusters.ROUNDS, [f"N={n}", f"TRANSPOSED={t}"]) for n in (128, 256) for t in (0, 1)),
    ],
)
def test_sources_compile(name, sources, definitions, chip, monkeypatch):
    text = "\n".join(source.read_text() for source in sources)
    options = ["-std=c++17", f"--gpu-architecture=sm_{chip}", *(f"-D{definition}" for definition in definitions)]
    binary = nvrtc._compiled(text, name, options)
    assert b".text." + name.encode() in binary  # under that name, not under one of C++
    monkeypatch.setattr(nvrtc, "_succeeded", lambda _: pytest.fail("compiled again instead of read from the cache"))
    assert nvrtc._compiled(text, name, options) == binary


@pytest.mark.usefixtures("_compiler")
def test_what_does_not_compile_is_shown():
    with pytest.raises(RuntimeError, match=r"NVRTC cannot compile broken: (?s:.)*error"):
        nvrtc._compiled("__global__ void broken( {}", "broken", ["--gpu-architecture=sm_90"])


def test_without_the_library_it_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "7.0")
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(OSError, match=r"libnvrtc\.so\.7"):
        nvrtc._nvrtc()


def test_a_thread_without_a_context_is_given_one(monkeypatch):
    asked, codes = [], [201, 0, 7]
    kernel = object.__new__(nvrtc.Kernel)
    kernel._function, kernel._launch = None, lambda *_: codes.pop(0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: asked.append(True))
    driver = SimpleNamespace(cuGetErrorString=lambda *_: None)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    kernel(0, 1, 1, 0, torch.zeros(1), 1, 1.0, None)
    assert asked == [True] and codes == [7]
    with pytest.raises(RuntimeError, match="CUDA reports error 7: unknown"):
        kernel(0, 1, 1, 0)


def test_what_fails_once_is_said_and_what_fails_while_recording_is_not_kept(monkeypatch):
    recording = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording[0])
    monkeypatch.setattr(clusters, "_room", lambda _: 2**17)
    monkeypatch.setattr(clusters, "Kernel", lambda *_: (_ for _ in ()).throw(OSError("no libnvrtc")))
    scores = SimpleNamespace(device=torch.device("cuda", 7), shape=(2, 200), is_cuda=True)
    labels = torch.zeros(1)
    with pytest.raises(RuntimeError, match="call the loss once before recording"):
        clusters.find(scores, labels, 30, False)
    recording[0] = False
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    with pytest.warns(UserWarning, match="slower kernels .*: no libnvrtc"):
        assert clusters.find(scores, labels, 30, False) is None
    assert clusters.find(scores, labels, 30, False) is None  # said once
    clusters._kernels.cache_clear()


def test_only_where_they_can_run():
    scores = torch.zeros(3, 240)
    assert clusters.find(scores, scores, 30, False) is None


@on_hopper
def test_which_lists_they_take():
    def found(length, iters=30, labels=torch.float32):
        return clusters.find(torch.zeros(2, length, device="cuda"), torch.zeros(2, length, dtype=labels), iters, False)

    assert found(33).width == found(128).width == 128 and found(129).width == found(256).width == 256
    assert found(32) is None and found(240, iters=1000) is None and found(240, labels=torch.complex64) is None


@functools.cache
def emulated(width, transposed):
    """The kernels for a CPU."""
    definitions = [f"N={width}"]
    sort = cuda_on_cpu.Kernel("sort_lists", clusters.SORT, definitions)
    definitions.append(f"TRANSPOSED={int(transposed)}")
    return clusters.Kernels(sort, cuda_on_cpu.Kernel("neural_ndcg", clusters.ROUNDS, definitions, width // 128), width)


@pytest.fixture
def _for_lists_of_any_length(monkeypatch):
    """On a GPU as they are; else their sources on the CPU, thread by thread."""
    if CLUSTERS:
        monkeypatch.setattr(clusters, "_SHORTEST", 1)
        return
    if torch.cuda.is_available() or not cuda_on_cpu.COMPILER:
        pytest.skip("needs a GPU with clusters of blocks, or no GPU and g++")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(
        clusters,
        "find",
        lambda scores, labels, iters, transposed: emulated(128 if scores.shape[-1] <= 128 else 256, transposed),
    )


@pytest.mark.usefixtures("_for_lists_of_any_length")
class TestTwins:
    """What holds for Triton's kernels holds for these."""

    test_options = staticmethod(test_short_lists.test_neural_ndcg_twins)
    test_temperatures = staticmethod(test_short_lists.test_temperatures_beyond_float32)
    test_stopping = staticmethod(test_short_lists.test_every_list_stops_by_itself)
    test_widths = staticmethod(test_short_lists.test_widths_of_neural_ndcg)
    test_huge_scores = staticmethod(test_short_lists.test_huge_scores_and_a_huge_outlier)

    @pytest.mark.parametrize("name", test_short_lists.NDCG)
    def test_degenerate_lists_and_bad_values(self, name):
        test_short_lists.test_degenerate_lists_and_reductions(name)
        test_short_lists.test_bad_values_are_loud_and_stay_in_their_list(name)
        test_short_lists.test_a_gain_that_is_not_finite_where_nothing_is_taught(name)

    @pytest.mark.parametrize("name", test_short_lists.NDCG)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, name, dtype):
        test_short_lists.test_half_precision_and_strides(name, dtype)

    @pytest.mark.parametrize("gain", ["linear", torch.sqrt])
    def test_gains(self, gain):
        test_short_lists.test_gains("neural_ndcg", gain)

    @pytest.mark.parametrize("name", test_short_lists.NDCG)
    @pytest.mark.parametrize("lengths", [(33, 1, 0), (65, 1), (128, 2), (129, 3), (256, 200)])
    def test_edges_of_widths(self, name, lengths):
        scores, labels, mask = test_short_lists.batch(lengths, max(lengths))  # NaN under the padding, ties
        test_short_lists.agree(name, scores, labels, mask, sinkhorn_iters=3, k=10)
        test_short_lists.agree(name, torch.zeros_like(scores), labels, mask, sinkhorn_iters=2, sinkhorn_tol=1e-4)
        test_short_lists.agree(name, scores, labels, mask, sinkhorn_iters=0, gain=torch.sqrt)
        for reduction in ("mean", "sum"):
            test_short_lists.agree(name, scores, labels, mask, sinkhorn_iters=1, reduction=reduction)

    @pytest.mark.parametrize("name", test_short_lists.NDCG)
    def test_two_blocks_stop_at_once(self, name):
        scores, labels, mask = test_short_lists.batch((240, 130), 240, ties=False)
        scores[1] *= 1e-3  # nearly equal scores are scaled at once
        test_short_lists.agree(name, scores, labels, mask, sinkhorn_iters=8, sinkhorn_tol=2e-2)

    def test_results_do_not_depend_on_who_comes_first(self):
        given = test_short_lists.batch((200, 140), 200, ties=False)
        first, second = (test_short_lists.run("neural_ndcg", *given, "triton", sinkhorn_iters=2) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second))

    @pytest.mark.filterwarnings("ignore:The .grad attribute")  # that Dynamo itself looks at
    def test_a_compiled_function_leaves_them_alone(self):
        scores, labels, mask = test_short_lists.batch((70, 66), 70, ties=False)

        def loss(scores):
            return LOSSES["neural_ndcg"](scores.tanh(), labels, mask, backend="triton", sinkhorn_iters=1)

        results = []
        for function in (loss, torch.compile(loss, backend="eager")):  # and no warning, which would be an error
            leaf = scores.nan_to_num().requires_grad_()
            function(leaf).backward()
            results.append(leaf.grad)
        assert torch.equal(*results)

    @pytest.mark.parametrize(
        "dtype",
        [*(f"int{bits}" for bits in (8, 16, 32, 64)), "uint8", "bool", "float64", "bfloat16", "float16"],
    )
    def test_label_dtypes(self, dtype):
        scores, labels, mask = test_short_lists.batch((7, 5, 100), 101)
        labels = labels.nan_to_num().to(getattr(torch, dtype))
        test_short_lists.agree("neural_ndcg", scores, labels, mask, sinkhorn_iters=2)


@on_hopper
@pytest.mark.parametrize("name", test_short_lists.NDCG)
@pytest.mark.parametrize("options", [{}, {"k": 10, "sinkhorn_iters": 1}, {"sinkhorn_iters": 60, "sinkhorn_tol": 1e-4}])
def test_many_rounds(name, options):
    scores, labels, mask = test_short_lists.batch((256, 255, 200, 128, 65), 256)
    test_short_lists.agree(name, scores, labels, mask, **options)


@on_hopper
class TestTritonWhereClustersAre:
    """Triton's kernels of more than 64 documents, which such a GPU would not be given."""

    @pytest.fixture(autouse=True)
    def _nowhere(self, monkeypatch):
        monkeypatch.setattr(clusters, "find", lambda *_: None)

    test_widths = staticmethod(test_short_lists.test_widths_of_neural_ndcg)
    test_many_lists = staticmethod(test_short_lists.test_more_lists_than_the_chip_holds)
    test_streams = staticmethod(test_short_lists.test_two_streams_at_once_do_not_wait_for_each_other_forever)


@on_hopper
@pytest.mark.parametrize("name", test_short_lists.NDCG)
def test_the_triton_twin_says_the_same(name, monkeypatch):
    given = test_short_lists.batch((240, 129, 200), 240, ties=False)
    value, gradient = test_short_lists.run(name, *given, "triton", reduction="none")
    monkeypatch.setattr(clusters, "find", lambda *_: None)
    other, slope = test_short_lists.run(name, *given, "triton", reduction="none")
    torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7)
    assert bool(((gradient - slope).norm(dim=-1) <= 1e-5 * slope.norm(dim=-1)).all())
    assert not torch.equal(gradient, slope)  # two kernels, not one
