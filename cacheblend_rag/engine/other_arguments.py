"""Arguments that only other packages and other servers have, and what to use in place of them, in words."""

from __future__ import annotations

_WINDOW = (
    'the context window is the model\'s own; the option overflow="drop_chunks" leaves out chunks that it does not hold'
)
_HERE = (
    'the model runs in this process; for a server use init_chat_model(…, model_provider="openai", base_url=…), or '
    "OpenAILike in LlamaIndex"
)
_THREADS = "use threads"
_TOKENIZER = "the tokenizer is the model's own; use from_model for another"
_JSON = 'give response_format={"type": "json_object"} or a schema with the call, or use with_structured_output'
_MIROSTAT = "sample with temperature, top_p, top_k or min_p"
_REASONING = "use reasoning: True, False, 'low', 'medium' or 'high'"
_BEAMS = "answers are decoded without beams"
_NEUTRAL = "leave it out; it has no effect on answers here"
_NO_DRAFTS = "answers are decoded without another model's drafts"
_SAID_ONCE = "put it into the prompt template, or into a system message"
# Arguments of other packages about an answer; a value that is listed holds here anyway, and any other is refused with
# the remedy. The server has the same remedies for fields of a request.
_OF_ANSWERS: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "a prompt has one answer here; ask for more by a batch with other seeds"),
    "num_return_sequences": ((1,), "a prompt has one answer here; ask for more by a batch with other seeds"),
    "num_beams": ((1,), _BEAMS),
    "num_beam_groups": ((1,), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "prompt_lookup_num_tokens": ((), _NO_DRAFTS),
    "length_penalty": ((1,), _BEAMS),
    "diversity_penalty": ((0,), _BEAMS),
    "penalty_alpha": ((0,), _NEUTRAL),
    "encoder_repetition_penalty": ((1,), "use repetition_penalty"),
    "low_memory": ((False,), _NEUTRAL),
    "synced_gpus": ((False,), _NEUTRAL),
    "is_assistant": ((False,), _NO_DRAFTS),
    "truncation": ((False,), _WINDOW),
    "padding": ((False,), "leave it out; each prompt has the tokens that it has"),
    "add_special_tokens": ((True,), "leave it out; the tokenizer or the chat template writes them"),
    "return_tensors": ((False,), "leave it out; an answer is text, and its report has the ids"),
    "guidance_scale": ((1,), "leave it out; a prompt is read once here"),
    "use_cache": ((True,), "leave it out; the KV cache is what answers are made with"),
    "output_scores": ((False,), "use logprobs=True"),
    "output_logits": ((False,), "use logprobs=True"),
    "return_full_text": ((False,), "an answer never repeats its prompt"),
    "skip_prompt": ((True,), "an answer never repeats its prompt"),
    "format": (("",), _JSON),
    "context_window": ((), _WINDOW),
    "num_ctx": ((), _WINDOW),
    "n_ctx": ((), _WINDOW),
    "max_model_len": ((), _WINDOW),
    "truncate": ((), _WINDOW),
    "max_length": ((), "use max_new_tokens; tokens of the prompt do not count"),
    "num_predict": ((), "use max_new_tokens"),
    "max_completion_tokens": ((), "use max_new_tokens"),
    "repeat_penalty": ((), "use repetition_penalty"),
    "repeat_last_n": ((), "use repetition_penalty, which counts all tokens of the prompt and the answer"),
    "mirostat": ((0,), _MIROSTAT),
    "mirostat_eta": ((), _MIROSTAT),
    "mirostat_tau": ((), _MIROSTAT),
    "tfs_z": ((1,), _MIROSTAT),
    "watermark": ((False,), "leave it out; answers hold no watermark"),
    "stop_sequences": (([],), "use stop"),
    "stop_sequence": ((), "use stop"),
    "keep_alive": ((), "give it where the model is made: it holds for all calls"),
    "think": ((), _REASONING),
    "thinking": ((), _REASONING),
    "enable_thinking": ((), _REASONING),
    "reasoning_effort": ((), _REASONING),
    "options": ((), "give each of the options by itself"),
}
# The same of arguments about a model and how it is called.
_OF_MODELS: dict[str, tuple[tuple[object, ...], str]] = {
    "assistant_model": ((), _NO_DRAFTS),
    "encoder_no_repeat_ngram_size": ((0,), "use no_repeat_ngram_size"),
    "output_attentions": ((False,), _NEUTRAL),
    "output_hidden_states": ((False,), _NEUTRAL),
    "bos_token_id": ((), "leave it out; the tokenizer writes the beginning of a prompt"),
    "stopping_criteria": (([],), "use stop, or logits_processor"),
    "streamer": ((), "use stream"),
    "return_dict_in_generate": ((False,), "use logprobs=True, and what an answer says of itself"),
    "stream": ((True, False), "use stream or invoke"),
    "streaming": ((True, False), "use stream or invoke"),
    "stream_usage": ((True,), "usage is part of every answer"),
    "parallel_tool_calls": (
        (True,),
        "the model decides how many tools it calls; take the first of an answer's calls where one is to be made",
    ),
    "strict": ((False,), "give a schema with the call as response_format, or use with_structured_output"),
    "response_format": ((), "give it with the call, or use with_structured_output"),
    "json_mode": ((False,), _JSON),
    "batch_size": ((), "use max_concurrent"),
    "backend": (("pt", "default"), "models are run by PyTorch"),
    "torch_dtype": ((), "use dtype"),
    "device_map": ((), "give it in model_kwargs"),
    "quantization_config": ((), "give it in model_kwargs"),
    "trust_remote_code": ((False,), "give it in model_kwargs"),
    "token": ((), "give it in model_kwargs"),
    "revision": ((), "give it in model_kwargs"),
    "cache_dir": ((), "give it in model_kwargs"),
    "local_files_only": ((), "give it in model_kwargs"),
    "attn_implementation": ((), "give it in model_kwargs"),
    "low_cpu_mem_usage": ((True,), "weights are always loaded so"),
    "load_in_4bit": ((False,), 'use model_kwargs={"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}'),
    "load_in_8bit": ((False,), 'use model_kwargs={"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}'),
    "task": (("text-generation",), "a model answers with text; leave it out"),
    "repo_id": ((), "use model_id"),
    "model_path": ((), "use model_id"),
    "model": ((), "use model_id for a path or an id, and from_model for a model with its tokenizer"),
    "tokenizer": ((), "use from_model for a model with its tokenizer"),
    "tokenizer_name": ((), _TOKENIZER),
    "tokenizer_kwargs": (({},), _TOKENIZER),
    "tokenizer_outputs_to_remove": (([],), _TOKENIZER),
    "pipeline": ((), "use from_pipeline"),
    "llm": ((), "use from_pipeline(llm.pipeline), or from_model_id"),
    "stop_strings": ((), "use stop"),
    "stopping_ids": (([],), 'use additional_kwargs={"eos_token_id": [...]}'),
    "request_timeout": ((), "use timeout"),
    "system_prompt": (("",), _SAID_ONCE),
    "query_wrapper_prompt": (("",), _SAID_ONCE),
    "prompt_key": (("prompt",), "leave it out"),
    "num_gpu": ((), "use device"),
    "n_gpu_layers": ((), "use device; a model is on one device as a whole"),
    "num_thread": ((), _THREADS),
    "n_threads": ((), _THREADS),
    "validate_model_on_init": ((True,), "a model is loaded when its object is made"),
    "base_url": ((), _HERE),
    "endpoint_url": ((), _HERE),
    "inference_server_url": ((), _HERE),
    "provider": ((), _HERE),
    "server_kwargs": (({},), _HERE),
    "client": ((), _HERE),
    "async_client": ((), _HERE),
    "client_kwargs": (({},), _HERE),
    "sync_client_kwargs": (({},), _HERE),
    "async_client_kwargs": (({},), _HERE),
    "headers": (({},), _HERE),
    "huggingfacehub_api_token": ((), "give it as token in model_kwargs; it is used to fetch the model alone"),
    "api_key": ((), "the model runs in this process, and no key is needed"),
}
OTHER_ARGUMENTS = _OF_ANSWERS | _OF_MODELS
"""Arguments of other packages: the values that hold here anyway, and what to use in place of any other."""
# Remedies of requests that have other words.
_LENGTH = "use max_tokens, or in /v1/responses max_output_tokens"
_THOUGHT = 'use reasoning, such as {"effort": "medium"}; "none" is for no thought'
_OF_REQUESTS = {
    **dict.fromkeys(("num_predict", "max_new_tokens", "max_tokens", "max_completion_tokens", "max_length"), _LENGTH),
    **dict.fromkeys(("think", "thinking", "enable_thinking", "reasoning_effort"), _THOUGHT),
    "format": 'use response_format, such as {"type": "json_object"}, or in /v1/responses text.format',
    "keep_alive": "give it to the server, as serve --keep-alive: it holds for all requests",
}


def request_remedy(name: str) -> str:
    """The field of a request to use in place of one that only other servers have, in words; empty if there is none."""
    return _OF_REQUESTS.get(name) or _OF_ANSWERS.get(name, ((), ""))[1]
