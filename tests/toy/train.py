"""Train the reference model: ``python -m tests.toy.train --out FOLDER``.

The curriculum widens by measured accuracy: copying random ids, recalling bare facts, facts told by role, whole
passages with references across them, every kind. A GPU is used when there is one. A deeper model, or a Qwen3, begins
with the weights of another (``--start``).
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.loading import in_hardware
from tests.toy import MODEL_PATH
from tests.toy.attention import PRODUCT_ATTENTION, products_are_faster
from tests.toy.batches import Batch, make_batches
from tests.toy.curriculum import SequenceMaker, Stage
from tests.toy.grow import ARCHITECTURES, Places, grow, parse_places, spread
from tests.toy.loss import GUIDED, Guidance, Probes, TrainingLoss
from tests.toy.sequences import COPY_KIND, KIND_NAMES
from tests.toy.tokenizer import train_tokenizer

logger = logging.getLogger(__name__)

_ALL = {"within": 0.15, "reference": 0.35, "bridge": 0.25, "comparison": 0.25}
STAGES: tuple[Stage, ...] = (
    Stage("copy", 192, 40, 3e-3, {}, target=0.85),
    Stage("recall", 256, 32, 2e-3, {"within": 1.0}, target=0.87, about=0.5),
    Stage("roles", 384, 20, 2e-3, {"within": 0.4, "reference": 0.6}, target=0.8, about=0.5),
    Stage("reference", 640, 14, 2e-3, {"within": 0.4, "reference": 0.6}, (2, 3, 4), target=0.9, about=0.5),
    Stage("compare", 640, 14, 1e-3, _ALL, (2, 3, 4), target=0.9, about=0.5, bare_comparisons=0.75),
    Stage("all", 1536, 6, 1e-3, _ALL, (5, 6, 6, 9, 12), 0.15, target=2.0, about=0.5, bare_comparisons=0.35),
)
_WIDE = {
    "within": 0.08,
    "reference": 0.14,
    "bridge": 0.08,
    "comparison": 0.10,
    "described": 0.16,
    "traced": 0.14,
    "chain": 0.15,
    "judged": 0.15,
}
_MANY = _WIDE | {"comparison": 0.18, "chain": 0.18}
WIDER: tuple[Stage, ...] = (
    Stage("wide", 2048, 5, 1e-3, _WIDE, (5, 6, 6, 8), 0.15, target=0.9, about=0.5, bare_comparisons=0.2, wide=0.8),
    Stage("long", 3584, 3, 7e-4, _WIDE, (6, 10, 14, 17), 0.15, target=0.9, about=0.5, bare_comparisons=0.2, wide=0.8),
    Stage("settle", 2048, 5, 8e-4, _WIDE, (5, 6, 6, 8), 0.15, target=0.97, about=0.5, bare_comparisons=0.2, wide=0.8),
    Stage("many", 4352, 2, 8e-4, _MANY, (6, 6, 6, 10, 15, 20), 0.15, 2.0, about=0.5, bare_comparisons=0.2, wide=0.8),
)
"""Take the place of the last stage where the wider archive is to be read (``--wide``)."""


@dataclass(frozen=True)
class Shape:
    """Family, depth and width of the model."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 640
    architecture: str = "llama"


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    ``steps`` bounds the steps of every stage but the last (0: no bound); the last stage runs ``final_tokens`` while
    the learning rate falls to a twentieth. ``start`` names an exported model: training then begins with its weights
    at the stage ``begin`` (default: the last), unless there is a checkpoint to go on from. ``end`` names the stage that
    is the last. ``places`` says which layer of it each layer begins as (default: spread evenly over those that there
    shall be). ``wide`` has the wider archive read at the end, in four stages.
    """

    out: Path
    seed: int = 0
    final_tokens: int = 20_000_000
    steps: int = 0
    compile: bool = True
    workers: int = 1
    checkpoint: Path | None = None
    start: Path | None = None
    begin: str | None = None
    end: str | None = None
    wide: bool = False
    places: Places | None = None
    guidance: Guidance = field(default_factory=Guidance)


def build_model(shape: Shape, vocab: int, bos: int, eos: int) -> Any:
    """Return a randomly initialised ``LlamaForCausalLM`` that begins to copy, or another without that beginning."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.architecture,
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    model = AutoModelForCausalLM.from_config(config)
    if shape.architecture == "llama":
        start_with_copying(model)
    return model


