"""The tests that transformers runs on every model of its own, run on models of every kind that is here."""

import fnmatch
import unittest
from unittest import mock

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import hf_infini
from common_model_tests import NotFetched, load
from hf_infini.models import families

try:
    common = load()
except NotFetched as reason:
    pytest.skip(str(reason), allow_module_level=True)

# Half a minute together; one of them looks for the warning
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("always:`past_key_values` is deprecated:FutureWarning")]
KNOWN = transformers.__version__.startswith("5.24.")  # the version whose tests SKIPS names
SEGMENT = 4
# The tests learn from these what a class is, by its name; in the order of `all_model_classes` below
TABLES = modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
# Why a test does not apply to any of the models: names of tests, * for any text
SKIPS = {
    "needs a GPU": [
        "test_can_load_with_device_context_manager",
        "test_can_load_with_global_device_set",
        "test_cpu_offload",
        "test_disk_offload_bin",
        "test_disk_offload_safetensors",
        "test_kernels_can_load_without_crashing",
        "test_model_parallelism",
        "test_resize_*_with_deepspeed*",
        "test_sdpa_can_compile_dynamic",
        "test_sdpa_can_dispatch_on_flash",
        "test_torch_compile_for_training",
    ],
    "the CPU has no other kernels": ["test_eager_matches_sdpa_inference_*_sdpa_kernels"],
    "without a mask there is no padding, as in the test with left": [
        "test_eager_matches_sdpa_inference_*right_no_attn_mask"
    ],
    "bfloat16 is tested, which saves time": ["test_eager_matches_sdpa_inference_fp16_*"],
    "flash and flex attention are not supported": ["test_flash_attn_*", "test_flex_attention_with_grads"],
    "a language model, of tokens only": ["test_get_*_features_*", "test_vision_axial_rope"],
    "not made of several models": ["test_*_composite_model*", "test_internal_model_config_and_subconfig_are_same"],
    "a decoder without an encoder": ["test_encoder_decoder_loss_no_double_shift"],
    "a weight that the file lacks is an error here": ["test_model_weights_reload_no_missing_tied_weights"],
    "no classifier is among the classes": [
        "test_problem_types",
        "test_load_with_mismatched_shapes",
        "test_can_load_ignoring_mismatched_shapes",
    ],
    "looks for experts in the source of the class, and finds families.py": ["test_moe_models_record_router_logits"],
    "no module stays in float32": ["test_keep_in_fp32_modules*"],
    "no resize_position_embeddings": ["test_resize_position_vector_embeddings"],
    "no option use_sliding_window": ["test_sliding_window_mask"],
    "the source distribution has no GenerationTesterMixin": ["test_generation_tester_mixin_inheritance"],
}
# The same for models of one kind
NO_ROPE = {"no rotary positions that could be scaled": ["test_model_rope_*"]}
NO_PLAN = {"no plan for tensor parallelism": ["test_tp_plan_matches_params"]}
OWN_CACHE = {"an InfiniCache, whose names test_cache_name.py tries": ["test_bc_cache_name_forward"]}
NO_EXPERTS = {
    "no experts": ["test_eager_matches_batched_and_grouped_inference_*", "test_output_router_logits_from_config"],
    "checkpoints name weights as the modules do": ["test_can_load_from_already_mapped_keys", "test_reverse_loading_mapping"],
}
UNNAMED = {
    "the test does not see that the head takes output_attentions": [
        "test_eager_matches_sdpa_inference_fp32_pad_left_output_attentions"
    ]
}
SLOW = {"takes seconds, and TestInfiniGPT2 runs the same code": ["test_bc_torch_dtype"]}
OWN_OUTPUTS = {
    "collects its outputs itself": ["test_capture_outputs_decorator", "test_can_capture_specific_layers_hidden_states"]
}


class ModelTester:
    """What the tests ask for: sizes, a configuration, and inputs, of which one row begins with padding."""

    batch_size, seq_length = 2, 10  # the last of three segments is not full
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    is_training = True

    def __init__(self, get_config, key_length: int):
        self.get_config, self.key_length = get_config, key_length

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.long)
        mask[-1, :3] = 0
        ids = torch.randint(3, config.vocab_size, mask.shape)  # not 0 to 2, the special tokens
        return config, {"input_ids": ids, "attention_mask": mask}


