"""Models against plain tensor code; padding, order, degenerate lists, dtypes, devices, dropout; refusals."""

import copy
import math
import pickle
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from rankgrad.models import (
    CUTS,
    MEMBERS_IN_ONE,
    MLP,
    MODELS,
    ONEDNN,
    AveragedMembers,
    Linear,
    Members,
    PackedLayout,
    SharedMLP,
    SharedTransformer,
    Transformer,
    bf16_twin,
    ranking_scores,
    standardised,
)
from rankgrad.runs.averaging import mean_of_standardised
from rankgrad.training.threads import torch_threads

FEATURES = 5
LENGTHS = (7, 3, 10, 1, 0, 5)
every_model = pytest.mark.parametrize("name", list(MODELS))
every_units = pytest.mark.parametrize("units", [1, 4])


def make(name, *, units=1, tanh=False, dtype=torch.float64, **options):
    sizes = {"transformer": {"width": 12, "heads": 3, "feedforward": 20}, "mlp": {"hidden": (8, 6)}, "linear": {}}
    torch.manual_seed(0)
    model = MODELS[name](FEATURES, units=units, tanh=tanh, **{**sizes[name], **options}).to(dtype).eval()
    with torch.no_grad():  # norms start at one and zero, where a forgotten one would not show
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch(width=12, lengths=LENGTHS, dtype=torch.float64, poison=math.nan, seed=0):
    """Lists of unequal length, padding in random places, NaN and worse in the features under it."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, n in enumerate(lengths):
        mask[row, torch.randperm(width, generator=draw)[:n]] = True
    features = torch.randn(len(lengths), width, FEATURES, generator=draw, dtype=torch.float64).to(dtype)
    features[~mask] = poison
    return features, mask


def gradients(model, features, mask, weights):
    """Gradients of sum(weights * scores) by the features and by every parameter."""
    features = features.clone().requires_grad_()
    total = (model(features, mask) * weights).sum()
    return torch.autograd.grad(total, [features, *model.parameters()])


# --- plain tensor code, one list at a time, from the text --------------------------------------------------------------


def affine(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def norm(x, weights, name):
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]
        + weights[f"{name}.bias"]
    )


def attention(x, weights, name, heads):
    query, key, value = (affine(x, weights, f"{name}.{part}") for part in ("query", "key", "value"))
    size = x.shape[-1] // heads
    seen = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        e = (query[:, part] @ key[:, part].T / math.sqrt(size)).exp()
        seen.append(e / e.sum(-1, keepdim=True) @ value[:, part])
    return affine(torch.cat(seen, -1), weights, f"{name}.merge")


def plain_transformer(x, weights, *, layers=2, heads=3, drop=lambda x: x):
    h = affine(x, weights, "input")
    for i in range(layers):
        block = f"blocks.{i}"
        h = h + drop(attention(norm(h, weights, f"{block}.attention_norm"), weights, f"{block}.attention", heads))
        inner = drop(affine(norm(h, weights, f"{block}.feedforward_norm"), weights, f"{block}.widen").clamp(min=0))
        h = h + drop(affine(inner, weights, f"{block}.narrow"))
    return affine(norm(h, weights, "norm"), weights, "output")


def plain_mlp(x, weights, drop=lambda x: x):
    for i in range(2):
        x = drop(affine(x, weights, f"layers.{i}").clamp(min=0))
    return affine(x, weights, "output")


def plain_linear(x, weights):
    return affine(x, weights, "output")


PLAIN = {"transformer": plain_transformer, "mlp": plain_mlp, "linear": plain_linear}


@every_model
@every_units
@pytest.mark.parametrize("tanh", [False, True])
def test_equals_plain_tensor_code(name, units, tanh):
    model = make(name, units=units, tanh=tanh)
    features, mask = batch()
    scores = model(features, mask)
    assert scores.shape == (*mask.shape, units)[: 2 if units == 1 else 3] and scores.dtype == torch.float64
    scores = scores.reshape(*mask.shape, units)
    for x, real, s in zip(features, mask, scores):
        expected = PLAIN[name](x[real], model.state_dict())
        torch.testing.assert_close(s[real], expected.tanh() if tanh else expected, rtol=1e-10, atol=1e-12)
    assert (scores[~mask] == 0).all()


def test_every_option_of_the_transformer_shapes_it():
    model = make("transformer", width=8, layers=3, heads=2, feedforward=5)
    features, mask = batch()
    expected = plain_transformer(features[0][mask[0]], model.state_dict(), layers=3, heads=2)
    torch.testing.assert_close(model(features, mask)[0][mask[0]], expected[:, 0])
    assert model.blocks[0].widen.out_features == 5 and model.input.out_features == 8


# --- who sees whom -----------------------------------------------------------------------------------------------------


@every_model
@every_units
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_list_scores_the_same_alone_and_in_a_wider_batch(name, units, dtype):
    model = make(name, units=units, dtype=dtype)
    features, mask = batch(width=17, dtype=dtype)
    together = model(features, mask)
    weights = torch.randn(together.shape, dtype=dtype)
    grads = gradients(model, features, mask, weights)
    sums = [torch.zeros_like(p) for p in model.parameters()]
    close = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    for row, real in enumerate(mask):
        alone = features[row : row + 1, real]
        torch.testing.assert_close(model(alone, None)[0], together[row, real], **close)
        torch.testing.assert_close(model(alone, real[None, real])[0], together[row, real], **close)
        by_features, *by_parameters = gradients(model, alone, None, weights[row : row + 1, real])
        torch.testing.assert_close(by_features[0], grads[0][row, real], **close)
        sums = [total + part for total, part in zip(sums, by_parameters)]
    for total, part in zip(sums, grads[1:]):
        torch.testing.assert_close(part, total, **close)
    assert (grads[0][~mask] == 0).all()


@every_model
@every_units
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_what_lies_under_the_padding_changes_nothing(name, units, poison):
    model = make(name, units=units)
    clean, mask = batch(poison=0.0)
    dirty, _ = batch(poison=poison)
    assert torch.equal(model(clean, mask), model(dirty, mask))
    weights = torch.randn_like(model(clean, mask))
    for a, b in zip(gradients(model, clean, mask, weights), gradients(model, dirty, mask, weights)):
        assert torch.equal(a, b)


@every_model
def test_reordering_documents_reorders_scores(name):
    model = make(name)
    features, mask = batch()
    order = torch.randperm(mask.shape[1])
    torch.testing.assert_close(model(features[:, order], mask[:, order]), model(features, mask)[:, order])


def test_context_matters_to_the_transformer_alone():
    features = torch.randn(1, 4, FEATURES, dtype=torch.float64)
    other = features.clone()
    other[0, 3] += 1
    for name in MODELS:
        model = make(name)
        same = torch.equal(model(features)[0, :3], model(other)[0, :3])
        assert same == (name != "transformer")


@every_model
@every_units
def test_fully_padded_lists_are_zero_and_never_nan(name, units):
    model = make(name, units=units, dropout=0.5).train() if name != "linear" else make(name, units=units)
    features, _ = batch()
    mask = torch.zeros(features.shape[:2], dtype=torch.bool)
    scores = model(features, mask)
    assert (scores == 0).all()
    for grad in gradients(model, features, mask, torch.ones_like(scores)):
        assert (grad == 0).all()


def test_no_softmax_runs_over_nothing(monkeypatch):
    """Some of torch's attention paths answer NaN there; that the others do not must not be relied on."""
    attend, masks = functional.scaled_dot_product_attention, []

    def recorded(*args, attn_mask, **options):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    make("transformer")(*batch())
    assert len(masks) == 2 and all(mask.any(-1).all() for mask in masks)


