"""What other libraries look up by the type or class of a model: one with Infini-attention is there what its own is.

What is found by the name of a class that stays (layers) or by the end of a name (`…ForCausalLM`) needs nothing here.
"""

import functools
import importlib
import sys

from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import tokenization_auto

from .options import ConfigBase

PREFIX = "infini_"  # model_type of a family with Infini-attention: this and the family's
LISTENERS: list = []  # of the installed package, for `tell`
PEFT_TABLES = ("peft.utils.constants", "peft.utils.transformers_weight_conversion")


def enter_tokenizer(own: type[PreTrainedConfig], infini: type[PreTrainedConfig]) -> None:
    """Has `AutoTokenizer` read a configuration's tokenizer as beside the own one: many files do not name their class, or a
    wrong one, which transformers knows by the type."""
    table, names = tokenization_auto.TOKENIZER_MAPPING, tokenization_auto.TOKENIZER_MAPPING_NAMES
    mistaken = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    if own.model_type in names:
        names[infini.model_type] = names[own.model_type]
    if own.model_type in mistaken:
        mistaken.add(infini.model_type)
    if own in table:
        table.register(infini, table[own], exist_ok=True)


@functools.cache
def enter_weights(own: str, infini: str) -> None:
    """Has the weights of a model type or class renamed and joined as those of the own one, whose checkpoints name some of
    them otherwise than its modules (experts)."""
    mapping = get_checkpoint_conversion_mapping(own)
    if mapping is not None:
        register_checkpoint_conversion_mapping(infini, mapping, overwrite=True)


def enter_adapters(infini: str) -> None:
    """Has PEFT, where it has been imported, choose and name the modules of an adapter as in a model of the own type."""
    if "peft" in sys.modules:
        constants, weights = map(importlib.import_module, PEFT_TABLES)
        found = [table for name, table in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")]
        own = infini.removeprefix(PREFIX)
        for table in (*found, weights._MODEL_TO_CONVERSION_PATTERN):
            if own in table:
                table[infini] = table[own]
        tell("peft")


def tell(event: str, *about) -> None:
    """Says that "peft" looks at a model or has "adapted" it, that it is "saved" in a folder, or "called"."""
    for listener in LISTENERS:
        listener(event, *about)


class AdaptersOfOwnMixin(ConfigBase):
    """[`enter_adapters`] of a configuration; comes before the own one.

    PEFT may be imported after a model is made. It looks for the type in `to_dict()`: so the entries are made there, too.
    """

    def to_dict(self) -> dict:
        enter_adapters(self.model_type)
        return super().to_dict()
