"""The fit of the learned score of kept tokens: the vectors of a ridge regression on what the plain
model's weights say."""

import copy
import itertools
import math
import threading
import warnings

import pytest
import torch
from torch.nn import functional as F

from decoders import decoder
from decoders import token_ids as ids_of_decoder
from hf_infini import cache_bytes, fit_keep_score, load_adapter, patch_model, save_adapter
from hf_infini.layers.memory_layer import memory_layers
from hf_infini.tools.keep_score import shares_of_layers
from models import causal_mha, gpt2, in_calls, infini_gpt2, token_ids

WINDOW = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 6}
DISTANCE, RIDGE = 12, 0.05


def rows_of(count=3):
    return [ids_of_decoder(1, 60 + 10 * number, number)[0].tolist() for number in range(count)]


@pytest.mark.parametrize("kind", ["rows", "passages", "both", "apart"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma2"])
def test_it_is_the_ridge_regression_on_the_plain_models_largest_weights(model_type, kind):
    """Those of queries a distance later, of a second reading, or of both; or a score for each."""
    model, inputs = decoder(model_type).double(), {}
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    score = "two_learned" if kind == "apart" else "half"
    patch_model(model, **WINDOW, keep_score=score)
    before = copy.deepcopy(model.state_dict())
    rows = [] if kind == "passages" else rows_of()
    passages = {"passages": rows_of(), "rows": []}.get(kind, rows_of(5)[3:])
    how = {"distance": DISTANCE, "ridge": RIDGE, "progress": False}
    fit_keep_score(model, rows, passages=passages, **how)
    # of each what is read, which tokens are scored, and from which query on a token counts
    sinks = WINDOW["sink_tokens"]
    read = [(row, slice(sinks, len(row) - DISTANCE), None) for row in rows]
    read += [(row + row[sinks:], slice(sinks, len(row)), len(row)) for row in passages]

    for module in plain.modules():
        if hasattr(module, "layer_idx") and hasattr(module, "scaling"):

            def keep(module, args, given):
                inputs.setdefault(module.layer_idx, []).append(
                    (args or (given["hidden_states"],))[0][0]
                )

            module.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        weights = [
            plain(torch.tensor([row]), output_attentions=True).attentions for row, *_ in read
        ]
    fits = {"keep_weight": range(len(read))}
    if kind == "apart":
        fits["keep_weight"], fits["passage_keep_weight"] = range(3), range(3, len(read))
    peaks = {}
    for layer, (name, numbers) in itertools.product(memory_layers(model).values(), fits.items()):
        given, wanted = [], []
        for number in numbers:
            _, counted, second = read[number]
            far = weights[number][layer.layer_idx][0]
            far = far.tril(-DISTANCE) if second is None else far[:, second:]
            far = far.unflatten(0, (layer.head_counts[1], -1)).amax((1, 2))
            given.append(inputs[layer.layer_idx][number][counted])
            wanted.append(far[:, counted].T)
        given, wanted = torch.cat(given), torch.cat(wanted)
        peaks.setdefault(layer.layer_idx, []).append(float(wanted.square().sum(0).max().sqrt()))
        penalty = (RIDGE * given.square().sum(0).mean()).sqrt() * torch.eye(given.shape[1])
        # the intercept has no penalty
        centred, wanted = given - given.mean(0), wanted - wanted.mean(0)
        solved = torch.linalg.lstsq(
            torch.cat([centred, penalty]), F.pad(wanted, (0, 0, 0, len(penalty)))
        ).solution.T
        solved = solved / (centred @ solved.T).std(0, correction=0).unsqueeze(1)
        # float64, but some models compute norms and softmax in float32
        found = layer.keep_weights[name]
        assert torch.allclose(found, solved, rtol=1e-2, atol=1e-2 * solved.abs().max())
    means = {number: math.prod(own) ** (1 / len(own)) for number, own in peaks.items()}
    assert model.config.kept_shares == shares_of_layers(means, model.config.num_hidden_layers)
    unchanged = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith("keep_weight")
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in unchanged.items())
    assert model.config.segment_length == 8


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_calls_of_other_threads_see_their_own_window(model_type):
    model = patch_model(decoder(model_type), **WINDOW, keep_score="learned").eval()
    ids, options, found = ids_of_decoder(2, 50, 7), vars(model.config).copy(), []

    def call():
        with torch.no_grad():
            found.append((model(input_ids=ids, use_cache=False).logits, vars(model.config).copy()))

    call()
    fitting = threading.current_thread()

    def meanwhile(*_):
        if threading.current_thread() is fitting:
            other = threading.Thread(target=call)
            other.start()
            other.join()

    hook = model.get_output_embeddings().register_forward_pre_hook(meanwhile)
    fit_keep_score(model, rows_of(), distance=DISTANCE, share_out=False, progress=False)
    hook.remove()
    assert len(found) == 4 and all(torch.equal(logits, found[0][0]) for logits, _ in found)
    assert all(seen == options for _, seen in found)


@pytest.mark.parametrize("make", [infini_gpt2, causal_mha])
def test_it_fits_models_trained_from_scratch(make):
    options = {"attention": "infini"} if make is causal_mha else {}
    model = make(**WINDOW, **options, keep_score="learned", position_encoding="rope").train()
    fit_keep_score(model, [token_ids(1, 50)[0]], distance=DISTANCE, progress=False)
    assert all(layer.keep_weight.abs().sum() > 0 for layer in memory_layers(model).values())
    assert model.training and not any(
        layer.keep_weight.requires_grad for layer in memory_layers(model).values()
    )


def test_layers_that_look_far_back_at_single_tokens_get_more_places():
    """Queries and keys of the second layer are made three times as large, so that its softmax is
    sharp."""
    model = decoder("llama")
    with torch.no_grad():
        for name in ("q_proj", "k_proj"):
            getattr(model.model.layers[1].self_attn, name).weight.mul_(3.0)
            getattr(model.model.layers[3].self_attn, name).weight.mul_(0.1)
    for score in ("attention", "learned"):
        patched = patch_model(
            copy.deepcopy(model), **WINDOW | {"kept_tokens": 100}, keep_score=score
        )
        before = cache_bytes(patched.config)
        fit_keep_score(patched, rows_of(), distance=DISTANCE, progress=False)
        shares = patched.config.kept_shares
        assert shares[1] == max(shares) > 1 > shares[3] == min(shares) and sum(
            shares
        ) == pytest.approx(4, abs=1e-3)
        # The same places, but for what each layer rounds down
        assert 0 <= before - cache_bytes(patched.config) < before / 50
        alike = patch_model(copy.deepcopy(model), **WINDOW, keep_score="learned")
        fit_keep_score(alike, rows_of(), distance=DISTANCE, share_out=False, progress=False)
        assert alike.config.kept_shares is None
        for name, layer in memory_layers(patched).items():
            if score == "learned":
                # in float32, summed in another order
                wanted = memory_layers(alike)[name].keep_weight
                torch.testing.assert_close(layer.keep_weight, wanted, rtol=1e-3, atol=1e-3)


def test_no_layer_gets_more_places_than_the_positions_that_it_was_trained_for():
    """A sharp layer among four gets 2.3 times as many, and has 200 places; with two sizes 1.6, and
    146; else as many."""
    for positions, share in ((200, 1 / 0.4375), (199, 1 / 0.625), (145, 1)):
        model = decoder("llama", max_position_embeddings=positions)
        with torch.no_grad():
            for number in (0, 2, 3):
                for name in ("q_proj", "k_proj"):
                    getattr(model.model.layers[number].self_attn, name).weight.mul_(0.02)
        patch_model(model, **WINDOW | {"kept_tokens": 80})
        fit_keep_score(model, rows_of(), distance=DISTANCE, progress=False)
        assert (
            model.config.kept_shares[1]
            == max(model.config.kept_shares)
            == pytest.approx(share, abs=1e-3)
        )
        assert model.config.places <= positions and sum(model.config.kept_shares) == pytest.approx(
            4, abs=1e-3
        )


def test_shares_are_of_few_sizes():
    shares = shares_of_layers({0: 0.3, 2: 1.0, 3: 0.72, 4: 0.7, 5: 1e-6}, 6)
    levels = (1 / 4, 0, 1, 1, 1 / 2, 1 / 8)
    assert shares == pytest.approx([5 * level / sum(levels) for level in levels], abs=1e-4)


def test_it_is_saved_and_put_on_as_an_adapter(tmp_path):
    model = decoder("llama")
    plain, other, third, fourth = (copy.deepcopy(model) for _ in range(4))
    patch_model(model, **WINDOW, keep_score="half")
    fit_keep_score(model, rows_of(), distance=DISTANCE, progress=False)
    save_adapter(model, tmp_path)
    ids = ids_of_decoder(2, 80)
    with torch.no_grad():
        everything = plain(ids).logits
        assert torch.equal(load_adapter(plain, tmp_path)(ids).logits, model(ids).logits)
        # With another number: so many that no layer loses anything. Logits in float32, summed in
        # another order
        enough = math.ceil(70 / min(model.config.kept_shares))
        assert torch.allclose(
            load_adapter(other, tmp_path, kept_tokens=enough)(ids).logits,
            everything,
            rtol=1e-4,
            atol=1e-4,
        )
        learned = load_adapter(third, tmp_path, keep_score="learned")
        assert (
            learned.config.keep_score == "learned"
            and learned.config.kept_shares == model.config.kept_shares
        )
        for layer, wanted in zip(
            *(memory_layers(one).values() for one in (learned, model)), strict=True
        ):
            assert torch.equal(layer.keep_weight, wanted.keep_weight)
        assert not torch.equal(learned(ids).logits, model(ids).logits)
    with pytest.raises(
        ValueError, match="saved with keep_score='half': only 'learned' and 'half' share scores"
    ):
        load_adapter(fourth, tmp_path, keep_score="attention")
    assert type(fourth) is type(decoder("llama"))


@pytest.mark.parametrize("score", ["learned", "half"])
def test_the_first_of_two_scores_is_put_on_without_the_second(score, tmp_path):
    plain = decoder("llama")
    model = patch_model(copy.deepcopy(plain), **WINDOW, keep_score="two_learned")
    fit_keep_score(model, rows_of(), passages=rows_of(5)[3:], distance=DISTANCE, progress=False)
    save_adapter(model, tmp_path / "two")
    alike = patch_model(copy.deepcopy(plain), **WINDOW, keep_score=score)
    alike.config.kept_shares = model.config.kept_shares
    for layer, wanted in zip(*(memory_layers(one).values() for one in (alike, model)), strict=True):
        layer.keep_weight.data.copy_(wanted.keep_weight)
    found = load_adapter(copy.deepcopy(plain), tmp_path / "two", keep_score=score)
    ids = ids_of_decoder(2, 80)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, alike(ids).logits)
        assert not torch.equal(found(ids).logits, model(ids).logits)
    save_adapter(found, tmp_path / "one")
    with pytest.raises(ValueError, match="only 'learned' and 'half' share scores"):
        load_adapter(plain, tmp_path / "one", keep_score="two_learned")


