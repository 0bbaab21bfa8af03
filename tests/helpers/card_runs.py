"""Runs with invented results, and what their cards say."""

import copy
import math

from huggingface_hub import ModelCard

from cards.run import Run
from running import load_recipe

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 96,
    "n_head": 6,
    "n_inner": None,
    "vocab_size": 517,
}
GPT2 |= {"activation_function": "gelu_new", "n_positions": 40, "tie_word_embeddings": True}
INFINI = GPT2 | {"model_type": "infini_gpt2", "segment_length": 5, "update_rule": "delta"}
INFINI |= {
    "local_segments": 2,
    "layers": [0, 2],
    "position_encoding": "segment",
    "auto_map": {"AutoConfig": "x.X"},
}
OPTIONS = dict.fromkeys(("n_layer", "n_embd", "n_head", "segment_length", "update_rule", "layers"))
OPTIONS |= {
    "learning_rate": 0.003,
    "schedule": "cosine",
    "precision": "bf16",
    "batch_size": 64,
    "seed": 5,
}
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
    "options": OPTIONS | {"gradient_accumulation": 2, "num_processes": 1},
    "command": "python /home/maria/src/recipes/train.py --data /home/maria/data/plays "
    "--out=/mnt/disk/runs/mha --use_cpu",
    "hardware": "8 CPU cores, Some CPU",
    "versions": {"hf_infini": "0.1.0", "torch": "2.13.0"},
    "date": "2026-11-20T10:11:12+00:00",
}
SAMPLE = {
    "prompt": "O rei",
    "arguments": {"do_sample": True, "top_k": 40, "max_new_tokens": 9},
    "seed": 5,
    "text": "first\n```\n---\n# no heading\n````\n{{ title }}",
}
POSITIONS = [{"first": 1, "last": 1, "tokens": 5, "perplexity": 3.0}]
POSITIONS += [{"first": 2, "last": 3, "tokens": 9, "perplexity": 2.5}]
MEASURED = {
    "hardware": "1 x NVIDIA H200",
    "date": "2026-11-22T01:02:03+00:00",
    "memory": "on",
    "model": "runs/mha",
}


def about(**changes):
    """Options of recipes/model_card.py."""
    options = {
        "run": "runs/mha",
        "out": "card",
        "repo_id": "user/a-model",
        "prompt": ["O rei"],
        "language": "pt",
    }
    return load_recipe("model_card").Options(
        **options | {"data_license": "public domain"} | changes
    )


def run_of(config=GPT2, **changes) -> Run:
    return Run(**{"config": config, "result": copy.deepcopy(RESULT)} | changes)


def evaluation(split, cross_entropy, tokens, **options) -> dict:
    usual = {"task": "perplexity", "data": "/home/maria/data/plays", "text": None, "length": None}
    usual |= {
        "min_characters": 0,
        "max_tokens": None,
        "precision": "float32",
        "memory": "on",
        "separate_documents": False,
    }
    options = usual | options
    found = {
        "cross_entropy": cross_entropy,
        "perplexity": math.exp(cross_entropy),
        "tokens": tokens,
    }
    found |= {
        "options": options,
        "source": options["text"] or options["data"],
        "split": split,
        "by_position": POSITIONS,
    }
    fingerprint = None if options["text"] else RESULT["data_fingerprint"]
    return MEASURED | found | {"memory": options["memory"], "data_fingerprint": fingerprint}


def cell(correct, **place) -> dict:
    found = {
        "samples": 48,
        "correct": correct,
        "accuracy": correct / 48,
        "low": correct / 100,
        "high": correct / 48,
    }
    return place | found | {"cross_entropy": 2.5, "chance": 0.02}


def recall(task, cells, memory="on") -> dict:
    options = {"task": task, "samples": 48, "seed": 3, "precision": "float32"}
    found = MEASURED | {
        "cells": cells,
        "options": options,
        "memory": memory,
        "source": None,
        "split": None,
    }
    if task == "passkey":
        return found | {
            "source": "data/plays",
            "data_fingerprint": RESULT["data_fingerprint"],
            "split": "validation",
        }
    return found | {"segment_length": 8, "data_fingerprint": None}


def load(text: str, tmp_path) -> ModelCard:
    (tmp_path / "card.md").write_text(text, encoding="utf-8")
    return ModelCard.load(tmp_path / "card.md")


def cells(text: str) -> list[list[str]]:
    """The cells of all tables but for the rules."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return [row for row in rows if set("".join(row)) - set("-:")]
