"""Many requests at once: each is answered as it would be alone, whoever comes, leaves or fails
beside it."""

import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cases import examples
from decoders import decoder
from hf_infini import patch_model
from hf_infini.cache.merged import merged
from hf_infini.tools.reader import Reader
from hf_infini.tools.serving.loop import Loop, Turn
from hf_infini.tools.serving.prefixes import Prefixes
from hf_infini.tools.serving.requests import Context, Ended, Prompt, Request
from hf_infini.tools.serving.text import AnswerText
from running import sample_text
from served import KINDS, WINDOW, alone, served_model, served_tokenizer

TEXT = sample_text()
TOKENIZER = served_tokenizer()
POISON = len(TOKENIZER)  # a token at which the model fails, and which is no text


@dataclass
class Told:
    """A request, and what it was told."""

    request: Any
    spec: dict
    told: list = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part for part in self.told if isinstance(part, str))

    @property
    def ended(self) -> Ended:
        assert isinstance(self.told[-1], Ended)
        assert all(isinstance(part, str) and part for part in self.told[:-1])
        return self.told[-1]


def asked(model, prompt, *, seed=None, new=10, stops=(), deaf_after=None, **options) -> Told:
    """A request; `deaf_after`: pieces that are heard, then whoever asked is gone."""
    config, _ = model._prepare_generation_config(None, suppress_tokens=[POISON], **options)
    spec = dict(prompt=prompt, seed=seed, new=new, stops=stops, config=config)
    found = Told(None, spec | {"deaf_after": deaf_after})

    def tell(part):
        if deaf_after is not None and len(found.told) >= deaf_after:
            raise ConnectionError("nobody listens")
        found.told.append(part)

    found.request = Request(
        model, TOKENIZER, prompt, tell, config=config, seed=seed, max_new_tokens=new, stops=stops
    )
    return found


def ids_of(text: str) -> torch.Tensor:
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def prompts(draw: random.Random, recalls: bool) -> Prompt:
    """Of a few texts that many begin with."""
    begin = draw.choice([0, 0, 3000])
    context = ids_of(TEXT[begin : begin + draw.choice([0, 1, 7, 64, 90, 200, 333])])
    if draw.random() < 0.3:
        context = torch.cat([context, ids_of(TEXT[9000:9070])])
    begin = draw.randrange(5000)
    rest = ids_of(TEXT[begin : begin + draw.choice([1, 2, 30])])
    contexts = (Context(context),)
    if recalls and draw.random() < 0.3:
        contexts = (Context(context), Context(ids_of(TEXT[4000 : 4000 + draw.choice([20, 150])])))
        contexts = (
            contexts
            if len(context) and max(len(each.ids) for each in contexts) >= 16
            else contexts[:1]
        )
    return Prompt(contexts, rest, rest if recalls else None, begin=0)


def requests(draw: random.Random, model, recalls: bool) -> Told:
    options: dict = {"do_sample": draw.random() < 0.6}
    if options["do_sample"]:
        options |= {"temperature": draw.choice([0.7, 1.5]), "top_p": draw.choice([1.0, 0.8])}
    if draw.random() < 0.3:
        options |= {"repetition_penalty": 1.3}
    prompt, fault = prompts(draw, recalls), draw.choice(["", "", "", "poison", "late", "deaf"])
    poisoned = prompt.rest.clone()
    if fault == "poison":  # while it is read, or in a step with the others
        poisoned[draw.randrange(len(poisoned))] = POISON
    if fault == "late":
        poisoned[-1] = POISON
    deaf = draw.randrange(3) if fault == "deaf" else None
    stops = draw.choice([(), (), ("e",), ("th", "or")])
    found = asked(
        model,
        prompt._replace(rest=poisoned),
        seed=draw.randrange(100),
        new=draw.choice([1, 2, 9, 20]),
        stops=stops,
        deaf_after=deaf,
        **options,
    )
    found.spec["fails"] = fault in ("poison", "late")
    return found


