"""Models from folders and from Hugging Face's cache; and what is said about those that cannot be read."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from overspill.figures import Origin
from overspill.model import ModelError
from overspill.model.checkpoint import MAX_HEADER_BYTES, Tensor
from overspill.model.config import Config
from overspill.model.derived import derive_tensors
from overspill.model.source import read_folder, read_model
from tests import model_configs as models
from tests.model_tensors import header_of, write_safetensors

CONFIG: dict[str, Any] = {**models.llama_3_1_8b(), "num_hidden_layers": 2}
TENSORS = derive_tensors(Config(CONFIG, where="config.json"), dtype="bfloat16", is_tied=False, quantization=None)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_model(folder: Path) -> Path:
    """Two shards and an index, as big models are published."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder)
    half = len(TENSORS) // 2
    for shard, tensors in zip(SHARDS, (TENSORS[:half], TENSORS[half:]), strict=True):
        write_safetensors(folder / shard, tensors)
    write_index(folder, {t.name: SHARDS[i >= half] for i, t in enumerate(TENSORS)})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "Llama-3.1-8B")


def test_a_folder_is_read(folder: Path) -> None:
    facts = read_folder(folder)
    assert (facts.name, facts.folder, facts.architecture) == ("Llama-3.1-8B", folder, "LlamaForCausalLM")
    assert (facts.dtype, facts.quantization, facts.kv_cache_dtype) == ("bfloat16", None, "auto")
    assert (facts.num_layers, facts.hidden_size, facts.intermediate_size) == (2, 4096, 14336)
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (32, 8, 128)
    assert (facts.vocab_size, facts.max_position_embeddings, facts.is_tied) == (128256, 131072, False)
    assert (facts.num_experts, facts.num_experts_per_tok) == (0, 0)
    assert facts.weights.source is Origin.MEASURED
    assert facts.weights.total_bytes == sum(tensor.num_bytes for tensor in TENSORS)


def test_one_file_needs_no_index(folder: Path) -> None:
    expected = read_folder(folder)
    for name in (*SHARDS, "model.safetensors.index.json"):
        (folder / name).unlink()
    write_safetensors(folder / "model.safetensors", TENSORS)
    assert read_folder(folder) == expected


def test_files_that_the_index_does_not_name_are_not_the_model(folder: Path) -> None:
    expected = read_folder(folder)
    write_safetensors(folder / "consolidated.safetensors", TENSORS)
    assert read_folder(folder) == expected
    (folder / "model.safetensors.index.json").unlink()
    assert read_folder(folder) == expected


def test_without_weights_they_are_derived(folder: Path) -> None:
    measured = read_folder(folder)
    for name in (*SHARDS, "model.safetensors.index.json"):
        (folder / name).unlink()
    derived = read_folder(folder)
    assert derived.weights.source is Origin.DERIVED
    assert derived.weights.total_bytes == measured.weights.total_bytes


def test_a_dtype_missing_from_the_config_comes_from_the_weights(folder: Path) -> None:
    write_config(folder, torch_dtype=None)
    assert read_folder(folder).dtype == "bfloat16"


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    wide = [Tensor(name=f"model.layers.{i}.weight", dtype="BF16", shape=(1 << 20, 1 << 18)) for i in (0, 1)]
    write_safetensors(tmp_path / "model.safetensors", wide)
    assert read_folder(tmp_path).weights.total_bytes == 1 << 40


