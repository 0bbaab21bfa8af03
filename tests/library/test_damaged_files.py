"""Files that hold tensors, damaged in every way: memory files, adapters, and a LoRA beside one.
Each is refused in one line that names the file, the model stays as it was, and the good file loads
afterwards. Also where nothing but the content can show it, as in files of earlier versions."""

import copy
import importlib.util
import json
import random
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, save

from decoders import decoder, fitted
from hf_infini import InfiniCache, load_adapter, patch_model, save_adapter
from hf_infini.cache.files import (
    METADATA_KEY,
    MemoryFileError,
    read_memory_file,
    write_memory_file,
)
from hf_infini.cache.tensor_files import checksum
from hf_infini.models.adapter import LORA, LORA_WEIGHTS, RECORD, SEALED, WEIGHTS, sealed
from memories import read
from models import infini_gpt2, token_ids

OPTIONS = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2, "memory_conv": 2}
OPTIONS |= {"kept_tokens": 4, "keep_score": "half"}
MEMORY = "memory.safetensors"
ROLLS_BACK = importlib.util.find_spec("hf_infini.models.transaction") is not None


# --- what can happen to a file, by its kind; each takes its content and a source of chance
# --------------------------------------------------------------------------------------------------


def cut(content, chance):
    return content[: chance.randrange(1, len(content))]


def flipped(content, chance):
    place = chance.choice(
        [chance.randrange(len(content)), chance.randrange(min(400, len(content)))]
    )
    return (
        content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
    )


def of_tensors(change):
    """Other tensors in a whole file: `change(tensors, a name)`."""

    def changed(content, chance):
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        tensors = load(content)
        floats = sorted(name for name in tensors if tensors[name].is_floating_point())
        change(tensors, chance.choice(floats))
        return save(tensors, header["__metadata__"])

    return changed


