"""The header of a GGUF file is walked as the format says, and damage is seen before weights load."""

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from forward_influence.errors import UserError
from forward_influence.gguf_header import read_header


def write(path, *, arch="llama", extra=lambda writer: None, tokens=("a", "b", "é")):
    writer = GGUFWriter(path, arch)
    writer.add_context_length(77)
    writer.add_rope_freq_base(5e5)
    writer.add_string("general.name", "Tiny ñ")
    writer.add_array(f"{arch}.per_layer", [1, 2, 3])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tokens))
    writer.add_token_scores([0.5] * len(tokens))
    extra(writer)
    writer.add_tensor("first", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("second.weight", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_header_equals_the_library_reader(tmp_path):
    path = write(tmp_path / "a.gguf", extra=lambda writer: writer.add_add_bos_token(True))
    header = read_header(path)
    reader = GGUFReader(path)
    assert header.architecture == "llama"
    for key, value in header.values.items():
        assert reader.fields[key].contents() == value
    missing = {key for key in reader.fields if not key.startswith("GGUF.")} - set(header.values)
    assert missing == {"tokenizer.ggml.tokens", "tokenizer.ggml.scores"}
    assert header.tokens == (b"a", b"b", "é".encode())
    assert {t.name: tuple(int(n) for n in t.shape) for t in reader.tensors} == {
        name: shape for name, (shape, _, _) in header.tensors.items()
    }
    start = min(int(tensor.data_offset) for tensor in reader.tensors)
    for tensor in reader.tensors:
        _, kind, offset = header.tensors[tensor.name]
        assert (kind, offset) == (int(tensor.tensor_type), int(tensor.data_offset) - start)
    assert header.fact("context_length") == 77
    assert header.fact("absent", "default") == "default"
    assert header.vocab_size == 3
    assert header.wants_bos


@pytest.mark.parametrize(
    ("model", "flag", "expected"),
    [("gpt2", None, False), ("llama", None, True), ("llama", False, False), ("gpt2", True, True)],
)
def test_bos_rule(tmp_path, model, flag, expected):
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if flag is not None:
        writer.add_add_bos_token(flag)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_header(path).wants_bos is expected


def test_every_cut_is_noticed(tmp_path):
    whole = write(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    header = read_header(tmp_path / "a.gguf")
    end = len(whole)
    while whole[end - 32 : end] == bytes(32):  # padding after the last tensor may be missing
        end -= 32
    for length in [*range(1, end - 32, 23), end - 32]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged|cut short"):
            read_header(cut)
    assert header.tensors


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(100), b"GGUF" + bytes(200)])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match="no GGUF file"):
        read_header(path)


def test_parts_of_a_split_model_are_refused(tmp_path):
    path = write(tmp_path / "a.gguf", extra=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(UserError, match="split model"):
        read_header(path)
