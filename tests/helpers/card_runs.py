"""Runs with invented results, and what their cards say."""

import copy
import math

from huggingface_hub import ModelCard

import cards
from cards import training as cards_training

GPT2 = {"model_type": "gpt2", "n_layer": 3, "n_embd": 96, "n_head": 6, "n_inner": None, "vocab_size": 517}
GPT2 |= {"activation_function": "gelu_new", "n_positions": 40, "tie_word_embeddings": True}
INFINI = GPT2 | {"model_type": "infini_gpt2", "segment_length": None, "n_segments": 5, "update_rule": "delta"}
INFINI |= {"local_segments": 2, "memory_init": "learned", "layers": [0, 2], "position_encoding": "segment", "gate_init": 0.0}
RESULT = {
    "cross_entropy": 1.2345678,
    "perplexity": 3.4371,
    "validation_tokens": 31_111,
    "tokens": 7_654_321,
    "steps": 1_212,
    "parameters": 98_765,
    "seconds": 432.1,
    "tokens_per_second": 17_714.2,
    "peak_rss_mib": 543.2,
    "gates": {},
    "data_fingerprint": "0123456789abcdef",
    "options": {"learning_rate": 0.003, "gate_learning_rate": 0.01, "batch_size": 64, "epochs": None, "seed": 5}
    | {"num_processes": 1},
    "command": "python /home/maria/src/recipes/train.py --data /home/maria/data/plays --out=/mnt/disk/runs/mha --use_cpu",
    "hardware": "8 CPU cores, Some CPU",
    "versions": {"hf_infini": "0.1.0", "torch": "2.13.0"},
    "date": "2026-11-20T10:11:12+00:00",
}
SAMPLES = {
    "samples": [
        {
            "prompt": "O rei",
            "method": "Top-k",
            "arguments": {"do_sample": True, "top_k": 40, "max_new_tokens": 9},
            "seed": 5,
            "text": "first\n```\n---\n# no heading\n````",
            "new_tokens": 8,
        }
    ]
}


POSITIONS = [{"first": 1, "last": 1, "tokens": 5, "perplexity": 3.0}]
POSITIONS += [{"first": 2, "last": 3, "tokens": 9, "perplexity": 2.5}]
MEASURED = {"hardware": "1 x NVIDIA H200", "date": "2026-11-22T01:02:03+00:00"}


def run_of(config=GPT2, **changes) -> cards.Run:
    given = {"name": "a-model", "folder": "runs/mha", "config": config, "result": copy.deepcopy(RESULT)}
    return cards.Run(**given | changes)


def evaluation(split, cross_entropy, tokens, **options) -> dict:
    usual = {"data": "/home/maria/data/plays", "text": None, "length": None, "join": True, "precision": "float32"}
    options = usual | options
    found = {"source": options["data"] or options["text"], "split": split, "length": options["length"] or 40}
    found |= {"cross_entropy": cross_entropy, "perplexity": math.exp(cross_entropy), "tokens": tokens}
    return found | {"options": options, "memory": "on", "by_position": POSITIONS, **MEASURED}


def baseline(split, **changes) -> dict:
    names = ("unigram", "bigram", "trigram", "4-gram")
    rows = [
        {"order": k, "name": name, "entropy": 2 - k / 2, "cross_entropy": 2.5 - k / 2, "perplexity": 9.0 + k}
        for k, name in enumerate(names)
    ]
    orders = [row | {"tokens": 31_111} for row in rows]
    return {"split": split, "training_tokens": 54_321, "orders": orders, **MEASURED} | changes


def load(text: str, tmp_path) -> ModelCard:
    (tmp_path / "card.md").write_text(text, encoding="utf-8")
    return ModelCard.load(tmp_path / "card.md")


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def options_of(run) -> dict[str, str]:
    return dict(row for row in cells(cards_training.training_section(run)) if len(row) == 2)


def cell(correct, **place) -> dict:
    found = {"samples": 48, "correct": correct, "accuracy": correct / 48, "low": correct / 100, "high": correct / 48 + 0.01}
    return {**place, **found, "cross_entropy": 2.5 - correct / 48}


def recall(task, found, memory="on", **options) -> dict:
    options = {"task": task, "data": None, "samples": 48, "seed": 3, "precision": "float32"} | options
    content = {"cells": found, "options": options, "memory": memory, "source": None, "split": None, **MEASURED}
    if task == "passkey":
        return content | {"source": "data/plays", "data_fingerprint": RESULT["data_fingerprint"], "split": "validation"}
    return content | {"segment_length": 8}
