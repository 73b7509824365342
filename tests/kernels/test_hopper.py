"""The CUDA C++ kernels of short lists: they compile, and they pass the tests of the Triton kernels, on a GPU or on a CPU."""

import contextlib
import functools
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import NDCG, ShortLists, agree, batch, check_repeatable, run

import cuda_on_cpu
from rankgrad.kernels import cuda
from rankgrad.kernels.neural_ndcg.hopper import launch as hopper
from rankgrad.losses import LOSSES

CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def on_hopper(test):
    """A test that needs a GPU with clusters of blocks."""
    return pytest.mark.gpu(pytest.mark.skipif(not CLUSTERS, reason="needs a GPU of Hopper or later")(test))


@pytest.fixture
def _compiler(monkeypatch, tmp_path):
    """NVRTC as a test dependency brings it, whatever torch was built with."""
    if not (importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cu13")):
        pytest.skip("needs pip install nvidia-cuda-nvrtc")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda._nvrtc.cache_clear()
    yield
    cuda._nvrtc.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("chip", ["90", "100"])
@pytest.mark.parametrize(
    ("name", "sources", "definitions"),
    [
        ("sort_lists", hopper.SORT, ["N=128"]),
        ("sort_lists", hopper.SORT, ["N=256"]),
        *(("neural_ndcg", hopper.ROUNDS, [f"N={n}", f"TRANSPOSED={t}"]) for n in (128, 256) for t in (0, 1)),
    ],
)
def test_sources_compile(name, sources, definitions, chip, monkeypatch):
    text = "\n".join(source.read_text() for source in sources)
    options = ["-std=c++17", f"--gpu-architecture=sm_{chip}", *(f"-D{definition}" for definition in definitions)]
    binary = cuda._compiled(text, name, options)
    assert b".text." + name.encode() in binary  # under that name, not under one of C++
    monkeypatch.setattr(cuda, "_succeeded", lambda _: pytest.fail("compiled again instead of read from the cache"))
    assert cuda._compiled(text, name, options) == binary


@pytest.mark.usefixtures("_compiler")
def test_what_does_not_compile_is_shown():
    with pytest.raises(RuntimeError, match=r"NVRTC cannot compile broken: (?s:.)*error"):
        cuda._compiled("__global__ void broken( {}", "broken", ["--gpu-architecture=sm_90"])


def test_without_the_library_it_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "7.0")
    cuda._nvrtc.cache_clear()
    with pytest.raises(OSError, match=r"libnvrtc\.so\.7"):
        cuda._nvrtc()


def test_a_thread_without_a_context_is_given_one(monkeypatch):
    asked, codes = [], [201, 0, 7]
    kernel = object.__new__(cuda.Kernel)
    kernel._function, kernel._launch = None, lambda *_: codes.pop(0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: asked.append(True))
    driver = SimpleNamespace(cuGetErrorString=lambda *_: None)
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    kernel(0, 1, 1, 0, torch.zeros(1), 1, 1.0, None)
    assert asked == [True] and codes == [7]
    with pytest.raises(RuntimeError, match="CUDA reports error 7: unknown"):
        kernel(0, 1, 1, 0)


def test_what_fails_once_is_said_and_what_fails_while_recording_is_not_kept(monkeypatch):
    recording = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording[0])
    monkeypatch.setattr(hopper, "_shared_limit", lambda _: 2**17)
    monkeypatch.setattr(hopper, "Kernel", lambda *_: (_ for _ in ()).throw(OSError("no libnvrtc")))
    scores = SimpleNamespace(device=torch.device("cuda", 7), shape=(2, 200), is_cuda=True)
    labels = torch.zeros(1)
    with pytest.raises(RuntimeError, match="call the loss once before recording"):
        hopper.find(scores, labels, 30, False)
    recording[0] = False
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    with pytest.warns(UserWarning, match="slower kernels .*: no libnvrtc"):
        assert hopper.find(scores, labels, 30, False) is None
    assert hopper.find(scores, labels, 30, False) is None  # said once
    hopper._kernels.cache_clear()


def test_only_where_they_can_run():
    scores = torch.zeros(3, 240)
    assert hopper.find(scores, scores, 30, False) is None


@on_hopper
def test_which_lists_they_take():
    def found(length, iters=30, labels=torch.float32):
        return hopper.find(torch.zeros(2, length, device="cuda"), torch.zeros(2, length, dtype=labels), iters, False)

    assert found(33).width == found(128).width == 128 and found(129).width == found(256).width == 256
    assert found(32) is None and found(240, iters=1000) is None and found(240, labels=torch.complex64) is None


