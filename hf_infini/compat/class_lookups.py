"""What other libraries look up by the type or class of a model: one with Infini-attention is there
what its own is."""

import sys

from transformers import PreTrainedConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import tokenization_auto

PREFIX = "infini_"  # model_type of a family with Infini-attention: this and the family's


def alias_tokenizer(own: type[PreTrainedConfig], infini: type[PreTrainedConfig]) -> None:
    """Has `AutoTokenizer` read a tokenizer beside a configuration of the class `infini` as beside
    one of the `own` class: many files name no class, or a wrong one."""
    table, names = tokenization_auto.TOKENIZER_MAPPING, tokenization_auto.TOKENIZER_MAPPING_NAMES
    mistaken = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    if own.model_type in names:
        names[infini.model_type] = names[own.model_type]
    if own.model_type in mistaken:
        mistaken.add(infini.model_type)
    if own in table:
        table.register(infini, table[own], exist_ok=True)


def alias_adapters(infini: str) -> None:
    """Has PEFT, once it is imported, choose the modules of an adapter in a model of the type
    `infini` as in one of the own type, for every kind of adapter that has defaults."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in {**vars(constants)}.items() if constants else ():
        if name.startswith("TRANSFORMERS_MODELS_TO_"):
            own = infini.removeprefix(PREFIX)
            table.update({infini: table[own]} if own in table else {})


def alias_weights(own: str, infini: str) -> None:
    """Has weights of the model type or class `infini` renamed and joined as those of the `own` one,
    whose checkpoints may name them otherwise."""
    mapping = get_checkpoint_conversion_mapping(own)
    if mapping is not None:
        register_checkpoint_conversion_mapping(infini, mapping, overwrite=True)
