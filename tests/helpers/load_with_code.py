"""Loads models by the code that was saved with them, where hf_infini is not installed;
test_hub_code.py runs it.

    python -I load_with_code.py IDS OUT SOURCE …

IDS is a safetensors file with `ids` `[batch, tokens]`, a SOURCE the folder of a model or the name
of a repository. For each, `OUT/NUMBER` receives what the model computes (`numbers.safetensors`) and
the model, saved again (`again`).
"""

import importlib.util
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM


@torch.no_grad()
def numbers(model, base, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits `[batch, tokens, vocabulary]` of a language model, hidden states `[batch, tokens,
    width]` of the model inside it, and the tokens, logits and bytes of cache of a short and a
    longer continuation."""
    found = {"logits": model(ids).logits, "hidden": base(ids).last_hidden_state}
    for new in (4, 24):
        output = model.generate(
            ids,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        found |= {f"tokens_{new}": output.sequences, f"logits_{new}": torch.stack(output.logits, 1)}
        if model.config.infini_layers:
            found[f"bytes_{new}"] = torch.tensor(output.past_key_values.nbytes())
    return {name: tensor.contiguous() for name, tensor in found.items()}


def main(ids: str, out: str, *sources: str) -> None:
    assert importlib.util.find_spec("hf_infini") is None
    for number, source in enumerate(sources):
        config = AutoConfig.from_pretrained(source, trust_remote_code=True)
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        base = AutoModel.from_pretrained(source, trust_remote_code=True)
        for loaded in (config, model, base):
            assert type(loaded).__module__.startswith("transformers_modules."), type(loaded)
        assert type(model.config) is type(config) and type(base) is type(model.base_model)
        folder = Path(out, str(number))
        model.save_pretrained(folder / "again")
        save_file(numbers(model, base, load_file(ids)["ids"]), folder / "numbers.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
