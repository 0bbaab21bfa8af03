"""`transformers serve` and `transformers chat`, and `pipeline`: a patched model answers as it does
in Python."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import hf_infini
from corpora.biographies import biography_documents
from corpora.tokenization import train_bpe
from decoders import decoder
from hf_infini import patch_model
from models import causal_mha, infini_gpt2

pytest.importorskip("fastapi", reason="pip install 'transformers[serving]'")

TEXTS = [document.text for document in biography_documents(10)]
PROMPT = " ".join(" ".join(TEXTS[:3]).split())  # many segments, one line
COMMAND = str(Path(sys.executable).with_name("transformers"))
WINDOW = {"segment_length": 8, "local_segments": 1, "sink_tokens": 2}
MODELS = {
    "qwen2": lambda **options: patch_model(decoder("qwen2", **options), **WINDOW),
    "causal_mha": lambda **options: causal_mha(
        attention="infini", segment_length=8, position_encoding="rope", **options
    ),
    "infini_gpt2": lambda **options: infini_gpt2(position_encoding="rope", **options),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    tokenizer = train_bpe(TEXTS, 500)
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
    found = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in found.items():
        ids = {
            id_name: getattr(tokenizer, id_name)
            for id_name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        MODELS[name](vocab_size=len(tokenizer), **ids).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return found


def answer(folder: Path, prompt: str) -> str:
    """Eight tokens, the likeliest again and again."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    messages = [{"role": "user", "content": prompt}]
    given = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    text = model.generate(**given, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(text[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


@contextlib.contextmanager
def served(folder: Path):
    """The address of a server, once it answers."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    environment = os.environ | {
        "HF_HOME": str(folder / "home"),
        "PYTHONPATH": str(Path(hf_infini.__file__).parents[1]),
    }
    command = [COMMAND, "serve", "--trust-remote-code", "--device", "cpu", "--port", str(port)]
    with (
        open(folder / "log", "w+") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server,
    ):
        try:
            for _ in range(240):
                assert server.poll() is None, (folder / "log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"http://localhost:{port}/health")
                    break
                time.sleep(0.5)
            yield f"http://localhost:{port}"
        finally:
            server.terminate()


def asked(address: str, model: Path) -> str:
    body = {
        "model": str(model),
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 8,
        "temperature": 0,
    }
    reply = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=300).raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_the_stub_beside_a_model_serves_all_kinds_and_is_chatted_with(folders, tmp_path):
    said = f"{PROMPT}\nn\n!exit\n"  # a turn, no further one, the end
    with served(tmp_path) as address:
        for folder in folders.values():
            assert asked(address, folder) == answer(folder, PROMPT)
        command = [
            COMMAND,
            "chat",
            str(folders["qwen2"]),
            address,
            "max_new_tokens=8",
            "do_sample=False",
        ]
        # offline it asks no server
        online = os.environ | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
        chat = subprocess.run(
            command, env=online, input=said, cwd=tmp_path, capture_output=True, text=True
        )
    assert chat.returncode == 0, chat.stderr
    wanted, found = (
        re.sub(r"\W", "", text) for text in (answer(folders["qwen2"], PROMPT), chat.stdout)
    )
    assert wanted in found


@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_answers_a_batch_of_ragged_prompts_as_each_alone(name, folders):
    # within one segment, less than one, several
    prompts = [TEXTS[0][:60], TEXTS[1][:9], TEXTS[2][:110]]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    generate = pipeline("text-generation", model=str(folders[name]), device="cpu")
    options = {"batch_size": 3, "max_new_tokens": 8, "do_sample": False}
    found = [texts[0]["generated_text"][-1]["content"] for texts in generate(chats, **options)]
    assert found == [answer(folders[name], prompt) for prompt in prompts] and len({*found}) == 3


def test_classes_are_found_in_transformers_whichever_module_of_it_one_has():
    """`processing_utils` imports it again."""
    import transformers.processing_utils as again

    model = MODELS["qwen2"]()
    for module in (transformers, sys.modules["transformers"], again.transformers_module):
        assert module.InfiniQwen2ForCausalLM is type(model) and module.InfiniQwen2Config is type(
            model.config
        )
        assert module.CausalMHAForCausalLM is hf_infini.CausalMHAForCausalLM
        assert module.InfiniGPT2LMHeadModel is hf_infini.InfiniGPT2LMHeadModel
