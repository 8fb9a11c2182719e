"""Pictures, and tiny models that take them, each with a processor of its kind."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from transformers import BatchFeature, Gemma3Processor, Idefics3Processor, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny

MARKS = {"gemma3": "<start_of_image>", "idefics3": "<image>", "llava": "<image>", "qwen2_vl": "<|image_pad|>"}
_OTHERS = {
    "gemma3": ("<end_of_image>", "<image_soft_token>"),
    "idefics3": ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    "llava": (),
    "qwen2_vl": ("<|vision_start|>", "<|vision_end|>"),
}


def template(mark: str) -> str:
    """A chat template that reads texts, and lists of blocks with images."""
    return (
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for block in m.content %}{% if block.type == 'text' %}{{ block.text }}"
        "{% elif block.type == 'image' %}" + mark + "{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )


def picture(seed: int = 0, width: int = 50, height: int = 40) -> Any:
    """A picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def file_of(image: Any, kind: str = "PNG") -> bytes:
    """The bytes of a picture's file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


class QwenLike:
    """Stands in for the processor of Qwen's models, which needs a reader of videos."""

    image_token = MARKS["qwen2_vl"]

    def __init__(self, images: Any, tokenizer: Any) -> None:
        self.images, self.tokenizer = images, tokenizer
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)

    def __call__(self, text: str, images: Sequence[Sequence[Any]], **options: Any) -> Any:
        seen = self.images(images=images[0], return_tensors="pt")
        for grid in seen["image_grid_thw"]:
            text = text.replace(self.image_token, "<|placeholder|>" * (int(grid.prod()) // 4), 1)
        made = self.tokenizer(text.replace("<|placeholder|>", self.image_token), **options)
        return BatchFeature({**made, **seen, "mm_token_type_ids": (made["input_ids"] == self.image_token_id).int()})


def taking_pictures(container: str) -> tuple[Any, Any, Any]:
    """A model, its tokenizer and its processor."""
    mark = MARKS[container]
    named = {"boi_token": mark, "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny.tokenizer().backend_tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=[mark, *_OTHERS[container]],
        **({"extra_special_tokens": named} if container == "gemma3" else {}),
    )
    tokenizer.chat_template = template(mark)
    processor: Any
    if container == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        processor = LlavaProcessor(
            images,
            tokenizer,
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=tokenizer.chat_template,
        )
    elif container == "idefics3":
        tiles = Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
        processor = Idefics3Processor(tiles, tokenizer, image_seq_len=1, chat_template=tokenizer.chat_template)
    elif container == "gemma3":
        images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        processor = Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=tokenizer.chat_template)
    else:
        sizes = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
        processor = QwenLike(Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=sizes), tokenizer)
    model = tiny.model(container)
    place = "<image_soft_token>" if container == "gemma3" else mark
    model.config.image_token_id = tokenizer.convert_tokens_to_ids(place)
    return model, tokenizer, processor