def start_with_copying(model: Any) -> None:
    """Begin with a rough induction circuit in layers 0 and 1, which training then sharpens.

    Layer 0, head 0 looks one position back (by RoPE, on a component all embeddings share) and writes a code of the
    id it finds into dimensions the embeddings leave free. Layer 1, head 0 looks for positions whose code matches the
    present id, that is, for what followed it before, and adds the id found there to the prediction. From random
    weights the same ability takes several million tokens of training to appear.
    """
    config = model.config
    width, size, half = config.hidden_size, config.head_dim, config.head_dim // 2
    if width < 3 * size + 1:
        raise ConfigError("hidden", width, f"use at least {3 * size + 1}, three heads of {size} and one more")
    layers = model.model.layers
    shared, names, free = 0, slice(1, width - size), slice(width - size, width)
    basis = torch.linalg.qr(torch.randn(width - size - 1, 2 * size))[0].T  # [2 * size, names]
    code, copied = basis[:size], basis[size:]
    theta = config.rope_parameters["rope_theta"]
    slow = [index for index in range(half) if theta ** (-index / half) < 2e-3]
    matched = slow + [index + half for index in slow]
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        nn.init.normal_(embedding, std=0.83 / math.sqrt(width - size - 1))
        embedding[:, shared], embedding[:, free] = 0.4, 0.0
        back, find = layers[0].self_attn, layers[1].self_attn
        for part in (back, find):
            part.q_proj.weight[:size], part.k_proj.weight[:size] = 0.0, 0.0
            part.v_proj.weight[:size], part.o_proj.weight[:, :size] = 0.0, 0.0
        for index, strength in enumerate((2.0, 1.3, 1.3, 1.3)):
            angle = theta ** (-index / half)
            back.k_proj.weight[index, shared] = strength
            back.q_proj.weight[index, shared] = strength * math.cos(angle)
            back.q_proj.weight[index + half, shared] = -strength * math.sin(angle)
        back.v_proj.weight[:size, names] = code
        back.o_proj.weight[free, :size] = 0.1 * torch.eye(size)
        find.q_proj.weight[matched, names] = 1.7 * code[matched]
        find.k_proj.weight[matched, free] = 1.7 * torch.eye(size)[matched]
        find.v_proj.weight[:size, names] = copied
        find.o_proj.weight[names, :size] = 0.6 * copied.T


class _Batches(IterableDataset[Batch]):
    def __init__(self, tokenizer: Any, stage: Stage, seed: int) -> None:
        self._tokenizer, self._stage, self._seed = tokenizer, stage, seed

    def __iter__(self) -> Iterator[Batch]:
        return make_batches(SequenceMaker(self._tokenizer, self._seed), self._stage, self._seed)


def _accuracy(batch: Batch, right: np.ndarray[Any, np.dtype[np.bool_]]) -> dict[str, tuple[int, int]]:
    """Count wholly right and all answers by kind; with the gold answer fed, this equals greedy exact match.

    Copied random ids are counted one by one.
    """
    answered = batch.question >= 0
    if (batch.kinds == COPY_KIND).all():
        return {"copy": (int((right & answered).sum()), int(answered.sum()))}
    wrong = np.zeros(len(batch.kinds), bool)
    seen = np.zeros(len(batch.kinds), bool)
    seen[batch.question[answered]] = True
    wrong[batch.question[answered & ~right]] = True
    return {
        name: (int((seen & ~wrong & (batch.kinds == kind)).sum()), int((seen & (batch.kinds == kind)).sum()))
        for kind, name in enumerate(KIND_NAMES)
        if (seen & (batch.kinds == kind)).any()
    }


def _stage_number(stages: Sequence[Stage], field: str, name: str) -> int:
    names = [stage.name for stage in stages]
    if name not in names:
        raise ConfigError(field, name, f"name one of the stages: {', '.join(names)}")
    return names.index(name)