@pytest.mark.parametrize(
    ("options", "rows", "how", "message"),
    [
        ({"keep_score": "attention"}, rows_of(), {"share_out": False}, "nothing to fit"),
        ({"kept_tokens": 0}, rows_of(), {}, "nothing to fit: patch the model with kept_tokens"),
        ({"keep_score": "half"}, [], {}, "nothing to fit on: give rows"),
        ({"keep_score": "half"}, [list(range(3, 18))], {}, "rows must have more than 15 tokens"),
        (
            {"keep_score": "half"},
            rows_of(),
            {"passages": [[3, 4, 5]]},
            "passages must have more than 3 tokens, as their sinks are not scored; got one of 3",
        ),
        ({"keep_score": "half"}, [], {"passages": [torch.rand(9)]}, "passages must hold token ids"),
        (
            {"keep_score": "half"},
            [],
            {"passages": [[5] * 9]},
            "the passages teach no score: each is",
        ),
        ({"keep_score": "half"}, [torch.rand(40)], {}, "rows must hold token ids"),
        (
            {"keep_score": "two_learned"},
            rows_of(),
            {},
            "fits a score on rows and another on passages: give both; got no passages",
        ),
        (
            {"keep_score": "two_learned"},
            [],
            {"passages": rows_of()},
            "give both; got no rows",
        ),
        ({"keep_score": "half"}, rows_of(), {"distance": 0}, "distance must be at least 1; got 0"),
        ({"keep_score": "half"}, rows_of(), {"ridge": -1.0}, "ridge must be at least 0; got -1.0"),
    ],
)
def test_what_is_refused(options, rows, how, message):
    model = patch_model(decoder("llama"), **WINDOW | options)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        fit_keep_score(model, rows, **{"distance": DISTANCE, "progress": False} | how)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def unfitted(recorded) -> int:
    return sum("fit_keep_score" in str(warning.message) for warning in recorded)


