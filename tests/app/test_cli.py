"""The command line over a tiny model and documents of the user's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig

from cacheblend_rag import __version__
from cacheblend_rag.app.cli import main
from cacheblend_rag.app.cli.arguments import Screen
from cacheblend_rag.app.cli.ask import fidelity_line
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.llama_cpp.library import is_installed
from cacheblend_rag.models import starters
from cacheblend_rag.report import Verification
from cacheblend_rag.store import DiskStore
from tests import gguf_files, tiny
from tests.app.server.common import write_documents
from tests.contract.test_store import files
from tests.integrations.retrieval.office import make_docx
from tests.programs import run_program
from tests.thinking import Writer, thinking_tokenizer
from tests.toy import EMBEDDER_PATH

STRONGER = "qwen2.5-coder-1.5b"
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("CACHEBLEND_RAG_MIN_TOKENS", "0")
    return write_documents(tmp_path / "docs")


def ask(model: Path, docs: Path, data: Path, *more: str) -> int:
    known = ["--docs", str(docs), "--model", str(model), "--embedder", str(EMBEDDER_PATH), "--data-dir", str(data)]
    return main(["ask", "Which leaf fell?", *known, "--max-new-tokens", "4", "--device", "cpu", *more])


def test_warm_and_changed_files(model: Path, docs: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    # No chunk is computed behind another, so what is erased is exactly what changed.
    monkeypatch.setenv("CACHEBLEND_RAG_CONDITION", "sink")
    data = tmp_path / "data"
    assert ask(model, docs, data, "--top-k", "2", "--warm") == 0
    first = capsys.readouterr()
    assert "4 chunks of 4 files indexed (4 embedded now)" in first.err
    assert "(0 hits, 2 misses; " in first.out, "an answer does not wait until all is stored"
    assert "Storing the KV of 2 of 2 passages, from 2 of 2 files, for the next question: " in first.err
    assert "Reading the prompt" not in first.err, "progress is for terminals"
    assert "2 computed" in first.err
    assert "2 there already" in first.err

    (docs / "passage-1.md").write_text(f"Passage 1\n{tiny.text(60, 99)}\n", encoding="utf-8")
    (docs / "passage-2.md").unlink()
    assert ask(model, docs, data, "--top-k", "3", "--warm") == 0
    second = capsys.readouterr()
    assert "3 chunks of 3 files indexed (1 embedded now)" in second.err
    assert "(2 hits, 1 misses; " in second.out
    assert "3 there already" in second.err


def test_comparison_shows_each_one(model: Path, docs: Path, tmp_path: Path, capsys: Capture) -> None:
    assert ask(model, docs, tmp_path / "data", "--compare", "--ratio", "0.3") == 0
    output = capsys.readouterr().out
    for method in ("full recompute", "prefix caching", "full reuse", "blended"):
        assert f"  {method}" in output
    said = "Another order of the same passages moves full recompute's own answer by KL "
    (line,) = [line for line in output.splitlines() if line.startswith(said)]
    assert 0 < float(line.removeprefix(said).rstrip(".")) < 10


def test_verify_takes_each_value(model: Path, docs: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    assert ask(model, docs, tmp_path / "data", "--warm") == 0
    held = "The prompt was prefilled in full: verify='held' lets full prefill answer"
    ways: tuple[tuple[str, list[str], str], ...] = (
        ("off", ["--verify", "held"], held),
        ("idle", [], "(4 hits, 0 misses"),  # the command ends with its answer: it is checked at once
        ("off", ["--verify"], "(4 hits, 0 misses"),
        ("off", [], "Approximate: not compared"),
    )
    for variable, flags, said in ways:
        capsys.readouterr()
        monkeypatch.setenv("CACHEBLEND_RAG_VERIFY", variable)
        assert ask(model, docs, tmp_path / "data", *flags) == 0
        told = capsys.readouterr()
        assert said in told.out + told.err, (variable, flags)
        compared = any(words in told.out for words in ("full model's answer", "Checked:", "Corrected:"))
        assert compared is (said != "Approximate: not compared")
        assert "[new]" not in told.out


def test_values_that_the_model_refuses_are_named(model: Path, docs: Path, tmp_path: Path, capsys: Capture) -> None:
    for arguments, message in (
        (["--model", "nowhere/at-all"], "model 'nowhere/at-all' could not be loaded"),
        (["--reasoning"], "--reasoning='on' is not usable: leave it out, or use a model that thinks"),
        (["--reasoning-tokens", "9"], "--reasoning-tokens=9 is not usable: leave it out, or use a model that thinks"),
        (["--device", "cuda:99"], "--device='cuda:99' is not usable: PyTorch cannot use such a device"),
    ):
        assert ask(model, docs, tmp_path / "data", *arguments) == 2
        assert message in capsys.readouterr().err


WRONG: list[tuple[list[str], str]] = [
    (["--ratio", "2"], "--ratio='2' is not usable: use a number from 0 to 1"),
    (["--reasoning", "loud"], "--reasoning='loud' is not usable: use True or 'on', False or 'off', 'low',"),
    (["--size-limit", "lots"], "--size-limit='lots' is not usable"),
    (["--docs", "nowhere"], "the folder nowhere does not exist"),
    (["--top-k", "0"], "--top-k=0 is not usable: use a whole number, 1 or more"),
    (["--dtype", "int8"], "dtype='int8' is not usable: use one of 'auto'"),
    (["--device", "gpu"], 'device=\'gpu\' is not usable: use "auto", "cpu"'),
    (["--docs", "FILE"], "is a file; name the folder that holds it"),
    (["--docs", "PICTURES"], "(there: 1 .png); add documents to it"),
    (["--data-dir", ""], "--data-dir='' is not usable: use the name of a folder"),
    (["--data-dir", "FILE"], "--data-dir='FILE' is not usable: File exists; name a folder that can be written"),
    (["--model", "smolm2"], "did you mean the starter model 'smollm2'?"),
    (["--model", "minilm"], "use 'smollm2' or 'qwen2.5-coder-0.5b' or 'qwen2.5-coder-1.5b' here"),
    (["--model", "./nowhere"], "model='./nowhere' is not usable: there is no such file or folder; name a folder"),
    (["--model", "PICTURES"], "the folder holds no config.json"),
    (["--embedder", "mini-lm"], "did you mean the starter model 'minilm'?"),
]


def test_wrong_options_are_refused_before_anything_heavy_is_imported(docs: Path, tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text("x")
    (tmp_path / "PICTURES").mkdir()
    (tmp_path / "PICTURES" / "x.png").write_bytes(b"x")
    command = ["ask", "Which?", "--docs", str(docs), "--data-dir", str(tmp_path / "data")]
    code = (
        "import sys\nfrom cacheblend_rag.app.cli import main\n"
        f"for more in {[arguments for arguments, _ in WRONG]!r}:\n"
        f"    assert main([*{command!r}, *more]) == 2, more\n"
        "    print('---', file=sys.stderr)\n"
        "heavy = {'torch', 'transformers', 'langchain_core'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    for (arguments, message), said in zip(WRONG, done.stderr.split("---\n"), strict=False):
        assert message in said, arguments


def test_skipped_files_of_a_folder_are_named(model: Path, docs: Path, tmp_path: Path, capsys: Capture) -> None:
    (docs / "page.html").write_text(f"<h1>Page</h1><p>{tiny.text(40, 7)}", encoding="utf-8")
    (docs / "letter.docx").write_bytes(make_docx(lambda one: one.add_paragraph(tiny.text(40, 8))))
    (docs / "latin.txt").write_bytes(f"Blåbær {tiny.text(40, 9)}".encode("latin-1"))
    (docs / "broken.pdf").write_bytes(b"%PDF-1.4")
    (docs / "noise.txt").write_bytes(bytes(range(256)) * 4)
    (docs / "empty.md").write_bytes(b"")
    for number in range(4):
        (docs / f"{number}.png").write_bytes(b"x")
    assert ask(model, docs, tmp_path / "data", "--top-k", "9") == 0
    seen = capsys.readouterr()
    assert "7 chunks of 8 files indexed (7 embedded now)" in seen.err
    assert "skipped: broken.pdf cannot be read as PDF" in seen.err
    assert "skipped: noise.txt holds bytes that are not text" in seen.err
    assert "skipped: empty.md holds no text" in seen.err
    assert "4 files of other kinds left out (4 .png): 0.png, 1.png, 2.png, …" in seen.err
    for name in ("page.html: Page", "letter.docx: ", "latin.txt: Blåbær"):
        assert name in seen.out


def test_terminal_shows_progress_of_the_prompt(model: Path, docs: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    for beginning in ("0", r"[1-9]\d*"):  # the second time, what is stored is read at once
        said: list[str] = []
        monkeypatch.setattr(Screen, "step", lambda screen, text, said=said: nullcontext(said.append))
        assert ask(model, docs, tmp_path / "data") == 0
        assert re.fullmatch(rf"Reading the prompt: {beginning} of \d+ tokens…", said[0])
        assert said.count("Answering…") == 1, "once the prompt is read, the line is as before"


def test_new_passages_are_marked_and_hinted_at(model: Path, docs: Path, tmp_path: Path, capsys: Capture) -> None:
    assert ask(model, docs, tmp_path / "data", "--top-k", "2") == 0
    first = capsys.readouterr()
    assert first.out.count("[new]") == 2
    assert "\x1b[" not in first.out, "colours are for terminals"
    assert "2 of 2 passages were new; their KV is stored now." in first.err
    assert "The answer was cut at 4 tokens; --max-new-tokens allows more." in first.err
    assert ask(model, docs, tmp_path / "data", "--top-k", "2") == 0
    second = capsys.readouterr()
    assert second.out.count("[disk]") == 2
    assert "were new" not in second.err


def test_server_names_a_stronger_starter(docs: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    from cacheblend_rag.app.server import app

    monkeypatch.setattr(app, "serve", lambda settings: 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cases: tuple[tuple[list[str], int | None, bool], ...] = (
        ([], 16 * 2**30, True),
        (["--also-model", STRONGER], 16 * 2**30, False),
        (["--model", STRONGER], 16 * 2**30, False),
        ([], 8 * 2**30, True),
        ([], 2 * 2**30, False),
        ([], None, False),
    )
    for more, memory, named in cases:
        monkeypatch.setattr(starters, "total_memory", lambda memory=memory: memory)
        assert main(["serve", "--docs", str(docs), "--data-dir", str(tmp_path / "data"), *more]) == 0
        said = capsys.readouterr().err
        assert (f"--model {STRONGER} (1.1 GB to fetch)" in said) is named, (more, memory)


def test_the_package_runs_as_its_command_does(tmp_path: Path) -> None:
    done = run_program(["-m", "cacheblend_rag", "--version"], tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, __version__)
    done = run_program(["-m", "cacheblend_rag", "answer"], tmp_path)
    assert done.returncode == 2
    assert "invalid choice: 'answer'" in done.stderr


def test_thought_is_shown_above_the_answer(docs: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    tiny.model(num_hidden_layers=2, max_position_embeddings=4096, vocab_size=420).save_pretrained(tmp_path / "model")
    tokenizer = thinking_tokenizer("qwen3")
    tokenizer.save_pretrained(tmp_path / "model")
    writer, generate = Writer(tokenizer, "<think>\nHm, leaves.\n</think>\n\nIt"), BlendEngine.generate
    process = {"logits_processor": [writer]}
    monkeypatch.setattr(BlendEngine, "generate", lambda *args, **more: generate(*args, **more | process))
    assert ask(tmp_path / "model", docs, tmp_path / "data", "--reasoning", "--reasoning-tokens", "30") == 0
    assert "Thought:  Hm, leaves.\nAnswer:   It\n" in capsys.readouterr().out


def test_removed_commands_and_flags_name_their_remedy(capsys: Capture) -> None:
    for given, remedy in (
        (["adapt"], "calibrate alone finds"),
        (["cache", "list"], "use cache stats"),
        (["keys", "list"], "read keys.json"),
        (["keys", "revoke", "ada"], "its entry is deleted"),
        (["serve", "--keep-conversations", "5"], "the browser keeps conversations"),
        (["serve", "--keep-alive", "-1"], "the system takes its memory back"),
        (["ask", "--int8-prefill", "on", "q"], "multiplied as the weights are"),
    ):
        with pytest.raises(SystemExit):
            main(given)
        said = capsys.readouterr().err
        assert " is gone; " in said, given
        assert remedy in said, given
    with pytest.raises(SystemExit):
        main(["calibrate", "--prompt", "8"])
    assert "unrecognized arguments: --prompt 8" in capsys.readouterr().err, "flags have no short forms"


@pytest.fixture
def data(model: Path, docs: Path, tmp_path: Path, capsys: Capture) -> Path:
    """A store warmed by the command itself."""
    folder = tmp_path / "data"
    known = ["--docs", str(docs), "--model", str(model), "--embedder", str(EMBEDDER_PATH), "--device", "cpu"]
    assert main(["cache", "warm", *known, "--data-dir", str(folder)]) == 0
    assert "4 computed" in capsys.readouterr().err
    return folder


def used_at(data: Path) -> list[tuple[str, float]]:
    store = DiskStore(data / "kv")
    found = [(entry.key, entry.used_at) for entry in store.entries()]
    store.close()
    return found


def test_stats_and_clear(data: Path, model: Path, capsys: Capture) -> None:
    where = ["--data-dir", str(data)]
    before = used_at(data)
    assert main(["cache", "stats", *where]) == 0
    assert used_at(data) == before, "looking is no use"
    seen = capsys.readouterr().out
    assert re.search(r"^4 records, 0\.\d MB; 0\.\d MB taken", seen)
    assert re.search(r"^\d+ hits, \d+ misses, 0 evictions$", seen, re.MULTILINE)
    assert f"{model}: 4 records" in seen

    files(data / "kv")[0].write_bytes(b"nothing")
    assert main(["cache", "stats", *where]) == 0
    assert "cannot be read: 1 records" in capsys.readouterr().out

    assert main(["cache", "clear", *where]) == 0
    assert capsys.readouterr().out == "4 records erased\n"
    assert files(data / "kv") == []


def test_folder_without_a_store_is_named_and_not_made(tmp_path: Path, capsys: Capture) -> None:
    for command in ("stats", "clear"):
        assert main(["cache", command, "--data-dir", str(tmp_path / "typo")]) == 2
        assert "typo" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_estimate_needs_no_weights(docs: Path, tmp_path: Path, capsys: Capture) -> None:
    """The shape of Mistral-7B, of which there is no more than a config here."""
    config = MistralConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=400
    )
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert main(["cache", "estimate", "--model", str(tmp_path)]) == 0  # also where memory is too small for the model
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["cache", "estimate", "--model", str(tmp_path), "--dtype", "bfloat16"]) == 0
    seen = capsys.readouterr().out
    assert re.search(r"^raw +131\.1 kB a token, +67\.1 MB per 512 tokens$", seen, re.MULTILINE)
    assert len(seen.splitlines()) == 3
    assert main(["cache", "estimate", "--model", str(tmp_path), "--codec", "int8", "--docs", str(docs)]) == 0
    seen = capsys.readouterr().out
    assert re.search(r"^4 chunks, \d+ tokens$", seen, re.MULTILINE)
    assert re.search(r"^int8 +\d+\.\d MB$", seen, re.MULTILINE)
    assert main(["cache", "estimate", "--model", str(tmp_path / "none")]) == 2
    assert main(["cache", "estimate", "--model", str(tmp_path), "--codec", "int5"]) == 2
    assert "codec='int5'" in capsys.readouterr().err


@pytest.mark.skipif(torch.accelerator.is_available() or not is_installed(), reason="PyTorch runs the file here")
def test_estimate_tells_the_type_that_the_backend_stores(tmp_path: Path, capsys: Capture) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", tiny.model("llama"))
    for flags, dtype in (((), "float16"), (("--dtype", "float32"), "float32")):
        assert main(["cache", "estimate", "--model", str(path), *flags]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith(f", {dtype}")


def test_profile_is_kept_beside_the_store(model: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["profile", "--model", str(model), "--data-dir", str(tmp_path), "--device", "cpu"]
    assert main([*arguments, "--lengths", "16", "32", "48", "--file-size", "2MB"]) == 0
    seen = capsys.readouterr().out
    line = r"^prefill of +\d+ tokens +\d+\.\d+ s$"
    assert len(re.findall(line, seen, re.MULTILINE)) == 3
    assert re.search(r"^disk +[\d,]+ MB/s +[\d,.]+ µs a read$", seen, re.MULTILINE)
    assert set(json.loads((tmp_path / "kv" / "profile.json").read_text())) == {"prefill", "devices"}
    assert main([*arguments, "--lengths", "0"]) == 2
    assert main([*arguments, "--file-size", "much"]) == 2


def test_fidelity_and_storing(model: Path, docs: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    from cacheblend_rag.engine import write_back

    monkeypatch.setattr(write_back, "CLOSE_SECONDS", 0.0)  # what is not stored before the command closes is dropped
    monkeypatch.setenv("CACHEBLEND_RAG_RECOMPUTE_RATIO", "1.0")
    assert ask(model, docs, tmp_path / "data") == 0
    first = capsys.readouterr()
    assert "Exact: this is the full model's answer" in first.out
    said = r"of 4 of 4 passages, from 4 of 4 files, for the next question: \d records left… Ctrl-C ends it\."
    assert re.search(f"Storing the KV {said}", first.err)
    for flags, said in (
        ((), "Checked: the same answer as without reuse. This compares computations, not facts."),
        (("--verify", "off"), "Approximate: not compared with the answer without reuse."),
    ):
        assert ask(model, docs, tmp_path / "data", *flags) == 0
        seen = capsys.readouterr()
        assert said in seen.out, flags
        assert seen.out.count("[disk]") == 4
    line = fidelity_line(Verification("corrected", before="30 days."))
    assert line.startswith("Corrected: the answer without reuse; the first one went on with '30 days.'.")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="Triton is used here")
def test_triton_is_left_out_where_no_gpu_is(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom cacheblend_rag.app.startup import no_search_for_garbage\n"
        "with no_search_for_garbage():\n    import torch._dynamo, transformers.masking_utils\n"
        "sys.exit(sys.modules['triton'] is not None)"
    )
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=surroundings)
    assert (done.returncode, "nanobind" in done.stderr) == (0, False), done.stderr