def check(model, each: Told, archive: bool | str) -> None:
    """What it was told is what it would have been told alone."""
    spec = {name: each.spec[name] for name in ("prompt", "config", "new", "stops", "seed")}
    if each.spec["fails"]:
        assert "poisoned" in str(each.ended.error) and each.told == [each.ended]
        return
    tokens, text, reason = alone(model, TOKENIZER, **spec, archive=archive)
    if each.spec["deaf_after"] is not None:
        heard = [part for part in each.told if isinstance(part, str)]
        assert text.startswith("".join(heard)) and len(each.told) <= each.spec["deaf_after"]
        return
    if each.request.cancelled and not any(isinstance(part, Ended) for part in each.told):
        assert text.startswith(each.text)
        return
    assert (each.text, each.ended.reason) == (text, reason), each.ended
    usage = each.ended.usage
    assert (usage.prompt, usage.new) == (each.spec["prompt"].tokens, len(tokens))
    assert 0 <= usage.cached < usage.prompt


@pytest.fixture(scope="module")
def models():
    """Each fails at one token, as a model with a broken weight would."""
    made = {kind: served_model(kind, TOKENIZER) for kind in KINDS}

    def poisoned(module, args):
        if (args[0] == POISON).any():
            raise RuntimeError("poisoned")

    for model in made.values():
        model.get_input_embeddings().register_forward_pre_hook(poisoned)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("HF_INFINI_EXAMPLES", 6))))
@pytest.mark.parametrize("kind", KINDS)
def test_each_is_answered_as_alone(models, kind, seed):
    """Arrivals, lengths, cancels and errors at random."""
    model, draw = models[kind], random.Random(seed)
    archive = kind == "llama, recalls" and draw.choice([True, "int8"])
    loop = Loop(
        model,
        TOKENIZER,
        slots=draw.randint(1, 5),
        chunk=draw.choice([1, 9, 64, 1000]),
        archive=archive,
        kept_bytes=draw.choice([0, 300_000, 10**9]),
    )
    coming = [requests(draw, model, archive) for _ in range(draw.randint(1, 9))]
    every, cancels = [], []
    while loop.step() or coming:
        if coming and draw.random() < 0.4:
            every.append(coming.pop())
            loop.waiting.append(every[-1].request)
            if draw.random() < 0.15:
                cancels.append(every[-1])
        if cancels and draw.random() < 0.2:
            cancels.pop().request.cancelled = True
        live = len(loop.rows.requests)
        assert live <= loop.slots and loop.prefixes.nbytes <= loop.prefixes.limit
    assert not loop.requests and loop.rows._cache is None
    for each in every:
        each.spec.setdefault("fails", False)
        if not (each.request.cancelled and each.spec["fails"]):
            check(model, each, archive)


def run(loop: Loop, *told: Told) -> None:
    for each in told:
        loop.waiting.append(each.request)
    while loop.step():
        pass


def test_what_was_read_is_not_read_again(models):
    """A prompt goes on from the longest beginning that is kept, with the same answer."""
    model = models["llama, memory"]
    loop, whole = Loop(model, TOKENIZER, chunk=50), ids_of(TEXT[:500])
    read = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, given: read.append(given["input_ids"].shape), with_kwargs=True
    )
    for context, cached in ((100, 0), (300, 100), (300, 300), (200, 100), (250, 200)):
        read.clear()
        rest = ids_of(TEXT[700:710])
        each = asked(model, Prompt((Context(whole[:context]),), rest), new=3)
        run(loop, each)
        assert each.ended.usage.cached == cached
        assert sum(shape[1] for shape in read) == context - cached + len(rest) - 1 + 3
        wanted = alone(model, TOKENIZER, each.spec["prompt"], each.spec["config"], 3)
        assert each.text == wanted[1]
    hook.remove()