@every_model
@every_units
@pytest.mark.parametrize("shape", [(0, 6), (0, 0), (3, 0), (3, 1), (1, 1)])
def test_any_number_of_lists_and_documents(name, units, shape):
    model = make(name, units=units)
    features = torch.randn(*shape, FEATURES, dtype=torch.float64)
    for mask in (None, torch.ones(shape, dtype=torch.bool)):
        scores = model(features, mask)
        assert scores.shape == (shape if units == 1 else (*shape, units))
        for grad in gradients(model, features, mask, torch.ones_like(scores)):
            assert grad.isfinite().all()


@every_model
def test_gradients_are_right(name):
    model = make(
        name, units=2, tanh=True, **({"width": 6, "heads": 2, "feedforward": 7} if name == "transformer" else {})
    )
    features, mask = batch(width=5, lengths=(3, 0, 5, 1))
    names = [key for key, _ in model.named_parameters()]

    def scores(features, *parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters)), (features, mask))

    features = features.nan_to_num().requires_grad_()
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert torch.autograd.gradcheck(scores, (features, *parameters))


# --- dtypes and devices ------------------------------------------------------------------------------------------------


@pytest.fixture
def plain_bfloat16(monkeypatch):
    """Some virtual machines announce bfloat16 matrix units that oneDNN then fails to use: do without oneDNN."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@every_model
def test_under_autocast_scores_keep_the_precision_of_the_weights(name, plain_bfloat16):
    sizes = {"transformer": {"width": 32, "heads": 1}, "mlp": {"hidden": (32, 32)}, "linear": {}}
    model = make(name, dtype=torch.float32, **sizes[name])
    features, mask = batch(width=240, lengths=(240, 100, 0), dtype=torch.float32)
    exact = model(features, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(features, mask)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, exact, rtol=0.05, atol=0.05)
    assert (scores[~mask] == 0).all()
    assert len(scores[0].unique()) > 230  # in bfloat16 about half of them would tie
    scores.sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())


def test_under_autocast_the_sums_along_the_layers_are_not_rounded(plain_bfloat16):
    model = make("transformer", dtype=torch.float32)
    dtypes = []
    model.norm.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(*batch(dtype=torch.float32))
    assert dtypes == [torch.float32]


@every_model
def test_a_bfloat16_model_stays_bfloat16(name, plain_bfloat16):
    model = make(name, dtype=torch.bfloat16)
    features, mask = batch(dtype=torch.bfloat16)
    scores = model(features, mask)
    assert scores.dtype == torch.bfloat16
    torch.testing.assert_close(scores.double(), make(name)(features.double(), mask), rtol=0.1, atol=0.1)


@every_model
def test_features_are_taken_to_the_dtype_of_the_weights(name):
    model = make(name, dtype=torch.float32)
    features, mask = batch(poison=0.0)
    assert torch.equal(model(features, mask), model(features.float(), mask))
    assert model(torch.ones(1, 2, FEATURES, dtype=torch.int64)).dtype == torch.float32


@every_model
def test_follows_its_device_and_never_asks_the_host(name):
    model = make(name).to("meta").train()  # tensors without values: reading one raises
    scores = model(torch.empty(2, 3, FEATURES, device="meta"), torch.empty(2, 3, dtype=torch.bool, device="meta"))
    assert scores.shape == (2, 3) and scores.device.type == "meta"


# --- start, dropout, names ---------------------------------------------------------------------------------------------


@every_model
def test_matrices_start_glorot_uniform_and_biases_at_the_default_of_torch(name):
    torch.manual_seed(0)
    model = MODELS[name](300)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(p.dim() > 1 for p in model.parameters()) == len(layers)
    for layer in layers:
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        largest = layer.weight.abs().max().item()
        assert 0.9 * bound < largest <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
        assert 0 < layer.bias.abs().max().item() <= 1 / math.sqrt(layer.in_features)
    for layer in model.modules():
        if isinstance(layer, torch.nn.LayerNorm):
            assert (layer.weight == 1).all() and (layer.bias == 0).all()


def test_number_of_parameters():
    def count(model):
        return sum(p.numel() for p in model.parameters())

    # 136 x 96 + 96; twice 4 (96 x 96 + 96) + 2 x 192 + (96 x 384 + 384) + (384 x 96 + 96); 192; 97
    assert count(Transformer(136)) == 13_152 + 2 * 111_840 + 192 + 97 == 237_121
    assert count(Transformer(220, width=128, units=4)) == 28_288 + 2 * 165_376 + 256 + 516 == 359_812
    assert count(MLP(136)) == 35_072 + 32_896 + 8_256 + 65 == 76_289
    assert count(Linear(136)) == 137


def test_defaults_are_those_of_the_paper():
    model = Transformer(136)
    assert (len(model.blocks), model.blocks[0].attention.heads, model.blocks[0].attention.dropout) == (2, 1, 0.1)
    assert model.input.out_features == 96 and model.blocks[1].widen.out_features == 384 and model.tanh is False
    assert MLP(136).dropout.p == 0.0 and [layer.out_features for layer in MLP(136).layers] == [256, 128, 64]


def test_names_of_the_weights():
    both = ("weight", "bias")
    block = ["attention_norm", *(f"attention.{part}" for part in "query key value merge".split())]
    block += ["feedforward_norm", "widen", "narrow"]
    layers = ["input", *(f"blocks.{i}.{part}" for i in range(2) for part in block), "norm", "output"]
    assert list(Transformer(3).state_dict()) == [f"{layer}.{part}" for layer in layers for part in both]
    layers = ["layers.0", "layers.1", "layers.2", "output"]
    assert list(MLP(3).state_dict()) == [f"{layer}.{part}" for layer in layers for part in both]
    assert list(Linear(3).state_dict()) == ["output.weight", "output.bias"]


@pytest.mark.parametrize("training", [True, False])
def test_dropout_falls_where_the_paper_has_it(monkeypatch, training):
    """With x -> 0.7 x in place of dropout, training equals plain code that has this factor at the paper's places."""
    attend, calls = functional.scaled_dot_product_attention, []

    def recorded(query, key, value, attn_mask=None, dropout_p=0.0):
        calls.append((dropout_p, attn_mask))
        return attend(query, key, value, attn_mask=attn_mask)

    def scaled(x, p, training=True, inplace=False):
        assert p == 0.25
        return 0.7 * x if training else x

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(functional, "dropout", scaled)
    drop = (lambda x: 0.7 * x) if training else (lambda x: x)
    x = torch.randn(6, FEATURES, dtype=torch.float64)
    for name in ("transformer", "mlp"):
        model = make(name, dropout=0.25).train(training)
        torch.testing.assert_close(model(x[None])[0, :, None], PLAIN[name](x, model.state_dict(), drop=drop))
    # One call a block; without a mask none is made up, so that torch may take its fastest path.
    assert calls == [(0.25 if training else 0.0, None)] * 2