@functools.cache
def emulated_sort(width):
    return cuda_on_cpu.Kernel("sort_lists", hopper.SORT, [f"N={width}"])


@functools.cache
def emulated(width, transposed):
    """The kernels for a CPU."""
    definitions = [f"N={width}", f"TRANSPOSED={int(transposed)}"]
    rounds = cuda_on_cpu.Kernel("neural_ndcg", hopper.ROUNDS, definitions, width // 128)
    return hopper.Kernels(emulated_sort(width), rounds, width)


@pytest.fixture
def _for_lists_of_any_length(monkeypatch):
    """On a GPU as they are; else their sources on the CPU, thread by thread."""
    if CLUSTERS:
        monkeypatch.setattr(hopper, "_SHORTEST", 1)
        return
    if torch.cuda.is_available() or not cuda_on_cpu.COMPILER:
        pytest.skip("needs a GPU with clusters of blocks, or no GPU and g++")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(
        hopper,
        "find",
        lambda scores, labels, iters, transposed: emulated(128 if scores.shape[-1] <= 128 else 256, transposed),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_for_lists_of_any_length")
class TestNeuralNdcg(ShortLists):
    @pytest.mark.parametrize("name", NDCG)
    @pytest.mark.parametrize("lengths", [(33, 1, 0), (65, 1), (128, 2), (129, 3), (256, 200)])
    def test_edges_of_widths(self, name, lengths):
        scores, labels, mask = batch(lengths, max(lengths))  # NaN under the padding, ties
        agree(name, scores, labels, mask, sinkhorn_iters=3, k=10)
        agree(name, torch.zeros_like(scores), labels, mask, sinkhorn_iters=2, sinkhorn_tol=1e-4)
        agree(name, scores, labels, mask, sinkhorn_iters=0, gain=torch.sqrt)
        for reduction in ("mean", "sum"):
            agree(name, scores, labels, mask, sinkhorn_iters=1, reduction=reduction)

    @pytest.mark.parametrize("name", NDCG)
    def test_two_blocks_stop_at_once(self, name):
        scores, labels, mask = batch((240, 130), 240, ties=False)
        scores[1] *= 1e-3  # nearly equal scores are scaled at once
        agree(name, scores, labels, mask, sinkhorn_iters=8, sinkhorn_tol=2e-2)

    def test_results_do_not_depend_on_who_comes_first(self):
        check_repeatable("neural_ndcg", *batch((200, 140), 200, ties=False), sinkhorn_iters=2)

    @pytest.mark.filterwarnings("ignore:The .grad attribute")  # that Dynamo itself looks at
    def test_a_compiled_function_leaves_them_alone(self):
        scores, labels, mask = batch((70, 66), 70, ties=False)

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
        scores, labels, mask = batch((7, 5, 100), 101)
        labels = labels.nan_to_num().to(getattr(torch, dtype))
        agree("neural_ndcg", scores, labels, mask, sinkhorn_iters=2)


@on_hopper
@pytest.mark.parametrize("name", NDCG)
@pytest.mark.parametrize("options", [{}, {"k": 10, "sinkhorn_iters": 1}, {"sinkhorn_iters": 60, "sinkhorn_tol": 1e-4}])
def test_many_rounds(name, options):
    scores, labels, mask = batch((256, 255, 200, 128, 65), 256)
    agree(name, scores, labels, mask, **options)


@on_hopper
class TestTritonOnHopper(ShortLists):
    """Triton's kernels, which such a GPU would not be given."""

    @pytest.fixture(autouse=True)
    def _no_other_kernels(self, monkeypatch):
        monkeypatch.setattr(hopper, "find", lambda *_: None)


@on_hopper
@pytest.mark.parametrize("name", NDCG)
def test_the_triton_twin_says_the_same(name, monkeypatch):
    given = batch((240, 129, 200), 240, ties=False)
    value, gradient = run(name, *given, "triton", reduction="none")
    monkeypatch.setattr(hopper, "find", lambda *_: None)
    other, slope = run(name, *given, "triton", reduction="none")
    torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-7)
    assert bool(((gradient - slope).norm(dim=-1) <= 1e-5 * slope.norm(dim=-1)).all())
    assert not torch.equal(gradient, slope)  # two kernels, not one
