"""This model needs the package hf-infini: pip install hf-infini"""

from hf_infini import (  # noqa: F401
    InfiniGPT2Config,
    InfiniGPT2ForQuestionAnswering,
    InfiniGPT2ForSequenceClassification,
    InfiniGPT2ForTokenClassification,
    InfiniGPT2LMHeadModel,
    InfiniGPT2Model,
)