@pytest.mark.parametrize("name", ["transformer", "mlp"])
def test_dropout_draws_from_the_global_generator_and_only_in_training(name):
    model = make(name, dropout=0.3)
    features, mask = batch()
    calm = model(features, mask)
    model.train()
    torch.manual_seed(1)
    first = model(features, mask)
    assert not torch.equal(first, calm) and not torch.equal(first, model(features, mask))
    torch.manual_seed(1)
    assert torch.equal(first, model(features, mask))
    assert (first[~mask] == 0).all() and first.isfinite().all()
    still = make(name, dropout=0.0)
    torch.testing.assert_close(still.train()(features, mask), still.eval()(features, mask))


@every_model
def test_input_noise_is_normal_of_its_deviation_and_drawn_anew_in_training_only(name):
    quiet = {} if name == "linear" else {"dropout": 0.0}
    model, plain = make(name, input_noise=0.3, **quiet), make(name, **quiet)
    features, mask = batch()
    calm = plain(features, mask)
    assert torch.equal(model(features, mask), calm)
    model.train()
    torch.manual_seed(1)
    first = model(features, mask)
    assert not torch.equal(first, model(features, mask))
    torch.manual_seed(1)
    assert torch.equal(first, model(features, mask))
    assert (first[~mask] == 0).all() and first.isfinite().all()
    torch.manual_seed(1)
    noisy = features + 0.3 * torch.randn(features.shape, dtype=torch.float64)
    torch.testing.assert_close(first, plain(noisy, mask))
    assert model.state_dict().keys() == plain.state_dict().keys()


