"""The facts at the start of a GGUF file, without its vocabulary and weights.

The reader of the `gguf` package walks the vocabulary in Python (12 s for 262,144 tokens); refusing a
file must not take that long, so the header is walked here. Weights are read by transformers alone.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forward_influence.errors import UserError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself.

    Attributes
    ----------
    path : Path
    values : dict
        Scalars, strings and short arrays of numbers by key, such as ``"llama.context_length"``.
    tokens : tuple of bytes
        The vocabulary as spelled in the file.
    tensors : dict of str to (shape, type, offset)
        Shape in GGUF order (fastest first), quantisation type, bytes from the start of the data.
    """

    path: Path
    values: dict[str, Any]
    tokens: tuple[bytes, ...]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]

    @property
    def architecture(self) -> str:
        return self.values["general.architecture"]

    def fact(self, name: str, default: Any = None) -> Any:
        """Value of ``<architecture>.<name>``."""
        return self.values.get(f"{self.architecture}.{name}", default)

    @property
    def vocab_size(self) -> int:
        return self.fact("vocab_size") or len(self.tokens)

    @property
    def wants_bos(self) -> bool:
        """Whether text starts with BOS; sentencepiece vocabularies that do not say so want it."""
        default = self.values.get("tokenizer.ggml.model") == "llama"
        return bool(self.values.get("tokenizer.ggml.add_bos_token", default))


class _Walker:
    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 0

    def take(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def text(self) -> bytes:
        length = self.take("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self.data):
            raise struct.error("a string ends behind the file")
        return self.data[start : self.position]

    def array(self) -> list[Any]:
        kind, count = self.take("I"), self.take("Q")
        if kind == _STRING:
            return [self.text() for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(code, self.data, self.position)
        self.position += struct.calcsize(code)
        return list(values)


def read_header(path: Path) -> GGUFHeader:
    """Walk the header of `path`, and check that the file is as long as its tensors.

    Raises
    ------
    UserError
        If it is no GGUF file of version 2 or 3, or is cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header, start = _walk(path, data)
            missing = start + _data_bytes(header) - len(data)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read ({error.strerror}); check its permissions.") from error
    except (struct.error, LookupError, ValueError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"{str(path)!r} is no GGUF file of version 2 or 3, or it is damaged ({error}); fetch it again."
        ) from error
    if header.values.get("split.count", 1) > 1:
        raise UserError(f"{str(path)!r} is one part of a split model; merge the parts into one GGUF file first.")
    if missing > 0:
        raise UserError(f"{str(path)!r} is cut short: {missing} bytes of its weights are missing; fetch it again.")
    return header


def _walk(path: Path, data: mmap.mmap) -> tuple[GGUFHeader, int]:
    if data[:4] != b"GGUF":
        raise ValueError("it does not start with 'GGUF'")
    walker = _Walker(data)
    walker.position = 4
    if (version := walker.take("I")) not in (2, 3):
        raise ValueError(f"version {version}")
    n_tensors, n_values = walker.take("Q"), walker.take("Q")
    values: dict[str, Any] = {}
    tokens: tuple[bytes, ...] = ()
    for _ in range(n_values):
        key, kind = walker.text().decode(), walker.take("I")
        if kind == _ARRAY:
            array = walker.array()
            if key == _TOKENS:
                tokens = tuple(array)
            elif not key.startswith("tokenizer.") and not isinstance(next(iter(array), b""), bytes):
                values[key] = array  # one value per layer
        else:
            values[key] = walker.text().decode() if kind == _STRING else walker.take(_SCALARS[kind])
    tensors = {}
    for _ in range(n_tensors):
        name = walker.text().decode()
        shape = tuple(walker.take("Q") for _ in range(walker.take("I")))
        tensors[name] = (shape, walker.take("I"), walker.take("Q"))
    if "general.architecture" not in values:
        raise ValueError("no general.architecture")
    alignment = values.get("general.alignment", 32)
    return GGUFHeader(path, values, tokens, tensors), -(-walker.position // alignment) * alignment


def _data_bytes(header: GGUFHeader) -> int:
    """Bytes from the start of the data to the end of the last tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    end = 0
    for shape, kind, offset in header.tensors.values():
        elements = 1
        for size in shape:
            elements *= size
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        end = max(end, offset + elements // block * block_bytes)
    return end