def test_nobody_waits_for_more_than_a_chunk(models):
    """Beside a long prompt a short one is read and answered, and all go on in each step."""
    model = models["llama, memory"]
    loop = Loop(model, TOKENIZER, chunk=16, slots=3)
    long, short = (
        asked(
            model, Prompt((Context(ids_of(TEXT[:length])),), ids_of("To")), new=30, eos_token_id=[]
        )
        for length in (2000, 20)
    )
    sizes = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, given: sizes.append(given["input_ids"].numel()), with_kwargs=True
    )
    loop.waiting.extend([long.request, short.request])
    steps = 0
    while not short.told or not isinstance(short.told[-1], Ended):
        before = short.request.new
        loop.step()
        steps += 1
        assert before == 0 or short.request.new == before + 1
    hook.remove()
    # its 22 tokens take two turns of the four chunks at the beginning
    assert steps <= 4 + 30 and not long.told and max(sizes) <= 16


def test_a_long_prompt_does_not_starve_beside_short_ones_that_keep_coming(models):
    model = models["llama, memory"]
    loop = Loop(model, TOKENIZER, chunk=16, slots=2)
    long = asked(model, Prompt((Context(ids_of(TEXT[:640])),), ids_of("To")), new=1)
    loop.waiting.append(long.request)
    for number in range(90):  # half of the turns: 80, and the step of its token
        if len(loop.waiting) < 2:
            rest = ids_of(TEXT[number : number + 16])
            loop.waiting.append(asked(model, Prompt((Context(rest),), rest), new=1).request)
        loop.step()
    assert long.told and long.ended.error is None


def test_turns_of_others_are_taken_between_steps_and_their_errors_are_their_own(models):
    model = models["llama, memory"]
    loop, ran = Loop(model, TOKENIZER, chunk=8, slots=1), []
    each = asked(model, Prompt((Context(ids_of(TEXT[:80])),), ids_of("To")), new=4)
    loop.reading += [Turn(lambda: ran.append(each.request.new), 8) for _ in range(4)]
    run(loop, each)
    assert len(ran) == 4 and each.ended.error is None


def test_late_requests_end_with_an_error_wherever_they_are(models):
    model = models["llama, memory"]
    loop = Loop(model, TOKENIZER, chunk=8, slots=2)
    prompt = Prompt((Context(ids_of(TEXT[:80])),), ids_of("To"))
    told = [asked(model, prompt, new=50, eos_token_id=[]) for _ in range(3)]
    for each in told:
        loop.waiting.append(each.request)
    while not loop.rows.requests:
        loop.step()
    assert loop.waiting and len(loop.requests) == 3
    for each in told:
        each.request.deadline = 0
    loop.step()
    assert not loop.requests
    for each in told:
        assert isinstance(each.ended.error, TimeoutError) and each.ended.reason is None


WHERE = {
    "at its beginning": lambda model: model.get_input_embeddings(),
    "in the last layer": lambda model: model.model.layers[-1].mlp,
}


@pytest.mark.parametrize("where", WHERE)
def test_a_step_that_fails_for_the_batch_alone_is_made_row_by_row(models, where):
    """Such as one for which there is no memory."""
    model, failed = models["qwen2, fitted"], []

    def too_large(module, args):
        if len(args[0]) > 1:
            failed.append(len(args[0]))
            raise RuntimeError("out of memory")

    hook = WHERE[where](model).register_forward_pre_hook(too_large)
    loop, told = Loop(model, TOKENIZER), []
    for number in range(3):
        prompt = Prompt((Context(ids_of(TEXT[number * 99 : number * 99 + 70])),), ids_of("To"))
        told.append(asked(model, prompt, new=12))
    run(loop, *told)
    hook.remove()
    assert len(failed) >= 3
    for each in told:
        wanted = alone(model, TOKENIZER, each.spec["prompt"], each.spec["config"], 12)
        assert (each.text, each.ended.error) == (wanted[1], None)


def test_who_comes_and_finds_no_memory_leaves_the_others_as_they_are(models, monkeypatch):
    model, told = models["llama, memory"], []

    def merged_of_two(caches):
        if sum(cache.batch_size for cache in caches) > 2:
            raise RuntimeError("out of memory")
        return merged(caches)

    monkeypatch.setattr("hf_infini.tools.serving.rows.merged", merged_of_two)
    for number in range(3):
        prompt = Prompt((Context(ids_of(TEXT[:80])),), ids_of("To be"[: number + 1]))
        told.append(asked(model, prompt, new=9, eos_token_id=[]))
    loop = Loop(model, TOKENIZER)
    loop.waiting.extend(each.request for each in told[:2])
    loop.step()
    run(loop, told[2])
    assert "out of memory" in str(told[2].ended.error)
    for each in told[:2]:
        wanted = alone(model, TOKENIZER, each.spec["prompt"], each.spec["config"], 9)
        assert (each.text, each.ended.error) == (wanted[1], None)


