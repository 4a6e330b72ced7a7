"""Models from local files: converted all or nothing, and refused in one line when damaged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flexgen.opt_config import get_opt_config
from safetensors.torch import load_file, save_file

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen import FlexGenRun, OptShape, make_opt, run
from cxl_offload.integrations.flexgen.checkpoint import convert_checkpoint
from cxl_offload.integrations.flexgen.model import (
    check_np_folder,
    config_of_checkpoint,
    resolve_model,
    weight_shapes,
)
from cxl_offload.memory import Session

from .reference import Reference, generate_with_transformers


def _copy(tiny: Path, target: Path, **changes: object) -> Path:
    """A copy of the checkpoint with other values in its config."""
    shutil.copytree(tiny, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def _as_bin(tiny: Path, target: Path, shards: int) -> Path:
    """The checkpoint in PyTorch's format, in so many files."""
    target.mkdir()
    shutil.copy(tiny / "config.json", target)
    state = list(load_file(tiny / "model.safetensors").items())
    for at in range(shards):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{at}-of-{shards}.bin"
        torch.save(dict(state[at::shards]), target / name)
    return target


@pytest.mark.parametrize("shards", [1, 3])
def test_pytorch_files_give_the_same_weights_as_safetensors(
    shards: int, tiny: Path, tmp_path: Path
) -> None:
    config = config_of_checkpoint(tiny)
    convert_checkpoint(tiny, config, tmp_path / "a-np")
    convert_checkpoint(_as_bin(tiny, tmp_path / "bin", shards), config, tmp_path / "b-np")

    for name in weight_shapes(config):
        first, second = np.load(tmp_path / "a-np" / name), np.load(tmp_path / "b-np" / name)
        assert first.dtype == np.float16
        np.testing.assert_array_equal(first, second)


def test_conversion_is_kept_in_path_and_used_again(
    request_tiny: FlexGenRun, session: Session, reference: Reference, tmp_path: Path
) -> None:
    cached = replace(request_tiny, path=str(tmp_path / "weights"))
    run(cached, session=session)
    folder = tmp_path / "weights" / "tiny-np"
    stamps = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}

    report = run(cached, session=session)

    assert stamps == {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert [file.name for file in folder.parent.iterdir()] == ["tiny-np"]
    np.testing.assert_array_equal(report.tokens, reference.tokens)
    as_model = run(replace(request_tiny, model=str(folder)), session=session)
    np.testing.assert_array_equal(as_model.tokens, reference.tokens)


def test_cache_of_another_checkpoint_is_refused(
    request_tiny: FlexGenRun, session: Session, tmp_path: Path
) -> None:
    other = make_opt(tmp_path / "tiny", OptShape(layers=3, hidden=64, heads=4, positions=64))
    run(replace(request_tiny, path=str(tmp_path / "weights")), session=session)

    with pytest.raises(ConfigError, match="another checkpoint"):
        run(
            replace(request_tiny, model=str(other), path=str(tmp_path / "weights")), session=session
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before"),
        ({"ffn_dim": 128}, "ffn_dim is 128"),
        ({"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"activation_function": "silu"}, "'silu'"),
        ({"num_attention_heads": 5}, "5 heads"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"pad_token_id": "1"}, "pad_token_id is '1', expected a token of the 272, or null"),
        ({"pad_token_id": -1}, "pad_token_id is -1"),
        ({"pad_token_id": 272}, "pad_token_id is 272"),
        ({"num_hidden_layers": 4}, "decoder.layers.3"),
        ({"vocab_size": 300}, r"\(272, 64\), config.json says \(300, 64\)"),
    ],
)
def test_checkpoint_flexgen_would_get_wrong_is_refused(
    changes: dict[str, object],
    words: str,
    tiny: Path,
    request_tiny: FlexGenRun,
    session: Session,
    tmp_path: Path,
    offload_dir: Path,
) -> None:
    folder = _copy(tiny, tmp_path / "changed", **changes)
    cache = tmp_path / "weights"

    with pytest.raises(ConfigError, match=words) as refused:
        run(replace(request_tiny, model=str(folder), path=str(cache)), session=session)

    assert "\n" not in str(refused.value)
    assert not cache.exists() or not list(cache.iterdir())
    assert session.stats().asked_bytes.total == 0


def test_checkpoint_without_a_pad_token_has_that_of_opt(tiny: Path, tmp_path: Path) -> None:
    folder = _copy(tiny, tmp_path / "null", pad_token_id=None)
    assert config_of_checkpoint(folder).pad_token_id == 1
    assert config_of_checkpoint(_copy(tiny, tmp_path / "other", pad_token_id=3)).pad == 3


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_checkpoint_is_refused_and_leaves_no_file(
    file: str,
    tiny: Path,
    request_tiny: FlexGenRun,
    session: Session,
    tmp_path: Path,
    offload_dir: Path,
) -> None:
    is_bin = file.endswith("bin")
    folder = _as_bin(tiny, tmp_path / "cut", 1) if is_bin else _copy(tiny, tmp_path / "cut")
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[: len(whole) * 2 // 3])
    cache = tmp_path / "weights"

    with pytest.raises(ConfigError, match=f"{file}.*truncated") as refused:
        run(replace(request_tiny, model=str(folder), path=str(cache)), session=session)

    assert "\n" not in str(refused.value)
    assert not list(cache.iterdir())
    assert session.stats().asked_bytes.total == 0


def test_values_beyond_half_precision_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = _copy(tiny, tmp_path / "large")
    state = load_file(folder / "model.safetensors")
    state["model.decoder.layers.1.fc1.weight"] = torch.full((256, 64), 1e6)
    save_file(state, folder / "model.safetensors")

    with pytest.raises(ConfigError, match=r"layers\.1\.fc1\.weight.*half precision"):
        convert_checkpoint(folder, config_of_checkpoint(folder), tmp_path / "large-np")

    assert not (tmp_path / "large-np").exists()
    assert not list(tmp_path.glob(".large-np*"))


def test_conversion_that_is_interrupted_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(tiny, config_of_checkpoint(tiny), tmp_path / "x-np", progress=stop)

    assert list(tmp_path.iterdir()) == []


def _break(folder: Path, how: str) -> None:
    file = folder / "decoder.layers.1.fc2.weight"
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "single precision":
        with file.open("wb") as handle:
            np.save(handle, np.load(folder / "decoder.layers.0.fc2.weight").astype(np.float32))
    else:
        with file.open("wb") as handle:
            np.save(handle, np.ones((3, 4), np.float16))


@pytest.mark.parametrize(
    "how", ["missing", "truncated", "empty", "single precision", "another shape"]
)
def test_damaged_flexgen_folder_is_refused(how: str, tiny: Path, tmp_path: Path) -> None:
    config = config_of_checkpoint(tiny)
    convert_checkpoint(tiny, config, tmp_path / "tiny-np")
    check_np_folder(tmp_path / "tiny-np", config)
    _break(tmp_path / "tiny-np", how)

    with pytest.raises(ConfigError, match=r"layers\.1\.fc2\.weight"):
        resolve_model(str(tmp_path / "tiny-np"), None)


def test_flexgen_folder_of_unknown_name_needs_the_config(tiny: Path, tmp_path: Path) -> None:
    convert_checkpoint(tiny, config_of_checkpoint(tiny), tmp_path / "tiny-np")
    (tmp_path / "tiny-np" / "config.json").unlink()

    with pytest.raises(ConfigError, match="heads"):
        resolve_model(str(tmp_path / "tiny-np"), None)


def test_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path), None)