def break_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        path = folder / SHARDS[0]
        entries = json.loads(header_of(TENSORS[: len(TENSORS) // 2]))
        size = path.stat().st_size
        change(entries)
        header = json.dumps(entries).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, size + len(header) - len(header_of(TENSORS[: len(TENSORS) // 2])))

    return breaks


def first(entries: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in entries.items() if name != "__metadata__")


def replace_file(name: str, content: bytes) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return breaks


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: write_config(folder, **changes)


def without(key: str) -> Callable[[Path], None]:
    def breaks(folder: Path) -> None:
        kept = {name: value for name, value in CONFIG.items() if name != key}
        (folder / "config.json").write_text(json.dumps(kept))

    return breaks


def index_to(name: object) -> Callable[[Path], None]:
    return lambda folder: write_index(folder, {tensor.name: name for tensor in TENSORS})


def empty(folder: Path) -> None:
    for entry in folder.iterdir():
        entry.unlink()


def only_gguf(folder: Path) -> None:
    empty(folder)
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


def unlink(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def pipe_for_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def folder_for_shard(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).mkdir()


def swap_shards(folder: Path) -> None:
    (folder / SHARDS[0]).rename(folder / "x")
    (folder / SHARDS[1]).rename(folder / SHARDS[0])
    (folder / "x").rename(folder / SHARDS[1])


def twice(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    write_safetensors(folder / "model.safetensors", TENSORS)


def truncate(size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / SHARDS[1], size)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n"
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
BAD: list[tuple[str, Callable[[Path], Any], str]] = [
    ("empty folder", empty, "holds no config.json and nothing else"),
    ("another format", only_gguf, r"holds no config.json \(it holds model-Q4_K_M.gguf\)"),
    ("config not JSON", replace_file("config.json", b"{'a': 1}"), "config.json in .* is not JSON"),
    ("config cut short", replace_file("config.json", b'{"architectures": ["Ll'), "is not JSON"),
    ("config not UTF-8", replace_file("config.json", b'{"a": "\xff"}'), "is not JSON"),
    ("config a list", replace_file("config.json", b"[1]"), "holds \\[1\\], and a JSON object was expected"),
    ("config nested too deep", replace_file("config.json", b"[" * 100_000), "is not JSON"),
    ("config a pipe", pipe_for_config, "is not a file"),
    ("no architectures", without("architectures"), "gives null for architectures"),
    (
        "unknown architecture",
        config(architectures=["NoSuchForCausalLM"]),
        "NoSuchForCausalLM, and",
    ),
    (
        "an encoder",
        config(architectures=["BertModel"]),
        r"others can be planned\. If vLLM knows it, vllm serve runs it",
    ),
    ("no layers key", without("num_hidden_layers"), "has no num_hidden_layers"),
    ("layers a string", config(num_hidden_layers="32"), 'gives "32" for num_hidden_layers'),
    ("layers true", config(num_hidden_layers=True), "gives true for num_hidden_layers"),
    (
        "no heads",
        config(num_attention_heads=0),
        "gives 0 for num_attention_heads",
    ),
    (
        "a billion layers",
        config(num_hidden_layers=10**9),
        "an integer of at least 1 and at most 500",
    ),
    ("a window of -1", config(layer_types=["x", "x"], sliding_window=-1), "gives -1 for sliding_window"),
    ("too few layer types", config(layer_types=["full_attention"]), "lists 1 layer_types for 2 layers"),
    ("a dtype of its own", config(torch_dtype="int3"), "gives 'int3' for dtype"),
    ("quantised somehow", config(quantization_config={"bits": 4}), "without a quant_method"),
    ("quantisation a string", config(quantization_config="awq"), "gives 'awq' for quantization_config"),
    ("sparse attention", config(**{**models.deepseek_v2_lite(), "index_topk": 64}), "index_topk"),
    ("index not JSON", replace_file("model.safetensors.index.json", b"<html>"), "is not JSON"),
    ("index without a map", replace_file("model.safetensors.index.json", b"{}"), "has no weight_map"),
    ("index out of the folder", index_to("../secret.safetensors"), "in the same folder was expected"),
    ("index to a root", index_to("/etc/passwd"), "in the same folder was expected"),
    ("index to a backslash", index_to("..\\x.safetensors"), "in the same folder was expected"),
    ("index to the folder above", index_to(".."), "which is not a safetensors file"),
    ("index to a number", index_to(7), "in the same folder was expected"),
    ("index to a pickle", index_to("pytorch_model.bin"), "which is not a safetensors file"),
    ("shard missing", unlink(SHARDS[1]), f"should hold {SHARDS[1]}, and does not"),
    ("shards swapped", swap_shards, "and it does not; the files are of different versions"),
    ("shard a folder", folder_for_shard, "is not a file"),
    ("a tensor twice", twice, "twice, in model-00001-of-00002.safetensors and in model.safetensors"),
    ("file empty", truncate(0), "is 0 bytes long"),
    ("length cut short", truncate(5), "is 5 bytes long"),
    ("header cut short", truncate(100), "and the file has 100"),
    ("weights cut short", truncate(10**8), "cut short"),
    ("LFS pointer", replace_file(SHARDS[1], POINTER), "not a safetensors file"),
    (
        "header longer than allowed",
        replace_file(SHARDS[1], (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}"),
        "announces a header of 100000001 bytes",
    ),
    ("header not JSON", replace_file(SHARDS[1], b"\x02" + bytes(7) + b"{]"), "is not JSON"),
    ("header a list", replace_file(SHARDS[1], b"\x02" + bytes(7) + b"[]"), "a JSON object was expected"),
    (
        "tensor without a shape",
        break_header(lambda e: first(e).pop("shape")),
        "a shape and data_offsets",
    ),
    ("shape negative", break_header(lambda e: first(e).update(shape=[-1])), "a shape and data_offsets"),
    ("unknown type", break_header(lambda e: first(e).update(dtype="F3")), "of type 'F3'"),
    ("wrong size", break_header(lambda e: first(e).update(shape=[7])), r"of shape \[7\] takes 14"),
    (
        "offsets overlap",
        break_header(lambda e: e[DOWN].update(data_offsets=e[UP]["data_offsets"])),
        "they overlap",
    ),
    ("a gap", break_header(lambda e: e.pop(UP)), "there is a gap"),
    ("a layer missing", config(num_hidden_layers=3), "hold nothing for layer 2"),
]


@pytest.mark.parametrize(("breaks", "said"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_an_unreadable_model_is_explained_in_one_sentence(
    folder: Path, breaks: Callable[[Path], Any], said: str
) -> None:
    breaks(folder)
    with pytest.raises(ModelError, match=said) as caught:
        read_folder(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions do not bind root, as which tests may run."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("name", ["", "config.json", SHARDS[0]])
def test_a_file_without_read_permission_is_reported(folder: Path, name: str) -> None:
    for parent in (folder, *list(folder.parents)[:-2]):
        if parent.owner() == folder.owner():
            parent.chmod(0o755)
    (folder / name).chmod(0)
    with as_nobody(), pytest.raises(ModelError, match="may not be read by this user"):
        read_folder(folder)


@pytest.mark.parametrize("name", ["", "a\0b", "/nowhere/at/all", "./nowhere", "a/b/c", "org/na..me", "or--g/x"])
def test_a_name_that_is_no_model_is_said_to_be_none(name: str) -> None:
    with pytest.raises(ModelError, match=r"is not the name of a model|does not exist"):
        read_model(name, environ={"HF_HUB_OFFLINE": "1"})


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"is a file, and a folder with a config\.json was expected"):
        read_model(str(folder / "config.json"))


def test_a_dtype_that_vllm_does_not_know_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="dtype is 'fp4'"):
        read_model(str(folder), dtype="fp4")


COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """As huggingface_hub lays it out: files are links to blobs."""
    repository = tmp_path / "hub" / "models--meta-llama--Llama-3.1-8B"
    blobs = make_model(repository / "blobs")
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("../../blobs") / blob.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def variables(cache: Path) -> list[dict[str, str]]:
    xdg = cache.parent / "xdg"
    (xdg / "huggingface").mkdir(parents=True)
    (xdg / "huggingface" / "hub").symlink_to(cache)
    return [{"HF_HUB_CACHE": str(cache)}, {"HF_HOME": str(cache.parent)}, {"XDG_CACHE_HOME": str(xdg)}]


def test_a_fetched_model_is_found_in_the_cache_without_a_network(cache: Path) -> None:
    for environ in variables(cache):
        facts = read_model("meta-llama/Llama-3.1-8B", environ={**environ, "HF_HUB_OFFLINE": "1"})
        assert facts.name == "meta-llama/Llama-3.1-8B"
        assert facts.weights.source is Origin.MEASURED
        assert facts.folder is not None
        assert facts.folder.name == COMMIT


def test_a_commit_is_found_by_its_name(cache: Path) -> None:
    environ = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    assert read_model("meta-llama/Llama-3.1-8B", revision=COMMIT, environ=environ).num_layers == 2


def test_a_config_alone_in_the_cache_will_do_offline(cache: Path) -> None:
    for link in next(cache.glob("*/snapshots/*")).glob("*safetensors*"):
        link.unlink()
    facts = read_model("meta-llama/Llama-3.1-8B", environ={"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"})
    assert facts.weights.source is Origin.DERIVED


@pytest.mark.parametrize(("name", "revision"), [("meta-llama/Llama-3.1-8B", "v2"), ("Qwen/Qwen3-8B", "main")])
def test_what_was_not_fetched_cannot_be_had_offline(cache: Path, name: str, revision: str) -> None:
    with pytest.raises(ModelError, match=r"is neither a folder nor in the cache .* HF_HUB_OFFLINE forbids"):
        read_model(name, revision=revision, environ={"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "yes"})


def test_a_ref_that_leads_out_of_the_cache_is_not_followed(cache: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "elsewhere")
    (cache / "models--meta-llama--Llama-3.1-8B" / "refs" / "main").write_text("../../../elsewhere")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE forbids"):
        read_model("meta-llama/Llama-3.1-8B", environ={"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("revision", ["../../x", "", "a b"])
def test_a_revision_that_is_a_path_is_refused(revision: str) -> None:
    with pytest.raises(ModelError, match="is not a revision"):
        read_model("Qwen/Qwen3-8B", revision=revision, environ={"HF_HUB_OFFLINE": "1"})


def test_neither_torch_nor_vllm_nor_httpx_is_imported(folder: Path) -> None:
    code = (
        "import sys; from overspill.model.kv import kv_geometry; "
        "from overspill.model.source import read_model; "
        f"print(kv_geometry(read_model({str(folder)!r})).bytes_per_block); "
        "print(sorted(sys.modules.keys() & {'torch', 'vllm', 'transformers', 'httpx', 'numpy', 'safetensors'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(2 * 64 * 1024), "[]"]