@every_model
def test_equal_seeds_start_equal_models(name):
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(torch.cat([v.flatten() for v in MODELS[name](FEATURES).state_dict().values()]))
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


@every_model
def test_learns(name):
    model = make(name, dtype=torch.float32).train()
    features, mask = batch(dtype=torch.float32)
    labels = features.nan_to_num()[..., 0]
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(60):
        loss = ((model(features, mask) - labels)[mask] ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# --- scores to rank by -------------------------------------------------------------------------------------------------


def test_ranking_scores():
    output = torch.randn(2, 3, 4)
    expected = sum(1 / (1 + (-output[..., t]).exp()) for t in range(4))
    torch.testing.assert_close(ranking_scores(output, 4), expected)
    single = torch.randn(2, 3)
    assert ranking_scores(single, 1) is single
    with pytest.raises(ValueError, match="4 units must have the shape"):
        ranking_scores(single, 4)


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "3", None, True])
@pytest.mark.parametrize("size", ["features", "width", "layers", "heads", "feedforward", "units"])
def test_sizes_are_whole_and_positive(size, wrong):
    for name, model in MODELS.items():
        if size in ("features", "units") or name == "transformer":
            with pytest.raises(ValueError, match=f"^{size} must be a whole number, 1 or above, got "):
                model(**{"features": 3, size: wrong})


@pytest.mark.parametrize("wrong", [-0.1, 1, 1.5, math.nan, "0.1", None, True])
@pytest.mark.parametrize("name", ["transformer", "mlp"])
def test_dropout_is_below_one(name, wrong):
    with pytest.raises(ValueError, match="dropout must be a number from 0"):
        MODELS[name](3, dropout=wrong)


@every_model
@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf, "0.1", None, True])
def test_input_noise_is_a_deviation(name, wrong):
    with pytest.raises(ValueError, match="input_noise must be a deviation"):
        MODELS[name](3, input_noise=wrong)


def test_other_refusals():
    with pytest.raises(ValueError, match="width must be divisible by heads, got width 96 and 5 heads"):
        Transformer(3, heads=5)
    with pytest.raises(ValueError, match="every size in hidden must be a whole number"):
        MLP(3, hidden=(4, 0))
    with pytest.raises(ValueError, match="hidden must be a sequence of layer sizes"):
        MLP(3, hidden=64)
    assert MLP(3, hidden=[4]).output.in_features == 4


@every_model
def test_shapes_are_checked(name):
    model = make(name)
    good = torch.zeros(2, 3, FEATURES, dtype=torch.float64)
    for features in (good[0], good[..., :-1], good[None]):
        with pytest.raises(ValueError, match=r"features must have the shape \[lists, documents, 5\]"):
            model(features)
    for mask in (torch.ones(2, 3), torch.ones(2, 1, dtype=torch.bool), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"mask must be of dtype torch.bool .* and shape \[2, 3\]"):
            model(good, mask)