class Trainer:
    """Runs the stages, keeps a checkpoint from which a run can go on, exports the model."""

    def __init__(self, options: TrainOptions, shape: Shape, stages: Sequence[Stage] | None = None) -> None:
        known = tuple(stages or ((*STAGES[:-1], *WIDER) if options.wide else STAGES))
        self.options, self.shape = options, shape
        self.stages = known if options.end is None else known[: _stage_number(known, "end", options.end) + 1]
        if shape.architecture != "llama" and options.start is None:
            raise ConfigError("start", None, f"give a trained model that a {shape.architecture} can begin with")
        torch.manual_seed(options.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.narrow = self.device.type == "cuda" or in_hardware(torch.bfloat16) is not False  # products in bfloat16
        self.tokenizer = train_tokenizer()
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        model = build_model(shape, len(self.tokenizer), bos, eos)
        self.model = model.to(self.device)
        self.probes = Probes(shape.hidden).to(self.device)
        self.stage_index, self.tokens = 0, 0
        self.accuracy: dict[str, float] = {}
        self.guided = np.zeros(len(GUIDED))
        self.optimizer = self._new_optimizer()
        if options.checkpoint is not None and options.checkpoint.exists():
            self._resume(options.checkpoint)
        elif options.start is not None:
            self._start_from(options.start)
        if products_are_faster(self.device, narrow=self.narrow):
            self.model.set_attn_implementation(PRODUCT_ATTENTION)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [*self.model.parameters(), *self.probes.parameters()],
            lr=3e-3,
            betas=(0.9, 0.95),
            weight_decay=0.02,
            fused=True,
        )

    def _resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.probes.load_state_dict(state["probes"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.stage_index, self.tokens = state["stage"], state["tokens"]
        stage = self.stages[self.stage_index].name if self.stage_index < len(self.stages) else "end"
        logger.info("resumed at stage %s, %.1fM tokens", stage, self.tokens / 1e6)

    def _start_from(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
        if vocabulary != self.tokenizer.get_vocab():
            raise ConfigError("start", str(folder), "use a model with this archive's vocabulary, or none")
        self.stage_index = _stage_number(self.stages, "begin", self.options.begin or self.stages[-1].name)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        count, wanted = model.config.num_hidden_layers, self.shape
        places = self.options.places or spread(count, wanted.layers)
        if len(places) != wanted.layers:
            raise ConfigError("places", len(places), f"say what each of the {wanted.layers} layers begins as")
        if places != tuple(range(count)) or wanted.architecture != model.config.model_type:
            text = next(make_batches(SequenceMaker(self.tokenizer, self.options.seed), self.stages[-1], 0)).ids
            model = grow(model, wanted.architecture, places, torch.from_numpy(text))
        self.model = model.to(self.device).train()
        self.optimizer = self._new_optimizer()

    def save(self) -> None:
        """Write the checkpoint, replacing the last one at once."""
        path = self.options.checkpoint
        if path is None:
            return
        state = {
            "model": self.model.state_dict(),
            "probes": self.probes.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "stage": self.stage_index,
            "tokens": self.tokens,
        }
        partial = path.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(path)

    def export(self) -> None:
        """Write tokenizer and bf16 weights to the output folder."""
        from transformers import GenerationConfig

        out = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        config.guided_layers = asdict(self.options.guidance)
        copy = type(self.model)(config)
        copy.load_state_dict(self.model.state_dict())
        copy = copy.to(torch.bfloat16)
        copy.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.eos_token_id
        )
        copy.save_pretrained(out)
        self.tokenizer.save_pretrained(out)

    def run(self) -> dict[str, float]:
        """Train through the remaining stages and export.

        Returns
        -------
        dict
            Share of wholly right answers by kind, a running mean at the end of the last stage.
        """
        while self.stage_index < len(self.stages):
            stage = self.stages[self.stage_index]
            self._run_stage(stage, last=self.stage_index == len(self.stages) - 1)
            self.stage_index += 1
            self.save()
            self.export()
        return self.accuracy

    def _run_stage(self, stage: Stage, *, last: bool) -> None:
        options = self.options
        data = _Batches(self.tokenizer, stage, options.seed * 1_000_003 + self.tokens)
        workers = options.workers
        loader = DataLoader(data, batch_size=None, num_workers=workers, prefetch_factor=8 if workers else None)
        loss_module: Any = TrainingLoss(self.model, self.probes, stage.about, options.guidance)
        if options.compile:
            loss_module = torch.compile(loss_module, dynamic=False)
        started, begun = time.monotonic(), self.tokens
        self.accuracy = {}
        for step, batch in enumerate(loader, start=1):
            rate = stage.rate * min(1.0, step / 40)
            if last:
                rate *= max(0.05, 1.0 - 0.95 * (self.tokens - begun) / max(1, options.final_tokens))
            loss = self._step(loss_module, batch, rate)
            self.tokens += stage.rows * stage.length
            speed = (self.tokens - begun) / (time.monotonic() - started)
            if step % 20 == 0:
                shown = " ".join(f"{name} {share:.3f}" for name, share in self.accuracy.items())
                total = self.tokens / 1e6
                shown += "".join(f" {name} {share:.3f}" for name, share in zip(GUIDED, self.guided, strict=True))
                logger.info("%s %d %.2fM tokens loss %.3f %s (%.0f tok/s)", stage.name, step, total, loss, shown, speed)
            if step % 100 == 0:
                self.save()
                self.export()
            if self._finished(stage, step, begun, last=last):
                return

    def _finished(self, stage: Stage, step: int, begun: int, *, last: bool) -> bool:
        if last:
            return self.tokens - begun >= self.options.final_tokens
        if self.options.steps and step >= self.options.steps:
            return True
        return step >= 60 and min(self.accuracy.values()) >= stage.target

    def _step(self, loss_module: Any, batch: Batch, rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        named = (getattr(batch, name) for name in signature(TrainingLoss.forward).parameters if name != "self")
        inputs = [torch.from_numpy(array).to(self.device) for array in named]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.narrow):
            loss, right, guided = loss_module(*inputs)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.guided += 0.05 * (guided.float().cpu().numpy() - self.guided)
        for name, (good, total) in _accuracy(batch, right.cpu().numpy()).items():
            share = good / total
            self.accuracy[name] = 0.95 * self.accuracy.get(name, share) + 0.05 * share
        return float(loss.detach())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.toy.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_PATH, help="folder for weights and tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--final-tokens", type=int, default=TrainOptions.final_tokens)
    parser.add_argument("--steps", type=int, default=0, help="most steps a stage, the last one apart (0: no bound)")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, kept up to date")
    parser.add_argument("--start", type=Path, help="exported model whose weights training begins with")
    parser.add_argument("--begin", help="stage to begin with those weights (default: the last)")
    parser.add_argument("--end", help="stage to end with (default: the last that there is)")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=Shape.architecture)
    parser.add_argument("--layers", type=int, help=f"default: as --start or --arrange has, else {Shape.layers}")
    parser.add_argument(
        "--arrange", type=parse_places, help="layer of --start that each begins as, - for new: 0,1,-,2 (default: even)"
    )
    parser.add_argument("--owner-layer", type=int, help="layer that looks up whose role it is (default: where it was)")
    parser.add_argument("--source-layer", type=int, help="layer that looks up values (default: where it was)")
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--mlp", type=int, default=Shape.mlp)
    parser.add_argument("--heads", type=int, default=Shape.heads)
    parser.add_argument("--wide", action="store_true", help="the wider archive at the end: wide, long, settle, many")
    parser.add_argument("--no-compile", action="store_true")
    return parser