def test_documents_are_recalled_as_by_a_reader(models):
    """And their passages are told."""
    model = models["llama, recalls"]
    texts = [TEXT[:900], TEXT[5000:5600]]
    reader = Reader(model, TOKENIZER, archive=True)
    reader.read_documents(texts, progress=False)
    question = [{"role": "user", "content": "Who is the king?"}]
    wanted = reader.chat(question, max_new_tokens=12, do_sample=False)
    head, rest = reader._rendered_parts(question, True)
    contexts = tuple(
        Context(torch.cat([reader._encode(head), reader._encode(text)])) for text in texts
    )
    asked_ids = reader._encode(question[0]["content"])
    prompt = Prompt(contexts, reader._encode(rest), asked_ids, begin=len(reader._encode(head)))
    each = asked(model, prompt, new=12, do_sample=False)
    run(Loop(model, TOKENIZER, archive=True), each)
    assert each.text.strip() == wanted and each.ended.error is None
    assert each.ended.passages and [*each.ended.passages] == reader.passages[0][:3]


def test_kept_beginnings_make_room_for_others(models):
    model = models["llama, memory"]
    loop = Loop(model, TOKENIZER)
    caches = {}
    for begin in (0, 100, 200):
        ids = ids_of(TEXT[begin : begin + 70])
        caches[begin] = ids, loop.new_cache()
        loop.read(caches[begin][1], ids)
    size = caches[0][1].nbytes()
    prefixes = Prefixes(2 * size)
    prefixes.keep(*caches[0])
    prefixes.keep(*caches[100])
    assert prefixes.longest(torch.cat([caches[0][0], caches[100][0]])) == (70, caches[0][1])
    prefixes.keep(*caches[200])  # instead of that which was asked for least lately
    assert len(prefixes) == 2 and prefixes.nbytes == 2 * size
    assert prefixes.longest(caches[100][0]) == (0, None)
    assert prefixes.longest(caches[0][0])[0] == prefixes.longest(caches[200][0])[0] == 70
    assert prefixes.longest(caches[0][0][:69]) == (0, None)
    none = Prefixes(size - 1)
    none.keep(*caches[0])
    assert not len(none) and not none.nbytes


def test_a_model_with_layers_that_grow_is_refused():
    partly = patch_model(decoder("llama", vocab_size=len(TOKENIZER)), **WINDOW, layers=[0, 2])
    with pytest.raises(ValueError, match="patch all of them"):
        Loop(partly, TOKENIZER)


PIECES = st.text(st.sampled_from("abcé€😀 "), max_size=12)


@examples(200)
@given(text=PIECES, stops=st.lists(st.text(st.sampled_from("abcé€"), min_size=1, max_size=3)))
@example(text="baa", stops=["a", "baa"])
@example(text="abc", stops=["bc", "abc"])
def test_text_comes_in_pieces_that_are_never_taken_back(byte_tokenizer, text, stops):
    """Up to the stop string that is whole first, with characters of several tokens."""
    tokens = byte_tokenizer(text)["input_ids"]
    answer, pieces = AnswerText(byte_tokenizer, stops), []
    for token in tokens:
        pieces.append(answer.add(token))
        if answer.stopped:
            break
    said = "".join(pieces)
    pieces.append(answer.end())
    places = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert "".join(pieces) == (text[: min(places)[1]] if places else text)
    assert answer.stopped == (bool(places) and said == "".join(pieces))


@pytest.fixture(scope="module")
def byte_tokenizer():
    """A token for each byte."""
    from corpora.tokenization import train_bpe

    return train_bpe(["abc"], 260)