# --- packed lists -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("units", [1, 3])
def test_packed_lists_score_as_padded_ones_and_learn_the_same(kind, units):
    torch.manual_seed(0)
    options = {"width": 8, "heads": 2, "feedforward": 16, "dropout": 0.0} if kind == "transformer" else {}
    model = MODELS[kind](7, units=units, **options)
    lengths = [5, 9, 1, 0, 4]
    offsets = torch.tensor([0, 5, 14, 15, 15, 19], dtype=torch.int32)
    mask = torch.arange(10) < torch.tensor(lengths)[:, None]
    padded = torch.randn(5, 10, 7)
    slopes = torch.randn(19) if units == 1 else torch.randn(19, units)
    gradients = []
    for scores in (model(padded, mask)[mask], model.packed(padded[mask], PackedLayout(offsets, 10))):
        model.zero_grad()
        scores.backward(slopes)
        gradients.append((scores.detach(), *(parameter.grad.clone() for parameter in model.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_document_of_another_list_is_not_seen():
    torch.manual_seed(0)
    model = Transformer(3, width=8, feedforward=8).eval()
    features = torch.randn(6, 3)
    lists = PackedLayout(torch.tensor([0, 2, 6], dtype=torch.int32), 4)
    before = model.packed(features, lists)
    features[1] = math.nan
    after = model.packed(features, lists)
    assert after[:2].isnan().all() and torch.equal(before[2:], after[2:])


@pytest.mark.parametrize("kind", MODELS)
def test_a_bf16_twin_shares_what_is_not_rounded(kind):
    model = MODELS[kind](7)
    twin = bf16_twin(model)
    for (name, own), its in zip(model.named_parameters(), twin.parameters()):
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, torch.nn.Linear) and layer is not model.output:
            assert its.dtype == torch.bfloat16 and torch.equal(its, own.bfloat16())
        else:
            assert its is own
    assert bf16_twin(torch.nn.Sequential(torch.nn.Linear(7, 1))) is None


# --- many at once ------------------------------------------------------------------------------------------------------

SHARED = {
    "mlp": lambda **options: SharedMLP(FEATURES, hidden=(8, 6), **options),
    "transformer": lambda **options: SharedTransformer(FEATURES, width=12, heads=3, feedforward=20, **options),
}
every_shared = pytest.mark.parametrize("name", SHARED)


def make_shared(name, **options):
    """Members in float64, without dropout unless asked for, whose vectors all differ."""
    torch.manual_seed(0)
    model = SHARED[name](**{"members": 3, "dropout": 0.0, **options}).double()
    with torch.no_grad():
        for parameter in model.vectors():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def packed(features, mask):
    """The same lists end to end, and where they are."""
    ends = torch.cat([torch.zeros(1), mask.sum(1).cumsum(0)]).int()
    return features[mask], PackedLayout(ends, int(mask.sum(1).max()))


def test_one_sharing_member_with_vectors_of_ones_is_the_plain_mlp():
    shared, plain = make_shared("mlp", members=1).eval(), make("mlp")
    with torch.no_grad():
        for ours, theirs in zip(shared.layers, plain.layers):
            ours.r.fill_(1)
            ours.s.fill_(1)
            ours.weight.copy_(theirs.weight)
            ours.bias[0] = theirs.bias
        shared.output.load_state_dict(plain.output.state_dict())
    torch.testing.assert_close(shared(*batch()), plain(*batch()), atol=1e-12, rtol=0)


def test_one_sharing_transformer_with_a_vector_of_ones_is_the_plain_one():
    shared, plain = make_shared("transformer", members=1).eval(), make("transformer")
    shared.load_state_dict({**plain.state_dict(), "first": torch.ones(1, FEATURES)})
    torch.testing.assert_close(shared(*batch()), plain(*batch()), atol=1e-12, rtol=0)


def test_sharing_members_are_what_their_formula_says():
    model = make_shared("mlp", tanh=True)
    features, mask = batch()
    scores = model(features, mask)
    for member in range(3):
        hidden = features[mask]
        for layer in model.layers:
            hidden = ((hidden * layer.r[member]) @ layer.weight.T * layer.s[member] + layer.bias[member]).relu()
        expected = (hidden @ model.output.weight[member] + model.output.bias[member]).tanh()
        torch.testing.assert_close(scores[mask][:, member], expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(model.eval()(features, mask), scores.mean(-1), atol=1e-12, rtol=0)


def test_sharing_transformers_are_what_their_formula_says():
    model = make_shared("transformer")
    plain = make("transformer")
    features, mask = batch()
    scores = model(features, mask)
    for member in range(3):
        state = {name: value for name, value in model.state_dict().items() if name != "first"}
        state |= {f"output.{part}": state[f"output.{part}"][member : member + 1] for part in ("weight", "bias")}
        plain.load_state_dict(state)
        torch.testing.assert_close(scores[..., member], plain(features * model.first[member], mask), atol=1e-12, rtol=0)


@every_shared
def test_sharing_members_start_apart_by_signs_alone(name):
    model = SHARED[name](members=8)
    first = model.layers[0].r if name == "mlp" else model.first
    assert set(first.unique().tolist()) == {-1.0, 1.0}
    if name == "mlp":
        for layer in model.layers:
            assert (layer.s == 1).all()
            assert (layer.bias == layer.bias[:1]).all()
            assert layer.weight.abs().max() <= layer.weight.shape[1] ** -0.5
        assert (model.layers[1].r == 1).all()
    assert len({tuple(row) for row in model.output.weight.tolist()}) == 8


@every_shared
@pytest.mark.parametrize("inputs", ["features", "list", "pieces"])
@pytest.mark.parametrize("training", [True, False])
def test_sharing_members_of_packed_lists_are_those_of_padded_ones(name, inputs, training):
    model = make_shared(name, inputs=inputs).train(training)
    features, mask = batch()
    torch.testing.assert_close(model.packed(*packed(features, mask)), model(features, mask)[mask], atol=1e-12, rtol=0)


@every_shared
def test_gradients_of_sharing_members(name):
    model = make_shared(name)
    features, mask = batch(width=4, lengths=(3, 2), poison=0.0)
    names, values = zip(*model.named_parameters())

    def scores(*parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters)), (features, mask))

    assert torch.autograd.gradcheck(scores, values, fast_mode=True)


@every_shared
def test_vectors_and_biases_of_sharing_members_do_not_decay(name):
    model = make_shared(name)
    free = {id(parameter) for parameter in model.vectors()}
    decaying = {key for key, parameter in model.named_parameters() if id(parameter) not in free}
    assert all(key.endswith("weight") for key in decaying)
    assert "output.weight" in decaying
    assert not any(key.endswith(("r", "s", "first", "bias")) or "norm" in key for key in decaying)


def make_members(inputs="features", **options):
    return Members(FEATURES, ids=[3, 8], hidden=(8, 6), inputs=inputs, **options).double()


@pytest.mark.parametrize("inputs", ["features", "list", "pieces"])
def test_members_are_mlps_side_by_side(inputs):
    model, plain = make_members(inputs, scale=[0.0, 2.0]).eval(), MLP(FEATURES, hidden=(8, 6), inputs=inputs).double()
    scores = model(*batch())
    for member in range(2):
        parts = iter(model.weights[member].split(model.sizes))
        with torch.no_grad():
            for layer in [*plain.layers, plain.output]:
                layer.weight.copy_(next(parts).view(layer.weight.shape[::-1]).T)
                layer.bias.copy_(next(parts))
        expected = plain(*batch())
        torch.testing.assert_close(scores[member], 2 * expected.tanh() if member else expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("inputs", ["features", "list", "pieces"])
def test_members_of_packed_lists_are_those_of_padded_ones(inputs):
    model, (features, mask) = make_members(inputs), batch()
    torch.testing.assert_close(
        model.packed(*packed(features, mask)), model(features, mask)[:, mask], atol=1e-12, rtol=0
    )


def test_members_that_score_on_the_cpu_follow_every_change_of_their_weights():
    """The first layer is laid out once for all calls; what was kept must not outlive the weights it was made of."""
    model, x = make_members().eval(), torch.randn(2, MEMBERS_IN_ONE // 2, FEATURES, dtype=torch.float64)

    def agrees():
        recorded = model(x).detach()  # with gradients nothing is kept
        with torch.no_grad():
            found = model(x)
        assert model._beside  # what was kept is what was used
        torch.testing.assert_close(found, recorded, rtol=1e-12, atol=1e-12)
        return found

    first = agrees()
    with torch.no_grad():
        model.weights.mul_(1.5)
    assert not torch.allclose(agrees(), first)
    model.load_state_dict(make_members().state_dict())
    assert torch.equal(agrees(), first)
    model.weights.data = 2 * model.weights.data
    assert not torch.allclose(agrees(), first)
    narrow = model.float()
    with torch.inference_mode():
        assert narrow(x.float()).dtype == torch.float32
    assert torch.equal(copy.deepcopy(narrow)(x.float()), narrow(x.float()))


@pytest.mark.skipif(not ONEDNN, reason="torch without oneDNN")
def test_one_large_list_is_scored_by_onednn_and_the_same_to_rounding(monkeypatch):
    model = AveragedMembers(Members(FEATURES, ids=range(3), hidden=(8, 6), inputs="pieces")).eval()
    members, x = model.members, torch.randn(1, 30, FEATURES)
    with torch.no_grad():
        expected = model(x)
    monkeypatch.setattr("rankgrad.models.WORTH_ONEDNN", 1)
    for again in (lambda given: given, copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))):
        of = again(model)
        with torch.inference_mode():
            torch.testing.assert_close(of(x), expected)
            assert of.members._beside[True][1].layout == torch._mkldnn
        with torch.no_grad():  # as the trainer does
            assert torch.equal(of(x), expected)
    with torch.inference_mode():
        assert model.double()(x).dtype == torch.float64
        model.float()
        members.weights.mul_(1.5)
        assert not torch.allclose(model(x), expected)


@pytest.mark.parametrize("inference", [True, False])
def test_weights_that_lie_where_others_lay_are_noticed(monkeypatch, inference):
    """Memory that is free again is given out again, and of tensors made in inference mode torch counts no changes."""
    model, x = Members(FEATURES, ids=range(3), hidden=(8, 6)).eval(), torch.randn(1, MEMBERS_IN_ONE, FEATURES)
    monkeypatch.setattr("rankgrad.models.WORTH_ONEDNN", 1)
    with torch.inference_mode(inference), torch.no_grad():
        for number in range(40):
            for _ in range(2):
                model.weights.data = torch.randn_like(model.weights)
            if inference:
                model.double().float()
                model.weights.mul_(1 + number)
            assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_what_training_measures_is_the_same_with_any_number_of_threads():
    """torch shares one product of few rows out by the number of threads, and sums then in another order."""
    members = Members(46, ids=range(16), hidden=(64, 64), inputs="list").eval()
    for length in [*range(1, 33), 100, MEMBERS_IN_ONE - 1, MEMBERS_IN_ONE, 1000]:
        features, found = torch.randn(1, length, 46), []
        for number in (1, 2, 4, 8):
            with torch_threads(number), torch.no_grad():
                found.append(members(features))
        assert all(torch.equal(found[0], other) for other in found), length


def test_a_member_begins_where_its_number_says():
    two, one = make_members(), Members(FEATURES, ids=[8], hidden=(8, 6)).double()
    assert torch.equal(two.weights[1], one.weights[0])
    assert not torch.equal(two.weights[0], two.weights[1])
    assert not torch.equal(one.weights, Members(FEATURES, ids=[8], hidden=(8, 6), seed=1).double().weights)


def test_some_members_are_the_members_they_were():
    model = make_members(scale=[0.0, 2.0], dropout=[0.1, 0.5]).eval()
    torch.testing.assert_close(model.select([1])(*batch()), model(*batch())[1:], atol=0, rtol=0)


def test_dropout_of_a_member_is_its_own_and_keeps_the_mean():
    model = Members(FEATURES, ids=range(3), hidden=(256,), dropout=[0.0, 0.25, 0.5]).train()
    model.seeds = torch.arange(12, dtype=torch.int32).view(3, 2, 2)
    kept = model._dropped(torch.ones(3, 500, 256), 0)
    for row, share in zip(kept, (0.0, 0.25, 0.5)):
        assert row.unique().tolist() == pytest.approx([1.0] if share == 0 else [0.0, 1 / (1 - share)])
        assert row.mean().item() == pytest.approx(1, abs=0.01)
    alone = model.select([2]).train()
    alone.seeds = model.seeds[2:]
    assert torch.equal(alone._dropped(torch.ones(1, 500, 256), 0)[0], kept[2])
    assert torch.equal(model.eval()._dropped(kept, 0), kept)


@every_model
def test_where_a_feature_stands_within_its_list(name):
    model = make(name, inputs="list")
    seen = []
    first = {"transformer": "input", "mlp": "layers.0", "linear": "output"}[name]
    model.get_submodule(first).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    features, mask = batch()
    features[:, :, 1] = 7.0  # constant in every list
    features[~mask] = math.nan
    model(features, mask)
    inputs = seen[0].unflatten(0, mask.shape) if seen[0].dim() == 2 else seen[0]
    for row, real in enumerate(mask):
        x = features[row, real]
        if not len(x):
            continue
        spread = x.std(0, correction=0)
        expected = torch.where(spread > 1e-6, (x - x.mean(0)) / spread.clamp(min=1e-6), 0.0)
        torch.testing.assert_close(inputs[row, real, :FEATURES], x)
        torch.testing.assert_close(inputs[row, real, FEATURES:], expected, atol=1e-9, rtol=0)
        if len(x) == 1:
            assert not inputs[row, real, FEATURES:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_say_how_far_a_value_has_come_between_two_cuts(dtype):
    model = Linear(1, inputs="pieces")
    seen = []
    model.output.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    values = [-100.0, -2.5, -1.0, 0.0, 0.3, 2.5, 7.0]
    model.to(dtype)(torch.tensor(values, dtype=dtype).view(1, -1, 1))
    inputs = seen[0].view(len(values), -1).tolist()
    spread = torch.tensor(values, dtype=torch.float64).std(correction=0).item()
    centre = sum(values) / len(values)
    for value, row in zip(values, inputs):
        expected = []
        for number in (value, (value - centre) / spread):
            through = [min(max((number - low) / (high - low), 0), 1) for low, high in pairwise(CUTS)]
            expected.append([number, *through])
        assert row[::2] == pytest.approx(expected[0], abs=1e-6)  # the feature and its standing take turns
        assert row[1::2] == pytest.approx(expected[1], abs=1e-6)


@every_model
@pytest.mark.parametrize("inputs", ["list", "pieces"])
def test_packed_lists_know_where_a_feature_stands_too(name, inputs):
    model, (features, mask) = make(name, inputs=inputs), batch()
    torch.testing.assert_close(model.packed(*packed(features, mask)), model(features, mask)[mask], atol=1e-9, rtol=0)


def test_standardised_scores_are_those_that_runs_are_averaged_by():
    draw = torch.Generator().manual_seed(0)
    scores = (
        torch.randn(3, len(LENGTHS), 12, generator=draw, dtype=torch.float64)
        * torch.tensor([1e-150, 1.0, 1e150], dtype=torch.float64)[:, None, None]
    )
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    scores[:, 1] = 5.0  # all equal
    scores = scores.masked_fill(~mask, math.nan)
    found = standardised(scores, mask)
    lists = [row for row, n in enumerate(LENGTHS) if n]
    offsets = [0, *torch.tensor([LENGTHS[row] for row in lists]).cumsum(0).tolist()]
    for member in range(3):
        expected = mean_of_standardised([scores[member][mask].numpy()], offsets)
        assert found[member][mask].tolist() == pytest.approx(expected.tolist(), abs=1e-9)
    assert not found[:, ~mask].any()


# --- categories -------------------------------------------------------------------------------------------------------

CODES = {1: 5, 3: 4, 4: 40}  # by column how many codes: 3, 2 and 38 levels; the second and third of other widths
WITH_CATEGORIES = {
    "transformer": lambda **o: Transformer(6, width=8, feedforward=8, layers=1, categories=CODES, **o),
    "mlp": lambda **o: MLP(6, hidden=(8,), categories=CODES, **o),
    "linear": lambda **o: Linear(6, categories=CODES, **o),
    "shared mlp": lambda **o: SharedMLP(6, members=3, hidden=(8,), categories=CODES, **o),
    "shared transformer": lambda **o: SharedTransformer(
        6, members=3, width=8, feedforward=8, layers=1, categories=CODES, **o
    ),
    "members": lambda **o: Members(6, ids=[4, 9], hidden=(8,), categories=CODES, **o),
    "linear members": lambda **o: Members(6, ids=[4, 9], hidden=(), categories=CODES, **o),
}


def documents_with_categories(seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(3, 4, 6, generator=generator)
    for column, count in CODES.items():
        features[..., column] = torch.randint(count, (3, 4), generator=generator).float()
    mask = torch.tensor([[True] * 4, [True, False, True, True], [True, False, False, False]])
    return features, mask


@pytest.mark.parametrize("inputs", ["features", "list", "pieces"])
@pytest.mark.parametrize("name", WITH_CATEGORIES)
def test_categories_have_vectors_and_lists_stay_alone(name, inputs):
    torch.manual_seed(0)
    model = WITH_CATEGORIES[name](inputs=inputs).eval()
    features, mask = documents_with_categories()
    scores = model(features, mask)
    # another code of the same column is another vector; only documents of that list may notice
    for column, count in CODES.items():
        other = features.clone()
        other[0, 2, column] = (other[0, 2, column] + 1) % count
        moved = model(other, mask)
        assert not torch.allclose(moved[..., 0, 2], scores[..., 0, 2])
        torch.testing.assert_close(moved[..., 1:, :], scores[..., 1:, :])
    poisoned = features.masked_fill(~mask[..., None], math.nan)
    torch.testing.assert_close(model(poisoned, mask), scores)
    lengths = mask.sum(1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    packed = model.packed(features[mask], PackedLayout(offsets, 4))
    torch.testing.assert_close(packed, scores[..., mask], rtol=1e-4, atol=1e-5)


def test_numbers_of_documents_are_told_from_their_categories():
    """A linear model is its weights times numbers and vectors, in the order of columns, then of tables by width."""
    torch.manual_seed(1)
    model = Linear(6, categories=CODES).eval()
    features, _ = documents_with_categories()
    document = model.document
    assert document.shapes == [(5 + 0, 3), (4, 2), (40, 7)] and document.width == 3 + 3 + 2 + 7
    parts = [features[..., [0, 2, 5]]]
    parts += [
        model.state_dict()[f"document.tables.{n}"][features[..., column].long()] for n, column in enumerate((1, 3, 4))
    ]
    expected = torch.cat(parts, -1) @ model.output.weight[0] + model.output.bias
    torch.testing.assert_close(model(features), expected)


def test_members_have_vectors_of_their_own():
    features, mask = documents_with_categories()
    both = WITH_CATEGORIES["members"]().eval()
    one = Members(6, ids=[9], hidden=(8,), categories=CODES).eval()
    torch.testing.assert_close(both(features, mask)[1], one(features, mask)[0])
    assert torch.equal(both.select([1]).weights, one.weights)
    plain = MLP(6, hidden=(8,), categories=CODES).eval()
    parts = list(one.weights[0].split(one.sizes))
    weights = [parts[0].view(-1, 8).T, parts[1], parts[2].view(1, -1), parts[3]]
    tables = [part.view(shape) for part, shape in zip(parts[4:], one.document.shapes)]
    names = ("layers.0.weight", "layers.0.bias", "output.weight", "output.bias")
    state = dict(zip(names, weights)) | {f"document.tables.{n}": table for n, table in enumerate(tables)}
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(features, mask), one(features, mask)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WITH_CATEGORIES)
def test_unknown_categories_learn_because_some_are_forgotten(name):
    torch.manual_seed(2)
    model = WITH_CATEGORIES[name]().train()
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(20, 50, 6, generator=generator)
    for column in CODES:
        features[..., column] = 0.0  # no value is unknown
    if isinstance(model, Members):
        model.seeds = torch.randint(2**31 - 1, (2, len(model.shapes), 2), dtype=torch.int32, generator=generator)
    model(features, None).square().sum().backward()
    if isinstance(model, Members):
        gradients = model.weights.grad.split(model.sizes, 1)[2 * len(model.shapes) :]
        tables = [g.view(2, *shape) for g, shape in zip(gradients, model.document.shapes)]
    else:
        tables = [table.grad[None] for table in model.document.tables]
    for table, count in zip(tables, CODES.values()):
        learned = table.abs().sum(-1) > 0  # [K, codes]
        assert learned[:, 0].all() and learned[:, count - 2].all() and learned.sum() == 2 * len(table)
    model.eval()
    assert torch.equal(model(features), model(features))  # nothing is forgotten in evaluation


def test_codes_are_exact_in_half_precision():
    model = MLP(2, hidden=(4,), categories={1: 1000}).eval()
    features = torch.tensor([[[0.5, 513.0], [0.5, 514.0]]])  # one number in bfloat16
    half = model.to(torch.bfloat16)
    scores = half(features)
    assert scores.dtype == torch.bfloat16 and scores[0, 0] != scores[0, 1]


def test_noise_spares_the_vectors_of_categories():
    torch.manual_seed(0)
    model = Linear(2, categories={1: 4}, input_noise=5.0).train()
    features = torch.tensor([[[1.0, 0.0]] * 500])
    with torch.no_grad():
        model.output.weight[0, 0] = 0.0  # of the number
    assert len(model(features).detach().unique()) <= 2  # the vector of the level, or of a forgotten one


@pytest.mark.parametrize("wrong", [{6: 3}, {-1: 3}, {0: 1}, {0: 2.5}])
def test_categories_are_columns_with_codes(wrong):
    with pytest.raises(ValueError, match="categor"):
        MLP(6, categories=wrong)


def test_a_document_may_be_categories_alone():
    model = MLP(1, hidden=(4,), inputs="list", categories={0: 5}).eval()
    assert model(torch.tensor([[[0.0], [3.0]]])).shape == (1, 2)
