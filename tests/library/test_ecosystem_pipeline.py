"""`pipeline("text-generation")` on folders with a tokenizer: batches of ragged prompts, and a stream of words."""

from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

from corpora.biographies import biography_documents
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import patch_model
from models import causal_mha

TEXTS = [document.text for document in biography_documents(10)]
PROMPTS = [TEXTS[0][:60], TEXTS[1][:9], TEXTS[2][:110]]  # within one segment, less than one, several
KINDS = {
    "llama": lambda **ids: patch_model(decoder("llama", **ids), segment_length=8, local_segments=1, sink_tokens=2),
    "causal_mha_infini": lambda **ids: causal_mha(attention="infini", segment_length=8, position_encoding="rope", **ids),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = train_bpe(TEXTS, 500)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    KINDS[request.param](vocab_size=len(tokenizer), **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def greedy(folder, prompt: str, count: int) -> str:
    """The likeliest token again and again, each from a fresh pass over everything before it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    while len(ids) < start + count and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


@pytest.mark.slow
def test_a_batch_of_ragged_prompts_is_the_prompts_one_by_one(folder):
    generate = pipeline("text-generation", model=str(folder), device="cpu")
    assert generate.tokenizer.padding_side == "left"
    options = dict(max_new_tokens=12, do_sample=False, return_full_text=False)
    found = [texts[0]["generated_text"] for texts in generate(PROMPTS, batch_size=len(PROMPTS), **options)]
    assert found == [greedy(folder, prompt, 12) for prompt in PROMPTS]
    assert len(set(found)) == len(PROMPTS)


def test_a_streamer_gives_the_same_text_piece_by_piece(folder):
    generate = pipeline("text-generation", model=str(folder), device="cpu")
    streamer = TextIteratorStreamer(generate.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120)
    options = dict(max_new_tokens=12, do_sample=False, streamer=streamer)
    thread = Thread(target=generate, args=(PROMPTS[0],), kwargs=options)
    thread.start()
    pieces = [piece for piece in streamer if piece]
    thread.join()
    assert "".join(pieces) == greedy(folder, PROMPTS[0], 12)
    assert len(pieces) > 1


def test_a_chat_is_the_text_that_its_template_gives(folder):
    template = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}assistant: {% endif %}")
    generate = pipeline("text-generation", model=str(folder), device="cpu")
    (folder / "chat_template.jinja").unlink()
    chat = [{"role": "user", "content": PROMPTS[0]}]
    [found] = generate(chat, max_new_tokens=8, do_sample=False)
    answer = found["generated_text"][-1]
    assert answer == {"role": "assistant", "content": greedy(folder, f"user: {PROMPTS[0]}\nassistant: ", 8)}