def test_known_names_have_flexgens_shapes_and_galactica_its_activation() -> None:
    opt = resolve_model("facebook/opt-1.3b", "_DUMMY_")
    galactica = resolve_model("galactica-30b", "_DUMMY_")

    assert opt.config == get_opt_config("opt-1.3b")
    assert opt.kind == "dummy"
    assert (opt.config.activation_fn, galactica.config.activation_fn) == ("relu", "gelu")
    assert opt.parameters == 1_315_758_080  # Zhang et al., OPT, Table 1: 1.3B; with 2050 positions


def test_dummy_weights_are_ones(request_tiny: FlexGenRun, session: Session, tmp_path: Path) -> None:
    from cxl_offload.integrations.flexgen import LoadedModel

    with LoadedModel(replace(request_tiny, path="_DUMMY_"), session=session) as loaded:
        for holder in loaded.model.weight_home:
            for weight in holder.val:
                assert bool((weight.data == 1).all())
        report = loaded.generate()

    assert report.tokens.shape == (8, 20)


def _without_biases(folder: Path) -> None:
    """What ``enable_bias: false`` makes of a checkpoint."""
    state = load_file(folder / "model.safetensors")
    biases = ("proj.bias", "fc1.bias", "fc2.bias")
    kept = {name: value for name, value in state.items() if not name.endswith(biases)}
    save_file(kept, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"enable_bias": False}))


def test_galactica_layers_without_biases_and_with_gelu_equal_transformers(
    session: Session, prompts: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    shape = OptShape(layers=3, hidden=64, heads=4, positions=64, activation="gelu")
    folder = make_opt(tmp_path / "galactica", shape, seed=14)
    _without_biases(folder)
    expected = generate_with_transformers(folder, prompts, new_tokens=4)
    assert expected.smallest_lead > 0.02
    with_relu = _copy(folder, tmp_path / "relu", activation_function="relu")
    request = FlexGenRun(
        model=str(folder), token_ids=prompts, gen_len=4, gpu_batch_size=8, cpu_cache_compute=True
    )

    report = run(request, session=session)
    control = run(replace(request, model=str(with_relu)), session=session)

    np.testing.assert_array_equal(report.tokens, expected.tokens)
    assert not (control.tokens == expected.tokens).all()


def test_seeded_checkpoint_is_the_same_for_the_same_seed_only(tiny: Path, tmp_path: Path) -> None:
    from .conftest import SEED, SHAPE

    again = make_opt(tmp_path / "again", SHAPE, seed=SEED)
    other = make_opt(tmp_path / "other", SHAPE, seed=SEED + 1)

    bytes_of = [(f / "model.safetensors").read_bytes() for f in (tiny, again, other)]
    assert bytes_of[0] == bytes_of[1] != bytes_of[2]
    with pytest.raises(FileExistsError):
        make_opt(again, SHAPE, seed=SEED)


def test_demo_shape_has_more_than_100_million_parameters() -> None:
    from cxl_offload.integrations.flexgen import DEMO_SHAPE

    assert DEMO_SHAPE.parameters > 100e6
    assert DEMO_SHAPE.vocab >= 260
