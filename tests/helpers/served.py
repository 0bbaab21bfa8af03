"""What the tests of serving share: small models, and what each request would get alone."""

import torch

from corpora.tokenization import build_character_tokenizer
from decoders import decoder, fitted
from hf_infini import InfiniCache, patch_model
from hf_infini.cache.joined import joined
from hf_infini.compat.cache_name import CACHE
from hf_infini.tools.passages import term_numbers
from running import sample_text

WINDOW = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2}
RECALLING = WINDOW | {"kept_tokens": 40, "update_rule": "none", "keep_score": "recent"}
RECALLING |= {"mask_special_tokens": False}
TEMPLATE = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}<assistant>"
# How models are patched, by the kind: with learned and with rotary positions; with and without a
# memory, kept tokens and a convolution. The last one recalls.
KINDS = {
    "gpt2, learned positions": ("gpt2", WINDOW | {"kept_tokens": 6, "keep_score": "attention"}),
    "llama, memory": ("llama", WINDOW | {"memory_conv": 3, "update_rule": "gated_delta"}),
    "qwen2, fitted": ("qwen2", WINDOW | {"kept_tokens": 9, "keep_score": "learned"}),
    "llama, recalls": ("llama", RECALLING),
}


def served_tokenizer():
    """One token a character, so that any ids are text."""
    tokenizer = build_character_tokenizer([sample_text(), TEMPLATE])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def served_model(kind: str, tokenizer, **options):
    """In float64, where the order of sums does not decide which token is the likeliest."""
    family, memory = KINDS[kind]
    sizes = {
        "vocab_size": len(tokenizer) + 1,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 2,
    }
    sizes |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    plain = decoder(family, **sizes | {"bos_token_id": None} | options)
    return fitted(patch_model(plain, **memory)).double().eval()


@torch.no_grad()
def alone(model, tokenizer, prompt, config, new: int, stops=(), seed=0, archive=False):
    """The tokens that follow a prompt, the text that is told, and how it ends: by whole calls for
    each token, without a cache but where something is recalled."""
    recalls = archive and prompt.question is not None and len(prompt.contexts[0].ids)
    if recalls:
        caches = []
        for context in prompt.contexts:
            caches.append(InfiniCache(model.config, archive=archive))
            model(context.ids[None], use_cache=True, **{CACHE: caches[-1]})
        cache = joined(caches) if len(caches) > 1 else caches[0]
        recalled = cache.recall(prompt.question, terms=term_numbers(tokenizer))
    ids = [*torch.cat([*(context.ids for context in prompt.contexts), prompt.rest]).tolist()]
    behind, chosen, text = prompt.rest.tolist(), [], ""
    processors = model._get_logits_processor(config, len(ids))
    draw = torch.Generator().manual_seed(seed)
    while len(chosen) < new:
        if recalls:
            own = {CACHE: recalled.__copy__()}
            logits = model(torch.tensor([behind]), use_cache=True, **own).logits[:, -1]
        else:
            logits = model(torch.tensor([ids]), use_cache=False).logits[:, -1]
        scores = processors(torch.tensor([ids]), logits.float())
        if config.do_sample:
            token = int(torch.multinomial(scores.softmax(-1), 1, generator=draw))
        else:
            token = int(scores.argmax())
        chosen.append(token)
        if token == tokenizer.eos_token_id:
            return chosen, text, "stop"
        ids.append(token)
        behind.append(token)
        text = tokenizer.decode(chosen, skip_special_tokens=True)
        if places := [text.find(stop) for stop in stops if stop in text]:
            return chosen, text[: min(places)], "stop"
    return chosen, text, "length"
