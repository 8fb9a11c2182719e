"""Arguments of other packages that people really give."""

from __future__ import annotations

from cacheblend_rag.config import REMOVED

_NO_SERVER = 'for a server use init_chat_model(…, model_provider="openai", base_url=…), or OpenAILike in LlamaIndex'
# The values that hold here anyway, and what to use in place of any other.
OTHERS: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "a prompt has one answer here; ask for more by a batch with other seeds"),
    "num_beams": ((1,), "answers are decoded without beams"),
    "num_ctx": ((), "the context window is the model's own; overflow='drop_chunks' leaves out chunks it does not hold"),
    "num_predict": ((), "use max_new_tokens"),
    "max_length": ((), "use max_new_tokens; tokens of the prompt do not count"),
    "repeat_penalty": ((), "use repetition_penalty"),
    "format": (("",), 'give response_format={"type": "json_object"} or a schema, or use with_structured_output'),
    "think": ((), "use reasoning: True, False, 'low', 'medium' or 'high'"),
    "keep_alive": ((-1,), REMOVED["keep_alive"]),
    "use_cache": ((True,), "leave it out; the KV cache is what answers are made with"),
    "return_full_text": ((False,), "an answer never repeats its prompt"),
    "parallel_tool_calls": ((True,), "take the first of an answer's calls where one is to be made"),
    "strict": ((False,), "give a schema with the call as response_format, or use with_structured_output"),
    "stream": ((True, False), "use stream or invoke"),
    "streaming": ((True, False), "use stream or invoke"),
    "stream_usage": ((True,), "usage is part of every answer"),
    "task": (("text-generation",), "a model answers with text; leave it out"),
    "model_path": ((), "use model"),
    "n_ctx": ((), "leave it out: the context grows with the prompt"),
    "n_gpu_layers": ((0,), "leave it out; a build of llama.cpp for a GPU is named by CACHEBLEND_RAG_LLAMA_CPP"),
    "n_batch": ((), "leave it out: llama.cpp computes 512 tokens at a time"),
    "flash_attn": ((), "leave it out: llama.cpp computes with flash attention"),
    "lora": ((), "give it in model_kwargs"),
    "lora_path": ((), "give it in model_kwargs as lora"),
    "model": ((), "use model_id for a path or an id, and from_model for a model with its tokenizer"),
    "tokenizer": ((), "use from_model for a model with its tokenizer"),
    "tokenizer_name": ((), "the tokenizer is the model's own; use from_model for another"),
    "base_url": ((), _NO_SERVER),
    "torch_dtype": ((), "use dtype"),
    "device_map": ((), "give it in model_kwargs"),
}