LONG = ids_of_decoder(1, 60) % 89
USES = {
    "a call": lambda model, folder: model(LONG),
    "calls with a cache": lambda model, folder: in_calls(model, LONG, range(0, 61, 10)),
    "generate": lambda model, folder: model.generate(LONG[:, :5], max_new_tokens=30),
    "save": lambda model, folder: model.save_pretrained(folder),
}


@pytest.mark.parametrize("score", ["half", "learned", "two_learned"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "make",
    [
        lambda options: patch_model(decoder("llama"), **options),
        lambda options: infini_gpt2(**options),
        lambda options: causal_mha(attention="infini", position_encoding="rope", **options),
    ],
    ids=["llama", "gpt2", "causal_mha"],
)
def test_a_score_that_was_not_fitted_is_said_once(make, use, score, tmp_path):
    model = make(WINDOW | {"keep_score": score})
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        model(LONG[:, :18])  # all of which the window holds
        assert unfitted(said) == 0
        for _ in range(2):
            USES[use](model, tmp_path)
            assert unfitted(said) == 1
        for other in USES.values():
            other(model, tmp_path)
        assert unfitted(said) == 1
        type(model).from_pretrained(tmp_path)
        assert unfitted(said) == 2


@pytest.mark.parametrize("score", ["attention", "half", "two_learned"])
def test_a_score_that_was_fitted_or_needs_none_is_used_without_a_word(score, tmp_path):
    model = patch_model(decoder("llama"), **WINDOW, keep_score=score)
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        passages = rows_of() if score == "two_learned" else []
        fit_keep_score(model, rows_of(), passages=passages, distance=DISTANCE, progress=False)
        for use in USES.values():
            use(model, tmp_path)
        save_adapter(model, tmp_path / "adapter")
        load_adapter(decoder("llama"), tmp_path / "adapter")(LONG)
        type(model).from_pretrained(tmp_path)(LONG)
    assert unfitted(said) == 0


def test_of_two_scores_the_one_that_was_not_fitted_is_said(tmp_path):
    model = patch_model(decoder("llama"), **WINDOW, keep_score="two_learned")
    for layer in memory_layers(model).values():
        layer.keep_weight.data.normal_()
    with pytest.warns(
        UserWarning, match=r"yet: zero in all layers \(passage_keep_weight\).*passages=pas"
    ):
        model(LONG)
    with pytest.raises(ValueError, match=r"layers 0, 1, 2, 3 was .*\(model, rows, passages=pas"):
        save_adapter(model, tmp_path)


def test_of_two_scores_the_passages_that_teach_nothing_are_named():
    model = patch_model(decoder("llama"), **WINDOW, keep_score="two_learned")
    passages = [[3, 4] + [7] * 60]  # whose two sinks are not scored
    with pytest.raises(ValueError, match="^the passages teach no score: the inputs of layer 0"):
        fit_keep_score(model, rows_of(), passages=passages, distance=DISTANCE, progress=False)
    assert not any(layer.keep_weight.any() for layer in memory_layers(model).values())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[5] * 60, [5] * 70], "each is one repeated token.*asking_rows or .*text_rows"),
        ([[5] * 60, [7] * 70], "each is one repeated token.*asking_rows or .*text_rows"),
        (
            None,
            "inputs of layer . are the same .*asking_rows or .*text_rows",
        ),  # but all ids have one embedding
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen2"])
def test_rows_of_one_token_teach_nothing(model_type, rows, message):
    model = patch_model(decoder(model_type), **WINDOW, keep_score="half")
    if rows is None:
        weight = model.get_input_embeddings().weight
        weight.data[:] = weight.data[5]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        fit_keep_score(model, rows or rows_of(), distance=DISTANCE, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.kept_shares is None


@pytest.mark.parametrize("rows", ["some text", ["some text"], [[3, None]]])
def test_rows_that_are_no_ids_are_named(rows):
    model = patch_model(decoder("llama"), **WINDOW, keep_score="half")
    with pytest.raises(TypeError, match="^rows must be lists or tensors of token ids"):
        fit_keep_score(model, rows, distance=DISTANCE)


def test_more_places_than_trained_positions_are_said_with_both_numbers(tmp_path):
    model = patch_model(decoder("llama"), **WINDOW, keep_score="half")
    fit_keep_score(model, rows_of(), distance=DISTANCE, share_out=False, progress=False)
    save_adapter(model, tmp_path)
    most = 512 - 2 - 16  # of 512 positions, beside sinks and two segments
    wide = WINDOW | {"kept_tokens": most + 1}
    for change in (
        lambda: patch_model(decoder("llama"), **wide),
        lambda: load_adapter(decoder("llama"), tmp_path, kept_tokens=most + 1),
    ):
        with pytest.warns(UserWarning, match="window of 513 places.*wider than the 512 positions"):
            change()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        patch_model(decoder("llama"), **WINDOW | {"kept_tokens": most})
        patch_model(gpt2(), **wide, position_encoding="rope")  # made with it, for any length