class CommonTests(common.ModelTesterMixin):
    """The tests of transformers, but for those that `SKIPS` and the class's own `skips` name."""

    options = {}  # of the configuration
    key_length = SEGMENT  # columns of the attention weights
    skips = {}
    test_can_init_all_missing_weights_before_2023 = True  # the files have no year in them

    def __init_subclass__(cls):
        super().__init_subclass__()
        for reason, names in (SKIPS | cls.skips).items():
            for name in matching(cls, names):
                setattr(cls, name, unittest.skip(reason)(lambda self: None))  # of one line: pytest folds them by reason

    def setUp(self):
        transformers.set_seed(0)
        self.model_tester = ModelTester(self.config, self.key_length)
        for table, model_class in zip(TABLES, self.all_model_classes, strict=False):
            self.enterContext(mock.patch.dict(table, {model_class.config_class.model_type: model_class.__name__}))
        self.enterContext(mock.patch.object(common, "set_config_for_less_flaky_test", set_known_options))

    def config(self):
        sizes = {name: getattr(ModelTester, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
        special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        config_class = self.all_model_classes[0].config_class
        return config_class(vocab_size=99, max_position_embeddings=64, **sizes, **special, **self.options)

    def skipTest(self, reason):
        if not KNOWN:
            super().skipTest(reason)
        self.fail(f"the test skips itself, and SKIPS does not name it: {reason}")


def matching(tests: type, names: list[str]) -> list[str]:
    return [found for name in names for found in fnmatch.filter(dir(tests), name)]


def set_known_options(config, set_all=common.set_config_for_less_flaky_test):
    """Leaves out options of other models, which the configurations here refuse when they are loaded."""
    known = set(vars(config))
    set_all(config)
    for name in set(vars(config)) - known:
        delattr(config, name)


class TestInfiniGPT2(CommonTests, unittest.TestCase):
    all_model_classes = (hf_infini.InfiniGPT2Model, hf_infini.InfiniGPT2LMHeadModel)
    options = {"segment_length": SEGMENT}
    skips = NO_EXPERTS | NO_ROPE | NO_PLAN | OWN_CACHE | UNNAMED


class TestInfiniOlmoe(CommonTests, unittest.TestCase):
    """As Llama, with experts: weights have other names in its checkpoints."""

    all_model_classes = (families.InfiniOlmoeModel, families.InfiniOlmoeForCausalLM)
    sizes = {"num_key_value_heads": 2, "intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    options = {"segment_length": SEGMENT} | sizes
    skips = OWN_CACHE | SLOW | {
        "a memory does not count positions beyond a window": ["test_model_rope_scaling_from_config_dynamic"],
        "rotates whole heads": ["test_model_rope_with_partial_rotation"],
    }


class TestCausalMHAWithMemory(CommonTests, unittest.TestCase):
    all_model_classes = (hf_infini.CausalMHAModel, hf_infini.CausalMHAForCausalLM)
    options = {"attention": "infini", "segment_length": SEGMENT}
    skips = NO_EXPERTS | NO_ROPE | NO_PLAN | OWN_CACHE | SLOW | OWN_OUTPUTS
    skips |= {"sets a sliding_window, which a model with a memory refuses": ["test_eager_matches_sdpa_inference_*"]}


class TestLocalCausalMHA(CommonTests, unittest.TestCase):
    all_model_classes = (hf_infini.CausalMHAModel, hf_infini.CausalMHAForCausalLM)
    options = {"attention": "local", "sliding_window": SEGMENT}
    key_length = ModelTester.seq_length
    skips = NO_EXPERTS | NO_ROPE | NO_PLAN | SLOW | OWN_OUTPUTS | UNNAMED


@pytest.mark.skipif(not KNOWN, reason="SKIPS names the tests of another version of transformers")
@pytest.mark.parametrize("tests", CommonTests.__subclasses__())
def test_skips_name_all_that_is_skipped_and_nothing_else(tests):
    named = SKIPS | tests.skips
    assert not [name for names in named.values() for name in names if not matching(common.ModelTesterMixin, [name])]
    functions = [getattr(tests, name) for name in dir(tests) if name.startswith("test_")]
    reasons = {function.__unittest_skip_why__ for function in functions if hasattr(function, "__unittest_skip_why__")}
    assert reasons <= named.keys()