def read_options(argv: Sequence[str] | None = None) -> tuple[TrainOptions, Shape]:
    """Read the command line.

    The layers to guide are, unless told, where those of the model to start from come to lie.
    """
    args = _parser().parse_args(argv)
    places, guidance = args.arrange, Guidance()
    layers = args.layers or (len(places) if places else Shape.layers)
    if args.start is not None:
        begun = json.loads((args.start / "config.json").read_text(encoding="utf-8"))
        count = begun["num_hidden_layers"]
        places = places or spread(count, args.layers or count)
        layers = len(places)
        guidance = Guidance(**begun.get("guided_layers", {})).moved(places)
    if args.owner_layer is not None:
        guidance = replace(guidance, owner=args.owner_layer)
    if args.source_layer is not None:
        guidance = replace(guidance, source=args.source_layer)
    options = TrainOptions(
        args.out,
        args.seed,
        args.final_tokens,
        args.steps,
        not args.no_compile,
        checkpoint=args.checkpoint,
        start=args.start,
        begin=args.begin,
        end=args.end,
        wide=args.wide,
        places=places,
        guidance=guidance,
    )
    shape = Shape(layers, args.hidden, args.heads, mlp=args.mlp, architecture=args.architecture)
    return options, shape


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    options, shape = read_options(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    accuracy = Trainer(options, shape).run()
    print(json.dumps(accuracy))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
