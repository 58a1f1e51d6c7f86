"""Small random-initialised vision–language models of the real transformers classes, with their real processors.

Each builder returns a model with its processor; what such a model says means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel as ByteDecoder

from guardpaint.audit.processors import pictures_only
from guardpaint.testing import small

IMAGE, START, STOP, PAD = "<image>", "<|start|>", "<|stop|>", "<|pad|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + ' ' }}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '%s' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{{ '<|stop|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant ' }}{% endif %}"
)


Pair = tuple[Any, Any]
"""A model and its processor."""
TEXT = (
    "You apply a content policy to one picture. Judge only what can be seen. Give every category a score from 0 to 1. "
    "Write one prompt for a text-to-image model that would make this picture: a person, a cat, a cup of coffee, a "
    "garden with flowers, a street at night, soft light, a photograph of a field. Answer with one line of JSON."
)
"""What the words of the tokenizers are taken from."""
WORDS = 400


def seeded(make: Callable[[], Pair]) -> Callable[..., Pair]:
    """A builder whose weights depend on a seed and leave the global random state as it was."""

    @wraps(make)
    def build(seed: int = 0) -> Pair:
        with small.seeded(seed):
            return make()

    return build


def tokenizer(*special: str, **names: str) -> Any:
    """Bytes and some words, with the special tokens that a family needs."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=[PAD, START, STOP],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=START,
        eos_token=STOP,
        unk_token=PAD,
        extra_special_tokens=names,
    )
    fast.add_tokens([*special, *names.values()], special_tokens=True)
    return fast


LOUD: dict[str, Any] = {"initializer_range": 0.3}
"""Wide enough weights that what a random model says depends on the picture."""


def text_config(vocab: int, **more: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 8192,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**shape, **more}


QWEN = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def qwen_parts(processor_class: Any) -> tuple[Any, dict[str, int]]:
    """The processor of a Qwen-VL, and the ids of its special tokens as its configuration names them."""
    from transformers import Qwen2VLImageProcessorPil

    words = tokenizer(*QWEN)
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size={"shortest_edge": 256, "longest_edge": 4096})
    template = TEMPLATE.replace("%s", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = pictures_only(processor_class)(image_processor=images, tokenizer=words, chat_template=template)
    return processor, dict(zip(keys, words.convert_tokens_to_ids(list(QWEN)), strict=True))


@seeded
def qwen25() -> Pair:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

    processor, ids = qwen_parts(Qwen2_5_VLProcessor)
    config = Qwen2_5_VLConfig(
        text_config=text_config(
            len(processor.tokenizer), rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}, **LOUD
        ),
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 8, "spatial_merge_size": 2, "fullatt_block_indexes": [0], "window_size": 32,
        },
        **ids,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config), processor


@seeded
def qwen3() -> Pair:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

    processor, ids = qwen_parts(Qwen3VLProcessor)
    config = Qwen3VLConfig(
        text_config=text_config(
            len(processor.tokenizer), rope_scaling={"rope_type": "default", "mrope_section": [2, 1, 1]}, **LOUD
        ),
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 8, "spatial_merge_size": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
        },
        **ids,
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config), processor


@seeded
def llava() -> Pair:
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

    words = tokenizer(IMAGE)
    config = LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 16, "projection_dim": 32,
        },
        text_config={"model_type": "llama", **text_config(len(words))},
        image_token_id=words.convert_tokens_to_ids(IMAGE),
        image_seq_length=4,
    )  # fmt: skip
    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = LlavaProcessor(
        image_processor=images, tokenizer=words, patch_size=16, vision_feature_select_strategy="default",
        image_token=IMAGE, num_additional_image_tokens=1, chat_template=TEMPLATE.replace("%s", IMAGE),
    )  # fmt: skip
    return LlavaForConditionalGeneration(config), processor


@seeded
def internvl() -> Pair:
    from transformers import (
        GotOcr2ImageProcessorPil,
        InternVLConfig,
        InternVLForConditionalGeneration,
        InternVLProcessor,
    )

    names = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    words = tokenizer(**names)
    config = InternVLConfig(
        vision_config={
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": [32, 32], "patch_size": [8, 8],
        },
        text_config={"model_type": "qwen2", **text_config(len(words), **LOUD)},
        image_token_id=words.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )  # fmt: skip
    images = GotOcr2ImageProcessorPil(size={"height": 32, "width": 32}, max_patches=1, crop_to_patches=False)
    template = TEMPLATE.replace("%s", "<IMG_CONTEXT>\n")
    processor = pictures_only(InternVLProcessor)(
        image_processor=images, tokenizer=words, image_seq_length=4, chat_template=template
    )
    return InternVLForConditionalGeneration(config), processor


CHAT: dict[str, Callable[..., Pair]] = {"qwen2.5-vl": qwen25, "qwen3-vl": qwen3, "llava": llava, "internvl": internvl}
"""LlavaGuard is a Llava model."""


@seeded
def shieldgemma() -> Pair:
    from transformers import (
        Gemma3ImageProcessorPil,
        ShieldGemma2Config,
        ShieldGemma2ForImageClassification,
        ShieldGemma2Processor,
    )

    words = tokenizer(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    words.add_tokens(["Yes", "No"])
    config = ShieldGemma2Config(
        text_config=text_config(len(words), sliding_window=64, query_pre_attn_scalar=8),
        vision_config={
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 8,
        },
        mm_tokens_per_image=4,
        image_token_index=words.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=words.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=words.convert_tokens_to_ids("<end_of_image>"),
        yes_token_index=words.convert_tokens_to_ids("Yes"),
        no_token_index=words.convert_tokens_to_ids("No"),
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, image_seq_length=4, do_pan_and_scan=False)
    template = (
        "{{ bos_token }}{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        "{{ '<start_of_image>' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
        "{% if policy_definitions is defined %}{{ policy_definitions[guideline] }}{% endif %} Yes or No? "
    )
    processor = ShieldGemma2Processor(images, words, chat_template=template, image_seq_length=4)
    return ShieldGemma2ForImageClassification(config), processor


@seeded
def grounding_dino() -> Pair:
    from transformers import (
        BertTokenizer,
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        GroundingDinoImageProcessorPil,
        GroundingDinoProcessor,
    )

    letters = "abcdefghijklmnopqrstuvwxyz."
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    words = BertTokenizer(vocab={t: i for i, t in enumerate(vocab)})
    config = GroundingDinoConfig(
        backbone_config={
            "model_type": "swin", "image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2],
            "window_size": 4, "out_features": ["stage2", "stage3", "stage4"],
        },
        text_config={
            "model_type": "bert", "vocab_size": len(vocab), "hidden_size": 32, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 2,
        },
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=2, num_queries=10, max_text_len=64,
        encoder_n_points=2, decoder_n_points=2, disable_custom_kernels=True,
    )  # fmt: skip
    images = GroundingDinoImageProcessorPil(size={"shortest_edge": 64, "longest_edge": 64})
    return GroundingDinoForObjectDetection(config).eval(), GroundingDinoProcessor(images, words)
