"""A model in llama.cpp: its weights, one context, and sequences within it."""

from __future__ import annotations

import copy
import ctypes
import os
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from cacheblend_rag.errors import GenerationError, ModelLoadError
from cacheblend_rag.llama_cpp.library import F16, Batch, ContextOptions, Library, ModelOptions, Observer, library
from cacheblend_rag.models.memory import free_memory

BATCH = 512
"""Tokens of one call of `llama_decode`. A prefill is always cut so, since other batches round otherwise."""
CELLS = 8192
"""Tokens that the context has room for at first."""
_CELLS_ALONE = 2048  # of the context of one sequence
_SEQUENCES = 64
_FLASH_ATTENTION = 1
_READ = 0  # load_mode: not mapped
_NO_ROOM = 1  # llama_decode: there are too few cells
_START = struct.Struct("<4I")  # magic, sequence, streams, cells
_MIDDLE = struct.Struct("<4I")  # V transposed, layers, two words about rotation
_LAYER = struct.Struct("<iQ")  # element type, bytes of a cell


class Runtime:
    """Computes tokens, and moves KV between sequences.

    Not safe for use by several threads at once.

    Parameters
    ----------
    path : Path
        The GGUF file; it is mapped into memory, or read once.
    threads : int
        Threads of the CPU.
    lora : Path, optional
        A GGUF file with a LoRA adapter for the model.
    repack : bool
        Whether llama.cpp computes faster with a rearranged copy of the weights even on AVX2.

    Raises
    ------
    ModelLoadError
        If llama.cpp cannot load a file.

    Attributes
    ----------
    vocabulary, layers, heads, kv_heads, window : int
        ``window`` is the context that the model was trained with.
    shifts : bool
        Whether KV can be moved to other positions.
    layout : StateLayout
    token_bytes : int
        Bytes of a token's KV; 0 where it cannot be moved.
    """

    is_alone = False
    """Whether the context is for one sequence."""
    _main: Runtime

    def __init__(self, path: Path, threads: int, lora: Path | None = None, repack: bool = False) -> None:
        self._lib = lib = library()
        self._threads = threads
        options: ModelOptions = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        # The file is then read instead of mapped, so that weights are in memory once. On AVX2 only the format Q4_0
        # gains (docs/decisions/0029-blending-inside-llama-cpp.md).
        options.use_extra_bufts = repack or torch.backends.cpu.get_cpu_capability() != "AVX2"
        if options.use_extra_bufts:
            options.load_mode = _READ
        self._model = lib.llama_model_load_from_file(os.fsencode(path), options)
        if not self._model:
            raise ModelLoadError(f"llama.cpp cannot load {str(path)!r}: it is damaged, or of an unknown architecture")
        self.vocabulary = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self.layers, self.heads, self.kv_heads, self.window = (
            int(getattr(lib, f"llama_model_{name}")(self._model))
            for name in ("n_layer", "n_head", "n_head_kv", "n_ctx_train")
        )
        self.version = lib.version
        self._held: list[int] = []  # what is given back in the end
        self._seen: dict[bytes, np.ndarray | None] = {}  # wanted tensors of the graph, by name
        self._observer = Observer(self._observe)
        self._cells = self.token_bytes = 0
        self._batch: Batch = lib.llama_batch_init(BATCH, 0, 1)
        self._sequences = _SEQUENCES
        self._free = list(range(_SEQUENCES - 1, -1, -1))
        self._left = deque[int]()
        weakref.finalize(self, _end, lib, self._held, self._model, self._batch)
        self._lora = None if lora is None else lib.llama_adapter_lora_init(self._model, os.fsencode(lora))
        if lora is not None and not self._lora:
            raise ModelLoadError(f"llama.cpp cannot load {str(lora)!r}: it is no LoRA adapter for {str(path)!r}")
        try:
            self._open(CELLS)
        except GenerationError as error:
            raise ModelLoadError(str(error)) from error
        states = lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model)
        windowed = lib.llama_model_n_swa(self._model) > 0
        self.shifts = bool(lib.llama_memory_can_shift(self._memory)) and not states and not windowed
        if self.shifts:
            with self.sequence() as probe:
                self.compute([1, 2], 0, probe)
                self.layout = StateLayout(self.state(probe), self.layers, self.kv_heads)
                self.token_bytes = sum(self.layout.widths)

    def alone(self, tokens: int = 0) -> Runtime:
        """The same model with a second context, for a single sequence of at least ``tokens`` tokens.

        Attention is summed in the order of cells, over all that are taken. So the same tokens round in other ways among
        other sequences, and an answer can go on otherwise where two words are almost as likely. In a context of its
        own, a sequence is computed as llama.cpp computes it by itself.
        """
        other = copy.copy(self)
        other._sequences, other._free, other._left, other._held = 1, [0], deque(), []
        other._observer, other._main, other.is_alone = Observer(), self, True  # the model lives as long as its contexts
        other._open(_CELLS_ALONE)
        weakref.finalize(other, _end, self._lib, other._held)
        if tokens > _CELLS_ALONE:
            other._grow(tokens)
        return other

    # Sequences -------------------------------------------------------------------------------

    def take(self) -> int:
        """A sequence that is empty; `drop` gives it back.

        Raises
        ------
        GenerationError
            If all are in use.
        """
        self._clear()
        if not self._free:
            raise GenerationError(f"more than {self._sequences} sequences at once; set max_concurrent to 40 or less")
        return self._free.pop()

    def drop(self, sequence: int) -> None:
        """Empty a sequence and give it back."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._free.append(sequence)

    def leave(self, sequence: int) -> None:
        """Have a sequence dropped before the next one is taken. May be called on any thread."""
        self._left.append(sequence)

    def _clear(self) -> None:
        while self._left:
            self.drop(self._left.popleft())

    @contextmanager
    def sequence(self) -> Iterator[int]:
        """A sequence that is dropped afterwards."""
        taken = self.take()
        try:
            yield taken
        finally:
            self.drop(taken)

    def cut(self, sequence: int, length: int) -> None:
        """Forget the positions from ``length`` on."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, length, -1)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Let one sequence have some positions of another, too. Their KV is shared."""
        if stop > start:
            self._lib.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def shift(self, sequence: int, by: int) -> None:
        """Move a whole sequence to other positions. llama.cpp rotates its keys before it computes next."""
        if by:
            self._lib.llama_memory_seq_add(self._memory, sequence, -1, -1, by)

    def settle(self) -> None:
        """Have llama.cpp rotate the keys that were moved: it does so before it computes a token, whichever that is."""
        with self.sequence() as one:
            self.compute([0], 0, one)

    def state(self, sequence: int) -> np.ndarray:
        """The state of a sequence as llama.cpp writes it, uint8."""
        size = self._lib.llama_state_seq_get_size(self._context, sequence)
        state = np.empty(size, np.uint8)
        written = self._lib.llama_state_seq_get_data(self._context, _bytes_of(state), size, sequence)
        return state[:written]

    def place(self, state: np.ndarray, sequence: int) -> None:
        """Let an empty sequence have a state.

        Raises
        ------
        GenerationError
            If llama.cpp refuses it.
        """
        if self._set(state, sequence):
            return
        self.settle()  # llama.cpp writes states without rotating what was moved
        if self._set(state, sequence):  # it grew meanwhile
            return
        self._grow(self.layout.cells(state.size))
        if not self._set(state, sequence):
            raise GenerationError(f"llama.cpp refused KV of {state.size:,} bytes")

    def _set(self, state: np.ndarray, sequence: int) -> bool:
        return bool(self._lib.llama_state_seq_set_data(self._context, _bytes_of(state), state.size, sequence))

    def kv(self, sequence: int, start: int, stop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of some positions of a sequence; see `StateLayout.read`."""
        return self.layout.read(self.state(sequence), start, stop)

    # Computing -------------------------------------------------------------------------------

    def compute(self, ids: Sequence[int], start: int, sequence: int, wanted: int = 0) -> torch.Tensor:
        """Compute tokens that stand at the end of a sequence.

        Parameters
        ----------
        ids : sequence of int
        start : int
            Position of the first, directly behind the sequence's last one.
        sequence : int
        wanted : int
            How many of the last tokens give logits.

        Returns
        -------
        Tensor, [wanted, vocab] float32
        """
        return self.step([(token, start + at, sequence) for at, token in enumerate(ids)], wanted)

    def step(self, rows: Sequence[tuple[int, int, int]], wanted: int) -> torch.Tensor:
        """Compute tokens at the ends of several sequences.

        Parameters
        ----------
        rows : sequence of (id, position, sequence)
        wanted : int
            How many of the last rows give logits.

        Returns
        -------
        Tensor, [wanted, vocab] float32
        """
        logits, first = torch.empty(wanted, self.vocabulary), len(rows) - wanted
        for begin in range(0, len(rows), BATCH):
            some = [(*row, at >= first) for at, row in enumerate(rows[begin : begin + BATCH], begin)]
            self._decode(some, logits[max(0, begin - first) :])
        return logits

    def queries(self, ids: Sequence[int], start: int, sequence: int, layers: Sequence[int]) -> list[torch.Tensor]:
        """Compute tokens as `compute` does, and give their rotated queries of some layers.

        Returns
        -------
        list of Tensor, a layer each, [rows, heads, head_dim] float32
        """
        found: list[list[torch.Tensor]] = [[] for _ in layers]
        for begin in range(0, len(ids), BATCH):
            some = ids[begin : begin + BATCH]
            seen = self._seen = dict.fromkeys(f"Qcur-{layer}".encode() for layer in layers)
            try:
                self.compute(some, start + begin, sequence)
            finally:
                self._seen = {}
            for parts, (name, queries) in zip(found, seen.items(), strict=True):
                if queries is None:
                    raise GenerationError(f"llama.cpp's graph has no tensor {name.decode()}")
                parts.append(torch.from_numpy(queries).view(len(some), self.heads, -1))
        return [torch.cat(parts) for parts in found]

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]], logits: torch.Tensor) -> None:
        batch, lib = self._batch, self._lib
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = wanted
        code = lib.llama_decode(self._context, batch)
        if code == _NO_ROOM:
            self._grow()
            code = lib.llama_decode(self._context, batch)
        if code:
            raise GenerationError(f"llama.cpp could not compute {len(rows)} tokens (code {code})")
        found = iter(logits)
        for at, row in enumerate(rows):
            if row[3]:
                pointer = lib.llama_get_logits_ith(self._context, at)
                next(found).copy_(torch.from_numpy(np.ctypeslib.as_array(pointer, (self.vocabulary,))))

    def _observe(self, tensor: int, ask: bool, data: object) -> bool:
        if not self._seen:
            return not ask
        name: bytes = self._lib.ggml_get_name(tensor)
        if name in self._seen and not ask:  # the last tensor of this name is the rotated one
            values = self._seen[name] = np.empty(self._lib.ggml_nbytes(tensor) // 4, np.float32)
            self._lib.ggml_backend_tensor_get(tensor, values.ctypes.data, 0, values.nbytes)
        return name in self._seen or not ask

    # Memory ----------------------------------------------------------------------------------

    def _grow(self, more: int = BATCH) -> None:
        """Give the context twice its cells, or more for so many tokens; both contexts are there for a while.

        Sequences are carried over one by one. Cells that several shared are those of each afterwards.
        """
        self._clear()
        lib, cells, used = self._lib, 2 * self._cells, set(range(self._sequences)) - set(self._free)
        taken = [one for one in sorted(used) if lib.llama_memory_seq_pos_max(self._memory, one) >= 0]
        sizes = [lib.llama_state_seq_get_size(self._context, one) for one in taken]
        carried = sum(map(self.layout.cells, sizes)) if self.shifts else 0
        while cells < carried + more:
            cells *= 2
        needed, free = cells * self.token_bytes + sum(sizes), free_memory()
        if free is not None and needed > free:
            raise GenerationError(
                f"a context of {cells:,} tokens takes {needed:,} bytes of memory, and {free:,} are free; ask "
                "with fewer documents, or fewer questions at once"
            )
        states, old = {one: self.state(one) for one in taken}, self._context
        self._open(cells)
        self._lib.llama_free(old)
        for sequence, state in states.items():
            if not self._set(state, sequence):
                raise GenerationError("llama.cpp's context could not be enlarged")

    def _open(self, cells: int) -> None:
        options: ContextOptions = self._lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = cells, BATCH, BATCH, self._sequences
        options.n_threads = options.n_threads_batch = self._threads
        options.kv_unified, options.flash_attn_type, options.no_perf = True, _FLASH_ATTENTION, True
        options.type_k = options.type_v = F16
        options.cb_eval = self._observer
        context = self._lib.llama_init_from_model(self._model, options)
        if not context:
            raise GenerationError(f"llama.cpp could not make a context of {cells} tokens; memory may be too small")
        self._context, self._cells, self._held[:] = context, cells, [context]
        self._memory = self._lib.llama_get_memory(context)
        if self._lora is not None:
            adapters, scales = (ctypes.c_void_p * 1)(self._lora), (ctypes.c_float * 1)(1.0)
            self._lib.llama_set_adapters_lora(context, adapters, 1, scales)


def is_in_llama_cpp(model: object) -> bool:
    """Whether a model is one that llama.cpp computes."""
    return isinstance(getattr(model, "runtime", None), Runtime)


def _bytes_of(state: np.ndarray) -> ctypes._Pointer[ctypes.c_uint8]:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _end(lib: Library, held: list[int], model: int | None = None, batch: Batch | None = None) -> None:
    """Give back the memory of a context, and of the model and the batch if they are its own."""
    if batch is not None:
        lib.llama_batch_free(batch)
    for context in held:
        lib.llama_free(context)
    if model is not None:
        lib.llama_model_free(model)


class StateLayout:
    """Reads and writes states of one model: positions, then keys and values of each layer, as llama.cpp writes them.

    ::

        magic, sequence             4 bytes each
        streams (1), cells          4 bytes each
        of each cell                its position, the number of its sequences, and these, 4 bytes each
        V transposed (0), layers    4 bytes each
        two words                   whether keys and values are rotated (0, 0)
        keys of each layer          element type (4 bytes), bytes of a cell (8 bytes), the cells
        values of each layer        likewise

    This is the layout of build 11548 for KV in F16 with flash attention. It is compared with what the library writes,
    so a library with another layout is refused when a model is loaded.

    Parameters
    ----------
    written : numpy array of uint8
        A state of some cells of one sequence, as the library wrote it.
    layers, kv_heads : int

    Raises
    ------
    ModelLoadError
        If the layout differs.
    """

    def __init__(self, written: np.ndarray, layers: int, kv_heads: int) -> None:
        self.layers, self.kv_heads, data = layers, kv_heads, memoryview(written)  # type: ignore[arg-type]
        try:
            magic, _, streams, cells = _START.unpack_from(data)
            at = _START.size
            owners = {struct.unpack_from("<I", data, at + number * 12 + 4)[0] for number in range(cells)}
            at += cells * 12
            transposed, count, *words = _MIDDLE.unpack_from(data, at)
            at += _MIDDLE.size
            widths = []
            for _ in range(2 * layers):
                kind, width = _LAYER.unpack_from(data, at)
                widths.append((kind, width))
                at += _LAYER.size + cells * width
        except struct.error:
            raise _other_layout() from None
        plain = (streams, owners, transposed, count, at) == (1, {1}, 0, layers, written.size)
        if not plain or {kind for kind, _ in widths} != {F16} or len(set(widths)) != 1 or widths[0][1] % (2 * kv_heads):
            raise _other_layout()
        self._magic, self._words, self.widths = magic, words, [width for _, width in widths]
        self.head_dim = self.widths[0] // (2 * kv_heads)

    def size(self, cells: int) -> int:
        """Bytes of a state of so many cells."""
        return int(_START.size + 12 * cells + _MIDDLE.size + sum(_LAYER.size + cells * width for width in self.widths))

    def cells(self, size: int) -> int:
        """Cells of a state of so many bytes."""
        return (size - self.size(0)) // (self.size(1) - self.size(0))

    def read(self, state: np.ndarray, start: int, stop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of the cells at positions from ``start`` up to ``stop``, in their order.

        Returns
        -------
        two lists of Tensor, each [kv_heads, tokens, head_dim] float16
            One entry a layer; copies.
        """
        cells = int(state[12:16].view("<u4")[0])
        head = state[_START.size : _START.size + 12 * cells].view("<i4").reshape(cells, 3)
        positions = head[:, 0]
        order = np.argsort(positions, kind="stable")
        order = order[(positions[order] >= start) & (positions[order] < stop)]
        if len(order) != stop - start:
            raise ValueError(f"the state holds {len(order)} of the {stop - start} positions from {start} to {stop}")
        plain = bool((np.diff(order) == 1).all())
        rows = slice(int(order[0]), int(order[0]) + len(order)) if plain and len(order) else order
        at = _START.size + 12 * cells + _MIDDLE.size
        tensors = []
        for width in self.widths:
            at += _LAYER.size
            block = state[at : at + cells * width].view(np.float16).reshape(cells, self.kv_heads, self.head_dim)[rows]
            tensors.append(torch.from_numpy(np.ascontiguousarray(block.transpose(1, 0, 2))))
            at += cells * width
        return tensors[: self.layers], tensors[self.layers :]

    def write(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], start: int) -> np.ndarray:
        """The state of a sequence with these keys and values at the positions from ``start`` on.

        Parameters
        ----------
        keys, values : sequence of Tensor, each [kv_heads, tokens, head_dim]
            One entry a layer.
        start : int
            Position of the first token.
        """
        cells = keys[0].shape[1]
        state = np.empty(self.size(cells), np.uint8)
        data = memoryview(state)  # type: ignore[arg-type]
        _START.pack_into(data, 0, self._magic, 0, 1, cells)
        at = _START.size
        head = np.zeros((cells, 3), "<i4")
        head[:, 0], head[:, 1] = np.arange(start, start + cells), 1
        state[at : at + 12 * cells] = head.view(np.uint8).reshape(-1)
        at += 12 * cells
        _MIDDLE.pack_into(data, at, 0, self.layers, *self._words)
        at += _MIDDLE.size
        for width, tensor in zip(self.widths, (*keys, *values), strict=True):
            _LAYER.pack_into(data, at, F16, width)
            at += _LAYER.size
            block = torch.from_numpy(state[at : at + cells * width].view(np.float16))
            block.view(cells, self.kv_heads, self.head_dim).copy_(tensor.transpose(0, 1))
            at += cells * width
        return state


def _other_layout() -> ModelLoadError:
    return ModelLoadError(
        "this build of llama.cpp lays out the state of a sequence in a way that is not known; run pip install "
        '"cacheblend-rag[llama-cpp]" for one that is'
    )