def with_number(number):
    def change(tensors, name):
        flat = tensors[name].reshape(-1).clone()
        flat[len(flat) // 2] = number
        tensors[name] = flat.view(tensors[name].shape)

    return of_tensors(change)


def of_json(change):
    """Another object: `change(object)` in place, or what comes instead."""

    def changed(content, chance):
        found = json.loads(content)
        other = change(found)
        return json.dumps(found if other is None else other).encode()

    return changed


ANY = {
    "empty": lambda content, chance: b"",
    "cut": cut,
    "more": lambda content, chance: content + b"1",
    "missing": lambda content, chance: None,
    "text": lambda content, chance: b"a text, and a long one " * 20,
    "zeros": lambda content, chance: bytes(len(content)),
}
TENSORS = {
    "nan": with_number(float("nan")),
    "inf": with_number(float("-inf")),
    "whole numbers": of_tensors(lambda of, name: of.update({name: of[name].long()})),
    "bits": of_tensors(lambda of, name: of.update({name: of[name] > 0})),
    "shape": of_tensors(lambda of, name: of.update({name: torch.ones(2, 3, 5)})),
    "missing tensor": of_tensors(lambda of, name: of.pop(name)),
    "extra tensor": of_tensors(lambda of, name: of.update({f"{name}s": torch.ones(2)})),
    "header": lambda content, chance: (2).to_bytes(8, "little") + b"[]" + content[8:],
    "huge header": lambda content, chance: (2**62).to_bytes(8, "little") + content[8:],
}
OBJECTS = {
    f"is {text}": lambda content, chance, text=text: text.encode()
    for text in ("[]", "null", "3", '"options"', "{}", "NaN", "[" * 100_000, '{"options": {}}')
}
RECORDS = {
    "extra entry": of_json(lambda found: found.update(option={})),
    "options are a list": of_json(lambda found: found.update(options=[1])),
    "model is null": of_json(lambda found: found.update(model=None)),
    "part of a model": of_json(lambda found: found["model"].pop("width") and None),
    "other model entry": of_json(lambda found: found["model"].update(height=3)),
    "layers as text": of_json(lambda found: found["model"].update(layers="4")),
    "no signs": of_json(lambda found: found["model"].update(signs="")),
    "unknown option": of_json(lambda found: found["options"].update(kept_token=3)),
    "no kept tokens": of_json(lambda found: found["options"].update(kept_tokens=0)),
    "nor a score": of_json(
        lambda found: found["options"].update(kept_tokens=0, keep_score="attention")
    ),
    "other score": of_json(lambda found: found["options"].update(keep_score="attention")),
    "no such layer": of_json(lambda found: found["options"].update(layers=[0, 9])),
    "fewer layers": of_json(lambda found: found["options"].update(layers=[0, 2])),
    "short shares": of_json(lambda found: found["options"].update(kept_shares=[1.0, 1.0])),
    "no convolution": of_json(lambda found: found["options"].update(memory_conv=0)),
    "learned write": of_json(
        lambda found: found["options"].update(memory_write="learned", feature_map="exp")
    ),
    "option of another type": of_json(lambda found: found["options"].update(segment_length="8")),
    "option is not finite": of_json(lambda found: found["options"].update(gate_init=float("nan"))),
}
LORAS = {
    "no kind": of_json(lambda found: found.pop("peft_type") and None),
    "unknown kind": of_json(lambda found: found.update(peft_type="MORA")),
}
# Of a LoRA whose record has no checksums only PEFT on the patched model can say these
LATE = {
    "rank": of_json(lambda found: found.update(r=3)),
    "rank is a text": of_json(lambda found: found.update(r="two")),
    "fewer targets": of_json(lambda found: found.update(target_modules=["q_proj"])),
    "other targets": of_json(lambda found: found.update(target_modules=["z_proj"])),
}
LATE_TENSORS = ("shape", "missing tensor", "extra tensor")
BY_FILE = {
    MEMORY: ANY | TENSORS,
    WEIGHTS: ANY | TENSORS,
    LORA_WEIGHTS: ANY | TENSORS,
    RECORD: ANY | OBJECTS | RECORDS,
    LORA: ANY | OBJECTS | LORAS | LATE,
}
CASES = [(file, kind) for file, kinds in BY_FILE.items() for kind in [*kinds, "flipped"]]


# --- the good files
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    return decoder("llama", num_hidden_layers=3)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter with a LoRA."""
    folder = tmp_path_factory.mktemp("adapter")
    model = fitted(patch_model(decoder("llama", num_hidden_layers=3), **OPTIONS))
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    save_adapter(get_peft_model(model, lora), folder)
    return folder


@pytest.fixture(scope="module")
def reader():
    return infini_gpt2(memory_conv=2, layers=[0, 2], kept_tokens=3)


@pytest.fixture(scope="module")
def memory(reader, tmp_path_factory):
    """The folder of a memory file."""
    folder = tmp_path_factory.mktemp("memory")
    read(reader, token_ids(2, 30)).save_pretrained(folder / MEMORY, reader)
    return folder


def unseal(folder, record=None) -> None:
    """Makes an adapter one of an earlier version."""
    record = json.loads((folder / RECORD).read_text()) if record is None else record
    record["model"].pop("layer_signs")
    rest = {name: value for name, value in record.items() if name not in SEALED}
    (folder / RECORD).write_text(json.dumps(rest))


def state_of(model):
    """All that may be seen of a model from outside."""
    return {
        "modules": {name: type(module) for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "parameters": {
            name: (id(p), p._version, p.requires_grad, p.dtype, p.sum(dtype=torch.float64).item())
            for name, p in model.named_parameters()
        },
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "config": (type(model.config), model.config.to_dict()),
    }


def refused(model, file, load, unchanged=True) -> str:
    """What is said when `load` is refused; the model stays as it was."""
    before = state_of(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises((ValueError, OSError)) as found:
        load()
    text = str(found.value)
    assert "\n" not in text and file in text, text
    if unchanged:
        assert state_of(model) == before
        assert all(torch.equal(now, weights[name]) for name, now in model.state_dict().items())
    return text


def same_json(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except (ValueError, RecursionError):
        return False


@pytest.mark.parametrize(("file", "kind"), CASES, ids=lambda text: text[:20])
def test_a_damaged_file_is_refused(file, kind, adapter, memory, plain, reader, tmp_path):
    """As it was saved, with its checksums."""
    good = memory if file == MEMORY else adapter
    content = (good / file).read_bytes()
    for seed in range(12 if kind == "flipped" else 3 if kind == "cut" else 1):
        damaged = {"flipped": flipped, **BY_FILE[file]}[kind](content, random.Random(seed))
        if file.endswith("json") and damaged is not None and same_json(damaged, content):
            continue  # a number or a text in another form
        folder = shutil.copytree(good, tmp_path / str(seed))
        if damaged is None:
            (folder / file).unlink()
        else:
            (folder / file).write_bytes(damaged)
        if file == MEMORY:
            refused(
                reader, file, lambda at=folder: InfiniCache.from_pretrained(at / MEMORY, reader)
            )
        else:
            refused(plain, file, lambda at=folder: load_adapter(plain, at))


UNSEALED = [
    (file, kind)
    for file, kind in CASES
    if kind != "flipped" and file != MEMORY and (file, kind) != (RECORD, "flipped")
]


@pytest.mark.parametrize(("file", "kind"), UNSEALED, ids=lambda text: text[:20])
def test_a_damaged_file_of_an_earlier_version_is_refused(file, kind, adapter, plain, tmp_path):
    """Whose record has no checksums: by what it holds."""
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    unseal(folder)
    damaged = BY_FILE[file][kind]((folder / file).read_bytes(), random.Random(0))
    if damaged is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(damaged)
    late = file == LORA and kind in LATE or file == LORA_WEIGHTS and kind in LATE_TENSORS
    model = copy.deepcopy(plain) if late else plain
    named = "adapter_" if late else file  # the configuration or the weights, which contradict
    refused(model, named, lambda: load_adapter(model, folder), unchanged=not late or ROLLS_BACK)


def test_the_good_files_load_afterwards(adapter, memory, plain, reader, tmp_path):
    """Also one of an earlier version: the same numbers."""
    shutil.copytree(adapter, tmp_path / "earlier")
    unseal(tmp_path / "earlier")
    models = [
        load_adapter(copy.deepcopy(plain), folder) for folder in (adapter, tmp_path / "earlier")
    ]
    with torch.no_grad():
        one, other = (model(input_ids=token_ids(1, 40)).logits for model in models)
    assert torch.equal(one, other)
    assert InfiniCache.from_pretrained(memory / MEMORY, reader).get_seq_length() == 30


# --- contradictions under a right checksum
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_that_contradicts_is_refused_whatever_its_checksum(kind, adapter, plain, tmp_path):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    record = json.loads(RECORDS[kind]((folder / RECORD).read_bytes(), None))
    rest = {name: value for name, value in record.items() if name not in SEALED}
    names = (WEIGHTS, LORA, LORA_WEIGHTS)
    (folder / RECORD).write_bytes(
        sealed(rest, {name: (folder / name).read_bytes() for name in names})
    )
    refused(plain, "infini_adapter.", lambda: load_adapter(plain, folder))


@pytest.mark.parametrize("lost", [["sha256"], ["files"], ["sha256", "files"]], ids=str)
def test_a_record_that_has_lost_its_checksum_is_none_of_an_earlier_version(
    lost, adapter, plain, tmp_path
):
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({n: v for n, v in record.items() if n not in lost}))
    text = refused(plain, RECORD, lambda: load_adapter(plain, folder))
    assert f"it has no {', '.join(sorted(lost))}" in text


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_saved(number, memory, reader, tmp_path):
    cache = read(reader, token_ids(2, 30))
    cache.state.memory[0, 0, 0, 0] = number
    file = shutil.copy(memory / MEMORY, tmp_path / MEMORY)
    before = (tmp_path / MEMORY).read_bytes()
    with pytest.raises(MemoryFileError, match="layers.0.memory has numbers that are not finite"):
        cache.save_pretrained(file, reader)
    assert (tmp_path / MEMORY).read_bytes() == before and len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": "30"}, "columns must be a whole number, and is a text"),
        ({"tokens_seen": None}, "tokens_seen must be a list, and is null"),
        ({"text_sha256": 3}, "text_sha256 must be a list or null, and is a whole number"),
        ({"document": {}}, "unknown entries document"),
        ({"model": []}, "model must be an object, and is a list"),
    ],
    ids=lambda value: str(value)[:15],
)
def test_a_record_of_a_memory_file_is_checked_whatever_its_checksum(
    change, message, memory, reader, tmp_path
):
    content = (memory / MEMORY).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    record = json.loads(header["__metadata__"][METADATA_KEY]) | change
    tensors = load(content)
    del record["sha256"]
    record["sha256"] = checksum(record, tensors)
    (tmp_path / MEMORY).write_bytes(save(tensors, {METADATA_KEY: json.dumps(record)}))
    load_it = lambda: InfiniCache.from_pretrained(tmp_path / MEMORY, reader)  # noqa: E731
    assert message in refused(reader, MEMORY, load_it)


LAYERS = {
    "shape": lambda of: of.update({"layers.0.memory": torch.ones(2, 4, 8, 9)}),
    "rows": lambda of: of.update({"layers.2.local_key": of["layers.2.local_key"][:1]}),
    "whole numbers": lambda of: of.update({"layers.0.normaliser": torch.ones(2, 4, 8).long()}),
    "floating point": lambda of: of.update({"layers.0.tokens_seen": torch.ones(2)}),
    "missing": lambda of: of.pop("layers.2.recent_inputs"),
    "of another option": lambda of: of.update({"layers.0.local_log_weight": torch.ones(2)}),
    "of no layer": lambda of: of.update({"layers.7.memory": torch.ones(2)}),
    "of full attention": lambda of: of.pop("layers.1.keys"),
    "with other dimensions": lambda of: of.update({"layers.1.keys": torch.ones(2, 3)}),
}


@pytest.mark.parametrize("change", LAYERS.values(), ids=LAYERS)
def test_tensors_that_are_not_the_model_s_are_refused_whatever_the_checksum(
    change, memory, reader, tmp_path
):
    record, tensors = read_memory_file(memory / MEMORY)
    change(tensors)
    write_memory_file(tmp_path / MEMORY, tensors, record)
    load_it = lambda: InfiniCache.from_pretrained(tmp_path / MEMORY, reader)  # noqa: E731
    assert "does not have what the model's cache has: layers." in refused(reader, MEMORY, load_it)
