"""GPT-2 with a memory under each head that transformers has for GPT-2; all of the family can be imported from here."""

from transformers.models.gpt2.modeling_gpt2 import (
    GPT2DoubleHeadsModel,
    GPT2ForQuestionAnswering,
    GPT2ForSequenceClassification,
    GPT2ForTokenClassification,
)

from .configuration_infini_gpt2 import InfiniGPT2Config
from .generation import MemoryGenerationMixin
from .hub_code import carry_code
from .modeling_infini_gpt2 import InfiniGPT2LMHeadModel, InfiniGPT2Model, InfiniGPT2PreTrainedModel


class MemoryBaseMixin:
    """Puts an [`InfiniGPT2Model`] under the head of a GPT-2; comes before the stock class, which has everything else."""

    def __init__(self, config: InfiniGPT2Config):
        super().__init__(config)
        self.transformer = InfiniGPT2Model(config)
        self.post_init()


class InfiniGPT2ForSequenceClassification(MemoryBaseMixin, InfiniGPT2PreTrainedModel, GPT2ForSequenceClassification):
    """`GPT2ForSequenceClassification` on an [`InfiniGPT2Model`]."""


class InfiniGPT2ForTokenClassification(MemoryBaseMixin, InfiniGPT2PreTrainedModel, GPT2ForTokenClassification):
    """`GPT2ForTokenClassification` on an [`InfiniGPT2Model`]."""


class InfiniGPT2ForQuestionAnswering(MemoryBaseMixin, InfiniGPT2PreTrainedModel, GPT2ForQuestionAnswering):
    """`GPT2ForQuestionAnswering` on an [`InfiniGPT2Model`]."""


class InfiniGPT2DoubleHeadsModel(MemoryBaseMixin, InfiniGPT2PreTrainedModel, MemoryGenerationMixin, GPT2DoubleHeadsModel):
    """`GPT2DoubleHeadsModel` on an [`InfiniGPT2Model`]. As for the stock class, no Auto class loads it."""


AUTO_CLASSES = {
    "AutoModel": InfiniGPT2Model,
    "AutoModelForPreTraining": InfiniGPT2LMHeadModel,
    "AutoModelForCausalLM": InfiniGPT2LMHeadModel,
    "AutoModelForSequenceClassification": InfiniGPT2ForSequenceClassification,
    "AutoModelForTokenClassification": InfiniGPT2ForTokenClassification,
    "AutoModelForQuestionAnswering": InfiniGPT2ForQuestionAnswering,
}
carry_code("modeling_infini_gpt2_heads", InfiniGPT2DoubleHeadsModel, **AUTO_CLASSES)
